"""A helper that finds nothing to do says what it looked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from titan.parallel import (
    apply_ac,
    apply_compile,
    apply_cp,
    apply_ddp,
    apply_ep,
    apply_float8,
    apply_fsdp,
    apply_tp,
    build_mesh,
    precompute_scales,
    require_equal_replicas,
    set_gradient_sync,
    split_stages,
)
from titan.parallel.grouped_float8 import apply_grouped_float8


class Experts(nn.Module):
    """Experts that are modules, not one stacked parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])


class Moe(nn.Module):
    def __init__(self, dispatches: bool) -> None:
        super().__init__()
        self.experts = Experts()
        if dispatches:
            self.dispatcher: Any = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])
        self.one = nn.ModuleList([nn.Linear(4, 4)])
        self.empty = nn.ModuleDict()


OTHER: Any = Net()
HELPERS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "ep, class": (lambda m, mesh: apply_ep(m, mesh=mesh, moe_type=Moe), "no Moe in Net"),
    "ep, any": (lambda m, mesh: apply_ep(m, mesh=mesh, moe_type=nn.Module), "no Module in Net.*`dispatcher`"),
    "ep, attribute": (
        lambda m, mesh: apply_ep(nn.Sequential(m, Moe(False)), mesh=mesh, moe_type=Moe),
        "Moe in Sequential, 1, without the attribute `dispatcher`",
    ),
    "ep, one of two": (
        lambda m, mesh: apply_ep(nn.Sequential(Moe(True), Moe(False)), mesh=mesh, moe_type=Moe),
        "Moe in Sequential, 1, without",
    ),
    "ep, experts": (
        lambda m, mesh: apply_ep(nn.Sequential(Moe(True)), mesh=mesh, moe_type=Moe),
        r"0\.experts \(Experts\) holds no parameters itself",
    ),
    "tp": (
        lambda m, mesh: apply_tp(m, mesh=mesh, plan={"layers.*.wq": "colwise"}, num_kv_heads=2),
        r"no style for|no module of Net matches the plan \(layers\.\*\.wq\)",
    ),
    "tp, frozen": (
        lambda m, mesh: apply_tp(m.requires_grad_(False), mesh=mesh, plan={"layers.*.wq": "colwise"}, num_kv_heads=2),
        r"no module of Net matches the plan \(layers\.\*\.wq\); it has blocks, ",
    ),
    "cp": (lambda m, mesh: apply_cp(m, mesh=mesh, attention_type=Moe), "no Moe in Net"),
    "ac": (lambda m, _: apply_ac(m), "Net has no blocks in `layers`; .* are blocks, one, empty"),
    "ac, empty": (lambda m, _: apply_ac(m, container="empty"), "no blocks in `empty`"),
    "ac, every": (lambda m, _: apply_ac(m, container="blocks", every=3), "no block of blocks"),
    "ac, numbers": (lambda m, _: apply_ac(m, container="blocks", blocks={7}), r"no block of blocks \(0, 1\)"),
    "compile": (lambda m, _: apply_compile(m, container=["blocks", "empty"], backend="eager"), "no blocks in `empty`"),
    "fsdp": (lambda m, mesh: apply_fsdp(m, mesh=mesh, blocks=iter(()), gradients="sum"), "no block of Net is named"),
    "fsdp, other": (
        lambda m, mesh: apply_fsdp(m, mesh=mesh, blocks=OTHER.blocks, gradients="sum"),
        "a module Linear is not in Net",
    ),
    "fsdp, own mesh": (
        lambda m, mesh: apply_fsdp(m, mesh=mesh, blocks=m.blocks, own_mesh={m.one[0]: mesh}, gradients="sum"),
        "a module Linear is not in a block, and own_mesh names it",
    ),
    "ddp": (lambda m, mesh: apply_ddp(m, mesh=mesh, blocks=[], gradients="mean"), "no block of Net"),
    "sync": (lambda m, _: set_gradient_sync(m, True), "Net is not sharded"),
    "replicas": (lambda m, _: require_equal_replicas([m]), "no parameter of Net is replicated"),
    "stages": (
        lambda *_: split_stages(2, num_ranks=2, num_microbatches=2, modules=[["layers.0", "layers.1"], []]),
        "modules are named for 1 stages, the schedule has 2",
    ),
}  # fmt: skip
FLOAT8: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "float8": (lambda m, _: apply_float8(nn.Sequential(nn.LayerNorm(4)), emulate=True), "no layer of Sequential .it has no nn.Linear"),
    "float8, small": (lambda m, _: apply_float8(m, emulate=True), r"no layer of Net \(blocks\.0: 4 x 4 does not divide by 16"),
    "grouped": (
        lambda m, _: apply_grouped_float8(m, recipe="float8", fqns=["moe"], emulate=True),
        "no experts .* in Net whose names contain moe; it has none",
    ),
    "scales": (lambda m, _: precompute_scales(m), "no layer of Net is gathered in float8"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*HELPERS, *FLOAT8])
def test_it_says_what_it_looked_for(name: str, one_rank: None) -> None:
    helper, text = (HELPERS | FLOAT8)[name]
    with pytest.raises(ValueError, match=text):
        helper(Net(), build_mesh("cpu")["dp_shard"])
