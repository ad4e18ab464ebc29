"""The judge itself: its checkpoint holds what its reference says, and its reference is what Adam makes of the losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from titan.contrib.megatron.tests.reference import MegatronRun, write_model_space
from titan.contrib.megatron.tests.reference import megatron as megatron


def read(run: MegatronRun) -> dict[str, torch.Tensor]:
    """Read each tensor of the checkpoint, without Megatron."""
    metadata = dcp.FileSystemReader(run.iteration).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=run.iteration, no_dist=True)
    return state


@pytest.mark.parametrize("variant", ["dense", "tp2", "pp2", "dp2", "bf16"])
def test_the_checkpoint_is_the_reference(
    megatron: Callable[..., MegatronRun], variant: str
) -> None:
    run = megatron(variant)
    state, reference = read(run), run.reference["state"][2]
    places = {
        "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
        "self_attention.linear_qkv.weight": "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight": "self_attention.linear_proj.weight",
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    master = "optimizer.state.fp32_param." if variant == "bf16" else ""
    for kind, prefix in [
        ("param", master),
        ("exp_avg", "optimizer.state.exp_avg."),
        ("exp_avg_sq", "optimizer.state.exp_avg_sq."),
    ]:
        for name, place in places.items():
            stacked = state[f"{prefix}decoder.layers.{place}"]
            layers = [reference[kind][f"decoder.layers.{layer}.{name}"] for layer in range(4)]
            torch.testing.assert_close(stacked, torch.stack(layers), rtol=0, atol=0)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert state[f"{prefix}{name}"].equal(reference[kind][name])


def test_the_older_form_of_moments_has_the_shapes_of_megatron_0_12(
    megatron: Callable[..., MegatronRun], tmp_path: Path
) -> None:
    """The shapes are those that megatron-core 0.12.3 wrote for the same model and layout."""
    run = megatron("dp2")
    write_model_space(run.iteration, tmp_path)
    older = read(MegatronRun(tmp_path, tmp_path, run.reference))
    layers = "optimizer.state.exp_avg.decoder.layers."
    expected = {
        "optimizer.state.exp_avg.embedding.word_embeddings.weight": (1, 1, 32768),
        "optimizer.state.exp_avg_sq.decoder.final_layernorm.weight": (1, 64),
        f"{layers}mlp.linear_fc1.weight": (4, 2, 1, 6144),
        f"{layers}mlp.linear_fc1.layer_norm_weight": (4, 1, 64),
        f"{layers}self_attention.linear_qkv.weight": (4, 1, 1, 6144),
    }
    assert {key: tuple(older[key].shape) for key in expected} == expected
    gate, up = read(run)[f"{layers}mlp.linear_fc1.weight"][3].chunk(2)
    flat = older[f"{layers}mlp.linear_fc1.weight"][3, :, 0]
    assert flat.equal(torch.stack([gate.flatten(), up.flatten()]))


def test_the_reference_is_adam(megatron: Callable[..., MegatronRun]) -> None:
    """From one step to the next, weights move as the two moments, the rate and the decay say."""
    reference = megatron("dense").reference
    beta1, beta2, eps, decay = 0.9, 0.95, 1e-8, 0.1
    for step in (3, 4):
        before, after = reference["state"][step - 1], reference["state"][step]
        rate = reference["steps"][step]["lr"]
        for name, weight in before["param"].items():
            mult = reference["groups"][name]["wd_mult"]
            assert mult == (0.0 if weight.ndim == 1 else 1.0)
            mean = after["exp_avg"][name] / (1 - beta1**step)
            square = after["exp_avg_sq"][name] / (1 - beta2**step)
            moved = weight * (1 - rate * decay * mult) - rate * mean / (square.sqrt() + eps)
            torch.testing.assert_close(after["param"][name], moved, rtol=2e-6, atol=2e-8)
