"""Cause faults between two hosts, and check every step against one process that repeats it.

    python scripts/drill.py hosts FOLDER --minutes 30    # go on where the last call stopped
    python scripts/drill.py hosts FOLDER --write         # the table of titan/contrib/elastic/README.md

The hosts are network namespaces on this machine (root, Linux), each with a replica group of one rank. FOLDER/state.json holds the
result of each run of a few faults, and of its replay. The exit code is 1 if a run has failed, 75 if some are left, 2 if the hosts
cannot be made.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import sub
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

from tests.support.hosts import Hosts, why_not
from tests.support.hosts import run as shell

from .groups import BOUND, JOB, Row, replay, rows_of, seconds
from .shared import LEFT, ROOT, TABLE, TITAN, Result, exit_code, run_kept, start, table, write
from .shared import add_options as add_shared

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
        section = {"enable": "true", "replica_groups": 2, "replica_id": number}
        section["lighthouse"] = self.address
        command = [*TITAN, "train", *JOB, "--nproc", "1"]
        command += [f"--fault_tolerance.{key}={value}" for key, value in section.items()]
        command += [f"--job.dump_folder={self.folder}/group-{number}"]
        command += [f"--checkpoint.folder={self.folder}/saved", *self.settings, *settings]
        self.processes[number] = start(
            self.hosts.on(number + 1, command),
            self.folder / f"group-{number}.log",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start_both(self) -> None:
        for number in NUMBERS:
            self.start(number)
        self.wait_for(lambda: all(self.row(n)["replica_groups"] == 2 for n in NUMBERS))

    def kill(self, number: int) -> None:
        """Kill all processes of a host. Unlike in a power cut, the kernel closes their connections."""
        self.signal(number, SIGKILL)
        self.processes.pop(number).wait()

    def signal(self, number: int, which: int) -> None:
        """Send a signal to all processes of a group's host."""
        for pid in self.hosts.processes(number + 1):
            with suppress(ProcessLookupError):
                os.kill(pid, which)

    def text(self, number: int) -> str:
        return (self.folder / f"group-{number}.log").read_text()

    def row(self, number: int) -> Row:
        """Return the last step of a group."""
        rows = rows_of(self.folder, f"group-{number}")
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

    def replayed(self) -> Row:
        """End the groups, and repeat their steps on one process. Raises SystemExit for a sample that is lost or doubled."""
        import torch

        # The matrices are small, and threads wait for each other on busy cores.
        torch.set_num_threads(1)
        steps = min(self.row(number)["step"] for number in NUMBERS)
        for number in [*self.processes]:
            self.kill(number)
        difference = replay(self.folder, [*JOB, *RATE], steps)
        row = next(row for row in rows_of(self.folder) if row["step"] == steps)
        return {"steps": steps, "samples": row["tokens"] // 64, "difference": difference}

    def close(self) -> None:
        self.hosts.close()
        for process in self.processes.values():
            process.wait()
        self.lighthouse.shutdown()


# ---- faults: of a group, the events that each causes ---------------------------------------------


def kill(groups: Groups, lost: int, times: int) -> Iterator[Row]:
    """Kill a group some times in a row, while it returns, too; the other one always goes on."""
    for number in range(times):
        event: Row = {"next_s": groups.next_step_s(1 - lost, partial(groups.kill, lost))}
        groups.start(lost)
        time.sleep(random.uniform(0, 6))
        if number == times - 1:
            event["both_s"] = groups.both_s()
        yield event


def silence(groups: Groups, lost: int, how: str) -> Iterator[Row]:
    """Cut the cable of a host, or stop its processes, for some seconds. Its group returns without a restart."""
    hosts, survivor = groups.hosts, 1 - lost
    stop, go = (partial(groups.signal, lost, which) for which in (SIGSTOP, SIGCONT))
    if how == "cut":
        stop, go = partial(hosts.cut, lost + 1), partial(hosts.mend, lost + 1)
    size = len(groups.text(survivor))
    next_s = groups.next_step_s(survivor, stop)
    text = groups.text(survivor)[size:]
    # No step is broken if the host fell silent between two steps.
    is_broken, said = "a replica group was lost" in text, f"lost (group-{lost} fell silent)"
    assert "2 -> 1 replica groups" in text and (said in text) == is_broken, text
    go()
    yield {"next_s": next_s, "both_s": groups.both_s()}


def split(groups: Groups, lost: int, how: str) -> Iterator[Row]:
    """Cut the link between the groups, but not to the lighthouse, until group-1 has ended, and group-0 goes on."""
    address = f"{groups.hosts.subnet}.2"
    nobody = f"replace {address} lladdr 00:00:00:00:00:01 dev eth0 nud permanent"
    neighbour = partial(shell, "ip", "-n", "ft1", "neigh")
    size, other = len(groups.text(1)), groups.processes.pop(1)
    next_s = groups.next_step_s(0, partial(neighbour, *nobody.split()), within_s=240)
    assert other.wait(timeout=120) == 1
    next_s += groups.next_step_s(0, lambda: None)
    neighbour("del", address, "dev", "eth0")
    text = groups.text(1)[size:]
    last = text.strip().splitlines()[-1]
    assert "group-0, group-1 reach the lighthouse, but not each other" in last, last
    assert "group-1 ends, so that group-0 goes on" in last and "Traceback" not in text
    yield {"next_s": next_s}
    groups.start(1)
    groups.both_s()


def refuse(groups: Groups, lost: int, change: str) -> Iterator[Row]:
    """Start a group with another value of a key, and wait until it has ended. Then start it with the job of the other."""
    groups.kill(lost)
    size, survivor = len(groups.text(lost)), f"group-{1 - lost}"
    began_s = time.time()
    groups.start(lost, f"--{change}")
    code = groups.processes.pop(lost).wait(timeout=120)
    last = groups.text(lost)[size:].strip().splitlines()[-1]
    is_named = f"group-{lost} runs another job than {survivor}: " in last
    assert code == 2 and is_named and change.partition("=")[0] in last, last
    groups.start(lost)
    event: Row = {"both_s": groups.both_s()}
    later = [
        row["unix_s"] for row in rows_of(groups.folder, survivor) if row["unix_s"] > began_s
    ]
    # The longest time that the survivor has taken for a step.
    yield event | {"next_s": max(map(sub, later, [began_s, *later]))}


# ---- runs and the table ------------------------------------------------------------------------

HEAD = """\
| between two hosts | number | next step, s: median | worst | both again, s: median | worst | difference | samples lost or doubled |
|---|--:|--:|--:|--:|--:|--:|--:|"""
KINDS = TABLE["hosts"]
CAUSES = {each.__name__: each for each in (kill, silence, split, refuse)}
# The first run of each kind comes before the second of any.
RUNS = sorted(
    ((kind, number) for kind, row in KINDS.items() for number in range(len(row["runs"]))),
    key=lambda run: run[1],
)


def cause(folder: Path, kind: str, number: int) -> Result:
    """Cause the faults of one run, and repeat its steps. Returns the events, and what went wrong."""
    folder = folder / f"{time.time_ns()}"
    folder.mkdir(parents=True)
    found: Result = {"events": [], "wrong": ""}
    groups, chosen = Groups(folder, *ENDLESS), random.Random(number)
    try:
        groups.start_both()
        for how in KINDS[kind]["runs"][number]:
            time.sleep(chosen.uniform(0, 2))
            for event in CAUSES[KINDS[kind]["cause"]](groups, chosen.randrange(2), how):
                found["events"].append(event | {"load": os.getloadavg()[0]})
                print(how, found["events"][-1], flush=True)
        found |= groups.replayed()
        if found["difference"] > BOUND:
            found["wrong"] = f"differs from one process by {found['difference']:.1e}"
    except (AssertionError, SystemExit, subprocess.SubprocessError) as error:
        traceback.print_exc()
        found["wrong"] = f"{type(error).__name__}: {str(error)[:2000]}"
    finally:
        groups.close()
    return found


def about(found: Mapping[str, Result]) -> list[str]:
    """Return the lines of the README: a sentence, and the table of what has run."""
    lines, loads, quick = [], [0.0], 0
    for kind in KINDS:
        done = [row for name, row in found.items() if name.startswith(kind)]
        events = [event for row in done for event in row["events"]]
        apart = [f"{row['difference']:.1e}" for row in done if "difference" in row]
        bad = sum("sample" in row["wrong"] for row in done)
        times = (*seconds(events, "next_s"), *seconds(events, "both_s"))
        lines.append((kind, len(events), *times, max(apart, key=float, default="-"), bad))
        loads += [event["load"] for event in events]
        quick += sum(event["next_s"] < 1 for event in events)
    steps, samples = (
        sum(row.get(name, 0) for row in found.values()) for name in ("steps", "samples")
    )
    said = (
        f"{time.strftime('%-d %B %Y')}, {os.cpu_count()} cores under a load of up to {max(loads):.0f}. One process "
        f"has repeated all {steps:,} steps, of {samples:,} samples. {quick} faults hit a group that was not back "
        "yet, and cost the other one less than a second. Of groups with another job, the seconds are the other group's longest pause."
    )
    return [said, "", *table(HEAD, lines)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the piece's options."""
    parser.add_argument("folder", type=Path)
    add_shared(parser, KINDS)


def run(options: argparse.Namespace) -> int:
    """Cause the faults that are left."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft's lighthouse reports every quorum
    if reason := why_not():
        print(reason)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = {
        f"{kind} {number}": partial(cause, options.folder, kind, number)
        for kind, number in RUNS
        if kind in (options.only or KINDS)
    }
    found = run_kept(options.folder / "state.json", runs, options)
    lines = about(found)
    print(*lines, sep="\n")
    code = exit_code(found, [f"{kind} {number}" for kind, number in RUNS])
    if options.write and code != LEFT:
        write(ROOT / "titan/contrib/elastic/README.md", "hosts drill", lines)
    return code
