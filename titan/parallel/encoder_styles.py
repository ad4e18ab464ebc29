"""Split an encoder over tensor parallel ranks: its sequence is cut after the embedding, and what it returns is put into the decoder's.

titan/parallel/tensor.py has the table of styles.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

SEQUENCE_DIM = 1


class CutSequence(SequenceParallel):
    """Run a module with whole weights on whole inputs on each rank, and keep the rank's part of the output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(args[0], device_mesh, (Replicate(),), run_check=False)
            return x, *args[1:]

        def cut(_: nn.Module, __: Any, output: DTensor) -> Tensor:
            x = output.to_local()
            sides = [0, 0] * (x.ndim - SEQUENCE_DIM - 1)  # of the dimensions after it: none
            x = F.pad(x, [*sides, 0, -x.shape[SEQUENCE_DIM] % device_mesh.size()])
            x = DTensor.from_local(x, device_mesh, (Replicate(),), run_check=False)
            return x.redistribute(placements=(Shard(SEQUENCE_DIM),)).to_local()

        for part in module.modules():
            self._replicate_module_fn("", part, device_mesh)
        module.register_forward_pre_hook(whole)
        module.register_forward_hook(cut)
        return module


class PlaceShared(ParallelStyle):
    """Let a module without weights read features of all ranks for the rank's part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, features, index = args
            cut = DTensor.from_local(features, device_mesh, (Shard(SEQUENCE_DIM),), run_check=False)
            whole = cut.redistribute(placements=(Replicate(),))
            part = index.chunk(device_mesh.size(), dim=SEQUENCE_DIM)[device_mesh.get_local_rank()]
            # Each rank's gradient is that of its own positions.
            return x, whole.to_local(grad_placements=(Partial(),)), part

        module.register_forward_pre_hook(prepare)
        return module
