"""Traces of jobs: from the cache, from two shallow models if all blocks are alike, or from the whole model.

A trace follows from the program. It depends neither on the hardware nor on the number of replicas,
which only changes the ranks of groups. The key of a trace is a hash of the settings that the
program is built from, of titan's source and of torch's version, so an entry is never stale, only
unused. Entries are in titan/traces in the user's cache folder. Reading an entry creates only
objects of titan.sim.record.trace.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import titan
import titan.models
from titan.base.run_writer import write_atomically
from titan.config.layout import Layout, stage_split
from titan.config.schema import JobConfig
from titan.data import default_cache_folder
from titan.parallel.traits import USUAL_ENDS, ends_of
from titan.sim.record import trace as events
from titan.sim.record.host_time import with_paces
from titan.sim.record.ranks import remap_ranks
from titan.sim.record.repeat import BlocksDiffer, CannotRepeat, Depth, Recorded, repeat_blocks
from titan.sim.record.segments import LAYER, SECTIONS
from titan.sim.record.trace import Trace, scope_of
from titan.sim.record.trace_jobs import Job, Prepare, distinct_ranks, trace_jobs
from titan.sim.routing import busiest_rank

logger = logging.getLogger("titan")

_PROGRAM = (
    "model",
    "task",
    "optimizer",
    "loss",
    "parallelism",
    "activation_checkpoint",
    "compile",
    "quantize",
    "moe",
    "sparse_attention",  # of an optional part
)
"""Sections that the program is built from, whole."""
_DEPTH = 5
"""Equal blocks in each stage of the model that stands in for a deep one."""


@dataclass(frozen=True)
class TraceRequest:
    """Job to trace.

    Attributes:
        config: the job.
        layout: its layout.
        of_host: whether to record the pace of the host in place of kernels.
        prepare: changes torch or the model first. Such traces are not cached, since the key does
            not cover the change.
    """

    config: JobConfig
    layout: Layout
    of_host: bool = False
    prepare: Prepare | None = None  # not in the key: such traces are not cached

    @property
    def key(self) -> str:
        """Return a hash that is equal for jobs whose ranks do the same."""
        config, layout = self.config, self.layout
        training = config.training
        shape: dict[str, Any] = {
            name: getattr(config, name).model_dump(mode="json")
            for name in _PROGRAM
            if hasattr(config, name)
        }
        # Two replicas stand for any number: `remap_ranks` moves a trace to another number of them.
        shape["layout"] = str(replace(layout, dp_replicate=min(layout.dp_replicate, 2)))
        shape["accumulation"] = layout.accumulation
        # Left out: settings that do not change a rank's step. The global batch is in the hash as
        # accumulation.
        shape["training"] = training.model_dump(
            mode="json",
            exclude={
                "dataset",
                "dataset_path",
                "dataloader",
                "global_batch_size",
                "steps",
                "expandable_segments",
            },
        )
        shape["busiest"] = busiest_rank(config, config.model.sizes, layout)
        shape["forced"] = config.debug.moe_force_load_balance
        shape["data"] = [config.data.reset_positions, config.data.document_mask]
        # Part of the layout above, where a degree of -1 is resolved.
        for name in ("data_parallel_replicate_degree", "data_parallel_shard_degree"):
            shape["parallelism"].pop(name)
        # The source too: any change of titan's code may change a rank's step.
        text = json.dumps([shape, self.of_host, source_hash()], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def get_traces(
    jobs: Sequence[TraceRequest],
    *,
    processes: int | None = None,
    whole: bool = False,
    use_cache: bool = True,
    done: Callable[[TraceRequest, dict[int, Trace] | Exception], None],
) -> None:
    """Trace jobs in parallel, and report the traces of each job when they are ready.

    Args:
        jobs: jobs to trace.
        processes: number of processes that run at once. All cores by default.
        whole: trace every block, and leave the cache alone.
        use_cache: read and write the cache.
        done: called once for each job, with its traces by rank or a TraceError.
    """
    plans = []
    for request, tell in with_paces(jobs, done):
        cached = use_cache and not whole and request.prepare is None
        path = default_cache_folder() / "traces" / f"{request.key}.pickle" if cached else None
        if path and (traces := read_entry(path)) is not None:
            # The cache may hold the trace of a world with more or fewer replicas.
            tell(request, {t.rank: t for t in (remap_ranks(t, request.layout) for t in traces)})
        else:
            is_whole = whole or request.of_host
            plans.append(_Plan(request, path, tell, deeper=None if is_whole else 0))
    processes = processes or os.cpu_count() or 1
    # First the shallow models, then deeper ones. If blocks are not alike, the whole model follows, with all processes free again.
    while plans:
        plans = _record(plans, processes)


def _record(plans: Sequence[_Plan], processes: int) -> list[_Plan]:
    """Record the jobs of plans, and report traces that are ready.

    Return plans in place of those whose blocks are not all alike.
    """
    # Few plans leave processes idle: then the ranks of a plan are dealt out to several. The host's pace takes few seconds.
    # `parts`: of each plan, each in a separate process
    parts = -(-processes // max(1, sum(not plan.request.of_host for plan in plans)))
    waiting = [(plan, job) for plan in plans for job in plan.jobs(parts)]
    others = []
    for number, result in trace_jobs([job for _, job in waiting], processes, shared=True):
        plan, job = waiting[number]
        if (other := plan.finish(job, result)) is not None:
            others.append(other)
    return others


class _Plan:
    """Job with its ranks to record, and their traces so far.

    Attributes:
        request: the job.
        path: its file in the cache, if it is cached.
        done: receives the traces.
        deeper: additional blocks of the shallow model that is recorded in its place. None: the whole model is recorded.
        depths: blocks of each stage, if shallow models are recorded.
    """

    def __init__(
        self,
        request: TraceRequest,
        path: Path | None,
        done: Callable[..., None],
        *,
        deeper: int | None = 0,
    ) -> None:
        self.request, self.path, self.done, self.deeper = request, path, done, deeper
        self.depths = None if deeper is None else shallow(request, deeper)
        self.ranks = distinct_ranks(request.config, request.layout)
        self.traces: dict[int, Trace] = {}
        self.ended = False

    def jobs(self, parts: int) -> list[Job]:
        """Return the recording jobs, with the ranks distributed over this many processes."""
        request, layout = self.request, self.request.layout
        if layout.pp == layout.world_size:  # fake_world.impersonate_rank cannot do this
            parts = layout.pp
        job = Job(
            (request.config,),
            layout.world_size,
            (),
            request.of_host,
            prepare=request.prepare,
        )
        if self.depths:
            recorded = shallow_depths(request, self.deeper or 0)
            # Programs compiled at one depth serve the other depth, too.
            depths = (recorded.fewest, recorded.depth)
            programs = tuple(at_depth(request, depth, len(self.depths)) for depth in depths)
            sizes = request.config.model.sizes
            size = request.config.parallelism.fsdp_blocks_per_unit
            missing = -sizes.n_layers % size
            in_units = size > 1 or sizes.num_mtp_modules
            join = partial(_repeated, recorded, self.depths, in_units and size, missing)
            job = replace(job, programs=programs, join=join)
        dealt = [tuple(self.ranks[part::parts]) for part in range(min(parts, len(self.ranks)))]
        return [replace(job, ranks=ranks) for ranks in dealt]

    def finish(self, job: Job, result: list[Trace] | Exception) -> _Plan | None:
        """Take the traces of some ranks. Return another plan if the blocks of these are not all alike."""
        # Another part of the job has failed already, and reported it.
        if self.ended:
            return None
        if isinstance(result, Exception):
            self.ended = True
            if isinstance(result, CannotRepeat):
                again = isinstance(result, BlocksDiffer) and not self.deeper
                logger.info(f"blocks are not all alike, so that more are traced: {result}")
                return _Plan(self.request, self.path, self.done, deeper=2 if again else None)
            self.done(self.request, result)
            return None
        # Parts end in any order. The last one completes the job.
        self.traces |= zip(job.ranks, result, strict=True)
        if len(self.traces) == len(self.ranks):
            # In the order of stages, whatever order the processes ended in.
            traces = {rank: self.traces[rank] for rank in self.ranks}
            if self.path:
                _write(self.path, list(traces.values()))
            self.done(self.request, traces)
            self.traces.clear()  # a sweep has hundreds of plans
        return None


def _repeated(
    recorded: Recorded,
    stages: Sequence[Depth],
    size: int,
    missing: int,
    traces: Sequence[Trace],
) -> Trace:
    """Return the trace of the whole model.

    Args:
        recorded: FSDP units of the shallow models.
        stages: units of each stage in the whole model.
        size: blocks of an FSDP unit; 0 if units are blocks and nothing comes after them.
        missing: blocks that the first unit lacks.
        traces: traces of the two shallow models.
    """

    def in_units(trace: Trace, units: int) -> Trace:
        """Return a trace whose "layers.N" counts units, which repeat even if their blocks do not."""

        def name(number: re.Match[str]) -> str:
            unit, place = divmod(int(number[1]) + missing, size)
            # Modules of multi-token prediction come after the blocks, and do not repeat.
            stack, unit = ("layers", unit) if unit < units else ("after", unit - units)
            return f"{stack}.{unit}.in {place}"

        return _renamed(trace, LAYER, name)

    if not size:
        return repeat_blocks(traces[0], traces[1], recorded, stages)
    num_units = (depth * len(stages) for depth in (recorded.fewest, recorded.depth))
    small, big = map(in_units, traces, num_units)
    whole = repeat_blocks(small, big, recorded, stages)
    starts = {"layers": 0, "after": sum(stage.count for stage in stages)}

    def in_blocks(number: re.Match[str]) -> str:
        unit = starts[number[1]] + int(number[2])
        return f"layers.{unit * size + int(number[3]) - missing}"

    return _renamed(whole, _IN_UNIT, in_blocks)


_IN_UNIT = re.compile(r"^(layers|after)\.(\d+)\.in (\d+)")


# ---- shallow models ------------------------------------------------------------------------------


def shallow(request: TraceRequest, deeper: int = 0) -> list[Depth] | None:
    """Return the stages of a model, in FSDP units, or None if tracing shallower models is not possible or not worth it."""
    config, layout = request.config, request.layout
    recompute = config.activation_checkpoint
    every = recompute.mode == "selective" and str(recompute.selective_ac_option) not in (
        "op",
        "1",
    )
    if config.model.freeze or every or len(recompute.op_keep_by_block) > 1:
        return None  # blocks differ
    size = config.parallelism.fsdp_blocks_per_unit
    model = config.model.sizes
    if len({model.window_of(layer) for layer in range(model.n_layers)}) > 1:
        return None  # local and global layers
    if size > 1 and model.num_mtp_modules:
        return None  # a unit may have one of its modules and a block
    if ends_of(model).first != USUAL_ENDS.first:
        return None  # an encoder's results are read past the first block
    if layout.pp == 1:
        depths = [Depth(0, -(-model.n_layers // size))]
    elif size > 1:  # stages begin anywhere within a unit
        return None
    else:
        plan = stage_split(config, num_layers=model.n_layers)
        depths = []
        for names in plan.modules:
            layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
            layers = [layer for layer in layers if layer < model.n_layers]
            if not layers:
                return None
            depths.append(Depth(layers[0], len(layers)))
    # The two shallow models together must have fewer blocks than the deep one.
    recorded = shallow_depths(request, deeper)
    small = at_depth(request, recorded.depth, len(depths)).model.sizes
    if small.num_block_params != model.num_block_params:
        return None  # two kinds of blocks, which a shallow model has in another ratio
    deep_enough = min(d.count for d in depths) > recorded.depth
    gains = sum(d.count for d in depths) > len(depths) * (recorded.depth + recorded.fewest)
    return depths if deep_enough and gains else None


def shallow_depths(request: TraceRequest, deeper: int = 0) -> Recorded:
    """Return the FSDP units in each stage of the two shallow models.

    There must be enough equal units between units without experts, units that are gathered ahead,
    and units that stay gathered.
    """
    parallel, model = request.config.parallelism, request.config.model.sizes
    size, kept = parallel.fsdp_blocks_per_unit, parallel.fsdp_kept_blocks
    # If all units stay gathered, they are alike.
    last = 1 if kept >= model.n_layers else max(1, -(-kept // size))
    dense = -(-model.n_dense_layers // size)
    # -1 is 0, or 1 for experts.
    ahead = abs(parallel.fsdp_prefetch) if model.num_experts else max(0, parallel.fsdp_prefetch)
    # The first unit may be incomplete, and a list of one tensor is a special case for experts' biases.
    fewest = dense + 1 + (size > 1 or bool(model.num_experts))
    more = deeper + (request.layout.tp > 1 or parallel.fsdp_prefetch > 0)
    depth = _DEPTH + last - 1 + ahead + dense + more
    return Recorded(fewest, depth, dense, last)


def at_depth(request: TraceRequest, depth: int, num_stages: int) -> JobConfig:
    """Return the job with `depth` blocks, or FSDP units of several blocks, in every pipeline stage."""
    config = request.config
    parallelism = config.parallelism
    if num_stages > 1:
        # The stage split of the shallow model must have as many stages as the deep one, with equal
        # blocks in each.
        names = [
            [f"layers.{stage * depth + n}" for n in range(depth)] for stage in range(num_stages)
        ]
        sizes = replace(config.model.sizes, n_layers=depth * num_stages)
        names[0][:0] = ends_of(sizes).first
        names[-1] += ends_of(sizes).last
        parallelism = parallelism.model_copy(
            update={
                "module_fqns_per_model_part": names,
                "pipeline_parallel_layers_per_stage": None,
            }
        )
    # The depth is a setting of the model like any other: nothing else of the job changes.
    size = parallelism.fsdp_blocks_per_unit
    missing = -config.model.sizes.n_layers % size  # in the first unit
    num_blocks = depth * num_stages * size - missing
    overrides = config.model.overrides | {"n_layers": num_blocks}
    kept = min(parallelism.fsdp_kept_blocks, num_blocks)
    parallelism = parallelism.model_copy(update={"fsdp_kept_blocks": kept})
    model = config.model.model_copy(update={"overrides": overrides})
    return config.model_copy(update={"model": model, "parallelism": parallelism})


# ---- names -----------------------------------------------------------------------------------------


def _renamed(trace: Trace, pattern: re.Pattern[str], name: Callable[..., str]) -> Trace:
    """Return a trace with other names of modules."""
    scopes: dict[events.Scope, events.Scope] = {}

    def rename(event: Any) -> events.Event:
        scope = scope_of(event)
        if scope is None:
            return event
        if scope not in scopes:
            scopes[scope] = replace(scope, module=pattern.sub(name, scope.module))
        return replace(event, scope=scopes[scope])

    setup, first_step, step = ([*map(rename, getattr(trace, name))] for name in SECTIONS)
    return replace(trace, setup=setup, first_step=first_step, step=step)


@cache
def source_hash() -> str:
    """Return a hash of the source of titan and its models, and of torch's version."""
    digest = hashlib.blake2b(version("torch").encode(), digest_size=16)
    # In a checkout, titan.__path__ also has the repository's root, with environments and tests.
    for folder in (Path(titan.__file__).parent, *map(Path, titan.models.__path__)):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


class _Reader(pickle.Unpickler):
    """Unpickler that creates only objects of titan.sim.record.trace."""

    # pickle calls this for every class, so a file cannot reach any other.
    def find_class(self, module: str, name: str) -> Any:
        """Return a class of titan.sim.record.trace; refuse all others."""
        if module == events.__name__ and name in vars(events) and "." not in name:
            return getattr(events, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a trace")


def read_entry(path: Path) -> list[Trace] | None:
    """Return the traces of a file in the cache, or None if there are none."""
    try:
        return _Reader(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        return None
    except Exception as error:  # damaged, or written by someone else: trace again
        logger.warning(f"{path} is no trace and is not used: {error}")
        return None


def _write(path: Path, traces: Sequence[Trace]) -> None:
    """Write traces into the cache."""
    try:
        data = pickle.dumps(list(traces), protocol=pickle.HIGHEST_PROTOCOL)
        write_atomically(path, data, durable=False)
    except OSError as error:
        logger.warning(
            f"{path} cannot be written, so that the next run has to trace again: {error}"
        )
