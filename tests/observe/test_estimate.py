"""The memory formula against counts by hand."""

from typing import Any

import pytest

from titan.config.layout import Layout
from titan.config.sections import (
    ActivationCheckpointSection,
    JobConfig,
    LossSection,
    ParallelismSection,
    TrainingSection,
)
from titan.models.llama3.config import FLAVORS, LlamaConfig
from titan.observe.estimate import estimate_memory

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


def test_activations_counted_by_hand() -> None:
    """Two layers of dim 8, 4 heads and 2 key/value heads of 2, ffn 16; 3 sequences of 10 tokens in bf16."""
    model = LlamaConfig(dim=8, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=16, vocab_size=32)
    estimate = estimate_memory(job(local_batch_size=3, seq_len=10), model, layout())
    inputs_of_norms, inputs_of_products = 2 * 8, 2 * 8
    q_and_output, k_and_v, feed_forward = 2 * 8, 2 * 4, 4 * 16
    per_token = inputs_of_norms + inputs_of_products + q_and_output + k_and_v + feed_forward
    assert estimate["activations"] == pytest.approx(2 * 30 * per_token * 2 / GIB)
    # Logits and their gradient in bf16, and as all 30 tokens are one chunk, once in fp32.
    assert estimate["logits"] == pytest.approx(30 * 32 * (2 + 2 + 4) / GIB)


def test_full_recomputation_keeps_block_inputs_and_one_block() -> None:
    model = FLAVORS["8B"]
    none = estimate_memory(job(), model, layout())["activations"]
    full = estimate_memory(job(mode="full"), model, layout())["activations"]
    op = estimate_memory(job(mode="selective"), model, layout())["activations"]
    block_inputs = model.n_layers * 8 * 2048 * model.dim * 2 / GIB
    assert full == pytest.approx(block_inputs + none / model.n_layers)
    assert full < op < none


def test_one_rank_in_one_precision_gathers_nothing() -> None:
    assert (
        estimate_memory(job(mixed_precision_param="float32"), FLAVORS["1B"], layout())["unsharded"]
        == 0
    )
    assert estimate_memory(job(), FLAVORS["1B"], layout())["unsharded"] > 0


def test_zero2_keeps_every_block_gathered() -> None:
    model = FLAVORS["8B"]
    zero2, zero3 = (
        estimate_memory(job(policy=policy), model, layout(dp_shard=8))["unsharded"]
        for policy in ("never", "always")
    )
    assert zero2 - zero3 == pytest.approx((model.n_layers - 2) * model.num_block_params * 2 / GIB)


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
