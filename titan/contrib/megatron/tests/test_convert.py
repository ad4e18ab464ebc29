"""The next two steps of titan after a conversion against those of megatron-core itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf_families import whole_weights
from tests.support.jobs import degrees_of
from tests.support.ranks import Pool
from tests.support.runs import saved_tensors
from tests.support.steps import build_step
from titan.checkpoint import manager as checkpoints
from titan.config.load import load_config
from titan.contrib.megatron.convert import from_megatron
from titan.contrib.megatron.tests.reference import MegatronRun
from titan.contrib.megatron.tests.reference import megatron as megatron
from titan.data.packing import Batch
from titan.numerics.certify.steps import micro_batches
from titan.numerics.digests import whole
from titan.parallel import build_mesh

Tensors = dict[str, Tensor]
HEADS, GROUPS, LAYERS, EXPERTS = 8, 2, 4, 4
MOMENTS = ("exp_avg", "exp_avg_sq")
# The largest difference of a loss or a norm, relative, and of a tensor, relative to its largest element. Weights move by
# the rate in a step whatever the gradient's size, so an element without a gradient may take another way.
BOUND, OF_TENSORS = 2e-6, 2e-5
# titan's name of a tensor, in its own families and in transformers' Mixtral.
NAMES = {
    "input_layernorm.weight": ("attention_norm.weight", "input_layernorm.weight"),
    "pre_mlp_layernorm.weight": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "self_attention.linear_proj.weight": ("attention.wo.weight", "self_attn.o_proj.weight"),
    "self_attention.q_layernorm.weight": ("attention.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("attention.k_norm.weight",),
    "self_attention.kv_layernorm.weight": ("attention.kv_norm.weight",),
    "self_attention.linear_q_down_proj.weight": ("attention.wq_a.weight",),
    "self_attention.linear_q_up_proj.weight": ("attention.wq_b.weight",),
    "self_attention.linear_kv_down_proj.weight": ("attention.wkv_a.weight",),
    "self_attention.linear_kv_up_proj.weight": ("attention.wkv_b.weight",),
    "mlp.router.weight": ("moe.router.gate.weight", "mlp.gate.weight"),
    "mlp.router.expert_bias": ("moe.bias",),
    "mlp.linear_fc2.weight": ("feed_forward.w2.weight",),
    "mlp.shared_experts.linear_fc2.weight": ("moe.shared_experts.w2.weight",),
    "embedding.word_embeddings.weight": ("tok_embeddings.weight",),
    "decoder.final_layernorm.weight": ("norm.weight",),
    "output_layer.weight": ("output.weight", "tok_embeddings.weight"),
    "final_layernorm.weight": ("head_norm.weight",),
}
PAIRS = {
    "mlp.linear_fc1.weight": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "mlp.shared_experts.linear_fc1.weight": (
        "moe.shared_experts.w1.weight",
        "moe.shared_experts.w3.weight",
    ),
}


def as_megatron(name: str, ours: Tensors) -> Tensor:
    """Put a tensor of Megatron together from titan's."""
    prefix = ""
    if layer := re.match(r"(decoder|mtp)\.layers\.(\d+)\.(transformer_layer\.)?", name):
        name = name[layer.end() :]
        number = int(layer[2]) + LAYERS * (layer[1] == "mtp")
        prefix = f"layers.{number}." + ("block." if layer[3] else "")
    if name == "self_attention.linear_qkv.weight":
        kind = "attention.w{}.weight"
        if f"{prefix}attention.wq.weight" not in ours:
            kind = "self_attn.{}_proj.weight"
        q, k, v = (ours[prefix + kind.format(part)].chunk(GROUPS) for part in "qkv")
        return torch.cat([torch.cat(group) for group in zip(q, k, v, strict=True)])
    if name in PAIRS:
        return torch.cat([ours[prefix + part] for part in PAIRS[name]])
    if expert := re.fullmatch(
        r"mlp\.experts\.local_experts\.(\d+)\.linear_fc(\d)\.weight", name
    ):
        number, is_first = int(expert[1]), expert[2] == "1"
        parts = ("w1", "w3") if is_first else ("w2",)
        if f"{prefix}moe.experts.w1" in ours:
            return torch.cat([ours[f"{prefix}moe.experts.{part}"][number] for part in parts])
        parts = ("gate_proj", "up_proj") if is_first else ("down_proj",)
        return torch.cat([ours[f"{prefix}mlp.experts.{part}"][number] for part in parts])
    found = [prefix + ending for ending in NAMES.get(name, (name,)) if prefix + ending in ours]
    assert found, name
    return ours[found[0]]


def train(output: Path, tokens: dict[int, Tensor], degrees: dict[str, int]) -> dict[str, Any]:
    """On a rank: continue from step 2, and return losses, norms and states of steps 3 and 4."""
    torch.set_num_threads(1)
    overrides = [f"parallelism.{key}={n}" for key, n in degrees_of(degrees).items()]
    if "pp" in degrees or "dp_shard" in degrees:
        overrides.append("training.local_batch_size=2")
    config = load_config(output / "config.toml", overrides=overrides)
    step = build_step(config, build_mesh("cpu", **degrees))
    path, parts = output / "checkpoint" / "step-2", step.model_parts
    checkpoints.load(path, checkpoints.model_state(parts))
    checkpoints.load(path, checkpoints.empty_optimizer_state(path, parts, step.optimizer))
    found: dict[str, Any] = {"steps": {}, "state": {}}
    for number in (3, 4):
        batch = Batch(tokens_BS=tokens[number][:, :-1], labels_BS=tokens[number][:, 1:])
        accumulation = 2 if "pp" in degrees else 1
        micro = micro_batches(batch, step.mesh, accumulation)
        report = step.train(micro, step=number)
        rate = step.optimizer.param_groups[0]["lr"]
        found["steps"][number] = (report.loss.item(), report.grad_norm.item(), rate)
        state = {"param": whole_weights(step)}
        of_optimizer = checkpoints.optimizer_state(parts, step.optimizer)
        for moment in MOMENTS:
            state[moment] = {
                name.removeprefix("optimizer.").removesuffix(f".{moment}"): whole(tensor)
                for name, tensor in of_optimizer.items()
                if name.endswith(f".{moment}")
            }
        state["buffer"] = {
            name.removeprefix("model."): whole(x)
            for name, x in checkpoints.model_state(parts).items()
            if name.endswith("bias")
        }
        found["state"][number] = state
    return found


def compare(results: list[dict[str, Any]], run: MegatronRun) -> None:
    """Compare the ranks' steps with Megatron's."""
    reference = run.reference
    for number in (3, 4):
        expected = reference["steps"][number]
        for loss, norm, rate in (found["steps"][number] for found in results):
            assert loss == pytest.approx(expected["loss"], rel=BOUND), number
            assert norm == pytest.approx(expected["grad_norm"], rel=BOUND), number
            assert rate == pytest.approx(expected["lr"], rel=1e-12), number
        for kind in ("param", *MOMENTS, "buffer"):
            ours: Tensors = {}
            for found in results:
                ours |= found["state"][number][kind]
            for name, theirs in reference["state"][number][kind].items():
                difference = (as_megatron(name, ours) - theirs).abs().max()
                assert difference <= OF_TENSORS * theirs.abs().max(), (number, kind, name)


def converted(run: MegatronRun, output: Path, **options: Any) -> list[str]:
    messages = from_megatron(run.folder, output, **options)
    assert (output / "checkpoint" / "step-2").is_dir()
    return messages


def check(
    run: MegatronRun, output: Path, pool: Pool, degrees: dict[str, int] | None = None
) -> None:
    converted(run, output)
    degrees = degrees or {}
    ranks = torch.Size(degrees.values()).numel()
    compare(pool.run(ranks, train, output, run.reference["tokens"], degrees), run)


VARIANTS = (
    "dense",
    "dense_single",
    "tied",
    "qk_norm",
    "padded",
    "tp2_single",
    "pp2",
    "pp2_tied",
    "dp2",
    "moe",
    "moe_single",
    "moe_ep2",
    "moe_tp2",
    "qwen3_moe",
    "deepseek",
    "deepseek_mtp",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_next_steps_are_megatrons(
    megatron: Callable[..., MegatronRun], variant: str, pool: Pool, tmp_path: Path
) -> None:
    check(megatron(variant), tmp_path / "out", pool)


@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
@pytest.mark.parametrize("variant", ["tp2", "qwen3_moe"])
def test_on_other_layouts_too(
    megatron: Callable[..., MegatronRun], variant: str, axis: str, pool: Pool, tmp_path: Path
) -> None:
    check(megatron(variant), tmp_path / "out", pool, {axis: 2})


@pytest.mark.parametrize("variant", ["tp2", "pp2", "dp2", "bf16", "bf16_dp2"])
def test_the_state_is_megatrons(
    megatron: Callable[..., MegatronRun], variant: str, tmp_path: Path
) -> None:
    """Bit for bit. Weights of a model in bf16 are the optimizer's, in fp32."""
    run = megatron(variant)
    converted(run, tmp_path / "out")
    found = saved_tensors(tmp_path / "out" / "checkpoint" / "step-2")
    for kind, theirs in run.reference["state"][2].items():
        ours = {
            re.sub(rf"^model\.|^optimizer\.|\.{kind}$", "", name): tensor
            for name, tensor in found.items()
            if name.startswith("model.") == (kind in ("param", "buffer"))
            and (kind in ("param", "buffer") or name.endswith(f".{kind}"))
        }
        for name, tensor in theirs.items():
            assert tensor.dtype == torch.float32 and as_megatron(name, ours).equal(tensor), name


def test_buckets_are_refused(megatron: Callable[..., MegatronRun], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"by bucket .*--dist-ckpt-optim-fully-reshardable.*--model-only"
    ):
        from_megatron(megatron("dp2_buckets").folder, tmp_path / "out")
    from_megatron(megatron("dp2_buckets").folder, tmp_path / "weights", model_only=True)
