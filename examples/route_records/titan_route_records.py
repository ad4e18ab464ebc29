"""Record which experts each token goes to, or take it from such a record (README.md).

A file holds one step: `samples-<first>-<count>.npy`, an array of ids [samples, tokens, layers, K] (int16; -1 in layers
without experts), which is vLLM's order for a sequence. Samples go by their global number and tokens by their place in
the sample, so a record does not depend on the layout that wrote it, and any layout reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan.base.untrusted import InputError
from titan.data.packing import Batch
from titan.models.common.moe import MoE
from titan.parallel.expert import is_recomputation, local_tokens
from titan.run.hook import Hook
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport

_NAME = "samples-{:012d}-{}.npy"


class Routes(Hook):
    """Give the experts' routers recorded routes, and write those that they take."""

    def __init__(
        self, trainer: RunProgress, *, record: str = "", replay: str = "", every: int = 1
    ) -> None:
        """Args:
        record: folder below the run folder to write to; "": write nothing.
        replay: folder to read from; "": the routers choose.
        every: steps from one record to the next.
        """
        parallel = trainer.config.parallelism
        if parallel.pipeline_parallel_degree > 1:
            raise InputError(
                "route_records: a pipeline's stages are not recorded; use a degree of 1"
            )
        self.trainer, self.every = trainer, every
        self.record = trainer.run_dir / record if record else None
        self.replay = trainer.run_dir / replay if replay else None
        self.layers = {
            moe: int(name.split(".")[1])
            for name, moe in trainer.train_step.balance.moes.items()
        }
        self.calls: dict[MoE, int] = {}
        self.array: np.ndarray | None = None  # of this step, on disk
        self.source: list[tuple[int, np.ndarray]] = []
        self.batches: Sequence[Batch] = ()
        length = trainer.config.training.seq_len
        balanced = parallel.splits_from_both_ends
        self.tokens = local_tokens(trainer.mesh, length, balanced=balanced).numpy()
        for moe in self.layers:
            moe.route_sources.append(self)

    def before_forward(self, batches: Sequence[Batch]) -> None:
        self.batches, self.calls = batches, {}
        trainer, count = self.trainer, self.trainer.sequences_per_step
        first = trainer.loader.state_dict()["position"] - count
        if self.replay is not None:
            self.source = _open_records(self.replay, first, count)
        if self.record is not None and trainer.step % self.every == 0:
            path = self.record / _NAME.format(first, count)
            sizes = trainer.sizes
            if trainer.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                shape = (count, trainer.config.training.seq_len, sizes.n_layers, sizes.top_k)
                np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=shape)[:] = -1
            if trainer.world_size > 1:
                dist.barrier()
            self.array, self.first = np.load(path, mmap_mode="r+"), first

    def updated(self, report: StepReport) -> None:
        self.batches, self.array = (), None  # an evaluation is not recorded

    # ---- titan.models.common.moe.RouteSource ----------------------------------------------------------

    def get(self, moe: MoE, tokens: Tensor) -> Tensor | None:
        if not self.batches or self.replay is None:
            return None
        layer, samples = self.layers[moe], self._samples(moe, tokens)
        ids_TK = np.concatenate([self._row(sample)[self.tokens, layer] for sample in samples])
        num_experts, top_k = moe.config.num_experts, moe.config.top_k
        # On a GPU, a look-up outside of the experts would end the process without a name.
        if ids_TK.shape[1] != top_k or ids_TK.min() < 0 or ids_TK.max() >= num_experts:
            raise ValueError(
                f"the record in {self.replay} has no {top_k} of {num_experts} experts for each token of layer "
                f"{layer}, samples {samples.start} to {samples.stop - 1}: it is another model's, or not complete"
            )
        return torch.from_numpy(ids_TK).to(tokens.device, torch.int64)

    def put(self, moe: MoE, ids_TK: Tensor) -> None:
        if is_recomputation():
            return
        if self.batches and self.array is not None:
            ids = ids_TK.unflatten(0, (-1, len(self.tokens))).cpu().numpy()
            for sample, of_sample in zip(self._samples(moe, ids), ids, strict=True):
                self.array[sample - self.first, self.tokens, self.layers[moe]] = of_sample
        self.calls[moe] = self.calls.get(moe, 0) + 1

    def _samples(self, moe: MoE, rows: Tensor | np.ndarray) -> range:
        """Return the samples of this call: there is one for each micro-batch, in order."""
        first = self.batches[self.calls.get(moe, 0)].first_sample
        return range(first, first + len(rows))

    def _row(self, sample: int) -> np.ndarray:
        for first, array in self.source:
            if first <= sample < first + len(array):
                return array[sample - first]
        raise ValueError(f"no record in {self.replay} has sample {sample}")


def from_environment(trainer: RunProgress) -> Hook:
    """Return the hook that the variables TITAN_RECORD_ROUTES and TITAN_REPLAY_ROUTES ask for; it does nothing without them."""
    asked = {
        key: os.environ.get(f"TITAN_{key.upper()}_ROUTES", "") for key in ("record", "replay")
    }
    if not any(asked.values()):
        return Hook()
    return Routes(trainer, **asked, every=int(os.environ.get("TITAN_RECORD_ROUTES_EVERY", "1")))


def _open_records(folder: Path, first: int, count: int) -> list[tuple[int, np.ndarray]]:
    """Open the files that hold any of `count` samples from `first` on, each with its first sample."""
    records = []
    for path in sorted(folder.glob("samples-*.npy")):
        match = re.fullmatch(r"samples-(\d+)-(\d+)\.npy", path.name)
        if match and int(match[1]) < first + count and first < int(match[1]) + int(match[2]):
            records.append((int(match[1]), np.load(path, mmap_mode="r")))
    return records
