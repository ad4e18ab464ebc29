"""The host's pace in a job's step: from the cache, or measured by a tiny step of the job in a process of its own (host_meter.py).

The pace does not depend on widths, batches, sequences, depths or degrees. `tiny` makes them small, so that jobs that differ only in
them share a measurement: a sweep needs a few. An entry is a small JSON file beside the cached traces. Where the tiny step cannot
run, such as with kernels that CPUs lack, the pace is empty, and titan.sim.price.cost has a usual one. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from titan.config.layout import Layout
from titan.config.model import model_config
from titan.config.schema import JobConfig, QuantizeSection
from titan.config.schema_simulator import SimulatorSection
from titan.sim.record.trace_jobs import recording_context

logger = logging.getLogger("titan")

_BLOCKS = 4
"""Blocks of a tiny model."""
_SIZES = {
    "dim": 64,
    "n_heads": 8,
    "head_dim": 16,
    "ffn_dim": 64,
    "vocab_size": 256,
    "num_experts": 8,
    "expert_dim": 32,
    "num_groups": 4,
    "top_groups": 2,
    "top_k": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "window": 16,
    "image_token": 255,
}
"""Upper limits of a tiny model's sizes. Zeros, which turn a part off, stay."""
_DEGREES = {"dp_replicate": 2, "dp_shard": 8, "cp": 2, "tp": 2}
"""Upper limits of degrees. FSDP cuts and joins a list with an entry for each shard."""
_TOKENS = 64
_LARGEST = 20_000_000
"""Parameters of a tiny model of another package, whose sizes have other names, from which it is not tried."""


def tiny(config: JobConfig, layout: Layout) -> tuple[JobConfig, Layout]:
    """Return a job with the same program as another, and small sizes, without pipeline, compilation and micro-batches.

    Compiled blocks are measured as eager ones. Their insides are left out (`titan.sim.price.cost.Pace`).
    """
    sizes = model_config(config.model)
    overrides = dict(config.model.overrides)
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if field.init and field.name in _SIZES and value:
            overrides[field.name] = min(value, _SIZES[field.name])
    if getattr(sizes, "n_dense_layers", 0) < sizes.n_layers and hasattr(sizes, "n_dense_layers"):
        overrides["n_dense_layers"] = 0  # few of many
    if "n_kv_heads" in overrides or getattr(sizes, "n_kv_heads", 0) != sizes.n_heads:
        overrides["n_kv_heads"] = 4 if sizes.n_kv_heads < sizes.n_heads else 8
    overrides["n_layers"] = min(sizes.n_layers, _BLOCKS)
    small = {axis: min(most, getattr(layout, axis)) for axis, most in _DEGREES.items()}
    ep, lent = config.parallelism.expert_parallel_degree, layout.dp_shard * layout.cp * layout.tp
    if 1 < ep < lent and small["dp_shard"] * small["cp"] * small["tp"] == 2:
        small["dp_shard"] *= 2  # experts are sharded over the rest
    shape = Layout(pp=1, accumulation=1, **small)
    resharding = config.parallelism.fsdp_reshard_after_forward
    parallelism = {
        "data_parallel_replicate_degree": shape.dp_replicate,
        "data_parallel_shard_degree": shape.dp_shard,
        "context_parallel_degree": shape.cp,
        "tensor_parallel_degree": shape.tp,
        "expert_parallel_degree": shape.world_size // shape.dp_replicate
        if ep == lent
        else min(2, ep),
        "expert_tensor_parallel_degree": min(
            shape.tp, config.parallelism.expert_tensor_parallel_degree
        ),
        "pipeline_parallel_degree": 1,
        "pipeline_parallel_layers_per_stage": None,
        "module_fqns_per_model_part": None,
        "enable_async_tensor_parallel": False,
        # With a pipeline, FSDP keeps gathered weights by default.
        "fsdp_reshard_after_forward": "never"
        if layout.pp > 1 and resharding == "default"
        else resharding,
        "fsdp_kept_blocks": min(config.parallelism.fsdp_kept_blocks, _BLOCKS),
    }
    changes: dict[str, dict[str, Any]] = {
        "model": {"overrides": overrides, "attention_backend": "auto"},
        "parallelism": parallelism,
        "training": {"local_batch_size": 1, "seq_len": _TOKENS, "global_batch_size": -1},
        "loss": {"chunk_tokens": min(config.loss.chunk_tokens, _TOKENS // 4)},
        "compile": {"enable": False},
        "activation_checkpoint": {"op_keep_by_block": []},
    }  # fmt: skip
    sections: dict[str, Any] = {
        name: getattr(config, name).model_copy(update=update) for name, update in changes.items()
    }
    return config.model_copy(update=sections | {"simulator": SimulatorSection()}), shape


class HostPaces:
    """Paces of several jobs. What the cache lacks is measured in a process, beside the recording of the jobs.

    Attributes:
        known: Pace by key.
    """

    def __init__(self, jobs: Iterable[tuple[JobConfig, Layout]], key: Callable[[JobConfig, Layout], str], folder: Path | None) -> None:  # fmt: skip
        """Begin to measure.

        Args:
            jobs: Jobs with their layouts.
            key: Hash of a tiny job.
            folder: Folder of the cache. None: none.
        """
        self.key, self.folder = key, folder
        self.known: dict[str, dict[str, float]] = {}
        self._waiting: dict[str, tuple[JobConfig, Layout]] = {}
        self._said = False
        for config, layout in jobs:
            small = tiny(config, layout)
            name = key(*small)
            if name in self.known or name in self._waiting:
                continue
            entry = _read(folder / f"host-{name}.json") if folder else None
            if entry is None:
                self._waiting[name] = small
            else:
                self.known[name] = entry
        self._process: Any = None
        self._answers: Connection | None = None
        self.start()

    def start(self) -> None:
        """Begin to measure what is missing, if anything is."""
        if self._waiting and self._process is None:
            context = recording_context()
            self._answers, theirs = context.Pipe(duplex=False)
            jobs = [*self._waiting.values()]
            self._process = context.Process(target=measure_child, args=(theirs, jobs), daemon=True)
            self._process.start()
            theirs.close()

    def of(self, config: JobConfig, layout: Layout) -> dict[str, float]:
        """Return the pace of a job, as soon as it is measured."""
        name = self.key(*tiny(config, layout))
        while name not in self.known:
            self.start()
            assert self._answers is not None
            measured = next(iter(self._waiting))
            try:
                pace, failure = pickle.loads(self._answers.recv_bytes())
            except EOFError:  # the process died: the next one goes on with the others
                pace, failure = {}, f"the process died (exit code {self._end()})"
            self.known[measured] = pace
            del self._waiting[measured]
            if not self._waiting and self._process:
                self._end()
            if failure and not self._said:
                self._said = True
                logger.warning(f"the host's time is the usual one, not that of this job, whose tiny step cannot run on a CPU: {failure}")  # fmt: skip
            if self.folder and not failure.startswith("the process"):
                _write(self.folder / f"host-{measured}.json", pace)
        return dict(self.known[name])

    def _end(self) -> int:
        """End the process, and return its exit code."""
        assert self._answers is not None
        self._answers.close()
        self._process.join()
        code, self._process = self._process.exitcode, None
        return code


def _read(path: Path) -> dict[str, float] | None:
    """Return the pace in a file of the cache, or None."""
    try:
        return {str(part): float(pace) for part, pace in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _write(path: Path, pace: dict[str, float]) -> None:
    """Write a pace into the cache. Without it, the next run has to measure again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(pace))
        temporary.replace(path)
    except OSError as error:
        logger.warning(f"{path} cannot be written: {error}")


# ---- child -----------------------------------------------------------------------------------------


def measure_child(connection: Connection, jobs: Sequence[tuple[JobConfig, Layout]]) -> None:
    """Measure tiny jobs in a child process, and send the pace of each, with the reason if there is none."""
    import warnings

    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    for config, layout in jobs:
        connection.send_bytes(pickle.dumps(measure_job(config, layout)))
    os._exit(0)


def measure_job(config: JobConfig, layout: Layout) -> tuple[dict[str, float], str]:
    """Return the pace of a tiny job, and the reason if there is none. This changes torch for good."""
    # Kernels in 8 bits, or for packed documents, may be missing on CPUs. The others are then measured without them.
    plain = {
        "quantize": QuantizeSection(),
        "data": config.data.model_copy(update={"document_mask": False}),
    }
    try:
        return measured(config, layout), ""
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    with suppress(Exception):
        return measured(config.model_copy(update=plain), layout), ""
    return {}, failure


def measured(config: JobConfig, layout: Layout, **options: Any) -> dict[str, float]:
    """Return the pace of a tiny job. `options` are those of host_meter.measure."""
    import torch
    import torch.distributed as dist

    from titan.parallel import build_mesh
    from titan.sim.record import host_meter, torch_compat
    from titan.sim.record.program import job_program

    if model_config(config.model).num_params > _LARGEST:
        raise ValueError("its sizes have names of their own, and are not made small")
    device = torch.device("cpu")
    store = torch_compat.find("torch.testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", store=store, rank=0, world_size=layout.world_size)
    try:
        degrees = {name: getattr(layout, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}  # fmt: skip
        mesh = build_mesh(device.type, **degrees)
        return host_meter.measure(lambda: job_program(config, layout, device, mesh), **options)
    finally:
        dist.destroy_process_group()
