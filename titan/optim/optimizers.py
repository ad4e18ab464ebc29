"""Construction of the optimizer from its section. Matrices are decayed, norms and biases only with `decay_norms`.

    AdamW, Adam   fused_adam.py, or another implementation of torch, if weights and moments share a precision
    the same with small states, AdamW8bit, Muon
                  plug-ins of the kind "optimizer" (titan/config/plug_ins.py)

Groups keep their own peak learning rate as "initial_lr" (torch's name for it), which the schedule scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from titan.config.base import completed
from titan.config.plug_ins import door, require_part
from titan.config.schema import (
    AdamOptions,
    AdamSection,
    AdamW8bitSection,
    AdamWSection,
    MuonSection,
    OptimizerDefaults,
    OptimizerSection,
)
from titan.parallel.init_weights import canonical_name

from .fused_adam import FusedAdam
from .rounding import RoundingSeeds
from .states import Allocates, adam_state


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices. A stack of biases is neither."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def parameter_groups(
    parameters: Iterable[nn.Parameter],
    *,
    weight_decay: float,
    decay_norms: bool = False,
    names: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """Return two groups of trained parameters: matrices, and vectors, which are decayed only with `decay_norms`.

    Args:
        parameters: the parameters. Frozen parameters are left out.
        weight_decay: weight decay of matrices.
        decay_norms: decay vectors, too.
        names: names of all parameters. Needed if there are stacks of biases.
    """
    named = zip(names or repeat(""), parameters, strict=False)
    trained = [(is_matrix(name, p), p) for name, p in named if p.requires_grad]
    vector_decay = weight_decay * decay_norms
    groups = [
        {"params": [p for matrix, p in trained if matrix], "weight_decay": weight_decay},
        {"params": [p for matrix, p in trained if not matrix], "weight_decay": vector_decay},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    section: OptimizerSection,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the optimizer of a section.

    Args:
        section: [optimizer]. A third party's section has a method `build(parameters) -> torch.optim.Optimizer`, which is called.
        named_parameters: parameters of the model, or of this rank's stages, with their names.
        seed: seed of stochastic rounding.
    """
    named = {canonical_name(name): p for name, p in named_parameters if p.requires_grad}
    build = completed(section, OptimizerDefaults).build
    if build is not None:
        optimizer = build(list(named.values()))
    elif isinstance(section, MuonSection):
        build_muon = _part(BuildMuon)
        optimizer = build_muon(section, named, seed=seed)
    else:
        assert isinstance(section, AdamOptions)
        optimizer = build_adam(section, named, lr=section.lr, seed=seed)
    # torch's schedulers keep the peak under this name.
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    return optimizer


def allocate_state(optimizer: torch.optim.Optimizer) -> bool:
    """Create the missing states of an optimizer's parameters, as their first step would.

    So a checkpoint has a state for each parameter, even without a gradient so far, and can be loaded into it.

    Args:
        optimizer: the optimizer.

    Returns:
        Whether titan can create this optimizer's states.
    """
    if isinstance(optimizer, Allocates):
        optimizer.allocate()
        return True
    # amsgrad has a third moment, which is not created here.
    is_torchs = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if not is_torchs or optimizer.defaults["amsgrad"]:
        return False
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            # Fused kernels read the step on the device, the others on the host.
            device = parameter.device if group["fused"] else "cpu"
            optimizer.state[parameter] = adam_state(parameter, step_on=device)
    return True


def build_adam(
    section: AdamOptions,
    named: Mapping[str, nn.Parameter],
    *,
    lr: float,
    seed: int,
) -> torch.optim.Optimizer:
    """Build Adam or AdamW: `FusedAdam`, torch's, or one with small states.

    Args:
        section: [optimizer].
        named: trained parameters, by name.
        lr: peak learning rate.
        seed: seed of stochastic rounding.
    """
    groups = parameter_groups(
        named.values(),
        weight_decay=section.weight_decay,
        decay_norms=section.decay_norms,
        names=named,
    )
    options: dict[str, Any] = {
        "lr": lr,
        "betas": (section.beta1, section.beta2),
        "eps": section.eps,
    }
    decoupled = not isinstance(section, AdamSection)
    weight_dtypes = {p.dtype for p in named.values()}
    state_dtype = _state_dtype(section)
    # torch's kernels keep moments in the weights' precision, and round to nearest.
    if not section.stochastic_rounding and (
        state_dtype is None or weight_dtypes == {state_dtype}
    ):
        if section.implementation == "fused":
            return FusedAdam(groups, decoupled=decoupled, **options)
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(
            groups, foreach=section.implementation == "foreach", **options
        )
    return _part(BuildSmallAdam)(
        groups,
        state_dtype=state_dtype or weight_dtypes.pop(),
        decoupled=decoupled,
        seeds=RoundingSeeds(named, seed=seed) if section.stochastic_rounding else None,
        compiled=section.implementation == "fused",
        **options,
    )


T = TypeVar("T")


@door("optimizer.Muon")
class BuildMuon(Protocol):
    """Function that builds Muon for the matrices of a rank's blocks, and Adam for its other parameters."""

    def __call__(
        self,
        section: MuonSection,
        named: Mapping[str, nn.Parameter],
        /,
        *,
        seed: int,
    ) -> torch.optim.Optimizer: ...


@door("optimizer.small")
class BuildSmallAdam(Protocol):
    """Function that builds Adam with moments of fewer bits. It takes the arguments of torch's Adam beside these."""

    def __call__(
        self,
        parameters: Iterable[Any],
        /,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype,
        decoupled: bool,
        seeds: RoundingSeeds | None,
        compiled: bool,
    ) -> torch.optim.Optimizer: ...


def _part(contract: type[T]) -> T:
    """Return the function that builds an optimizer of titan's optional parts."""
    missing = 'its part of titan/contrib is not installed; use "AdamW", without state_dtype and stochastic_rounding'
    return require_part(contract, key="optimizer.name", missing=missing)


def _state_dtype(section: AdamOptions) -> torch.dtype | None:
    """Return the precision of the moments. None: that of the weights."""
    if isinstance(section, AdamW8bitSection):
        return torch.uint8
    name = section.state_dtype if isinstance(section, AdamWSection) else None
    return getattr(torch, name) if name else None
