"""Diagnosis of a run from its evidence: the causes of a failure, most likely first, with advice.

A run that failed has one cause and many symptoms: every other rank loses its connection, or waits.
The rules run in the order of their certainty: a fault in native code, a failure that a rank
recognised itself, how processes ended, waits by the flight recorders, the rest.

A failure carries its kind from where it was noticed (titan/base/errors.py). No rule reads
sentences.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from titan.base.errors import TIMED_OUT
from titan.base.failure import list_ranks

from . import waits as waiting
from .evidence import Evidence
from .waits import Wait

SLOW = 1.5  # a straggler's time over the median of the other ranks
STALE_S = 60.0  # seconds without a step: the run lives, but may hang
# The disk counts as full if less than this is free.
FULL_BYTES = 2**20
_MAX_DAMAGED = 20  # files to name

# Kinds of failure that explain themselves, with their meanings. All other kinds are symptoms: a rank lost its
# connection to another, a step hung, a signal was not obeyed in time.
_MEANING = {
    "out_of_device_memory": "the device's memory was not enough",
    "disk_full": "the disk is full",
    "disk_lost": "the disk cannot be written or read",
    "loss_not_finite": "the loss is no number, or far off",
    "replicas_differ": "memory, or a link, of one machine is broken",
    "group_leaves": "a replica group gave way, so that the others train on",
    "replay_differs": "a device computed the same twice, with other bits",
    "checkpoint_differs": "the job's model or optimizer is not the checkpoint's",
    "checkpoint_damaged": "the checkpoint cannot be loaded",
    "checkpoint_newer": "a newer titan wrote the checkpoint",
    "save_failed": "a checkpoint could not be saved",
    "data_source": "the data source failed",
    "launcher_killed": "the process that starts the ranks was killed, and they with it",
    "user_error": "the job asks for what cannot be done",
    "error": "the program failed",
}
# Kinds that all ranks notice together, so the first rank does not matter.
_SHARED = {
    "loss_not_finite",
    "replicas_differ",
    "replay_differs",
    "save_failed",
    "launcher_killed",
}
_SILENCE = ("rank_silent", "host_lost")
_AGAIN = "then run the same command again, which goes on from the newest checkpoint"
_ADVICE = {
    "out_of_device_memory": "`titan check JOB.toml --hardware H` lists changes that fit: activation checkpointing, a smaller local batch, more shards",
    "out_of_host_memory": f"ask for more memory per node, or use fewer loader workers and smaller shuffle buffers; on a CPU the model counts, too; {_AGAIN}",
    "disk_full": f"make room, or set checkpoint.keep_latest_k; {_AGAIN}",
    "disk_lost": f"look at the mount and the file server; {_AGAIN}",
    "loss_not_finite": "look at the samples it names; lower optimizer.lr; fault_tolerance.on_nonfinite and on_spike skip such steps, or rewind",
    "replicas_differ": "take that machine out; the newest checkpoint may hold the fault, an older one (checkpoint.load_step) does not",
    "group_leaves": "see to what the message names, such as a network between groups; started again, the group takes the others' state",
    "replay_differs": "take that rank's machine out; `titan audit RUN --step N` on another one tells whether a checkpoint holds the fault",
    "checkpoint_differs": "the checkpoint is whole: correct [model] or [optimizer] in the job (the run's own are in config.toml), or choose another job.dump_folder",
    "checkpoint_damaged": "`titan verify STEP_DIR` names the file; delete the step, or name an older one with checkpoint.load_step",
    "checkpoint_newer": "train with that titan, or a newer one; the checkpoint is as it was",
    "save_failed": 'see to the disk; checkpoint.on_failure = "continue" trains on without the save',
    "data_source": f"see that what it names is there, and readable from every host; {_AGAIN}",
    "error": "the traceback is in the output of that rank; if it is titan's fault, please report it with this page",
    "killed": f"find out who sent SIGKILL: the kernel when memory runs out (dmesg), the scheduler at a time limit, an operator; {_AGAIN}",
    "user_error": "correct what the message names, then run the same command again",
    "crashed": "a fault in native code: its last words are in the rank's output, its stack in logs/",
    "missing_rank": f"no rank may end before the others: look for SIGKILL (the kernel when memory runs out: dmesg; an operator), sys.exit, or a loader with fewer steps; and at what the scheduler says; {_AGAIN}",
    "mismatch_operation": "code that only some ranks run (an `if rank == ...`, a loss that some skip) must not hold a collective",
    "mismatch_dtype": "make the dtype the same on all ranks: a flag, or autocast, that only some have?",
    "mismatch_shape": "make the sizes the same on all ranks: a last, smaller batch, or weights of another size?",
    "deadlock": "ranks enter collectives of several groups in different orders; make the order the same on all",
    "hang": "see the line that it was in, and the stacks of its threads",
    "hang_in_data": "its data source does not answer: see the file server or service that it reads from, as seen from its host",
    "host_lost": f"look at that host and its network; without it, or once it is repaired, {_AGAIN.removeprefix('then ')}",
    "evidence": "read these files with care, or restore them; what is said here rests on the others",
    "rank_silent": "a debugger, an operator or the scheduler stops a process; an extension that holds the GIL locks it: see its stack in logs/",
    "slow_rank": "look at the clocks and temperature of its device, at other processes on its host, at its disk; `titan preflight`",
    "no_progress": "`kill -USR2 PID` of `titan train`, or of each rank, writes their stacks and flight recorders; then ask again",
    "vanished": f"killed from outside (memory, a time limit), or the machine went down: see dmesg and the scheduler; {_AGAIN}",
    "unknown": "look at the output of the ranks, and at logs/rank-*.stacks.txt",
}


@dataclass(frozen=True)
class Finding:
    """Fault of a run.

    Attributes:
        kind: key of the advice, for programs.
        cause: a sentence.
        evidence: files and facts that show it.
    """

    kind: str
    cause: str
    evidence: list[str] = field(default_factory=list)

    @property
    def advice(self) -> str:
        """Return the advice for the fault."""
        return _ADVICE[self.kind]


@dataclass(frozen=True)
class Diagnosis:
    """Result of a diagnosis.

    Attributes:
        state: "done", "stopped", "running" or "failed".
        summary: a line for people.
        findings: faults, the most likely cause first; empty if all is well.
    """

    state: str
    summary: str
    findings: list[Finding]


def diagnose(run: Evidence) -> Diagnosis:
    """Diagnose a run.

    Damaged files come last in the findings: they may be why other evidence is missing.
    """
    diagnosis = _diagnose(run)
    if run.damaged:
        cause = "files of the run folder cannot be used: damaged, or written by something else"
        damaged = [*run.damaged.values()][:_MAX_DAMAGED]
        diagnosis.findings.append(Finding("evidence", cause, damaged))
    return diagnosis


def _diagnose(run: Evidence) -> Diagnosis:
    status = run.status
    # The newest row of metrics: the status of a run that was killed may have an older step.
    step = run.metrics[-1].step if run.metrics else status.step
    if status.state == "done":
        return Diagnosis("done", f"finished: all {step:,} steps are done", _slow(run))
    if status.state == "stopped":
        summary = status.reason or f"stopped by a signal after step {step:,}, and saved"
        return Diagnosis("stopped", summary, [])
    # A killed run could not write that it ended. A live run may still hang.
    alive = status.state == "running" and run.holder is not None
    if alive and not _is_stale(run):
        return Diagnosis("running", f"running: step {step:,}, on {run.holder}", _slow(run))
    # In the order of the rules' certainty. The first finding is shown as the most likely.
    rules = (_crashed, _reported, _ended, _mismatch, _hang, _silent, _disk, _slow)
    findings = [finding for rule in rules for finding in rule(run)]
    # Without a finding, explain the run's state.
    if not findings:
        kind, cause = "unknown", status.reason or "the run folder does not say why"
        if alive:
            kind = "no_progress"
            cause = f"the run lives, in {run.holder}, but has made no step for long"
        elif status.state == "running":
            kind = "vanished"
            cause = "the run ended without a report: its process is gone, and status.json still says that it runs"
        elif status.kind == "hang":
            kind = "hang"
        findings = [Finding(kind, cause, _status(run))]
    what = "hangs" if alive else "hung" if status.state == "hung" else "failed"
    at = f"{what} in step {max(status.step, step):,}"
    return Diagnosis("running" if alive else "failed", at, findings)


# ---- rules -----------------------------------------------------------------------------------------


def _crashed(run: Evidence) -> list[Finding]:
    """Find faults in native code.

    They outrank the reports of other ranks, which lose their connection to such a rank.
    """
    if not run.fatal:
        return []
    ranks = sorted(run.fatal)
    names = " and ".join(sorted({number.name for number in run.fatal.values()}))
    stacks = {rank: stack for rank in ranks[:4] if (stack := run.stack(rank))}
    # Without `titan train` no process saw the exit code, and only the stacks are left.
    evidence = _exits(run, [rank for rank in ranks if rank in run.exits])
    evidence += [f"logs/rank-{rank}.stacks.txt: {stack}" for rank, stack in stacks.items()]
    return [Finding("crashed", _ended_by(run, ranks, names), evidence)]


def _reported(run: Evidence) -> list[Finding]:
    """Find a failure that a rank recognised itself."""
    # status.json has the failure that the ranks agreed on. Without a store, each dump has its own rank's failure.
    reports = [("status.json", run.status)] + [
        (f"flight_recorder/rank-{rank}.json", dump.failure) for rank, dump in run.dumps.items()
    ]
    # The first report that explains itself ends the search.
    for file, report in reports:
        if meaning := _MEANING.get(report.kind):
            who = "" if report.kind in _SHARED else f" (rank {report.rank})"
            cause = f"{meaning}{who}: {_shorten(report.reason, 300)}"
            kind = "killed" if report.kind == "launcher_killed" else report.kind
            return [Finding(kind, cause, [f"{file}: {_shorten(report.reason)}"])]
    return []


def _ended(run: Evidence) -> list[Finding]:
    """Find ranks that were killed, or ended by themselves, as far as the launcher knows."""
    if run.status.kind in _SILENCE:  # the monitor ended the ranks, and reported the reason
        return []
    # After a time-out, torchrun kills ranks that do not answer: that is no cause.
    timed_out = run.status.kind == TIMED_OUT
    by_signal: dict[int, list[int]] = {}
    for rank, code in run.exits.items():
        # torchrun itself sends SIGTERM to the remaining ranks; _crashed names faults.
        if code < 0 and not timed_out and -code != signal.SIGTERM and rank not in run.fatal:
            by_signal.setdefault(-code, []).append(rank)
    # If memory runs out, the kernel kills with SIGKILL, too. Its counter distinguishes the two cases.
    killed = by_signal.get(signal.SIGKILL, [])
    # Exit codes may be missing: Slurm and plain torchrun record none.
    if run.num_oom_kills and (killed or not run.exits):
        cause = (
            f"{list_ranks(killed) if killed else 'a process'} {_was(killed)} killed by the kernel: the memory of the "
            "host, or of the job's cgroup, was not enough"
        )
        evidence = [f"cgroup: oom_kill rose by {run.num_oom_kills}", *_exits(run, killed)]
        return [Finding("out_of_host_memory", cause, evidence)]
    # The first signal counts: other ranks may have ended because of it.
    for number, ranks in by_signal.items():
        known = number in {*signal.Signals}
        name = signal.Signals(number).name if known else f"signal {number}"
        if number == signal.SIGKILL:
            cause = f"{list_ranks(ranks)} {_was(ranks)} ended by {name}, from outside"
            return [Finding("killed", cause, _exits(run, ranks))]
        if not _mismatch(run):  # gloo ends a process after a mismatch
            return [Finding("crashed", _ended_by(run, ranks, name), _exits(run, ranks))]
    # Every rank that ends by itself after a failure writes a dump.
    quiet = [rank for rank in run.without_dump if timed_out or not run.exits.get(rank)]
    if not quiet:
        return []
    evidence = [f"there is no flight_recorder/rank-{rank}.json" for rank in quiet[:3]]
    evidence += _status(run)
    if timed_out:
        cause = f"{list_ranks(quiet)} did not answer, and left no report: stopped, locked, or the host is lost"
        return [Finding("rank_silent", cause, evidence)]
    how = "left no report: killed, or ended by itself"
    if run.exits:
        how = "ended with exit code 0, or unseen, while others trained"
    return [Finding("missing_rank", f"{list_ranks(quiet)} {how}", evidence)]


def _mismatch(run: Evidence) -> list[Finding]:
    mismatch = waiting.find_mismatch(run.dumps)
    if mismatch is None:
        return []
    number = f"#{mismatch.seq} of {_axis(mismatch.axis)}"
    calls = [
        f"{list_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {text}{_at(mismatch.lines[text])}"
        for text, ranks in mismatch.calls.items()
    ]
    cause = f"ranks call different collectives, {number}: {'; '.join(calls)}"
    files = [f"flight_recorder/rank-{ranks[0]}.json" for ranks in mismatch.calls.values()]
    return [Finding(f"mismatch_{mismatch.differs}", cause, [f"{', '.join(files)}: {number}"])]


def _hang(run: Evidence) -> list[Finding]:
    """Find a rank that others wait for, by the flight recorders."""
    waits = waiting.find_waits(run.dumps)
    if not waits or run.status.kind in _SILENCE:
        return []
    # Follow the waits to the rank at which all chains end.
    at = waiting.root(waits, run.dumps)
    if at is None:  # each rank waits for another rank
        parts = [
            f"rank {w.rank} never entered {_what(w)}, for which {_wait(w.waiting)}"
            for w in waits[:4]
        ]
        cause = f"every rank waits for another: {'; '.join(parts)}"
        return [Finding("deadlock", cause, _dumps(run, [w.rank for w in waits[:2]]))]
    dump, stack = run.dumps[at.rank], run.stack(at.rank)
    doing = dump.main_thread.text
    # After a long time the rank hangs, and does not just arrive late.
    idle = f" for {dump.idle_s:.0f} s" if dump.idle_s and dump.idle_s >= 1 else ""
    others = [
        rank
        for rank, other in run.dumps.items()
        if rank != at.rank and (rank in at.waiting or other.main_thread.waits)
    ]
    cause = (
        f"rank {at.rank} on {dump.host} never entered {_what(at)}; it was in {doing}{idle}; "
        f"{_wait(others) if others else 'no other rank waits'}"
    )
    evidence = _dumps(run, [at.rank, *at.waiting[:1]])
    evidence += [f"logs/rank-{at.rank}.stacks.txt: {stack}"] * bool(stack)
    kind = "hang_in_data" if "titan/data/" in doing + stack else "hang"
    return [Finding(kind, cause, evidence + _status(run))]


def _silent(run: Evidence) -> list[Finding]:
    """Report ranks that the monitor found silent."""
    if run.status.kind not in _SILENCE:
        return []
    missing, cause = run.without_dump, run.status.reason
    # Written when the rank was ended, so newer than its last heartbeat, which the reason names.
    stacks = {rank: stack for rank in missing if (stack := run.stack(rank))}
    for rank, stack in stacks.items():
        cause += f"; when rank {rank} was ended, it was in {stack}"
    evidence = [f"no flight recorder of {list_ranks(missing)}"] * bool(missing)
    return [Finding(run.status.kind, cause, [*_status(run), *evidence])]


def _disk(run: Evidence) -> list[Finding]:
    """Find a full disk: it takes no report."""
    free = run.free_bytes
    cause = f"the disk of {run.run_dir} is full"
    return (
        [Finding("disk_full", cause, [f"{free:,} bytes are free"])] if free < FULL_BYTES else []
    )


def _slow(run: Evidence) -> list[Finding]:
    """Find ranks whose own time per step is far above the others'."""
    # A rank's own time leaves out its waits for others, so a straggler stands out even though all
    # steps take equally long.
    own: dict[int, float] = {}
    for rank, rows in run.times.items():
        values = [
            row.step_s if row.own_s is None else row.own_s for row in rows if row.step > 1
        ]
        if len(values) >= 3:  # the first steps compile
            own[rank] = median(values)
    findings = []
    for rank, seconds in own.items():
        others = [value for other, value in own.items() if other != rank]
        # 0.05 s more, since a short step varies by more than half of itself.
        if not others or seconds < max(SLOW * median(others), median(others) + 0.05):
            continue
        wait = median(row.data_wait_s for row in run.times[rank])
        why = f", {wait:.2f} s of it for data" if wait > seconds / 4 else ""
        cause = f"rank {rank} is slow: {seconds:.2f} s of work per step{why}, against {median(others):.2f} s on the others"
        findings.append(Finding("slow_rank", cause, [f"logs/rank-{rank}.times.jsonl"]))
    return findings


def _is_stale(run: Evidence) -> bool:
    """Return whether no step has ended for a long time, by the standards of the run."""
    # A large job may well take minutes for a step.
    step_s = [row.step_s for row in run.metrics[-20:]]
    since_s = time.time() - run.status.unix_s
    return bool(step_s) and since_s > max(STALE_S, 10 * median(step_s))


# ---- words -----------------------------------------------------------------------------------------


def _what(wait: Wait) -> str:
    return f"{wait.what} #{wait.seq} of {_axis(wait.axis)}{_at(wait.line)}"


def _wait(ranks: Sequence[int]) -> str:
    return f"{list_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _axis(axis: str) -> str:
    """Return a name such as "the FSDP group (dp_shard)" for an axis of the mesh."""
    known = {"pp": "pipeline", "tp": "tensor-parallel", "cp": "context-parallel"}
    known |= {"dp_shard": "FSDP", "dp_replicate": "replica"}
    if axis.startswith("all ranks"):
        return axis
    return f"the {known[axis]} group ({axis})" if axis in known else f"group {axis}".strip()


def _at(line: str) -> str:
    return f" ({line})" if line else ""


def _was(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"


def _ended_by(run: Evidence, ranks: Sequence[int], name: str) -> str:
    where = run.stack(ranks[0])
    return f"{list_ranks(ranks)} {_was(ranks)} ended by {name}{f', in {where}' * bool(where)}"


def _exits(run: Evidence, ranks: Sequence[int]) -> list[str]:
    return [
        f"logs/launch-*.json: rank {rank} ended with {run.exits[rank]}" for rank in ranks[:4]
    ]


def _dumps(run: Evidence, ranks: Sequence[int]) -> list[str]:
    dumps = [run.dumps[rank] for rank in dict.fromkeys(ranks) if rank in run.dumps]
    return [
        f"flight recorder of rank {dump.rank} on {dump.host}: in {dump.main_thread.text}, step {dump.step}"
        for dump in dumps
    ]


def _status(run: Evidence) -> list[str]:
    return [f"status.json: {_shorten(run.status.reason)}"] if run.status.reason else []


def _shorten(text: str, limit: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 4] + " ..."
