"""Stochastic rounding of fp32 to bf16, by torchao: up or down with the odds that make it right on average.

A bf16 weight has 8 significant bits. Rounding to the nearest loses an update below a 256th of the weight, step after step.
Stochastic rounding moves the weight by the update on average, and needs no fp32 master (arXiv:2010.06192).

torchao draws from torch's generator, which is seeded here for each shard and step: replicas of a shard round alike, shards of one
parameter differently, a resumed run as an uninterrupted one, and nothing else in the run draws other numbers than before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.parallel.init_weights import derived_seed
from titan.parallel.torch_compat import compute_local_shape_and_global_offset


class RoundingSeeds:
    """Seeds of the stochastic rounding of a run's parameters.

    Args:
        named: the parameters to round, with their names.
        seed: of the run.
    """

    def __init__(self, named: Mapping[str, Tensor], *, seed: int) -> None:
        self.seed = seed
        self.places = {
            parameter: f"{name} at {_offset(parameter)}" for name, parameter in named.items()
        }

    @contextmanager
    def seeded(self, parameter: Tensor, step: float) -> Iterator[None]:
        """Seed torch's generators for one update of a parameter, and put them back afterwards."""
        devices = [parameter.device] if parameter.device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=parameter.device.type):
            torch.manual_seed(
                derived_seed(self.seed, f"rounding {self.places[parameter]}, step {int(step)}")
            )
            yield


def _offset(parameter: Tensor) -> tuple[int, ...]:
    """Return where this rank's shard begins in the parameter."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim
    where = parameter.device_mesh, parameter.placements
    return tuple(compute_local_shape_and_global_offset(parameter.shape, *where)[1])
