"""Fake world of the recorded program: a device, a process group of all ranks, fake tensors.

All changes to torch last for the life of the process, which records and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.config.layout import Layout
from titan.parallel import build_mesh
from titan.parallel.torch_compat import GPU_TYPES
from titan.sim.record import device, torch_compat


@contextmanager
def fake_world(
    layout: Layout | None, *, rank: int, world_size: int
) -> Iterator[tuple[torch.device, DeviceMesh | None]]:
    """Become a rank of a fake world. Tensors made inside are fake.

    Yields:
        The device, and the mesh of the layout (None without a layout).
    """
    # The device first: the process group names it as its backend, and the mesh asks both.
    fake_device = device.register()
    torch_compat.init_fake_process_group(device.NAME, rank=rank, world_size=world_size)
    _replace_generic_names()
    mesh = build_mesh(device.NAME, **layout.degrees) if layout else None
    # From here on, tensors have shapes and no memory. The mesh above holds real tensors of ranks.
    with torch_compat.fake_tensors():
        yield fake_device, mesh


def impersonate_rank(rank: int, mesh: DeviceMesh) -> int:
    """Make the program believe that this process is another rank, in another pipeline stage.

    Return the distance in ranks.

    A stage's number depends only on the rank within the pipeline's group, so the two ranks change
    places there. Groups along other axes stay this rank's own and have the same size. Not supported
    if the pipeline group is the whole world: torch does not look up the rank there.
    """
    own = dist.get_rank()
    shift = rank - own
    # A shift of 0 needs no change: this rank is in the wanted stage.
    if shift:
        pipeline = mesh.get_group("pp")
        # In the whole world's group torch takes the rank from elsewhere, so a change here would do
        # nothing.
        assert dist.get_world_size(pipeline) < dist.get_world_size()
        numbers = torch_compat.group_ranks(pipeline)
        # Start from the true order: an earlier call may have swapped two other ranks.
        numbers.update(
            {global_rank: number for number, global_rank in enumerate(sorted(numbers))}
        )
        numbers[own], numbers[rank] = numbers[rank], numbers[own]
    return shift


def _replace_generic_names() -> None:
    """Replace torch's device-independent streams and generators, which support only devices of its C++ side."""
    generic: Any = torch
    generic.Stream, generic.Event = device.Stream, device.Event
    generic.accelerator.current_stream = lambda *_: device.current()
    torch.accelerator.is_available = lambda: False  # or Dynamo would look into its streams
    generator = torch.Generator

    class Generator:
        """Generator on the host. No numbers are drawn from it."""

        # __new__ returns torch's object: callers only pass it on.
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator("cpu")

    generic.Generator = Generator
    # Its default is CUDA's generators, and pipelines of torch 2.12 leave it at that.
    torch.random.fork_rng = partial(torch.random.fork_rng, device_type=device.NAME)
    Tensor.pin_memory = lambda tensor, *_, **__: tensor
    # Linear attention of GPUs is a kernel.
    GPU_TYPES.add(device.NAME)
