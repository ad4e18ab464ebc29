"""What the tests of the recorder share: small jobs, and what a real rank does, counted by other means than the recorder's."""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.steps import build_step
from titan.checks.rules import resolve_layout
from titan.config.schema import JobConfig
from titan.data.packing import Batch
from titan.parallel import build_mesh, documents
from titan.sim.record import device
from titan.sim.record.trace import Allocate, Event, Free, Trace, Transfer
from titan.sim.record.trace_jobs import Job, Prepare, distinct_ranks, trace_jobs
from titan.step.train_step import TrainStep


def job(*, batch: Any = 4, layers: Any = 4, **sections: dict[str, Any]) -> JobConfig:
    """A tiny Llama; sections are merged into it."""
    base: dict[str, dict[str, Any]] = {
        "model": {"flavor": "tiny", "overrides": {"n_layers": layers}},
        "training": {
            "seq_len": 64,
            "local_batch_size": batch,
            "steps": 10,
            # Not "auto", which differs between the CPU and the simulated device.
            "mixed_precision_param": "bfloat16",
        },
        "lr_scheduler": {"warmup_steps": 2},
        "loss": {"chunk_tokens": 100},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return JobConfig.model_validate(base)


def trace_ranks(
    config: JobConfig,
    *,
    world_size: int,
    ranks: Sequence[int] | None = None,
    processes: int | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> dict[int, Trace]:
    """Trace ranks, by default one of each pipeline stage (`distinct_ranks`). options: those of titan.sim.record.trace_jobs.trace_job.

    Raises ConfigError for a layout that does not fit `world_size`, and TraceError.
    """
    layout = resolve_layout(config, world_size)
    if ranks is None:
        ranks = distinct_ranks(config, layout)
    jobs = [Job((config,), world_size, (rank,), prepare=prepare) for rank in ranks]
    traces: dict[int, Trace] = {}
    for number, result in trace_jobs(jobs, processes or os.cpu_count() or 1, **options):
        if isinstance(result, Exception):
            raise result
        [traces[ranks[number]]] = result
    return {rank: traces[rank] for rank in ranks}


def on_cpu(*_: Any) -> None:
    """Declare a CPU's kernels in place of an H100's (`prepare` of a recording): torch decomposes more operations there, among
    them RMSNorm, and has one fused attention. Such a recording is compared with a real run on a CPU."""
    while device._library:
        device._library.pop()._destroy()
    documents.flex_attention = _flex_attention
    library = torch.library.Library("aten", "IMPL")
    device._library.append(library)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for declared in ("silu_backward", name, f"{name}_backward"):
        library.impl(declared, device._never, "PrivateUse1")

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        settings: dict[str, Any] = {"attn_mask": device._added(attn_mask, q), "scale": scale}
        if v.shape[-1] != q.shape[-1]:  # which the fused kernel does not have
            settings["enable_gqa"] = enable_gqa
            math = torch.ops.aten._scaled_dot_product_attention_math
            return math(q, k, v, settings.pop("attn_mask"), dropout_p, is_causal, **settings)[0]
        # The second result is the logsumexp, which only backward uses.
        return getattr(torch.ops.aten, name)(q, k, v, dropout_p, is_causal, **settings)[0]

    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    device._module.get_device_capability = lambda device=None: (0, 0)


_flex_attention = documents.flex_attention


def trace_of(config: JobConfig, *, world: int = 1, **settings: Any) -> Trace:
    """The first rank's, which tests share: not to be changed."""
    return _trace_of(config.model_dump_json(exclude_unset=True), world, **settings)


@functools.cache
def _trace_of(config: str, world: int, **settings: Any) -> Trace:
    job = JobConfig.model_validate_json(config)
    return trace_ranks(job, world_size=world, ranks=[0], **settings)[0]


def left_behind(trace: Trace) -> list[Allocate]:
    """What is alive after the last step."""
    alive: dict[int, Allocate] = {}
    for event in (*trace.setup, *trace.first_step, *trace.step):
        if isinstance(event, Allocate):
            alive[event.block] = event
        elif isinstance(event, Free):
            del alive[event.block]
    return [*alive.values()]


def in_turn(names: Collection[str], *, slow: Collection[str]) -> list[Any]:
    """Parameters of a test, some of which run with -m slow only."""
    marked = set(slow)
    assert marked <= set(names)
    return [pytest.param(n, marks=pytest.mark.slow) if n in marked else n for n in names]


def real_program(config: JobConfig) -> TrainStep:
    layout = resolve_layout(config, dist.get_world_size())
    mesh = build_mesh("cpu", **layout.degrees)
    return build_step(config, mesh)


def real_batches(config: JobConfig) -> list[Any]:
    layout = resolve_layout(config, dist.get_world_size())
    shape = (config.training.local_batch_size, config.training.seq_len)
    numbers = torch.arange(shape[0] * shape[1]).view(shape) % 256
    ids = numbers % 2 if config.data.document_mask else None
    positions = numbers % 8 if config.data.reset_positions else None
    batch = Batch(
        tokens_BS=numbers, labels_BS=numbers, positions_BS=positions, document_ids_BS=ids
    )
    return [batch] * layout.accumulation


class _Plain(TorchDispatchMode):
    """Sees plain tensors only: subclasses come apart first."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if FakeTensor in types:  # DTensor finds out shapes
            return func(*args, **(kwargs or {}))
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.see(func, args, result)
        return result

    def see(self, func: Any, args: Any, result: Any) -> None:
        raise NotImplementedError


_KINDS = ("all_gather", "allgather", "reduce_scatter", "allreduce", "all_reduce", "all_to_all", "alltoall", "send", "recv")  # fmt: skip


class CountTransfers(_Plain):
    """(kind, global ranks of the group) -> number, bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.bytes: Counter[Any] = Counter()

    def see(self, func: Any, args: Any, result: Any) -> None:
        if func.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
            return
        name = func._opname
        kind = next((kind for kind in _KINDS if kind in name), None)
        if kind is None:  # a wait
            return
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        sizes = [t.numel() * t.element_size() for t in (*tensors, *outputs)]
        # A gathered tensor, or one to be scattered, is the largest of the call; of the others all have one size.
        size = sizes[0] if "to_all" in name or "toall" in name else max(sizes)
        names: list[Any] = [a for a in args if isinstance(a, str) and a not in ("sum", "max")]
        if names:
            group = dist.distributed_c10d._resolve_process_group(names[0])
        else:
            group = dist.ProcessGroup.unbox(
                next(a for a in args if isinstance(a, torch.ScriptObject))
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        kind = kind.replace("allgather", "all_gather").replace("allreduce", "all_reduce").replace("alltoall", "all_to_all")  # fmt: skip
        self.counts[kind, ranks] += 1
        self.bytes[kind, ranks] += size


class CountOperations(_Plain):
    """Operator -> calls, of those whose first argument is a tensor of at least one dimension, or a list of such."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def see(self, func: Any, args: Any, result: Any) -> None:
        first = args[0] if args else None
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, Tensor) and first.ndim:
            self.counts[str(func)] += 1


def watched(config: JobConfig, counter: Any) -> Any:
    """Return a counter of what this rank does in its second step."""
    train_step = real_program(config)
    batches = real_batches(config)
    train_step.train(batches, step=1)
    with counter:
        train_step.train(batches, step=2)
    return counter


def count_real_operations(config: JobConfig) -> Counter[str]:
    return watched(config, CountOperations()).counts


def count_real_transfers(config: JobConfig) -> tuple[Counter[Any], Counter[Any]]:
    """Count the transfers that this rank really starts, and their bytes."""
    counter = watched(config, CountTransfers())
    return counter.counts, counter.bytes


def counts_of(trace: Trace) -> Counter[Any]:
    transfers = events_of(trace.step, Transfer)
    return Counter((t.kind, trace.groups[t.group].ranks) for t in transfers)


def bytes_of(trace: Trace) -> Counter[Any]:
    sizes: Counter[Any] = Counter()
    for t in events_of(trace.step, Transfer):
        sizes[t.kind, trace.groups[t.group].ranks] += t.size_bytes
    return sizes


class TrackMemory(_Plain):
    """Bytes of all storages alive that were made since it began, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.bytes = self.peak = 0
        self._resize = torch.UntypedStorage.resize_

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            weakref.finalize(storage, self._set, key, None)
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int | None) -> None:
        self.bytes += (size or 0) - self.alive.pop(key, 0)
        if size is not None:
            self.alive[key] = size
        self.peak = max(self.peak, self.bytes)

    def see(self, func: Any, args: Any, result: Any) -> None:
        for tensor in tree_leaves(result):
            # On meta there are only shapes, as torch 2.11's stages keep of what they send. What wraps a
            # collective's result (AsyncCollectiveTensor) has a size, and no memory.
            wraps = isinstance(tensor, AsyncCollectiveTensor)
            if isinstance(tensor, Tensor) and not wraps and not tensor.is_meta:
                self.add(tensor)
        if (
            func._opname == "logsumexp"
        ):  # inside, the input less its largest elements exists whole
            inside = (
                args[0].numel() * args[0].element_size()
                + result.numel() * result.element_size()
            )
            self.peak = max(self.peak, self.bytes + inside)

    def __enter__(self) -> TrackMemory:
        tracker, original = self, self._resize

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in tracker.alive:
                tracker._set(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize  # pyrefly: ignore[bad-assignment]
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*args)


def real_peak(config: JobConfig) -> int:
    """The most memory of a real run's step after the first.

    A thread of gloo may let go of a buffer a moment after the wait for it, which only adds: the least of three steps counts.
    """
    with TrackMemory() as memory:
        program = real_program(config)
        batches = real_batches(config)
        gc.collect()
        gc.disable()  # as the trainer does
        program.train(batches, step=1)  # what it reports is dropped at once
        peaks: list[int] = []
        for step in (2, 3, 4):
            memory.peak = memory.bytes
            program.train(batches, step=step)
            peaks.append(memory.peak)
        return min(peaks)


def traced_peak(trace: Trace) -> int:
    """Of the second step, in bytes."""
    alive: dict[int, int] = {}
    total = peak = 0
    for events in (trace.setup, trace.first_step, trace.step):
        peak = total
        for event in events:
            if isinstance(event, Allocate):
                alive[event.block] = event.size_bytes
                total += event.size_bytes
                peak = max(peak, total)
            elif isinstance(event, Free):
                total -= alive.pop(event.block)
    return peak


def events_of(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]
