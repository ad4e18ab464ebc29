"""Cost of a whole run (`titan sim --run`): days, GPU hours, energy, money, checkpoints, failures, spare nodes.

A step's simulation gives the seconds of a step and the bytes of a checkpoint. `[simulator.run]`
gives figures that are no part of a job, and titan/sim/report/interval.py the time under failures.
All figures are expectations.

Each phase of a job (`[[phase]]`, titan/config/phases.py) is accounted for separately. A later job
that starts from the checkpoint is added by `--phase OVERLAY.toml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from titan.config.layout import mesh_of
from titan.config.schema import JobConfig
from titan.sim.estimate import estimate_memory
from titan.sim.section import assumptions
from titan.sim.simulate import Facts, Simulation

from .interval import (
    daly_interval_s,
    expected_interval_s,
    num_spares,
    young_interval_s,
)
from .text import duration

_DAY_S, _HOUR_S = 86_400.0, 3_600.0
BYTES = {"float32": 4, "bfloat16": 2}
COPY_TINY = (
    10  # tiny operations of the host to start a copy of a DTensor, as measured with torch 2.13
)
_NEVER = 1e-6  # goodput of a run that does not end


def state_bytes(simulation: Simulation) -> float:
    """Return the bytes of a checkpoint: parameters and optimizer states."""
    config, layout = simulation.config, simulation.layout
    model = config.model.sizes
    ranks = [dict(report.by_category) for report in simulation.memory.values()]
    # Offloaded states are on the host, which the simulator's allocator does not see.
    if config.training.enable_cpu_offload:
        ranks = [estimate_memory(config, model, layout)]
    params, optimizer = (sum(r[name] for r in ranks) for name in ("parameters", "optimizer"))
    # The ranks seen hold the largest shards, which at a thousand shards are far above the mean.
    # Their proportions are exact.
    return model.num_params * BYTES[config.training.dtype] * (1 + optimizer / params)


def save_times_s(simulation: Simulation, size: float, *, nodes: int) -> tuple[float, float]:
    """Return the seconds for which training stops for a save of this size, and the seconds of writing during training."""
    config, layout, profile = simulation.config, simulation.layout, simulation.profile
    run, mode = assumptions(config).run, config.checkpoint.async_mode
    write_s = size / 1e9 / (nodes * run.node_storage_gb_per_s)
    if (share := run.save_blocking_share) is not None:
        return share * write_s, (1 - share) * write_s
    if mode == "disabled":
        return write_s, 0.0
    # Each rank copies its shards, one tensor after the other.
    held = size * layout.dp_replicate / layout.world_size / 1e9
    if mode == "async":
        return held / profile.pageable_gb_per_s, write_s
    # A copy into pinned memory overlaps with the next step, whose update waits for it. The host
    # still starts each copy.
    num_tensors = max(len(t.setup) + len(t.first_step) for t in simulation.traces.values())
    start_s = num_tensors * (COPY_TINY * profile.host_tiny_us + profile.launch_us) * 1e-6
    copy_s = held / profile.host_gb_per_s
    late_s = max(0.0, copy_s - simulation.timeline.step_s)
    return start_s + late_s, copy_s - late_s + write_s


def phase_facts(simulation: Simulation, *, changes_layout: bool = False) -> Facts:
    """Return the cost of one phase from its first step to its last. docs/simulator.md defines every field.

    Args:
        simulation: a step of the phase.
        changes_layout: the phase begins with a save in the foreground and a new start, in another
            layout.
    """
    config, step_s = simulation.config, simulation.timeline.step_s
    run, steps, ranks = (
        assumptions(config).run,
        config.training.steps,
        simulation.layout.world_size,
    )
    nodes = ceil(ranks / simulation.profile.gpus_per_node)
    mtbf_s = run.mtbf_gpu_hours * _HOUR_S / ranks
    size = state_bytes(simulation)
    blocked_s, beside_s = save_times_s(simulation, size, nodes=nodes)
    trained_s, validation_s = steps * step_s, _validation_s(simulation)

    def wall_and_waits(interval_s: float) -> tuple[float, float]:
        # One save at a time: the next waits for the one before.
        save_s = blocked_s + max(0.0, beside_s - interval_s)
        times = {"save_s": save_s, "restart_s": run.restart_seconds, "write_s": beside_s}
        num_intervals = (trained_s + validation_s) / interval_s
        wall_s = num_intervals * expected_interval_s(interval_s, mtbf_s=mtbf_s, **times)
        return wall_s, num_intervals * save_s

    interval = _interval(config, step_s)
    wall_s, saved_s = wall_and_waits(interval * (trained_s + validation_s) / steps)
    best_s = max(daly_interval_s(blocked_s, mtbf_s), beside_s, step_s)
    parts_s = {"training": trained_s, "validation": validation_s, "waiting for saves": saved_s}
    parts_s["restarts and lost work"] = wall_s - sum(parts_s.values())
    if changes_layout:
        parts_s["change of layout"] = border_s = blocked_s + beside_s + run.restart_seconds
        wall_s += border_s
    gpu_hours = wall_s / _HOUR_S * ranks
    away = run.repair_hours * _HOUR_S / mtbf_s
    return {
        "layout": str(simulation.layout),
        "steps": steps,
        "tokens": steps * simulation.tokens_per_step,
        "days": wall_s / _DAY_S,
        "days_by_part": {name: seconds / _DAY_S for name, seconds in parts_s.items()},
        "gpu_hours": gpu_hours,
        "energy_mwh": gpu_hours * simulation.profile.power_w / 1e6,
        "cost": gpu_hours * run.gpu_hour_price,
        "needed_gib": simulation.fullest.needed_bytes / 2**30,
        "failures": wall_s / mtbf_s,
        "goodput": trained_s / wall_s,
        "mtbf_hours": mtbf_s / _HOUR_S,
        "nodes": nodes,
        "spare_nodes": num_spares(away, probability=run.spare_probability),
        "checkpoint": {
            "bytes": round(size),
            "blocked_s": blocked_s,
            "beside_s": beside_s,
            "interval_steps": interval,
            "young_steps": young_interval_s(blocked_s, mtbf_s) / step_s,
            "daly_steps": daly_interval_s(blocked_s, mtbf_s) / step_s,
            "best_steps": max(1, round(best_s / step_s)),
            "best_goodput": trained_s / wall_and_waits(best_s)[0],
        },
    }


def _interval(config: JobConfig, step_s: float) -> int:
    """Return the number of steps between saves; without saves, all of the run's steps."""
    section, steps = config.checkpoint, config.training.steps
    if section.why_unsaved:
        return steps
    by_time = section.interval_minutes * 60 / step_s or steps
    return max(1, min(section.interval, steps, int(by_time)))


def _validation_s(simulation: Simulation) -> float:
    """Return the seconds of all validations.

    They are forward passes, timed in proportion to their tokens.
    """
    config, by_phase = simulation.config, simulation.timeline.mean_by("by_phase_s")
    section, training = config.validation, config.training
    tokens = 0
    # -1 asks for all of a text, whose length is not known here.
    if section.enable and section.steps > 0:
        tokens_of_batch = section.local_batch_size * (section.seq_len or training.seq_len)
        tokens += ceil(training.steps / section.freq) * section.steps * tokens_of_batch
    forward_s = simulation.timeline.step_s * by_phase["forward"] / sum(by_phase.values())
    tokens_of_step = (
        training.local_batch_size * training.seq_len * simulation.layout.accumulation
    )
    return forward_s * tokens / tokens_of_step


def whole_run(simulations: Sequence[Simulation]) -> Facts:
    """Return the cost of consecutive phases: the sums, and `phases` with each."""
    meshes = [mesh_of(simulation.config, simulation.layout) for simulation in simulations]
    phases = [
        phase_facts(simulation, changes_layout=meshes[n] != meshes[max(0, n - 1)])
        for n, simulation in enumerate(simulations)
    ]
    sums = ("days", "gpu_hours", "energy_mwh", "cost", "failures", "steps", "tokens")
    trained = sum(phase["days_by_part"]["training"] for phase in phases)
    total: Facts = {name: sum(phase[name] for phase in phases) for name in sums}
    total["goodput"] = trained / total["days"]
    return total | {"spare_nodes": max(p["spare_nodes"] for p in phases), "phases": phases}


def whole_run_page(facts: Facts) -> str:
    """Return the result of `whole_run` as text."""
    if facts["goodput"] < _NEVER:
        return "  the whole run does not end: it fails before it can save"
    phases, lines = facts["phases"], [_summary("the whole run", facts)]
    for number, phase in enumerate(phases, start=1):
        lines += [_summary(f"phase {number}", phase)] * (len(phases) > 1) + _phase_lines(phase)
    return "\n".join(lines)


def _summary(name: str, facts: Facts) -> str:
    """Return the line of the run, or of a phase."""
    days, hours, energy, cost = (
        _figure(facts[key]) for key in ("days", "gpu_hours", "energy_mwh", "cost")
    )
    # Power and price may not be known.
    energy = f", at most {energy} MWh in the GPUs" * (facts["energy_mwh"] > 0)
    cost = f", cost {cost}" * (facts["cost"] > 0)
    goodput = f"{facts['tokens']:,} tokens; goodput {facts['goodput']:.1%}"
    return f"  {name}: {days} days, {hours} GPU hours{energy}{cost} for {goodput}"


def _phase_lines(phase: Facts) -> list[str]:
    """Return the details of a phase."""
    save, failures, hours = phase["checkpoint"], phase["failures"], phase["mtbf_hours"]
    shares = ((name, days / phase["days"]) for name, days in phase["days_by_part"].items())
    best = f"best every {save['best_steps']:,}: {save['best_goodput']:.2%} (Young {save['young_steps']:,.0f}, Daly {save['daly_steps']:,.0f})"
    return [
        f"    time          {', '.join(f'{name} {share:.1%}' for name, share in shares)}",
        f"    memory        {phase['needed_gib']:.1f} GiB on the fullest rank",
        f"    failures      {_figure(failures)} expected, one in {_figure(hours)} hours; nodes: {phase['nodes']}, and {phase['spare_nodes']} to spare",
        f"    checkpoints   {save['bytes'] / 1e9:,.1f} GB each: training stands still for {duration(save['blocked_s'])}, "
        f"written beside it in {duration(save['beside_s'])}",
        f"    saved         every {save['interval_steps']:,} steps: goodput {phase['goodput']:.2%}; {best}",
    ]


def _figure(value: float) -> str:
    """Return a number as text, with three digits or in full."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
