"""The helpers alone, on a module of the test's own: no trainer, no config, no model of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.support.commands import finished
from tests.support.ranks import RankFailed
from tests.support.tables import tabled
from titan.parallel import (
    apply_fsdp,
    apply_tp,
    build_mesh,
    materialize,
)
from titan.parallel.init_weights import canonical_name
from titan.parallel.random_numbers import seed_generators


class Net(nn.Module):
    """Two blocks and a head of odd sizes, so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class EndsNet(Net):
    """The same with ends that are units: one that needs its weights in the backward pass, and one of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.blocks[1](self.blocks[0](self.stem(x))))))


def _gathered_ahead(
    gathers_experts: bool, prefetch: int
) -> list[tuple[str, set[str], set[str]]]:
    """Return each unit and what it gathers ahead in the forward and in the backward pass, by name."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_shard", "one"))
    with torch.device("meta"):
        model: Any = EndsNet()
        for block in model.blocks:
            block.experts = nn.Linear(3, 3)
    own = {
        block.experts: mesh["dp_shard" if gathers_experts else "one"] for block in model.blocks
    }
    units = {"blocks": model.blocks, "first": [model.stem], "last": [model.norm, model.head]}
    apply_fsdp(
        model, gradients="sum", mesh=mesh["dp_shard"], own_mesh=own, prefetch=prefetch, **units
    )
    names: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            names.setdefault(module._get_fsdp_state(), name)
    return [
        (
            name,
            {names[other] for other in state._states_to_forward_prefetch},
            {names[other] for other in state._states_to_backward_prefetch},
        )
        for state, name in names.items()
    ]


def test_what_is_inside_a_unit_is_gathered_ahead_with_it(pool) -> None:
    """FSDP drops its own order for the lists, so a unit that they leave out is gathered only when it runs."""
    order = [{"stem"}, *({f"blocks.{n}", f"blocks.{n}.experts"} for n in range(2)), {"head"}]
    for depth, gathers_experts, prefetch in (
        (1, True, 1),
        (2, True, 2),
        (1, True, -1),
        (0, False, -1),
        (0, True, 0),
    ):
        expected = {name: (set(), set()) for unit in order for name in unit} | {
            "": (set(), set())
        }
        for place, unit in enumerate(order):
            ahead, behind = order[place + 1 :][:depth], order[:place][::-1][:depth]
            # The first of a unit stands for it.
            expected[min(unit)] = set().union(*ahead), set().union(*behind)
        for lists in pool.run(2, _gathered_ahead, gathers_experts, prefetch):
            assert {name: ahead for name, *ahead in lists} == {
                name: [*ahead] for name, ahead in expected.items()
            }


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class FilledPlaces(Places):
    table: torch.Tensor

    def reset_buffers(self) -> None:
        torch.arange(4.0, out=self.table)


def test_buffers_are_filled_or_refused() -> None:
    with torch.device("meta"):
        good, bad = FilledPlaces(), nn.Sequential(Net(), Places())
    materialize(nn.Sequential(good), device="cpu")
    assert good.table.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"buffers 1\.table, .* a method reset_buffers\(\)"):
        materialize(bad, device="cpu")
    assert all(p.is_meta for p in bad.parameters())


class CountedPlaces(Places):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_a_callback_fills_buffers_and_misses_none() -> None:
    def fill(module: nn.Module) -> None:
        torch.arange(4.0, out=module.get_buffer("table"))

    with torch.device("meta"):
        good, bad = nn.Sequential(Net(), Places()), nn.Sequential(Places(), CountedPlaces())
    materialize(good, device="cpu", fill_buffers=fill)
    assert good.get_buffer("1.table").tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"^fill_buffers did not fill 1\.count$"):
        materialize(bad, device="cpu", fill_buffers=fill)


def test_buffers_built_on_the_cpu_keep_their_values_and_follow_the_parameters() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(Net(), Places())
    model[1].table = torch.arange(4.0)
    materialize(model, device="cpu")
    assert model[1].table.tolist() == [0, 1, 2, 3]
    materialize(model, device="meta")  # as another device than the buffers'
    assert model[1].table.is_meta


class NormedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)


def _run_snippet() -> dict[str, torch.Tensor]:
    """Weights of the model in the first snippet of docs/parallelism.md; on four ranks and a CPU."""
    text = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"MyModel": NormedNet}
    exec(code.replace('"cuda"', '"cpu"').replace("dp_shard=8", "dp_shard=2"), names)
    return {n: p.detach().full_tensor() for n, p in names["model"].named_parameters()}


def test_the_snippet_of_the_docs_runs_and_sets_biases_to_zero(pool) -> None:
    for weights in pool.run(4, _run_snippet):
        assert not any(value.any() for name, value in weights.items() if "bias" in name)
        assert (weights["norm.weight"] == 1).all() and weights["head.weight"].std() < 0.03


def _leave_out(plan: dict[str, str]) -> None:
    apply_tp(Net(), mesh=build_mesh("cpu", tp=2)["tp"], plan=plan, num_kv_heads=2)


def test_a_plan_names_every_module_with_parameters(pool) -> None:
    """Else each rank would keep the gradient of its own part of the sequence."""
    with pytest.raises(
        RankFailed, match=r"no style for blocks\.1\.weight, blocks\.1\.bias: name"
    ):
        pool.run(
            2,
            _leave_out,
            {"blocks.0": "sequence", "blocks.[2-9]": "rowwise", "head": "sequence"},
        )


def test_helpers_import_neither_trainer_nor_config() -> None:
    names = "precompute_scales, require_equal_replicas, set_gradient_sync, unshard_sequence"
    code = f"import sys, titan.losses.loss; from titan.parallel import *; {names}; print(list(sys.modules))"
    modules = finished([sys.executable, "-c", code]).stdout
    assert "titan.parallel" in modules
    for forbidden in (
        "titan.config",
        "titan.run.trainer",
        "titan.models",
        "titan.data",
        "pydantic",
        "torchao",
    ):
        assert forbidden not in modules


@pytest.mark.parametrize(
    "name", ["layers.0._checkpoint_wrapped_module.w.weight", "_orig_mod.layers.0.w.weight"]
)
def test_canonical_name(name: str) -> None:
    assert canonical_name(name) == "layers.0.w.weight"


_START = """
import sys, torch
from titan.parallel.init_distributed import start_process_group
start_process_group(init_timeout_s=60, expandable_segments=sys.argv[1] == "True")
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="torch 2.11 does not tell",
)
@tabled("wanted, variable, expected")
def test_the_allocator_is_set_before_it_is_used(
    wanted: str, variable: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RANK"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", variable)
    command = [sys.executable, "-c", _START, wanted]
    assert subprocess.check_output(command, text=True).strip() == expected


def test_seeding_the_host_takes_no_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    with (
        monkeypatch.context() as patch
    ):  # torch.manual_seed keeps one for each kind of device that is not in use
        patch.setattr("traceback.format_stack", None)
        seed_generators(5, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
