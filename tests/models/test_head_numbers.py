"""Numbers of heads that differ from the usual ones, by model and by layer, under tensor parallelism: transformers' numbers, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.stablelm import modeling_stablelm

from tests.support import hf_families, hf_sizes
from tests.support.hf_families import is_equal, job_of, overrides_of
from tests.support.ranks import Pool
from tests.support.tables import table
from titan.checks.layout_rules import check_layout
from titan.contrib.transformers import build_model
from titan.contrib.transformers.flows import Flows
from titan.contrib.transformers.probe import Watch


def row_with(kind: str, change: dict[str, Any], degrees: dict[str, int]) -> str:
    """Run on each rank: the largest difference of a family with other fields, or why it is refused."""
    whole = dict(hf_sizes.LAYERS)
    hf_sizes.LAYERS[kind] = whole.get(kind, {}) | change
    try:
        with TemporaryDirectory() as folder:
            chosen = {kind: hf_families.families()[kind]}
            row = hf_families.run_rank(chosen, {"it": degrees}, False, Path(folder))[kind]
    finally:
        hf_sizes.LAYERS.clear()
        hf_sizes.LAYERS.update(whole)
    return row.get("it", str(row))


CASES: list[tuple[str, dict[str, Any], dict[str, int]]] = table(__file__, "cases")


@pytest.mark.parametrize(("kind", "change", "degrees"), CASES)
def test_a_layout_equals_transformers(
    kind: str, change: dict[str, Any], degrees: dict[str, int], pool: Pool
) -> None:
    found = pool.run(hf_families.num_ranks(degrees), row_with, kind, change, degrees)[0]
    assert is_equal(found), found


def with_a_norm_after_the_last_matrix() -> str:
    """Run on each rank: StableLM with a norm of the output of attention, inside of its module."""
    kind: Any = modeling_stablelm.StableLmAttention
    init, forward = kind.__init__, kind.forward

    def begin(self: Any, *args: Any, **keys: Any) -> None:
        init(self, *args, **keys)
        self.after = nn.LayerNorm(self.hidden_size)

    def run(self: Any, *args: Any, **keys: Any) -> Any:
        output, weights = forward(self, *args, **keys)
        return self.after(output), weights

    kind.__init__, kind.forward = begin, run
    return row_with("stablelm", {}, {"tp": 2})


def test_gradients_of_each_ranks_own_tokens_are_added_up(pool: Pool) -> None:
    found = pool.run(2, with_a_norm_after_the_last_matrix)[0]
    assert is_equal(found), found


def test_a_layer_that_cannot_be_shared_is_refused_by_check() -> None:
    architecture = "MiMoV2FlashForCausalLM"
    fields = overrides_of(architecture) | {"num_attention_heads": 12, "num_key_value_heads": 6}
    job = job_of(architecture, {"tp": 4}, fields)
    sizes, problems = job.model.resolved
    assert not problems and {block.kv_heads for block in sizes.heads_of_blocks} == {6, 12}
    found = str(check_layout(job, world_size=4))
    assert "4 neither divides the model's 6 key/value heads nor is a multiple of them" in found


class Fused(nn.Module):
    """One matrix for queries, keys and values, whose output is cut in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.qkv = way, nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.qkv(x)
        by_head = out.view(1, 5, 2, 12)  # two heads with a query, a key and a value each
        if self.way == "heads":
            return [part.transpose(1, 2)[..., ::2] for part in by_head.chunk(3, -1)]
        if self.way == "one head":
            return out.view(1, 5, 1, 24)[..., :8]
        if self.way == "split":
            return out.clamp(-1, 1).split([8, 8, 8], dim=-1)
        if self.way == "slice":
            return out.view(5, 24)[:, :8]
        if self.way == "unbind":
            return out.view(1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return out.unflatten(-1, (6, 4)).transpose(1, 2)[:, :-2]


WAYS = {
    "heads": False,
    "one head": False,
    "split": True,
    "slice": True,
    "unbind": True,
    "last heads": True,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fused_matrix_is_known_by_how_its_output_is_cut(way: str) -> None:
    model = Fused(way).to("meta")
    watch = Watch({})

    def begin(_: nn.Module, __: object, out: torch.Tensor) -> None:
        watch.flows.begin("qkv", out, -1)

    model.qkv.register_forward_hook(begin)
    with torch.no_grad(), watch:
        model(torch.zeros(1, 5, 8, device="meta"))
    assert (watch.flows.cut == {"qkv"}) is WAYS[way]


def test_what_follows_a_matmul_is_another_output() -> None:
    flows = Flows()
    x = torch.zeros(2, 4)
    flows.begin("first", x, -1)
    flows.follow(torch.ops.aten.relu.default, (x,), {}, y := torch.relu(x))
    flows.follow(torch.ops.aten.mm.default, (y, y.T), {}, z := y @ y.T)
    assert flows.of(y) == {"first": 1} and flows.of(z) == {}


def test_flops_of_layers_with_other_heads() -> None:
    name = "Gemma4ForCausalLM"
    sizes = job_of(name, {}, overrides_of(name)).model.sizes
    # Its embeddings of each layer come after the blocks by name, and before them by use.
    assert "embed_tokens_per_layer" in dict(sizes.refuses)["tensor_parallel_degree"]
    with torch.device("meta"):
        model: Any = build_model(sizes)
    widths = [layer.self_attn.q_proj.out_features for layer in model.layers.values()]
    assert len({*widths}) == 2
    assert [sizes.attention_width(n) for n in range(len(widths))] == widths
