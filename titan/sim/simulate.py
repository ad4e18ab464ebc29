"""Simulation of a job on hardware that is not there: its trace, its prices, its replay, and the result as data."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titan.checks.rules import resolve_layout
from titan.config.layout import Layout
from titan.config.model import model_title
from titan.config.quantize import lacks_units, quantize_section
from titan.config.schema import JobConfig, MXSection
from titan.observe.flops import flops_per_token, utilization
from titan.sim.section import assumptions

from .documents import document_keys
from .estimate import estimate_memory
from .price.cost import Cost, peak_dtype, routing_exponent
from .price.network import Dispatch
from .price.profiles import Profile, load_profile, scaled
from .record.trace import Launch, Trace, no_garbage_collection
from .record.trace_cache import TraceRequest, get_traces
from .record.trace_jobs import Prepare, TraceError
from .replay.host import host_facts
from .replay.memory import MemoryReport, memory_report
from .replay.queues import ReplayError, replay, step_seconds
from .replay.timeline import Timeline
from .report.communication import communication
from .report.intervals import interval_facts, lacks_runs
from .routing import busiest_rank

GIB = 2**30
Facts = dict[str, Any]
_PARTS = ("compute_s", "copies_s", "host_s", "host_busy_s", "peers_s")
_SUMS = ("by_phase_s", "by_kind_s", "by_module_s", "span_s")
"""Times of a step: means over the traced ranks."""


@dataclass
class StepSimulation:
    """Simulated step.

    Attributes:
        world_size: number of ranks.
        profile: the hardware.
        traces: traces by global rank, with one rank of each kind.
        timeline: timeline of these ranks.
        memory: memory of these ranks.
        wall_s: duration of the simulation.
        cost: prices of kernels and transfers.
    """

    world_size: int
    profile: Profile
    traces: dict[int, Trace]
    timeline: Timeline
    memory: dict[int, MemoryReport]
    wall_s: float
    cost: Cost

    @cached_property
    def fullest(self) -> MemoryReport:
        """Memory of the rank that needs most."""
        return max(self.memory.values(), key=lambda report: report.needed_bytes)

    @property
    def fits(self) -> bool:
        """Whether every stage's rank leaves the margin free."""
        return all(report.fits for report in self.memory.values())

    @property
    def runs(self) -> bool:
        """Whether every stage's rank goes through, with or without the margin."""
        return all(report.runs for report in self.memory.values())

    @property
    def busiest_rank(self) -> float:
        """Tokens of the traced ranks' experts, over the mean."""
        return 1.0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks; 0 if a script does not state them."""
        return next(iter(self.traces.values())).tokens

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of one device."""
        return self.tokens_per_step / self.timeline.step_s / self.world_size


@dataclass
class Simulation(StepSimulation):
    """Simulated step of a job, with one rank of each pipeline stage.

    Attributes:
        config: the job.
        layout: its layout.
        fits_up_to: largest load of the busiest rank of experts that fits, as a multiple of the mean
        (titan.sim.report.imbalance). None: not asked for, or the job does not fit as it is.
        routed: spread of time and load over steps, with experts on several ranks.
    """

    config: JobConfig
    layout: Layout
    fits_up_to: float | None = None
    routed: Facts | None = None

    @cached_property
    def model(self) -> Any:
        """Sizes of the model."""
        return self.config.model.sizes

    @cached_property
    def busiest_rank(self) -> float:
        """Assumed tokens of the busiest expert-parallel rank, over the mean."""
        return busiest_rank(self.config, self.model, self.layout)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        training, layout = self.config.training, self.layout
        return training.local_batch_size * training.seq_len * layout.dp * layout.accumulation


def not_simulated(config: JobConfig, profile: Profile) -> str:
    """Return the reason why a job cannot be simulated on some hardware, or an empty text."""
    section = quantize_section(config)
    if lacks := lacks_units(config, profile.name, profile.peak_tflops):
        return lacks
    # Its kernels need Triton, which has nothing to run on.
    is_mx = isinstance(section, MXSection) and not section.emulate
    return "products in MXFP8 are not simulated yet" if is_mx else ""


class HardwareError(ValueError):
    """Hardware that cannot run the job. The message is for the user."""


FAILURES = (HardwareError, TraceError, ReplayError)
"""Errors of a job that has no simulation. Their messages are for the user."""


def simulate(
    config: JobConfig,
    *,
    world_size: int,
    profile: Profile,
    processes: int | None = None,
    whole: bool = False,
    use_cache: bool = True,
    prepare: Prepare | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Simulate a step of a job that passed titan.checks.rules.

    Args:
        config: the job.
        world_size: number of ranks.
        profile: the devices and their network.
        processes: number of processes that trace at once. All cores by default.
        whole: trace every block, even if all are alike.
        use_cache: read and write traces in the user's cache folder.
        prepare: called in each tracing process, to change torch or the model. Such traces are not
            cached.
        say: progress callback, called with a line.

    Returns:
        The simulated step, with a trace, a timeline and a memory report for one rank of each
            pipeline stage.

    Raises:
        ConfigError: the layout does not suit the world size.
        HardwareError: the hardware cannot run the job.
        TraceError: the job cannot be traced.
        ReplayError: the traced ranks wait for each other forever.
    """
    start_s = time.monotonic()
    if reason := not_simulated(config, profile):
        raise HardwareError(reason)
    config = config.on_device(profile.device_kind)
    request = TraceRequest(config, resolve_layout(config, world_size), prepare=prepare)
    say(f"tracing {request.layout.pp} of {world_size} ranks")
    results: list[dict[int, Trace] | Exception] = []
    # Traces are lists of millions of objects, so collecting cycles stays off until they are priced.
    with no_garbage_collection():
        get_traces(
            [request],
            processes=processes,
            whole=whole,
            use_cache=use_cache,
            done=lambda _, result: results.append(result),
        )
        # One request, so one answer.
        [traces] = results
        if isinstance(traces, Exception):
            raise traces
        say("replaying")
        simulation = price(config, request.layout, traces, profile)
    simulation.wall_s = time.monotonic() - start_s
    return simulation


def price(
    config: JobConfig, layout: Layout, traces: dict[int, Trace], profile: Profile
) -> Simulation:
    """Price and replay existing traces of a job on some hardware.

    Args:
        config: the job.
        layout: its layout.
        traces: traces by global rank, one rank of each stage.
        profile: the hardware.

    Returns:
        The simulated step.

    Raises:
        ConfigError: the profile lacks the job's kernel of attention.
        ReplayError: the traced ranks wait for each other forever.
    """
    section, model = assumptions(config), config.model.sizes
    profile = profile.with_attention(
        section.attention_kernel,
        backend=config.model.attention_backend,
        torch_version=section.torch_version,
    )
    cost = Cost(
        profile,
        Dispatch.of(model) if section.dispatch == "deepep" else None,
        unevenness=routing_exponent(config, model),
        document_keys=document_keys(config) or 0.0,
    )
    start_s = time.monotonic()
    parts = replayed(
        traces,
        cost,
        expandable=config.training.expandable_segments,
        busiest=busiest_rank(config, model, layout),
    )
    wall_s = time.monotonic() - start_s
    return Simulation(layout.world_size, profile, traces, *parts, wall_s, cost, config, layout)


def replayed(
    traces: dict[int, Trace],
    cost: Cost,
    *,
    expandable: bool,
    busiest: float = 1.0,
) -> tuple[Timeline, dict[int, MemoryReport]]:
    """Replay traces in time and in memory.

    Args:
        traces: traces by global rank.
        cost: prices of kernels and transfers.
        expandable: `training.expandable_segments`.
        busiest: tokens of the traced ranks' experts, over the mean.
    """
    cost.alone = all(trace.world_size == 1 for trace in traces.values())
    # Time and memory are independent: the allocator is replayed in the order of the host, without a
    # clock.
    memory = {
        rank: memory_report(trace, cost.profile, expandable=expandable)
        for rank, trace in traces.items()
    }
    return replay(traces, cost, busiest=busiest), memory


def step_facts(simulation: StepSimulation) -> Facts:
    """Return the facts of any simulated step, as data for JSON.

    Args:
        simulation: the simulated step.

    Returns:
        A dict whose fields docs/simulator.md defines. Times are in seconds, memory is in GiB.
    """
    timeline, profile = simulation.timeline, simulation.profile
    speed, attention = simulation.tokens_per_s_per_gpu, _attention(simulation)
    traces, has_rates = simulation.traces, not attention["attention_lacks"]
    return {
        "world_size": simulation.world_size,
        "hardware": profile.name,
        "hardware_note": profile.note,
        "hardware_supported": not profile.unsupported,
        "hardware_lacks": lacks_runs(profile),
        "hardware_assumes": profile.assumes,
        **attention,
        "step_time_s": timeline.step_s,
        "tokens_per_step": simulation.tokens_per_step,
        "tokens_per_s_per_gpu": speed,
        "interval": interval_facts(speed, timeline, traces, profile, has_rates=has_rates),
        "fits": simulation.fits,
        "tight": simulation.runs and not simulation.fits,
        "time": {
            **{name: timeline.mean(name) for name in _PARTS},
            **{name: timeline.mean_by(name) for name in _SUMS},
        },
        "comm": communication(timeline, traces, profile, simulation.cost.dispatch),
        "pipeline": {"bubble_fraction": timeline.bubble_fraction},
        "host": host_facts(traces.values(), profile),
        "memory": _memory(simulation.fullest),
        "per_rank": [_rank(simulation, rank) for rank in traces],
        "wall_s": simulation.wall_s,
    }


def facts(simulation: Simulation) -> Facts:
    """Return a simulated job as data for JSON.

    Args:
        simulation: the simulated job.

    Returns:
        The fields of `step_facts`, with the model, the layout, FLOPs and, for a model with experts,
            "experts".
    """
    config, profile, model = simulation.config, simulation.profile, simulation.model
    parallel = config.parallelism
    convention = config.metrics.mfu_convention
    known_keys, length = document_keys(config), config.training.seq_len
    if known_keys:  # attention of tokens that a mask hides is no work
        length = min(length, round(2 * known_keys))
    full, causal = (
        flops_per_token(config, model, causal=c, length=length) for c in (False, True)
    )
    flops = causal if convention == "causal" else full
    # MFU counts the model's FLOPs, without recomputation: recomputation lowers it.
    tflops = simulation.tokens_per_s_per_gpu * flops / 1e12
    # A profile may lack a peak for the dtype. Then there is no MFU.
    dtype = config.training.compute_dtype
    peak = profile.peak_tflops.get(dtype)
    common = step_facts(simulation)
    common["memory"]["formula_gib"] = estimate_memory(config, model, simulation.layout)["total"]
    return {
        **common,
        "document_keys": known_keys,
        "layout": str(simulation.layout),
        "replica_groups": config.groups.num_groups,
        "sequences_at_once": parallel.pipeline_parallel_microbatch_size
        if simulation.layout.pp > 1
        else config.training.local_batch_size,
        "model": f"{config.model.name} {model_title(config.model)}",
        "tflops_per_gpu": tflops,
        "mfu": tflops / peak if peak else None,
        "mfu_causal": tflops * (causal / flops) / peak if peak else None,
        "utilization": _utilization(simulation, flops),
        "mfu_convention": convention,
        "mfu_dtype": dtype,
    } | _experts(simulation)


def _utilization(simulation: Simulation, flops_per_token: float) -> float | None:
    """Return the model's FLOPs over the peaks of their precisions, as a share of the step.

    FLOPs in 8 bits are the recorded ones.
    """
    peaks, world = simulation.profile.peak_tflops, simulation.layout.world_size
    eight = Counter[str]()
    for trace in simulation.traces.values():
        for event in trace.step:
            if not isinstance(event, Launch) or event.scope.phase not in (
                "forward",
                "backward",
            ):
                continue
            kernel = event.kernel
            if kernel.kind == "matmul" and kernel.dtype.startswith("float8"):
                eight[peak_dtype(kernel.dtype, simulation.profile)] += kernel.flops
    tokens_per_rank = simulation.tokens_per_step / world * len(simulation.traces)
    flops = {dtype: total / tokens_per_rank for dtype, total in eight.items()}
    flops[simulation.config.training.compute_dtype] = flops_per_token - sum(flops.values())
    per_s = {dtype: tflops * 1e12 for dtype, tflops in peaks.items()}
    rate = simulation.tokens_per_s_per_gpu
    return utilization(flops, per_s, tokens_per_s=rate, num_ranks=1)


def _attention(simulation: StepSimulation) -> Facts:
    """Return the kernels of attention, and those without rates of their own."""
    kernels = {
        event.kernel
        for trace in simulation.traces.values()
        for event in trace.step
        if isinstance(event, Launch) and "attention" in event.kernel.kind
    }
    runs = sorted({simulation.cost.attention_kernel(kernel) for kernel in kernels})
    lacks = [name for name in runs if simulation.profile.rates_of(name) != name]
    return {"attention_kernel": " and ".join(runs), "attention_lacks": lacks}


_DECIDES = {
    "links": r"(ring|all_reduce|all_to_all|p2p|nic)_gb_per_s",
    "attention": r"attention_(forward|backward)_tflops",
    "matmuls": r"matmul_share",
    "the host": r"(host_tiny|launch\w*|compiled_call)_us",
}
"""Figures of a profile by the part of the machine that they describe."""
_MOST_EVENTS = 50_000


def alternatives(simulation: StepSimulation) -> Facts:
    """Return the speed in tokens/s/GPU on other hardware: of the same name, with other kernels of attention, and with a part 10% faster.

    The recorded step is priced and replayed again, unless it has so many events that it takes seconds.

    Args:
        simulation: the simulated step.
    """
    own, traces = simulation.profile, simulation.traces
    is_long = sum(len(trace.step) for trace in traces.values()) > _MOST_EVENTS
    if is_long or not simulation.tokens_per_step:  # a script has not stated its tokens
        return {}

    def speed(profile: Profile) -> float:
        step_s = step_seconds(traces, replace(simulation.cost, profile=profile))
        return simulation.tokens_per_step / step_s / simulation.world_size

    def faster(pattern: str) -> Profile:
        # Times are shorter, and rates higher.
        update = {
            name: scaled(getattr(own, name), 1 / 1.1 if name.endswith("_us") else 1.1)
            for name in Profile.model_fields
            if re.fullmatch(pattern, name)
        }
        return own.model_copy(update=update)

    same = {"attention_kernel": own.attention_kernel}
    others = {*own.attention_kernels} - {own.attention_kernel, "efficient"}
    return {
        "hardware_kin": {n: speed(load_profile(n).model_copy(update=same)) for n in own.kin},
        "attention_others": {n: speed(own.with_attention(n)) for n in sorted(others)},
        "decides": {part: speed(faster(pattern)) for part, pattern in _DECIDES.items()},
    }


def _experts(simulation: Simulation) -> Facts:
    """Return the facts about experts, if the model has any."""
    config, model = simulation.config, simulation.model
    if not model.num_experts:
        return {}
    ep = config.parallelism.expert_parallel_degree
    experts = {
        "parameters": model.num_params,
        "active_parameters": model.num_active_params,
        "parallel_degree": ep,
        "routing": assumptions(config).routing,
        "imbalance": simulation.busiest_rank,
        "dispatch": assumptions(config).dispatch,
        "fits_up_to_imbalance": simulation.fits_up_to,
        "routed": simulation.routed,
    }
    return {"experts": experts}


def _memory(report: MemoryReport) -> Facts:
    """Return the facts about a rank's memory."""
    where = report.at
    return {
        "rank": report.rank,
        "peak_active_gib": report.peak_active_bytes / GIB,
        "peak_reserved_gib": report.peak_reserved_bytes / GIB,
        "reserved_by_stream_gib": in_gib(report.by_stream),
        "outside_gib": report.outside_bytes / GIB,
        "needed_gib": report.needed_bytes / GIB,
        "usable_gib": report.usable_bytes / GIB,
        "capacity_gib": report.capacity_bytes / GIB,
        "by_category_gib": in_gib(report.by_category),
        "by_module_gib": in_gib(report.by_module),
        "by_category_and_module_gib": {
            category: in_gib({m: n for (c, m), n in report.by_both.items() if c == category})
            for category in report.by_category
        },
        "at": " of ".join(filter(None, (where.action, where.phase, where.module))),
        "num_retries": report.num_retries,
        "failure": report.failure,
    }


def in_gib(sizes: Mapping[Any, int]) -> dict[Any, float]:
    """Return sizes in bytes as GiB."""
    return {name: size / GIB for name, size in sizes.items()}


def _rank(simulation: StepSimulation, rank: int) -> Facts:
    """Return the facts about a rank."""
    timeline, memory = simulation.timeline.ranks[rank], simulation.memory[rank]
    stage = [*simulation.traces].index(rank)  # ranks are numbered stage by stage
    return {
        "rank": rank,
        "pipeline_rank": stage,
        "compute_s": timeline.compute_s,
        "exposed_s": sum(timeline.exposed_s.values()),
        "bubble_s": timeline.bubble_s,
        "host_s": timeline.host_s,
        "peak_active_gib": memory.peak_active_bytes / GIB,
        "peak_reserved_gib": memory.peak_reserved_bytes / GIB,
        "needed_gib": memory.needed_bytes / GIB,
        "by_category_gib": in_gib(memory.by_category),
        "fits": memory.fits,
    }
