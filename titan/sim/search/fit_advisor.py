"""Changes for a job that does not fit: each is simulated, and the fastest changes that fit come first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from titan.config.errors import divisors
from titan.config.layout import Layout
from titan.config.model import model_config
from titan.config.schema import JobConfig
from titan.observe.routing import most_imbalance
from titan.sim.price.profiles import Profile, load_profile, profile_names
from titan.sim.record.trace_jobs import TraceError
from titan.sim.replay.queues import ReplayError
from titan.sim.report.phases import simulate_phases
from titan.sim.report.text import duration, say, speed_range, uneven_routing, verdict
from titan.sim.search.variants import Variant, simulate_variants
from titan.sim.simulate import HardwareError, facts

Settings = dict[str, str]
_MOST = 5  # changes that are shown
_UNEVEN = 2.0  # times the mean load: routing gets as uneven as that where nothing balances it

_TP = "parallelism.tensor_parallel_degree"
_SHARD = "parallelism.data_parallel_shard_degree"
_REPLICATE = "parallelism.data_parallel_replicate_degree"


def candidates(
    config: JobConfig, layout: Layout, profile: Profile
) -> tuple[list[Settings], list[Settings]]:
    """Return changes that save memory and keep the global batch: single changes, and pairs of different kinds."""
    # Modes that save more than the one at hand.
    stronger = {"full": (), "none": ("selective", "full")}
    modes = stronger.get(config.activation_checkpoint.mode, ("full",))
    kinds = [
        [{"activation_checkpoint.mode": mode} for mode in modes],
        [*_smaller_batch(config, layout)],
        [*_spread(config, layout, profile)],
        [*_offload(config)],
        [*_experts(config, layout)],
        [*_precision(config)],
    ]
    if not config.loss.chunk_output and not config.parallelism.disable_loss_parallel:
        kinds.append([{"loss.chunk_output": "true"}])
    single = list(itertools.chain(*kinds))
    of_two_kinds = itertools.combinations(kinds, 2)
    return single, [a | b for one, other in of_two_kinds for a, b in itertools.product(one, other)]


def _smaller_batch(config: JobConfig, layout: Layout) -> Iterator[Settings]:
    """Yield smaller local batches."""
    # A pipeline needs whole microbatches. The largest batch that fits need not be the fastest, so all are tried.
    whole = _same_global_batch(config, layout)
    for size in divisors(config.training.local_batch_size)[:-1]:
        if size >= config.parallelism.pipeline_parallel_microbatch_size:
            yield {"training.local_batch_size": str(size)} | whole


def _same_global_batch(config: JobConfig, layout: Layout) -> Settings:
    """Return the setting that keeps the global batch."""
    # Made explicit, since the default follows the layout that is about to change.
    whole = config.training.local_batch_size * layout.dp * layout.accumulation
    return {"training.global_batch_size": str(whole)}


def _spread(config: JobConfig, layout: Layout, profile: Profile) -> Iterator[Settings]:
    """Yield layouts that spread the model over more ranks."""
    # Replicas hold whole copies. Sharding over them as well adds communication and no computation.
    if layout.dp_replicate > 1:
        yield {_REPLICATE: "1", _SHARD: "-1"}
    # TP stays within a node, and takes its ranks from FSDP.
    for factor in (2, 4, 8):
        if layout.tp * factor <= profile.gpus_per_node and layout.dp_shard % factor == 0:
            yield {
                _TP: str(layout.tp * factor),
                _SHARD: str(layout.dp_shard // factor),
                **_same_global_batch(config, layout),
            }


def _offload(config: JobConfig) -> Iterator[Settings]:
    """Yield settings that move memory to the host."""
    # Offloading concerns the activations that checkpointing saves, so that mode must be on.
    if not config.activation_checkpoint.cpu_offload and config.activation_checkpoint.mode != "none":
        yield {"activation_checkpoint.cpu_offload": "true"}
    if not config.training.enable_cpu_offload:
        yield {"training.enable_cpu_offload": "true"}


def _precision(config: JobConfig) -> Iterator[Settings]:
    """Yield a smaller precision."""
    if config.training.compute_dtype == "float32":
        yield {"training.mixed_precision_param": "bfloat16"}


def _experts(config: JobConfig, layout: Layout) -> Iterator[Settings]:
    """Yield settings of experts that need less memory."""
    model = model_config(config.model)
    if not getattr(model, "num_experts", 0):
        return
    # A part of the mean number of tokens sent: then the chunks of experts do not depend on the number that arrives.
    tokens = config.training.local_batch_size * config.training.seq_len // (layout.cp * layout.tp)
    if layout.pp > 1:
        parts = config.training.local_batch_size
        tokens = tokens // parts * config.parallelism.pipeline_parallel_microbatch_size
    chunk = tokens * model.top_k // 4
    if not 0 < config.moe.expert_chunk_rows <= chunk:
        yield {"moe.expert_chunk_rows": str(chunk)}
    # More ranks hold fewer experts each. Fewer ranks even out the loads. The rules refuse degrees that do not divide.
    ep = config.parallelism.expert_parallel_degree
    for degree in {2 * ep, max(1, ep // 2)} - {ep}:
        yield {"parallelism.expert_parallel_degree": str(degree)}


def find_changes(
    job: Sequence[str], config: JobConfig, layout: Layout, profile: Profile
) -> list[Variant]:
    """Simulate changes of a job that save memory, and return the fastest that fit.

    Args:
        job: Files and overrides that `config` was loaded from.
        config: The job.
        layout: Its layout.
        profile: The hardware.

    Returns:
        At most five variants that fit, the fastest first.
    """
    fitting: list[Variant] = []
    # First single changes, then pairs.
    for changes in candidates(config, layout, profile):
        variants = simulate_variants(
            job,
            changes,
            world_size=layout.world_size,
            profiles=[profile],
            progress=lambda done, total: say(f"does not fit: {done} of {total} changes tried"),
        )
        fitting += [variant for variant in variants if variant.fits]
        if fitting:  # one change is less than two
            break
    return sorted(fitting, key=lambda variant: -variant.speed)[:_MOST]


def suggest(
    job: Sequence[str], config: JobConfig, layout: Layout, *, hardware: str
) -> dict[str, Any]:
    """Simulate a job for `titan check`, and changes that may help if it does not fit.

    Args:
        job: Files and overrides that `config` was loaded from.
        config: The job.
        layout: Its layout.
        hardware: Name or file of a profile.

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
        if limit is not None and limit < (
            uneven := min(_UNEVEN, most_imbalance(config, simulation.model))
        ):
            imbalance = uneven
            job = [*job, f"--simulator.expert_imbalance={imbalance}"]
        is_safe = simulation.fits and imbalance is None
        fitting = [] if is_safe else find_changes(job, config, layout, profile)
    except (HardwareError, TraceError, ReplayError) as error:
        return {"not_simulated": str(error)}
    finally:
        say("")
    fixes = [
        {
            "settings": variant.settings,
            "tokens_per_s_per_gpu": variant.speed,
            "needed_gib": variant.needed_gib,
        }
        for variant in fitting
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
    uneven = f" at {imbalance:g} times the mean load" if (imbalance := answer["imbalance"]) else ""
    if fixes:
        lines.append(f"changes that make it fit{uneven}, the fastest first:")
    elif uneven or not step["fits"]:
        lines.append(f"no single change, nor two together, makes it fit{uneven}")
    for fix in fixes:
        change = " ".join(f"--{key}={value}" for key, value in fix["settings"].items())
        lines.append(
            f"  {fix['tokens_per_s_per_gpu']:>8,.0f} tokens/s/GPU  {fix['needed_gib']:>6.1f} GiB  {change}"
        )
    return lines
