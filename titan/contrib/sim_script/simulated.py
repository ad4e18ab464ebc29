"""Simulation of a user's training step: `titan sim --script train.py:build`, and titan.sim.simulate_step in Python.

script.py defines the script's protocol. Its traces are not cached, because any file that it imports
may change its behaviour.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from titan.sim.price.cost import Cost, peak_dtype
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace import Launch, no_garbage_collection
from titan.sim.record.trace_jobs import Job, trace_jobs
from titan.sim.simulate import Facts, StepSimulation, replayed, step_facts

from .script import Script


def simulate_step(
    build: Callable[..., Any] | str,
    *,
    world_size: int,
    profile: Profile | str,
    ranks: Sequence[int] = (0,),
    processes: int | None = None,
    **settings: Any,
) -> StepSimulation:
    """Simulate the step that a build function returns. script.py defines its protocol.

    The allocator is that of PYTORCH_ALLOC_CONF.

    Args:
        build: a function at the top level of a file, or "FILE.py:NAME".
        world_size: number of ranks.
        profile: the devices and their network, or the name of a profile.
        ranks: one rank of each kind of rank with different work. All other ranks are assumed to do
            the same as one of them.
        processes: number of processes that record at once. All cores by default.
        settings: keyword arguments of `build`.

    Returns:
        The simulated step, with one trace, timeline and memory report for each of `ranks`.

    Raises:
        TraceError: The step cannot be recorded.
        ReplayError: The recorded ranks wait for each other forever.
    """
    started = time.monotonic()
    if isinstance(profile, str):
        profile = load_profile(profile)
    if callable(build):
        build = f"{inspect.getsourcefile(build)}:{build.__qualname__}"
    file, _, function = build.rpartition(":")
    script = Script(file, function, tuple(settings.items()))
    jobs = [Job((), world_size, (rank,), script=script) for rank in ranks]
    traces: dict[int, Any] = dict.fromkeys(ranks)
    with no_garbage_collection():
        for number, result in trace_jobs(jobs, processes or os.cpu_count() or 1):
            if isinstance(result, Exception):
                raise result
            [traces[ranks[number]]] = result
        allocator = "".join(os.environ.get(f"PYTORCH_{n}ALLOC_CONF", "") for n in ("", "CUDA_"))
        expandable = "expandable_segments:true" in allocator.lower()
        cost = Cost(profile)
        parts = replayed(traces, cost, expandable=expandable)
    wall_s = time.monotonic() - started
    return StepSimulation(world_size, profile, traces, *parts, wall_s, cost)


def script_facts(simulation: StepSimulation, name: str) -> Facts:
    """Return a simulated script as data for JSON.

    Its FLOPs are the recorded ones, without recomputation.

    Args:
        simulation: the simulated step.
        name: name of the script.

    Returns:
        A dict with the fields of titan.sim.simulate.facts.
    """
    traces, step_s = [*simulation.traces.values()], simulation.timeline.step_s
    per_s: defaultdict[str, float] = defaultdict(
        float
    )  # TFLOPs, by the dtype whose peak counts
    for event in (event for trace in traces for event in trace.step):
        if isinstance(event, Launch) and event.scope.phase in ("forward", "backward"):
            dtype = (
                peak_dtype(event.kernel.dtype, simulation.profile) if event.kernel.flops else ""
            )
            per_s[dtype] += event.kernel.flops / len(traces) / step_s / 1e12
    per_s.pop("", None)
    dtype = max(per_s, key=lambda key: per_s[key], default="bfloat16")
    peaks, tflops = simulation.profile.peak_tflops, sum(per_s.values())
    known = per_s.keys() <= peaks.keys()
    return {
        **step_facts(simulation),
        "layout": " x ".join(f"{axis} {size}" for axis, size in traces[0].mesh.items()),
        "model": name,
        "tflops_per_gpu": tflops,
        "mfu": tflops / peaks[dtype] if dtype in peaks else None,
        "utilization": sum(n / peaks[d] for d, n in per_s.items()) if known else None,
        "mfu_convention": "full",
        "mfu_dtype": dtype,
    }
