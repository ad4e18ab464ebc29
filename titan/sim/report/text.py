"""A simulation as text for a terminal, and the options, tables and JSON that the simulator's commands share."""

from __future__ import annotations

import re
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import floor, log10
from pathlib import Path

from titan.config.options import (
    JOB,
    CommandParser,
    add_quiet,
    check_target,
    command_parser,
    is_quiet,
    mistake,
    positive,
)
from titan.sim.price.profiles import Profile, hardware_names
from titan.sim.simulate import Facts

from .intervals import errors

# Characters of a bar that stands for the whole.
_BAR = 28
_SMALL = 0.005  # of the whole: not worth a line
_NOTABLE = 0.05  # of the step: what to do about it is said
_UNKNOWN = 1.5  # a range that is wider than this factor comes first
EVERY_S = 10.0  # between lines of a log, so that short commands write none
_said_s = time.monotonic()


def say(text: str) -> None:
    """Show progress: on one line of a terminal that the next text replaces, or as a line of a log now and then.

    Args:
        text: the line. An empty text clears the line of a terminal.
    """
    global _said_s
    if is_quiet():
        return
    # Carriage return and "erase to the end of the line": in a pipe or a log they would be noise.
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text and time.monotonic() - _said_s >= EVERY_S:
        _said_s = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def job_parser(
    name: str, usage: str, description: str, *, required: bool = True
) -> CommandParser:
    """Return the parser of a command that simulates a job, with the options that all such commands have."""
    usage = f"{JOB} --world-size N --hardware H {usage}"
    parser = command_parser(name, usage, summary=description)
    parser.add_argument(
        "--world-size", type=positive, required=required, metavar="N", help="ranks in all"
    )
    parser.add_argument("--hardware", required=required, metavar="H", help=hardware_names())
    parser.add_json()
    parser.add_argument(
        "--processes", type=positive, metavar="P", help="at once; default: all cores"
    )
    add_quiet(parser)
    return parser


def memory_limit(profile: Profile, gib: float | None) -> Profile:
    """Return the profile with the memory that --memory allows, all of which may be used.

    Raises:
        ConfigError: the devices have less.
    """
    if gib is None:
        return profile
    if not 0 < gib <= profile.memory_gib:
        what = f"more than 0 and at most {profile.memory_gib:g} GiB, which {profile.name} has"
        raise mistake("--memory", f"expected {what}")
    return profile.model_copy(update={"memory_gib": gib, "margin": 0.0})


def require_writable(options: Namespace, *names: str, folders: Collection[str] = ()) -> None:
    """Raise ConfigError if one of these output files cannot be written. `folders` may be folders."""
    for name in (*names, *folders):
        target = getattr(options, name)
        if target not in (None, "-"):
            check_target(
                f"--{name}", Path(target), is_folder=name in folders and Path(target).is_dir()
            )


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines of a table.

    Args:
        rows: rows with equally many cells.
        left: numbers of the columns that are aligned on the left. All others are aligned on the
            right.

    Returns:
        One line for each row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if number in left else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def utilization(facts: Facts) -> str:
    """Return the MFU of a simulation as text.

    A profile may lack the peak of the dtype. The dtype is named if it is float32.
    """
    if facts["mfu"] is None:
        return "n/a"
    return f"{facts['mfu']:.1%}" + (" of fp32" if facts["mfu_dtype"] == "float32" else "")


def page(facts: Facts) -> str:
    """Return the page of a simulation.

    Args:
        facts: the simulation as data, from titan.sim.simulate.facts.

    Returns:
        The page, as lines for a terminal.
    """
    return "\n".join(
        [
            *unsupported(facts),
            f"{facts['model']} on {facts['world_size']} x {facts['hardware']}: {degrees(facts)}",
            *_machine(facts),
            "",
            *_speed(facts),
            "",
            *_time(facts),
            *_rests_on(facts["interval"]),
            "",
            *_memory(facts),
            *([f"  experts   {line}"] if (line := uneven_routing(facts)) else []),
            *_routed(facts.get("experts", {})),
            *_ranks(facts["per_rank"]),
            *other_groups(facts.get("replica_groups", 1)),
            *_measured(facts.get("measured", ())),
            "",
            f"  simulated in {facts['wall_s']:.1f} s",
        ]
    )


def unsupported(facts: Facts) -> list[str]:
    """Return the first line of a page about hardware that no published run supports; none for other hardware."""
    if not (reason := facts["hardware_lacks"]):
        return []
    return [f"UNSUPPORTED PROFILE {facts['hardware']}: {reason}, so times may be far off"]


def other_groups(count: int) -> list[str]:
    """Return the line of a job with replica groups."""
    if count == 1:
        return []
    return [
        f"  groups    one of {count} replica groups; the cost of their sums is not simulated"
    ]


def speed_range(facts: Facts, unit: str = " tokens/s/GPU", *, times: float = 1.0) -> str:
    """Return a simulated speed with its interval as text, such as "5,720 tokens/s/GPU (5,400 to 6,000)".

    Args:
        facts: the simulation.
        unit: follows the speed.
        times: speed of a variant over the simulated one. Its interval is as wide.
    """
    low, high = (facts["interval"][end] * times for end in ("low", "high"))
    # Six to sixty rounded units make the range.
    places = -floor(log10((high - low) / 6)) if high > low else 0
    ends = (f"{round(end, places):,.{max(0, places)}f}" for end in (low, high))
    return f"{facts['tokens_per_s_per_gpu'] * times:,.0f}{unit} ({' to '.join(ends)})"


def degrees(facts: Facts) -> str:
    """Return the axes of a layout that are longer than 1."""
    # Layout prints "pp 1 x dp_shard 8 ...".
    parts = [part for part in facts["layout"].split(" x ") if not part.endswith(" 1")]
    ep = facts.get("experts", {}).get("parallel_degree", 1)
    # It borrows the ranks of other axes, and is no factor.
    return (" x ".join(parts) or "one rank") + (f", ep {ep}" if ep > 1 else "")


def _machine(facts: Facts) -> Iterator[str]:
    """Yield the assumptions about the machine, and their uncertainty."""
    if note := facts["hardware_note"]:
        yield f"  {facts['hardware']}: {note}"
    runs = facts["attention_kernel"]
    assumed = filter(None, (facts["hardware_assumes"], runs and f"attention in {runs}"))
    yield f"  assumed   {', '.join(assumed)}"
    if (keys := facts.get("document_keys", 0)) is None:
        yield "  documents as long as a sequence, since nothing tells their length; simulator.document_tokens does"
    elif keys:
        yield f"  documents let a token see {keys:,.0f} keys in the mean"
    for name in facts["attention_lacks"]:
        yield f"            {facts['hardware']} has no rates of {name}: the nearest kernel's count, and the range is wider"
    for key, what in (("hardware_kin", "it is"), ("attention_others", "attention runs in")):
        for name, speed in facts.get(key, {}).items():
            times = speed / facts["tokens_per_s_per_gpu"]
            if times != 1 or key == "hardware_kin":
                yield f"            if {what} {name}: {speed_range(facts, times=times)}, {times - 1:+.0%}"


def _speed(facts: Facts) -> Iterator[str]:
    """Yield the step time, throughput and MFU."""
    convention = f"{facts['mfu_convention']} attention"
    if facts["mfu_convention"] == "full" and facts.get("mfu_causal"):
        convention += f"; {facts['mfu_causal']:.1%} with causal attention"
    tokens = facts["tokens_per_step"]  # 0: a script has not stated them
    of_tokens = f" for {tokens:,} tokens" if tokens else ""
    speed = f"{speed_range(facts)}, " if tokens else ""
    interval = facts["interval"]
    reason, low, high = (interval[name] for name in ("reason", "low", "high"))
    level = f"{interval['level']:.0%} of measured speeds should be in the range, by {interval['runs']} public runs on this card and others"
    is_unknown = tokens and high > _UNKNOWN * low
    if is_unknown:
        middle, _, ends = speed[:-3].partition(" (")
        speed = f"{middle}, "
        yield f"  speed     {ends} tokens/s/GPU: little is known of {reason}; {level}"
        yield "            a profile with the rates of that machine narrows it; in the middle of the range:"
    yield f"  step      {duration(facts['step_time_s'])}{of_tokens}"
    yield (
        f"  speed     {speed}{_tflops(facts['tflops_per_gpu'])} TFLOP/s/GPU, MFU {utilization(facts)} ({convention})"
    )
    if tokens and reason and not is_unknown:
        yield f"            {level}; most of its width is from {reason}"


def time_rows(facts: Facts) -> dict[str, float]:
    """Return the parts of the step in seconds, which add up to it, in the order of the page."""
    time = facts["time"]
    rows = {f"compute: {phase}": s for phase, s in time["by_phase_s"].items()}
    for axis, transfers in facts["comm"]["by_axis"].items():
        rows[f"waiting for {axis.replace('+', ' x ')}"] = transfers["exposed_s"]
    rows["waiting for other stages"] = time["peers_s"]
    rows["waiting for copies"] = time["copies_s"]
    rows["waiting for the host"] = time["host_s"]
    return rows


def _time(facts: Facts) -> Iterator[str]:
    """Yield the parts of the step, and the modules that compute the longest."""
    time, comm, total = facts["time"], facts["comm"], facts["step_time_s"]
    yield "  where the time goes" + (
        "" if len(facts["per_rank"]) == 1 else " (mean over stages)"
    )
    yield from _bars(time_rows(facts), total=total, unit=duration)
    if time["host_s"] > _NOTABLE * total:
        yield f"    {_host_line(facts)}"
    hidden = {
        axis: seconds
        for axis, row in comm["by_axis"].items()
        if (seconds := row["overlapped_s"])
    }
    if hidden:
        parts = ", ".join(f"{axis} {duration(seconds)}" for axis, seconds in hidden.items())
        yield f"    communication hidden behind compute: {parts}"
    waits = {kind: s for kind, s in comm["waiting_s"].items() if s > _SMALL * total}
    if waits:
        parts = ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in waits.items())
        yield f"    of the times above, waiting for other ranks: {parts}"
    if len(facts["per_rank"]) > 1:
        yield f"    pipeline bubble: {facts['pipeline']['bubble_fraction']:.1%} of the step"
    yield "  compute by module"
    yield from _bars(_by_part(time["by_module_s"], most=8), total=total, unit=duration)
    if decides := facts.get("decides"):
        own = facts["tokens_per_s_per_gpu"]
        parts = ", ".join(f"{part} {own / speed - 1:+.1%}" for part, speed in decides.items())
        yield f"  what decides: a tenth faster, the step changes by: {parts}"


def price_rows(interval: Facts) -> list[list[str]]:
    """Return class of work, share of the step, published runs and source of its prices, the largest share first."""
    shares = {name: interval["shares"][name] for name in interval["rests_on"]}
    shown = sorted((n for n in shares if shares[n] > _SMALL), key=lambda n: -shares[n])
    runs = errors()["runs"]
    return [
        [name, f"{shares[name]:.1%}", f"{runs[name] or 'no'} runs", interval["rests_on"][name]]
        for name in shown
    ]


def _rests_on(interval: Facts) -> Iterator[str]:
    """Yield what the time of each class of work rests on."""
    if rows := price_rows(interval):
        yield "  how each part was priced, and the published runs that check it"
        yield from (f"    {line}" for line in columns(rows, left=(0, 3)))


def _host_line(facts: Facts) -> str:
    """Return the work of the host in a step that waits for it, and remedies."""
    host, busy = facts["host"], duration(facts["time"]["host_busy_s"])
    line = f"the host is busy for {busy}"
    if host["pace"] == "usual":
        line += ", at the usual pace (this program's was not counted)"
    if host["compiled"]:
        return f"{line}: more tokens a step hide it"
    return f"{line}: `compile.enable` shortens that, and more tokens a step hide it"


def verdict(facts: Facts) -> str:
    """Return whether a simulated job fits, and the memory that it needs.

    The same figure is in every table.
    """
    memory = facts["memory"]
    needed, capacity = memory["needed_gib"], memory["capacity_gib"]
    what = (
        f"{needed:.1f} of {capacity:.1f} GiB on {facts['hardware']} "
        f"({memory['peak_reserved_gib']:.1f} reserved + {memory['outside_gib']:.1f} outside)"
    )
    margin = f"{1 - memory['usable_gib'] / capacity:.0%}"
    if facts["fits"]:
        return f"fits: {what}, {margin} or more stays free"
    if not facts["tight"]:
        return f"DOES NOT FIT: {what}"
    cache = f" and gives back its cache {memory['num_retries']} times, which is slow"
    how = cache if memory["num_retries"] else f", and a job that fits leaves {margin}"
    return f"TIGHT: {what}; it runs with {max(0.0, capacity - needed):.1f} GiB to spare{how}"


def _memory(facts: Facts) -> Iterator[str]:
    """Yield the memory at the peak, by category and module."""
    memory = facts["memory"]
    yield f"  memory    {verdict(facts)}"
    if "formula_gib" in memory:  # of a job
        yield f"            the formula of `titan check` says {memory['formula_gib']:.1f} GiB; the simulated value is used"
    streams = memory["reserved_by_stream_gib"]
    if len(streams) > 1:
        parts = ", ".join(f"{name} {_gib(gib)}" for name, gib in streams.items())
        yield f"            reserved by stream, of which each keeps its own: {parts}"
    if memory["failure"]:
        yield f"            {memory['failure']}"
    yield f"  at its peak of {memory['peak_active_gib']:.1f} GiB in use (rank {memory['rank']}, {memory['at'] or 'start'})"
    yield from _bars(memory["by_category_gib"], total=memory["peak_active_gib"], unit=_gib)
    yield "  in which modules"
    parts = {
        c: _by_part(sizes) for c, sizes in memory["by_category_and_module_gib"].items() if sizes
    }
    rows = [["", *parts, "in all"]]
    for module, gib in _by_part(memory["by_module_gib"], most=8).items():
        if gib > _SMALL * memory["peak_active_gib"]:
            cells = (of_category.get(module, 0.0) for of_category in parts.values())
            rows.append([module, *(_gib(cell) if cell else "" for cell in cells), _gib(gib)])
    yield from (f"    {line}" for line in columns(rows, left=(0,)))


def uneven_routing(facts: Facts) -> str:
    """Return the limit of uneven routing with experts on several ranks, or an empty text."""
    experts = facts.get("experts", {})
    limit, degree = experts.get("fits_up_to_imbalance"), experts.get("parallel_degree")
    if degree in (None, 1):
        return ""
    ranks = f"times the mean load of the {degree} ranks that share them"
    assumed = f"assumed: the busiest gets {experts['imbalance']:g}"
    if limit is None:
        return f"{assumed} {ranks}"
    worst = ", where one rank gets all rows" if limit >= degree else ""
    return f"fits up to {limit:g} {ranks}{worst}; {assumed}"


def _routed(experts: Facts) -> Iterator[str]:
    """Yield what uneven routing costs over many steps."""
    if not (routed := experts.get("routed")):
        return
    even, mean = routed["step_s_even"], routed["step_s_mean"]
    yield (
        f"  routing   {experts['routing']}: the busiest rank gets {routed['load_mean']:.2f} times the mean load in the mean of the steps, "
        f"and at most {routed['load_p99']:.2f} in 99 of 100"
    )
    yield (
        f"            a step takes {duration(routed['step_s_p50'])} in the median, at most {duration(routed['step_s_p99'])} in 99 of 100; "
        f"even routing would save {1 - even / mean:.0%}"
    )
    fits = "which fits" if routed["fits_p99"] else "which does NOT fit"
    yield f"            with that load, a step needs {routed['needed_gib_p99']:.1f} GiB, {fits}"


def _by_part(by_module: Mapping[str, float], *, most: int | None = None) -> dict[str, float]:
    """Return the sums over modules of one name in all blocks, the largest first."""
    parts = defaultdict[str, float](float)
    # "layers.3.attention" and "layers.4.attention" are one row.
    for module, gib in by_module.items():
        parts[re.sub(r"\.\d+", ".*", module) or "(outside of modules)"] += gib
    return dict(sorted(parts.items(), key=lambda item: -item[1])[:most])


def _ranks(ranks: Sequence[Facts]) -> Iterator[str]:
    """Yield a table of pipeline ranks."""
    if len(ranks) == 1:
        return
    yield ""
    yield "  pipeline rank   compute     waiting    bubble   in use GiB   needed GiB"
    for rank in ranks:
        yield (
            f"  {rank['pipeline_rank']:>13}  {duration(rank['compute_s']):>8}   {duration(rank['exposed_s']):>9} "
            f"{duration(rank['bubble_s']):>9}   {rank['peak_active_gib']:>10.1f}   {rank['needed_gib']:>10.1f}"
            + ("" if rank["fits"] else "   without the margin")
        )


def _measured(rows: Iterable[Facts]) -> Iterator[str]:
    """Yield a table of predicted and measured figures."""
    table = [["", "predicted", "measured", "difference"]]
    for row in rows:
        unit, predicted, measured = row["unit"], row["predicted"], row["measured"]
        shown = duration if unit == "s" else _gib
        change = f"{predicted / measured - 1:+.1%}" if measured else "-"
        table.append([row["name"], shown(predicted), shown(measured), change])
    if len(table) > 1:
        yield from ("", *(f"  {line}" for line in columns(table, left=(0,))))


def _bars(
    rows: Mapping[str, float], *, total: float, unit: Callable[[float], str]
) -> Iterator[str]:
    """Yield rows with bars, and leave out rows that are too small to show."""
    shown = {name: value for name, value in rows.items() if value > _SMALL * total}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        share = value / total
        yield f"    {name:<{width}}  {unit(value):>9}  {share:>6.1%}  {'█' * round(_BAR * share)}"


def _tflops(value: float) -> str:
    """Return TFLOP/s as text."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Return seconds as text.

    Args:
        seconds: the duration.

    Returns:
        Seconds, or milliseconds below one second.
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _gib(value: float) -> str:
    """Return GiB as text, in MiB below 0.1 GiB."""
    return f"{value:.2f} GiB" if value >= 0.1 else f"{value * 1024:.1f} MiB"
