"""A job that does not fit: the cheapest changes with which it would, each simulated, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from titan.config.layout import Layout
from titan.config.schema import JobConfig

from .profiles import Profile, load_profile, profile_names
from .replay import ReplayError
from .report import duration, say
from .simulate import HardwareError, facts, simulate
from .sweep import Variant, sweep
from .trace_jobs import TraceError

Settings = dict[str, str]

_AC, _BATCH = "activation_checkpoint.mode", "training.local_batch_size"
_TP, _SHARD, _REPLICATE = (
    f"parallelism.{name}_degree"
    for name in ("tensor_parallel", "data_parallel_shard", "data_parallel_replicate")
)


def candidates(
    config: JobConfig, layout: Layout, profile: Profile
) -> tuple[list[Settings], list[Settings]]:
    """Changes that save memory and keep the global batch: single ones, and two of different kinds together."""
    kinds = [
        [*_recompute(config)],
        [*_smaller_batch(config, layout)],
        [*_spread(config, layout, profile)],
        [*_offload(config)],
    ]
    if not config.loss.chunk_output and not config.parallelism.disable_loss_parallel:
        kinds.append([{"loss.chunk_output": "true"}])
    single = [change for kind in kinds for change in kind]
    pairs = [
        one | other
        for i, kind in enumerate(kinds)
        for another in kinds[i + 1 :]
        for one in kind
        for other in another
    ]
    return single, pairs


def _recompute(config: JobConfig) -> Iterator[Settings]:
    stronger = {
        "none": ("selective", "full"),
        "selective": ("full",),
        "memory_budget": ("full",),
        "full": (),
    }
    for mode in stronger[config.activation_checkpoint.mode]:
        yield {_AC: mode}


def _smaller_batch(config: JobConfig, layout: Layout) -> Iterator[Settings]:
    training, size = config.training, config.training.local_batch_size
    least = config.parallelism.pipeline_parallel_microbatch_size
    while size % 2 == 0 and size // 2 >= least:
        size //= 2
        yield {_BATCH: str(size), **_same_global_batch(config, layout)}
        if training.local_batch_size // size >= 4:
            return


def _same_global_batch(config: JobConfig, layout: Layout) -> Settings:
    whole = config.training.local_batch_size * layout.dp * layout.accumulation
    return {"training.global_batch_size": str(whole)}


def _spread(config: JobConfig, layout: Layout, profile: Profile) -> Iterator[Settings]:
    if layout.dp_replicate > 1:
        yield {_REPLICATE: "1", _SHARD: "-1"}
    for factor in (2, 4, 8):
        if layout.tp * factor <= profile.gpus_per_node and layout.dp_shard % factor == 0:
            yield {
                _TP: str(layout.tp * factor),
                _SHARD: str(layout.dp_shard // factor),
                **_same_global_batch(config, layout),
            }


def _offload(config: JobConfig) -> Iterator[Settings]:
    if not config.activation_checkpoint.cpu_offload and config.activation_checkpoint.mode != "none":
        yield {"activation_checkpoint.cpu_offload": "true"}
    if not config.training.enable_cpu_offload:
        yield {"training.enable_cpu_offload": "true"}


def find_fixes(
    job: Sequence[str],
    config: JobConfig,
    layout: Layout,
    *,
    profile: Profile,
    processes: int | None = None,
    most: int = 5,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Variant]:
    """The fastest variants that fit. job: files and overrides that `config` was loaded from."""
    fitting: list[Variant] = []
    for changes in candidates(config, layout, profile):
        variants = sweep(
            job,
            changes,
            world_size=layout.world_size,
            profiles=[profile],
            processes=processes,
            progress=progress,
        )
        fitting += [variant for variant in variants if variant.fits]
        if fitting:  # one change is less than two
            break
    return sorted(fitting, key=lambda variant: -variant.speed)[:most]


def judge(
    job: Sequence[str], config: JobConfig, layout: Layout, *, hardware: str
) -> dict[str, Any]:
    """For `titan check`: {"simulation": facts, "fixes": changes with which it fits, if it does not}, or {"not_simulated": why}."""
    if not hardware.endswith(".toml") and hardware.lower() not in profile_names():
        return {"not_simulated": f"the simulator has no profile of {hardware}"}

    def tried(done: int, of: int) -> None:
        say(f"does not fit: {done} of {of} changes tried")

    profile = load_profile(hardware)
    try:
        simulation = simulate(config, world_size=layout.world_size, profile=profile, say=say)
    except (HardwareError, TraceError, ReplayError) as error:
        say("")
        return {"not_simulated": str(error)}
    told: dict[str, Any] = {"simulation": facts(simulation), "fixes": []}
    if not simulation.fits:
        told["fixes"] = [
            {
                "settings": fix.settings,
                "tokens_per_s_per_gpu": fix.speed,
                "peak_reserved_gib": fix.reserved_gib,
            }
            for fix in find_fixes(job, config, layout, profile=profile, progress=tried)
        ]
    say("")
    return told


def describe(judged: dict[str, Any]) -> list[str]:
    """What `judge` found, for people."""
    if reason := judged.get("not_simulated"):
        return [f"not simulated: {reason}"]
    told, fixes = judged["simulation"], judged["fixes"]
    memory = told["memory"]
    lines = [
        f"time     {duration(told['step_time_s'])} a step, {told['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, simulated on {told['hardware']}",
        f"{'fits' if told['fits'] else 'DOES NOT FIT'}: {memory['peak_reserved_gib']:.1f} GiB reserved + {memory['outside_gib']:.1f} outside, "
        f"of {memory['capacity_gib']:.1f} on {told['hardware']}, simulated; the most at {memory['at'] or 'the start'} of rank {memory['rank']}",
    ]
    if told["fits"]:
        return lines
    lines.append(
        "changes that make it fit, the fastest first:"
        if fixes
        else "no single change, nor two together, makes it fit"
    )
    for fix in fixes:
        what = " ".join(f"--{key}={value}" for key, value in fix["settings"].items())
        lines.append(
            f"  {fix['tokens_per_s_per_gpu']:>8,.0f} tokens/s/GPU  {fix['peak_reserved_gib']:>6.1f} GiB reserved  {what}"
        )
    return lines
