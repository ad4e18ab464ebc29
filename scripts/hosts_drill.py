"""Cause faults between two hosts, and check every step against one process that repeats it.

    python scripts/hosts_drill.py FOLDER --minutes 30       # go on where the last call of this commit stopped
    python scripts/hosts_drill.py FOLDER --write titan/contrib/elastic/README.md

The hosts are network namespaces on this machine (root, Linux), each with a replica group of one rank. FOLDER/state.json holds the
result of each piece: a run of a few faults, and its replay. The table says how many of the faults were caused so far. The exit
code is 1 if a piece has failed, 75 if some are left, 2 if the hosts cannot be made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import elastic_drill
from pieces import LEFT, ROOT, git

from tests.support.hosts import Hosts, run, why_not
from titan.base.untrusted import InputError
from titan.checks.rules import check
from titan.config.errors import ConfigError
from titan.config.keys import models_at
from titan.config.load import load_from_argv
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.config.toml import KeyPath, format_value, key_text
from titan.contrib.elastic.agreement import HARMLESS

BEGIN, END = "<!-- hosts drill -->", "<!-- end of hosts drill -->"
BOUND = elastic_drill.BOUND
JOB = (*elastic_drill._JOB, *elastic_drill._SETTINGS, "--training.seq_len=64")
# One schedule, whenever a run ends, and a rate at which rounding errors do not grow over thousands of steps.
RATE = ("--lr_scheduler.total_steps=100000", "--optimizer.lr=1e-5")
ENDLESS = (*RATE, "--training.steps=100000", "--checkpoint.interval=100000")
NUMBERS = (0, 1)


class Groups:
    """Two hosts with a group each, and a lighthouse that both reach."""

    def __init__(self, folder: Path, *settings: str) -> None:
        from torchft.coordination import LighthouseServer

        self.folder, self.settings = folder, settings
        self.hosts = Hosts(2, name="ft", subnet="10.79.3")
        limits = {"min_replicas": 1, "join_timeout_ms": 20_000, "heartbeat_timeout_ms": 2000}
        self.lighthouse: Any = LighthouseServer(bind="0.0.0.0:0", **limits)
        port = self.lighthouse.address().rpartition(":")[2]
        self.address = f"http://{self.hosts.subnet}.254:{port}"
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int, *settings: str) -> None:
        command = [sys.executable, "-m", "titan.cli", "train", *JOB, "--nproc", "1"]
        command += [*self.section(number), f"--job.dump_folder={self.folder}/group-{number}"]
        command += [f"--checkpoint.folder={self.folder}/saved", *self.settings, *settings]
        with (self.folder / f"group-{number}.log").open("a") as log:
            self.processes[number] = subprocess.Popen(
                self.hosts.on(number + 1, command),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )

    def section(self, number: int) -> list[str]:
        """Return the arguments of a group's [fault_tolerance]."""
        section = {"enable": "true", "replica_groups": 2, "replica_id": number}
        section["lighthouse"] = self.address
        return [f"--fault_tolerance.{key}={value}" for key, value in section.items()]

    def start_both(self) -> None:
        for number in NUMBERS:
            self.start(number)
        self.wait_for(lambda: all(self.row(n)["replica_groups"] == 2 for n in NUMBERS))

    def kill(self, number: int) -> None:
        """Kill all processes of a host. Unlike in a power cut, the kernel closes their connections."""
        self.signal(number, signal.SIGKILL)
        self.processes.pop(number).wait()

    def signal(self, number: int, which: int) -> None:
        """Send a signal to all processes of a group's host."""
        for pid in self.hosts.processes(number + 1):
            with suppress(ProcessLookupError):
                os.kill(pid, which)

    def text(self, number: int) -> str:
        return (self.folder / f"group-{number}.log").read_text()

    def row(self, number: int) -> dict[str, Any]:
        """Return the last step of a group."""
        rows = elastic_drill.rows_of(self.folder, f"group-{number}")
        return rows[-1] if rows else {"step": 0, "replica_groups": 0}

    def wait_for(self, what: Callable[[], Any], *, within_s: float = 120) -> float:
        """Return the seconds until something holds. Fails if a group has ended."""
        began_s = time.monotonic()
        while not what():
            late = time.monotonic() - began_s > within_s
            ended = [n for n, process in self.processes.items() if process.poll() is not None]
            assert not ended and not late, (ended, self.text(0)[-1500:], self.text(1)[-1500:])
            time.sleep(0.1)
        return time.monotonic() - began_s

    def next_step_s(
        self, survivor: int, cause: Callable[[], Any], *, within_s: float = 120
    ) -> float:
        """Cause a fault. Return the seconds until the survivor has done a step without the other group."""
        began_s = time.monotonic()
        cause()
        before = self.row(survivor)
        # A step that was under way may still count for both. Of a survivor that was alone, the next but one began after the fault.
        least = before["step"] + (before["replica_groups"] == 1)

        def is_alone() -> bool:
            row = self.row(survivor)
            return row["replica_groups"] == 1 and row["step"] > least

        self.wait_for(is_alone, within_s=within_s)
        return time.monotonic() - began_s

    def both_s(self, *, within_s: float = 120) -> float:
        """Return the seconds until both groups have done another step together."""
        before = max(self.row(number)["step"] for number in NUMBERS)

        def are_together() -> bool:
            rows = [self.row(number) for number in NUMBERS]
            return all(row["replica_groups"] == 2 and row["step"] > before for row in rows)

        return self.wait_for(are_together, within_s=within_s)

    def replayed(self) -> dict[str, Any]:
        """End the groups, and repeat their steps on one process. Raises SystemExit for a sample that is lost or doubled."""
        import torch

        torch.set_num_threads(
            1
        )  # the matrices are small, and threads wait for each other on busy cores
        steps = min(self.row(number)["step"] for number in NUMBERS)
        for number in [*self.processes]:
            self.kill(number)
        options = argparse.Namespace(steps=steps, seq_len=64, more=RATE)
        difference = elastic_drill.replay(self.folder, options)
        row = next(row for row in elastic_drill.rows_of(self.folder) if row["step"] == steps)
        return {"steps": steps, "samples": row["tokens"] // 64, "difference": difference}

    def close(self) -> None:
        self.hosts.close()
        for process in self.processes.values():
            process.wait()
        self.lighthouse.shutdown()


# ---- faults ------------------------------------------------------------------------------------

Event = dict[str, Any]


def kills(groups: Groups, count: int, chosen: random.Random) -> Iterator[Event]:
    """Kill one of the groups at a random moment, sometimes again while it returns; the other one always goes on."""
    while count:
        lost = chosen.randrange(2)
        time.sleep(chosen.uniform(0, 2))
        events = []
        for _ in range(1 + (count > 1 and chosen.random() < 0.4)):
            seconds = groups.next_step_s(1 - lost, lambda n=lost: groups.kill(n))
            events.append({"what": f"group-{lost}", "next_s": seconds})
            groups.start(lost)
            time.sleep(chosen.uniform(0, 6))
        count -= len(events)
        yield from events[:-1]
        yield events[-1] | {"both_s": groups.both_s()}


def silences(
    groups: Groups, count: int, chosen: random.Random, *, is_cut: bool
) -> Iterator[Event]:
    """Cut the cable of a host, or stop its processes, for some seconds. Its group returns without a restart."""
    for _ in range(count):
        time.sleep(chosen.uniform(0, 2))
        yield silence(groups, chosen.randrange(2), is_cut=is_cut)


def silence(groups: Groups, lost: int, *, is_cut: bool) -> Event:
    """Stop a host, and return what that and its return cost."""
    hosts, survivor = groups.hosts, 1 - lost
    silent: Callable[[], None] = lambda: groups.signal(lost, signal.SIGSTOP)  # noqa: E731
    again: Callable[[], None] = lambda: groups.signal(lost, signal.SIGCONT)  # noqa: E731
    if is_cut:
        silent, again = lambda: hosts.cut(lost + 1), lambda: hosts.mend(lost + 1)
    size = len(groups.text(survivor))
    seconds = groups.next_step_s(survivor, silent)
    text = groups.text(survivor)[size:]
    # No step is broken if the host fell silent between two steps.
    is_broken, said = "a replica group was lost" in text, f"lost (group-{lost} fell silent)"
    assert "2 -> 1 replica groups" in text and (said in text) == is_broken, text
    again()
    return {"what": f"group-{lost}", "next_s": seconds, "both_s": groups.both_s()}


def splits(groups: Groups, count: int, chosen: random.Random) -> Iterator[Event]:
    """Cut the link between the groups, but not to the lighthouse, until group-1 has ended."""
    for _ in range(count):
        time.sleep(chosen.uniform(0, 2))
        yield split(groups)
        groups.start(1)
        groups.both_s()


def split(groups: Groups) -> Event:
    """Split the groups, and mend the link once group-1 has ended and group-0 goes on."""
    address = f"{groups.hosts.subnet}.2"
    nobody = f"{address} lladdr 00:00:00:00:00:01 dev eth0 nud permanent"
    size, other = len(groups.text(1)), groups.processes.pop(1)
    seconds = groups.next_step_s(
        0, lambda: run("ip", "-n", "ft1", "neigh", "replace", *nobody.split()), within_s=240
    )
    assert other.wait(timeout=120) == 1
    seconds += groups.next_step_s(0, lambda: None)
    run(*f"ip -n ft1 neigh del {address} dev eth0".split())
    text = groups.text(1)[size:]
    last = text.strip().splitlines()[-1]
    assert "group-0, group-1 reach the lighthouse, but not each other" in last, last
    assert "group-1 ends, so that group-0 goes on" in last and "Traceback" not in text
    return {"what": "group-1", "next_s": seconds}


def changed_jobs(
    groups: Groups, count: int, chosen: random.Random, *, first: int = 0
) -> Iterator[Event]:
    """Start a group with another value of a key, and wait until it has ended. Then start it with the job of the other."""
    for change in real_changes()[first : first + count]:
        lost = chosen.randrange(2)
        groups.kill(lost)
        size = len(groups.text(lost))
        groups.start(lost, change.argument)
        refused = groups.processes.pop(lost)
        pause_s = longest_pause_s(groups, 1 - lost, refused)
        last = groups.text(lost)[size:].strip().splitlines()[-1]
        said = f"group-{lost} runs another job than group-{1 - lost}: "
        assert refused.returncode == 2 and said in last and change.key in last, last
        groups.start(lost)
        event = {"what": last[last.index(said) :], "next_s": pause_s}
        yield event | {"both_s": groups.both_s()}


def longest_pause_s(groups: Groups, survivor: int, refused: subprocess.Popen[str]) -> float:
    """Return the longest time between two steps of the survivor until the other group has been refused."""
    worst_s, steps_after, step, at_s = 0.0, 0, groups.row(survivor)["step"], time.monotonic()
    ends_s = at_s + 120
    while steps_after < 2:
        time.sleep(0.05)
        now_s, newest = time.monotonic(), groups.row(survivor)["step"]
        assert now_s < ends_s, "the changed group was not refused within 120 s"
        if newest > step:
            worst_s, step, at_s = max(worst_s, now_s - at_s), newest, now_s
            steps_after += refused.poll() is not None
    return worst_s


# ---- a change of each key ----------------------------------------------------------------------


class Change(SimpleNamespace):
    """Another value of a key.

    Attributes:
        path: the key.
        kind: kind of its values.
        argument: the argument of `titan train` that sets it.
        config: the changed job, or None if no changed job is valid.
        is_possible: whether `titan check` finds nothing wrong with it.
    """

    path: KeyPath
    kind: str
    argument: str
    config: JobConfig | None
    is_possible: bool

    @property
    def key(self) -> str:
        return key_text(self.path)

    @property
    def is_harmless(self) -> bool:
        return any(self.path[: len(known)] == known for known in HARMLESS)


def argv(number: int = 0) -> list[str]:
    """Return the arguments of a group's job, for a comparison within this process."""
    section = (
        "enable=true",
        "replica_groups=2",
        f"replica_id={number}",
        "lighthouse=http://x:1",
    )
    return [*JOB, *ENDLESS, *(f"--fault_tolerance.{each}" for each in section)]


def changes() -> Iterator[Change]:
    """Yield another value for each key of the job's schema, valid if one of the tried values is."""
    config = load_from_argv(argv(), warn=False)
    for path, value, annotation in keys_of(config):
        yield change_of(config, path, value, annotation)


def keys_of(section: BaseModel, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield key, value and type of each key of a section and those below it. A list of sections is one key."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from keys_of(value, (*path, name))
        else:
            yield (*path, name), value, field.annotation


def change_of(config: JobConfig, path: KeyPath, value: Any, annotation: Any) -> Change:
    """Return the change of a key: the first value that `titan check` accepts, or else the first that is valid."""
    ours, found = to_toml(config), None
    kind, values = candidates(path, value, annotation)
    for candidate in values:
        argument = f"--{key_text(path)}={format_value(candidate)}"
        try:
            other = load_from_argv([*argv(), argument], warn=False)
            is_possible = not list(check(other)) if to_toml(other) != ours else None
        except (ConfigError, InputError):
            continue
        if is_possible is None:
            continue
        change = Change(
            path=path, kind=kind, argument=argument, config=other, is_possible=is_possible
        )
        if is_possible:
            return change
        found = found or change
    none = Change(path=path, kind=kind, argument="", config=None, is_possible=False)
    return found or none


def candidates(path: KeyPath, value: Any, annotation: Any) -> tuple[str, list[Any]]:
    """Return the kind of a key, and other values to try."""
    if choices := [each for each in choices_of(path, annotation) if each != value]:
        return "choice", [[each] for each in choices] if isinstance(value, list) else choices
    if isinstance(value, bool):
        return "yes or no", [not value]
    if isinstance(value, int):
        return "whole number", [value + 1, value * 2, value - 1, value // 2, 2, 1, 4]
    if isinstance(value, float):
        return "number", [value * 2, value / 2, value + 0.25, value - 0.25, 0.5]
    if isinstance(value, str):
        return "text", ["other", "/other", "tiny", "3", value + "x", "debug", "float8_e4m3"]
    if isinstance(value, list | tuple):
        lists = [
            [],
            ["other"],
            ["model"],
            ["model.output"],
            [1],
            [0, 1],
            [{"type": "synthetic"}],
        ]
        return "list", [*lists, [*value[:-1]], [{"path": "other"}], [{"steps": 5}]]
    if isinstance(value, dict):
        return "table", [{"n_layers": 3}, {"other": 1}, {"other": "x"}]
    return "unset", [1, 2, 0.5, True, "other", "/other", ["other"], {"other": 1}]


def choices_of(path: KeyPath, annotation: Any) -> list[Any]:
    """Return the choices of a key, of all sections that its table may be."""
    here = [model.model_fields.get(str(path[-1])) for model in models_at(path[:-1])]
    types = [annotation, *(field.annotation for field in here if field)]
    return list(dict.fromkeys(choice for each in types for choice in literals(each)))


def literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    for inner in get_args(annotation):
        yield from literals(inner)


def real_changes() -> list[Change]:
    """Return changes that processes can make: no two in a row of one kind, and of a section once if there are enough."""
    chosen = random.Random(3)
    possible = [each for each in changes() if each.is_possible and not each.is_harmless]
    # A text is often a path, and samples are read before groups meet: the group would end earlier, for another reason.
    possible = [each for each in possible if each.kind != "text" and each.path[0] != "data"]
    possible = [each for each in possible if each.key != "fault_tolerance.enable"]
    chosen.shuffle(possible)
    found: list[Change] = []
    while possible:
        kinds = [each.kind for each in found]
        sections = [each.path[0] for each in found]
        best = min(possible, key=lambda c: (sections.count(c.path[0]), kinds.count(c.kind)))
        possible.remove(best)
        found.append(best)
    return found


def refusals() -> dict[str, Any]:
    """Compare the job with each changed one, as a group does that returns. Returns how many keys of each kind there were."""
    from titan.contrib.elastic.membership import Elastic

    ours = to_toml(load_from_argv(argv(), warn=False))
    found: dict[str, Any] = {"refused": [], "harmless": [], "invalid": [], "wrong": []}
    for change in changes():
        if change.config is None:
            found["invalid"].append(change.key)
            continue
        group: Any = SimpleNamespace(trainer=SimpleNamespace(config=change.config))
        try:
            Elastic._require_same(group, "group-1", ours)
            said = ""
        except InputError as error:
            said = str(error)
        is_named = re.search(rf"(: |; ){re.escape(change.key)}\b", said) is not None
        if is_named == change.is_harmless:
            found["wrong"].append(f"{change.key}: {said}")
        found["harmless" if change.is_harmless else "refused"].append(change.key)
    return found


# ---- pieces and the table ----------------------------------------------------------------------

PIECES: dict[str, list[tuple[int, Callable[..., Iterator[Event]], dict[str, Any]]]] = {
    "killed groups": [(5, kills, {})] * 4,
    "cut cables": [(count, silences, {"is_cut": True}) for count in (2, 3)],
    "stopped hosts": [(count, silences, {"is_cut": False}) for count in (2, 3)],
    "groups that reach only the lighthouse": [(1, splits, {})] * 3,
    "groups with another job": [(2, changed_jobs, {"first": first}) for first in (0, 2, 4, 6)],
}


def piece(
    folder: Path, number: int, count: int, cause: Callable[..., Iterator[Event]], **how: Any
) -> Event:
    """Cause some faults in one run, and repeat its steps. Returns the events, and what went wrong."""
    folder.mkdir(parents=True)
    found: dict[str, Any] = {"events": [], "wrong": ""}
    groups = Groups(folder, *ENDLESS)
    try:
        groups.start_both()
        for event in cause(groups, count, random.Random(number), **how):
            found["events"].append(event | {"load": os.getloadavg()[0]})
            print(found["events"][-1], flush=True)
        found |= groups.replayed()
        if found["difference"] > BOUND:
            found["wrong"] = f"differs from one process by {found['difference']:.1e}"
    except (AssertionError, SystemExit, subprocess.SubprocessError) as error:
        traceback.print_exc()
        found["wrong"] = f"{type(error).__name__}: {str(error)[:2000]}"
    finally:
        groups.close()
    return found


def table(state: dict[str, Any]) -> str:
    """Return the table of the README."""
    lines = [
        "| between two hosts | number | next step, s: median | worst | both again, s: median | worst | "
        "difference | samples lost or doubled |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind, pieces in PIECES.items():
        rows = [state["pieces"].get(f"{kind} {i}") for i in range(len(pieces))]
        done = [row for row in rows if row]
        if not done:
            continue
        events = [event for row in done for event in row["events"]]
        number, wanted = len(events), sum(count for count, *_ in pieces)
        cells = [kind, f"{number}" if number == wanted else f"{number} of {wanted}"]
        for name in ("next_s", "both_s"):
            values = [event[name] for event in events if name in event]
            cells += [f"{median(values):.1f}", f"{max(values):.1f}"] if values else ["-", "-"]
        checked = [row for row in done if "difference" in row]
        cells += [f"{max(row['difference'] for row in checked):.1e}"] if checked else ["-"]
        bad = sum("sample" in row["wrong"] for row in done)
        lines.append("| " + " | ".join([*cells, str(bad)]) + " |")
    return "\n".join(lines)


def about(state: dict[str, Any]) -> str:
    """Return the sentences around the table."""
    rows = [*state["pieces"].values()]
    loads = [event["load"] for row in rows for event in row["events"]] or [0]
    steps, samples = (sum(row.get(name, 0) for row in rows) for name in ("steps", "samples"))
    compared = state["refusals"]
    quick = sum(event["next_s"] < 1 for row in rows for event in row["events"])
    return (
        f"{time.strftime('%-d %B %Y')}, {os.cpu_count()} cores under a load of {min(loads):.0f} to "
        f"{max(loads):.0f} (median {median(loads):.0f}). One process has repeated all {steps:,} steps, "
        f"of {samples:,} samples. The comparison that refuses a group was made for each key of the job: "
        f"{len(compared['refused'])} changed keys refused by name, {len(compared['harmless'])} harmless "
        f"ones accepted, {len(compared['invalid'])} that no valid job of this kind can change. "
        f"{quick} faults hit a group that was not back yet, and cost the other one less than a second. "
        "Of groups with another job, the seconds are the other group's longest pause."
    )


def main() -> int:
    """Cause the faults that are left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no piece after these")
    parser.add_argument("--again", action="store_true", help="forget what the state holds")
    parser.add_argument(
        "--only", nargs="+", choices=PIECES, metavar="KIND", help="these kinds only"
    )
    parser.add_argument("--write", type=Path, help="page for the table")
    args = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")  # torchft's lighthouse reports every quorum
    if reason := why_not():
        print(reason)
        return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    file, commit = args.folder / "state.json", git("rev-parse", "--short", "HEAD")
    state: dict[str, Any] = {"commit": commit, "pieces": {}}
    if file.exists() and not args.again:
        state = json.loads(file.read_text())
        if state["commit"] != commit:
            print(f"{file} is of commit {state['commit']}, and this is {commit}: pass --again")
            return 2
    end, left = time.monotonic() + 60 * args.minutes, []
    state["refusals"] = state.get("refusals") or refusals()
    # The first piece of each kind comes before the second of any.
    order = [
        (i, kind, each) for kind, pieces in PIECES.items() for i, each in enumerate(pieces)
    ]
    for index, kind, (count, cause, how) in sorted(order, key=lambda item: item[0]):
        name = f"{kind} {index}"
        if name in state["pieces"] or (args.only and kind not in args.only):
            continue
        if time.monotonic() > end:
            left.append(name)
            continue
        folder = args.folder / f"{time.time_ns()}"
        state["pieces"][name] = found = piece(folder, index, count, cause, **how)
        outcome = found["wrong"] or f"{found['steps']} steps, {found['difference']:.1e}"
        print(f"{name}: {outcome}", flush=True)
        file.write_text(json.dumps(state, indent=1) + "\n")
    file.write_text(json.dumps(state, indent=1) + "\n")
    wrong = [f"{name}: {row['wrong']}" for name, row in state["pieces"].items() if row["wrong"]]
    wrong += state["refusals"]["wrong"]
    print(about(state), table(state), *wrong, sep="\n\n")
    if args.write:
        text = args.write.read_text(encoding="utf-8")
        new = f"{BEGIN}\n{about(state)}\n\n{table(state)}\n{END}"
        args.write.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: new, text, flags=re.DOTALL))
    return 1 if wrong else LEFT * bool(left)


if __name__ == "__main__":
    sys.exit(main())
