"""Stochastic rounding of fp32 to bf16, by torchao: up or down, with probabilities that make the mean exact.

A bf16 weight has 8 significant bits. Rounding to the nearest loses an update below a 256th of the weight, step after step.
Stochastic rounding moves the weight by the update on average, and needs no fp32 master (arXiv:2010.06192).

torchao draws from torch's generator, which is seeded here for each shard and step. So replicas of a shard round alike, shards
of one parameter round differently, a resumed run rounds like an uninterrupted run, and other random numbers of the run do
not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.parallel.init_weights import derived_seed
from titan.parallel.random_numbers import seed_generators
from titan.parallel.torch_compat import compute_local_shape_and_global_offset


class RoundingSeeds:
    """Seeds of the stochastic rounding of a run's parameters.

    Attributes:
        seed: seed of the run.
        places: name of each parameter and the offset of this rank's shard in it.
    """

    def __init__(self, named: Mapping[str, Tensor], *, seed: int) -> None:
        """Record the places of the parameters.

        Args:
            named: parameters to round, by name.
            seed: seed of the run.
        """
        self.seed = seed
        self.places = {
            parameter: f"{name} at {_offset(parameter)}" for name, parameter in named.items()
        }

    @contextmanager
    def seeded(self, parameter: Tensor, step: float) -> Iterator[None]:
        """Seed torch's generators for one update of a parameter, and restore them afterwards.

        Args:
            parameter: the parameter.
            step: number of its step.
        """
        devices = [parameter.device] if parameter.device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=parameter.device.type):
            name = f"rounding {self.places[parameter]}, step {int(step)}"
            seed_generators(derived_seed(self.seed, name), parameter.device)
            yield


def _offset(parameter: Tensor) -> tuple[int, ...]:
    """Return the offset of this rank's shard in the parameter."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.ndim
    where = parameter.device_mesh, parameter.placements
    return tuple(compute_local_shape_and_global_offset(parameter.shape, *where)[1])
