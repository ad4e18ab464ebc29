"""Changes for a job that does not fit: each is simulated, and the fastest changes that fit come first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from titan.config.errors import divisors
from titan.config.layout import AXES, Layout
from titan.config.schema import JobConfig
from titan.sim.price.profiles import Profile, load_profile, profile_names
from titan.sim.report.phases import simulate_phases
from titan.sim.report.text import duration, say, speed_range, uneven_routing, verdict
from titan.sim.routing import most_imbalance
from titan.sim.simulate import FAILURES, facts

from .point import Settings, words
from .variants import Search, Variant

_MOST = 5  # changes that are shown
_TP, _SHARD, _REPLICATE = AXES["tp"], AXES["dp_shard"], AXES["dp_replicate"]
_UNEVEN = 2.0  # times the mean load: routing gets as uneven as that where nothing balances it


def candidates(
    config: JobConfig, layout: Layout, profile: Profile
) -> tuple[list[Settings], list[Settings]]:
    """Return changes that save memory and keep the global batch: single changes, and pairs of different kinds."""
    training, parallel, ac = config.training, config.parallelism, config.activation_checkpoint
    batch, microbatch = training.local_batch_size, parallel.pipeline_parallel_microbatch_size
    # Made explicit, since the default follows the layout that is about to change.
    same = {"training.global_batch_size": str(batch * layout.dp * layout.accumulation)}
    # Modes that save more than the one at hand.
    modes = {"full": (), "none": ("selective", "full")}.get(ac.mode, ("full",))
    # TP stays within a node, and takes its ranks from FSDP. Replicas hold whole copies: sharding
    # over them adds communication only.
    most = profile.gpus_per_node // layout.tp
    tps = [n for n in (2, 4, 8) if n <= most and layout.dp_shard % n == 0]
    # A pipeline needs whole microbatches. The largest batch that fits need not be the fastest, so
    # all are tried.
    sizes = [size for size in divisors(batch)[:-1] if size >= microbatch]
    is_chunked = config.loss.chunk_output or parallel.disable_loss_parallel
    kinds = [
        [{"activation_checkpoint.mode": mode} for mode in modes],
        [{"training.local_batch_size": str(size)} | same for size in sizes],
        [{_REPLICATE: "1", _SHARD: "-1"}] * (layout.dp_replicate > 1)
        + [{_TP: str(layout.tp * n), _SHARD: str(layout.dp_shard // n)} | same for n in tps],
        [{"training.enable_cpu_offload": "true"}] * (not training.enable_cpu_offload),
        _experts(config, layout),
        [{"training.mixed_precision_param": "bfloat16"}]
        * (training.compute_dtype == "float32"),
        [{"loss.chunk_output": "true"}] * (not is_chunked),
    ]
    of_two_kinds = itertools.combinations(kinds, 2)
    pairs = [a | b for one, other in of_two_kinds for a, b in itertools.product(one, other)]
    return [*itertools.chain(*kinds)], pairs


def _experts(config: JobConfig, layout: Layout) -> list[Settings]:
    """Return settings of experts that need less memory."""
    model, training, parallel = config.model.sizes, config.training, config.parallelism
    if not model.num_experts:
        return []
    # A part of the mean number of tokens sent: then the chunks of experts do not depend on the
    # number that arrives.
    tokens = training.local_batch_size * training.seq_len // (layout.cp * layout.tp)
    if layout.pp > 1:
        tokens = (
            tokens // training.local_batch_size * parallel.pipeline_parallel_microbatch_size
        )
    chunk, ep = tokens * model.top_k // 4, parallel.expert_parallel_degree
    is_chunked = 0 < config.moe.expert_chunk_rows <= chunk
    # More ranks hold fewer experts each. Fewer ranks even out the loads. The rules refuse degrees
    # that do not divide.
    degrees = {2 * ep, max(1, ep // 2)} - {ep}
    by_degree = [{"parallelism.expert_parallel_degree": str(degree)} for degree in degrees]
    return [{"moe.expert_chunk_rows": str(chunk)}] * (not is_chunked) + by_degree


def find_changes(
    job: Sequence[str], config: JobConfig, layout: Layout, profile: Profile
) -> list[Variant]:
    """Simulate changes of a job that save memory, and return at most five that fit, the fastest first.

    Args:
        job: files and overrides that `config` was loaded from.
        config: the job.
        layout: its layout.
        profile: the hardware.
    """
    trials = Search(job, layout.world_size, profile, what="changes tried: the job does not fit")
    for changes in candidates(config, layout, profile):  # one change is less than two
        if fitting := [variant for variant in trials(changes) if variant.fits]:
            return sorted(fitting, key=lambda variant: -variant.speed)[:_MOST]
    return []


def suggest(
    job: Sequence[str], config: JobConfig, layout: Layout, *, hardware: str
) -> dict[str, Any]:
    """Simulate a job for `titan check`, and changes that may help if it does not fit.

    Args:
        job: files and overrides that `config` was loaded from.
        config: the job.
        layout: its layout.
        hardware: name or file of a profile.

    Returns:
        {"simulation": facts, "fixes": changes with which it fits}, or {"not_simulated": reason}. If
            the job fits only as long as
        routing is nearly even, the fixes suit a stronger "imbalance", which is in the answer, too.
    """
    # titan check knows more devices than the simulator has profiles of.
    if not hardware.endswith(".toml") and hardware.lower() not in profile_names():
        return {"not_simulated": f"the simulator has no profile of {hardware}"}
    profile = load_profile(hardware)
    try:
        # The phase that needs most memory.
        parts = simulate_phases(config, world_size=layout.world_size, profile=profile, say=say)
        _, simulation = max(parts, key=lambda part: part[1].fullest.needed_bytes)
        imbalance, limit = None, simulation.fits_up_to
        uneven = min(_UNEVEN, most_imbalance(config, simulation.model)) if limit else 0.0
        if limit is not None and limit < uneven:
            imbalance = uneven
            job = [*job, f"--simulator.expert_imbalance={imbalance}"]
        is_safe = simulation.fits and imbalance is None
        fitting = [] if is_safe else find_changes(job, config, layout, profile)
    except FAILURES as error:
        return {"not_simulated": str(error)}
    finally:
        say("")
    fixes = [
        {"settings": v.settings, "tokens_per_s_per_gpu": v.speed, "needed_gib": v.needed_gib}
        for v in fitting
    ]
    return {"simulation": facts(simulation), "fixes": fixes, "imbalance": imbalance}


def describe(answer: dict[str, Any]) -> list[str]:
    """Return the answer of `suggest` as lines of text."""
    if reason := answer.get("not_simulated"):
        return [f"not simulated: {reason}"]
    step, fixes = answer["simulation"], answer["fixes"]
    memory, hardware = step["memory"], step["hardware"]
    lines = [
        f"time     {duration(step['step_time_s'])} a step, {speed_range(step)}, simulated on {hardware}",
        f"{verdict(step)}, simulated; the most at {memory['at'] or 'the start'} of rank {memory['rank']}",
    ]
    if line := uneven_routing(step):
        lines.append(f"experts  {line}")
    uneven = (
        f" at {imbalance:g} times the mean load" if (imbalance := answer["imbalance"]) else ""
    )
    if fixes:
        lines.append(f"changes that make it fit{uneven}, the fastest first:")
    elif uneven or not step["fits"]:
        lines.append(f"no single change, nor two together, makes it fit{uneven}")
    for fix in fixes:
        change = " ".join(words(fix["settings"]))
        lines.append(
            f"  {fix['tokens_per_s_per_gpu']:>8,.0f} tokens/s/GPU  {fix['needed_gib']:>6.1f} GiB  {change}"
        )
    return lines
