"""The memory formula against counts by hand."""

from typing import Any, ClassVar, Literal

import pytest

from titan.checks.rules import resolve_layout
from titan.config.base import Section
from titan.config.layout import Layout
from titan.config.schema import (
    ActivationCheckpointSection,
    AdamW8bitSection,
    AdamWSection,
    JobConfig,
    LossSection,
    MuonSection,
    OptimizerSection,
    ParallelismSection,
    TrainingSection,
)
from titan.models.llama3.config import FLAVORS, LlamaConfig
from titan.models.qwen3.config import FLAVORS as QWEN3
from titan.sim.estimate import activation_elements, estimate_memory
from titan.sim.price.profiles import load_profile
from titan.sim.section import SimulatorSection
from titan.sim.simulate import simulate

GIB = 2**30


def layout(**degrees: int) -> Layout:
    ones = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "accumulation": 1}
    return Layout(**(ones | degrees))


def job(*, mode: Any = "none", policy: Any = "default", **training: Any) -> JobConfig:
    return JobConfig(
        training=TrainingSection(**training),
        activation_checkpoint=ActivationCheckpointSection(mode=mode),
        parallelism=ParallelismSection(fsdp_reshard_after_forward=policy),
        loss=LossSection(chunk_tokens=1024),
    )


def test_states_of_8b_on_8_ranks() -> None:
    estimate = estimate_memory(job(), FLAVORS["8B"], layout(dp_shard=8))
    assert estimate["parameters"] == pytest.approx(8_030_261_248 * 4 / 8 / GIB)
    assert estimate["gradients"] == estimate["parameters"]
    assert estimate["optimizer"] == 2 * estimate["parameters"]
    assert estimate["total"] == pytest.approx(
        sum(v for k, v in estimate.items() if k != "total"), rel=1e-12
    )


def test_experts_by_hand() -> None:
    """Of 30B-A3B on 8 ranks: 8 of 128 experts are active, and each rank gathers 16 of them."""
    model, base = QWEN3["30B-A3B"], job(mode="none", mixed_precision_param="bfloat16")

    def of(ep: int, imbalance: float = 1.0) -> tuple[dict[str, float], float]:
        parallel = base.parallelism.model_copy(update={"expert_parallel_degree": ep})
        simulator = SimulatorSection(expert_imbalance=imbalance)
        config = base.model_copy(update={"parallelism": parallel, "simulator": simulator})
        kept, _ = activation_elements(config, model, layout(dp_shard=8), layers=48)
        return estimate_memory(config, model, layout(dp_shard=8)), kept

    (whole, kept), (split, kept_split), (_, uneven) = of(1), of(8), of(8, 1.5)
    assert (
        whole["parameters"]
        == split["parameters"]
        == pytest.approx(30_532_122_624 * 4 / 8 / GIB)
    )
    # Two blocks are gathered (2 bytes) and one's gradient waits (2 + 4): of the experts' part, 7/8 less.
    stacked = 128 * 3 * 2048 * 768
    saved = (2 * 2 + 6) * stacked * 7 / 8 / GIB
    assert whole["unsharded"] - split["unsharded"] == pytest.approx(saved)
    assert kept == kept_split
    # Half of the rows more: the row and w1 x, w3 x, silu, product of 8 experts, in 48 layers.
    assert uneven - kept == pytest.approx(48 * 0.5 * 8 * (2048 + 4 * 768))


def test_states_of_each_optimizer() -> None:
    """Of the 8B model, whose blocks hold 6,979,584,000 parameters."""
    model, blocks = FLAVORS["8B"], 6_979_584_000
    rest = model.num_params - blocks

    def gib(optimizer: OptimizerSection, dtype: Any = "float32") -> dict[str, float]:
        config = job(dtype=dtype, max_norm=0.0).model_copy(update={"optimizer": optimizer})
        return {k: v * GIB for k, v in estimate_memory(config, model, layout()).items()}

    def kept(optimizer: OptimizerSection, dtype: Any = "float32") -> float:
        return gib(optimizer, dtype)["optimizer"]

    assert kept(AdamWSection()) == pytest.approx(8 * model.num_params)
    assert kept(AdamWSection(state_dtype="bfloat16")) == pytest.approx(4 * model.num_params)
    assert kept(AdamWSection(), "bfloat16") == pytest.approx(4 * model.num_params)
    mixed = AdamWSection(stochastic_rounding=True, state_dtype="float32")
    assert kept(mixed, "bfloat16") == pytest.approx(8 * model.num_params)
    # Two codes of a byte, and two scales of four bytes for 256 of them.
    assert kept(AdamW8bitSection()) == pytest.approx((2 + 8 / 256) * model.num_params)
    assert kept(MuonSection()) == pytest.approx(4 * blocks + 8 * rest)

    class Custom(Section):  # of another package
        moments: ClassVar[int] = 3
        name: Literal["Custom"] = "Custom"

    own: Any = Custom()
    assert kept(own) == pytest.approx(12 * model.num_params)
    # Gradients of the largest FSDP unit: the embedding, or the output layer.
    early = gib(AdamWSection(early_step_in_backward=True))
    assert early["gradients"] == pytest.approx(4 * model.num_embedding_params)


def test_activations_counted_by_hand() -> None:
    """Two layers of dim 8, 4 heads and 2 key/value heads of 2, ffn 16; 3 sequences of 10 tokens in bf16."""
    model = LlamaConfig(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=16, vocab_size=32)
    estimate = estimate_memory(job(local_batch_size=3, seq_len=10), model, layout())
    inputs_of_norms, inputs_of_products = 2 * 8, 2 * 8
    q_and_output, k_and_v, feed_forward = 2 * 8, 2 * 4, 4 * 16
    per_token = inputs_of_norms + inputs_of_products + q_and_output + k_and_v + feed_forward
    last_norm_and_output = 2 * 8
    assert estimate["activations"] == pytest.approx(
        30 * (2 * per_token + last_norm_and_output) * 2 / GIB
    )
    # Logits and their gradient in bf16, and as all 30 tokens are one chunk, once in fp32; the gradient of the output
    # layer's weight in fp32 and a product to be added to it in bf16; the gradient of its input.
    assert estimate["logits"] == pytest.approx(
        (30 * 32 * (2 + 2 + 4) + 8 * 32 * (4 + 2) + 30 * 8 * 2) / GIB
    )


def test_chunked_output_never_holds_all_logits() -> None:
    """Llama 3's vocabulary over 65,536 tokens: 31 GiB of logits and gradients, or 4."""
    config = job(local_batch_size=8, seq_len=8192)
    whole = config.model_copy(
        update={"loss": LossSection(chunk_tokens=1024, chunk_output=False)}
    )
    in_chunks, at_once = (
        estimate_memory(c, FLAVORS["8B"], layout(dp_shard=8))["logits"] for c in (config, whole)
    )
    assert at_once == pytest.approx((2 * 65536 * 2 + 1024 * 4) * 128256 / GIB)
    assert in_chunks < 0.15 * at_once


def test_what_op_keeps_follows_its_list() -> None:
    model = LlamaConfig(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=16, vocab_size=32)
    kept = {}
    for op_keep in (["attention"], ["matmul", "attention"], ["matmul/2", "attention"]):
        section = ActivationCheckpointSection(mode="selective", op_keep=op_keep)
        config = JobConfig(activation_checkpoint=section)
        kept[op_keep[0]] = activation_elements(config, model, layout(), layers=1)[0] - 2 * 8
    assert kept == {
        "attention": 8 + 8,  # the block's input and attention's output
        "matmul": 16 + (8 + 4 + 4 + 8 + 16 + 16 + 8),
        "matmul/2": 16 + (8 + 4 + 16 + 8),  # q, v, w1, w2
    }


def test_full_recomputation_keeps_block_inputs_and_one_block() -> None:
    model = FLAVORS["8B"]
    none = estimate_memory(job(), model, layout())["activations"]
    full = estimate_memory(job(mode="full"), model, layout())["activations"]
    op = estimate_memory(job(mode="selective"), model, layout())["activations"]
    units = 8 * 2048 * model.dim * 2 / GIB
    block_inputs, last = model.n_layers * units, 2 * units
    assert full == pytest.approx(block_inputs + last + (none - last) / model.n_layers)
    assert full < op < none


def test_one_rank_in_one_precision_gathers_nothing() -> None:
    assert (
        estimate_memory(job(mixed_precision_param="float32"), FLAVORS["1B"], layout())[
            "unsharded"
        ]
        == 0
    )
    assert estimate_memory(job(), FLAVORS["1B"], layout())["unsharded"] > 0


def test_zero2_keeps_every_block_gathered() -> None:
    model = FLAVORS["8B"]
    zero2, zero3 = (
        estimate_memory(job(policy=policy), model, layout(dp_shard=8))["unsharded"]
        for policy in ("never", "always")
    )
    freed = (model.n_layers - 2) * model.num_block_params + model.num_embedding_params
    assert zero2 - zero3 == pytest.approx(freed * 2 / GIB)


def test_ddp_accumulates_whole_gradients() -> None:
    config = job(mixed_precision_param="float32")
    estimate = estimate_memory(config, FLAVORS["1B"], layout(dp_replicate=2, accumulation=4))
    assert estimate["unsharded"] == pytest.approx(FLAVORS["1B"].num_params * 4 / GIB)


def test_every_axis_saves() -> None:
    whole = estimate_memory(job(), FLAVORS["70B"], layout(dp_shard=8))
    for axis in ("cp", "tp", "pp", "dp_shard"):
        degrees = {"dp_shard": 8, axis: 16 if axis == "dp_shard" else 2}
        assert (
            estimate_memory(job(), FLAVORS["70B"], layout(**degrees))["total"] < whole["total"]
        ), axis


@pytest.mark.parametrize(
    ("schedule", "batch", "bound"),
    [("1F1B", 8, 0.2), ("1F1B", 4, 0.2), ("Interleaved1F1B", 8, 0.2), ("", 1, 0.1)],
)
def test_whole_gradients_are_added_up(schedule: str, batch: int, bound: float) -> None:
    """The first rank of a simulated pipeline needs what the formula says, and so does a step of micro-batches that reduces once."""
    pipeline = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
    sizes = {"n_layers": 8, "tied_embeddings": False}
    training = {"seq_len": 2048, "local_batch_size": batch}
    config = JobConfig.model_validate(
        {
            "model": {"flavor": "1B", "overrides": sizes},
            "training": training if schedule else {**training, "global_batch_size": 32},
            "activation_checkpoint": {"mode": "full"},
            "parallelism": pipeline if schedule else {"fsdp_reduce_gradients": "step"},
        }
    )
    estimate = estimate_memory(config, config.model.sizes, resolve_layout(config, 8))
    simulation = simulate(config, world_size=8, profile=load_profile("h100-sxm"))
    simulated = simulation.memory[0].peak_active_bytes / GIB
    assert estimate["total"] == pytest.approx(simulated, rel=bound)
