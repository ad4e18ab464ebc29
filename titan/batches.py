"""From a data-parallel rank's batch to what this one rank computes with: on its device, and of its part of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan.data.packing import IGNORED
from titan.parallel.context import shard_sequence


class MicroBatch(Protocol):
    """What a step reads of a batch; titan.data's Batch is one. All int64, (B, S), on any device."""

    @property
    def tokens_BS(self) -> Tensor: ...
    @property
    def labels_BS(self) -> Tensor: ...
    @property
    def positions_BS(self) -> Tensor | None: ...
    @property
    def document_ids_BS(self) -> Tensor | None: ...


@dataclass(frozen=True)
class LocalBatch:
    """A micro-batch on this rank's device; under context parallelism, of its part of the sequence."""

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor | None
    document_ids_BS: Tensor | None


@dataclass(frozen=True)
class Localizer:
    """context: the cp axis over which sequences are split, balanced or not. needs_positions: give them even where
    they only count up, to a model part that cannot know its place: of the sequence, or past the embedding."""

    device: torch.device
    context: DeviceMesh | None
    balanced: bool
    needs_positions: bool

    def __call__(self, batch: MicroBatch) -> LocalBatch:
        positions_BS = batch.positions_BS
        if positions_BS is None and self.needs_positions:
            positions_BS = torch.arange(batch.tokens_BS.shape[1]).expand(batch.tokens_BS.shape)
        return LocalBatch(
            self._part(batch.tokens_BS),
            self._part(batch.labels_BS),
            self._part(positions_BS),
            self._part(batch.document_ids_BS),
        )

    def _part(self, tensor_BS: Tensor | None) -> Any:
        if tensor_BS is None:
            return None
        if self.context is not None:
            rank, size = self.context.get_local_rank(), self.context.size()
            tensor_BS = shard_sequence(
                tensor_BS, dim=1, rank=rank, size=size, balanced=self.balanced
            )
        return tensor_BS.to(self.device, non_blocking=True)


def sum_valid(batches: Sequence[LocalBatch]) -> Tensor:
    """Labels that are trained on, over the batches; a scalar int64 on their device."""
    return torch.stack([(batch.labels_BS != IGNORED).sum() for batch in batches]).sum()
