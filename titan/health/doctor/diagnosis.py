"""From evidence to findings: what went wrong, most likely cause first, and what to do.

A run that failed has one cause and many symptoms: every other rank loses its connection, or waits. Rules are asked in the order
of how much they know: a fault in native code, what a rank itself said of an error that is not one of communication, how processes ended, who waits for whom
by the flight recorders, what is left.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from titan.health.doctor import waits as waiting
from titan.health.doctor.evidence import Evidence
from titan.health.doctor.waits import Wait
from titan.health.errors import is_communication

SLOW = 1.5  # times the median of the other ranks: a straggler
LATE_S = 5.0  # to a collective in which others have failed
STALE_S = 60.0  # without a step: a run that lives, but may hang
FULL_BYTES = 2**20
_MAX_DAMAGED = 20  # files to name

# Kind, the words of a rank's own error, what they mean. The first that matches counts.
_SAID = [
    ("out_of_device_memory", r"OutOfMemoryError|out of memory", "the device's memory was not enough"),
    ("disk_full", r"No space left on device|Disk quota exceeded", "the disk is full"),
    ("disk_lost", r"Read-only file system|Stale file handle|Input/output error", "the disk cannot be written or read"),
    ("loss_not_finite", r"(loss|gradient norm) -?(nan|inf)|deviations above", "the loss is no number, or far off"),
    ("replicas_differ", r"replicas hold different weights", "memory, or a link, of one machine is broken"),
    ("checkpoint_differs", r"holds other shapes|lacks .* saved from", "the job's model or optimizer is not the checkpoint's"),
    ("checkpoint_damaged", r"is damaged|NO CHECKPOINT|is not a checkpoint", "the checkpoint cannot be loaded"),
    ("killed", r"^torchrun .* was ended by SIG", "what starts the ranks was killed, and they with it"),
    ("save_failed", r"could not be saved|was not written", "a checkpoint could not be saved"),
    ("data_source", r"\(titan/data/|dataset|tokenizer|shards|no text|UTF-8|line of JSON|Parquet", "the data source failed"),
    ("error", r"failed in step \d+.*: \w+: ", "the program failed"),
]  # fmt: skip
_AGAIN = "then run the same command again, which goes on from the newest checkpoint"
_ADVICE = {
    "out_of_device_memory": "`titan check JOB.toml --hardware H` lists changes that fit: activation checkpointing, a smaller local batch, more shards",
    "out_of_host_memory": "ask for more memory per node, or use fewer loader workers and smaller shuffle buffers; on a CPU the model counts, too",
    "disk_full": f"make room, or set checkpoint.keep_latest_k; {_AGAIN}",
    "disk_lost": f"look at the mount and the file server; {_AGAIN}",
    "loss_not_finite": "look at the samples it names; lower optimizer.lr; fault_tolerance.on_nonfinite and on_spike skip such steps, or rewind",
    "replicas_differ": "take that machine out; the newest checkpoint may hold the fault, an older one (checkpoint.load_step) does not",
    "checkpoint_differs": "the checkpoint is whole: correct [model] or [optimizer] in the job (the run's own are in config.toml), or choose another job.dump_folder",
    "checkpoint_damaged": "`titan verify STEP_DIR` names the file; delete the step, or name an older one with checkpoint.load_step",
    "save_failed": "see to the disk; checkpoint.on_failure = \"continue\" trains on without the save",
    "data_source": f"see that what it names is there, and readable from every host; {_AGAIN}",
    "error": "the traceback is in the output of that rank; if it is titan's fault, please report it with this page",
    "killed": "who sends SIGKILL: the kernel for want of memory (dmesg), the scheduler at a time limit, an operator",
    "crashed": "a fault in native code: its last words are in the rank's output, its stack in logs/",
    "missing_rank": "no rank may end before the others: look for SIGKILL (the kernel for want of memory: dmesg; an operator), sys.exit, or a loader with fewer steps; and at what the scheduler says",
    "mismatch_operation": "code that only some ranks run (an `if rank == ...`, a loss that some skip) must not hold a collective",
    "mismatch_dtype": "make the dtype the same on all ranks: a flag, or autocast, that only some have?",
    "mismatch_shape": "make the sizes the same on all ranks: a last, smaller batch, or weights of another size?",
    "deadlock": "ranks enter collectives of several groups in different orders; make the order the same on all",
    "hang": "see the line that it was in, and the stacks of its threads",
    "hang_in_data": "its data source does not answer: see the file server or service that it reads from, as seen from its host",
    "host_lost": f"look at that host and its network; without it, or mended, {_AGAIN.removeprefix('then ')}",
    "evidence": "read these files with care, or restore them; what is said here rests on the others",
    "rank_silent": "a debugger, an operator or the scheduler stops a process; an extension that holds the GIL locks it: see its stack in logs/",
    "slow_rank": "look at the clocks and temperature of its device, at other processes on its host, at its disk; `titan preflight`",
    "no_progress": "`kill -USR2 PID` of `titan train`, or of each rank, writes their stacks and flight recorders; then ask again",
    "vanished": f"killed from outside (memory, a time limit), or the machine went down: see dmesg and the scheduler; {_AGAIN}",
    "unknown": "look at the output of the ranks, and at logs/rank-*.stacks.txt",
}  # fmt: skip
_SILENT = r"ha(s|ve) not been heard of|has not answered rank|says nothing"


@dataclass(frozen=True)
class Finding:
    """kind: for programs; cause: a sentence; evidence: where it was read."""

    kind: str
    cause: str
    evidence: list[str] = field(default_factory=list)

    @property
    def advice(self) -> str:
        return _ADVICE[self.kind]


@dataclass(frozen=True)
class Diagnosis:
    """state: done, stopped, running, or failed; findings: the most likely cause first, nothing where all is well."""

    state: str
    summary: str
    findings: list[Finding]


def diagnose(run: Evidence) -> Diagnosis:
    found = _diagnose(run)
    if run.damaged:
        cause = "files of the run folder cannot be used: damaged, or written by something else"
        found.findings.append(Finding("evidence", cause, [*run.damaged.values()][:_MAX_DAMAGED]))
    return found


def _diagnose(run: Evidence) -> Diagnosis:
    step = run.metrics[-1].step if run.metrics else run.status.step
    if run.state == "done":
        return Diagnosis("done", f"finished: all {step:,} steps are done", _slow(run))
    if run.state == "stopped":
        return Diagnosis("stopped", f"stopped by a signal after step {step:,}, and saved", [])
    alive = run.state == "running" and run.owner is not None
    if alive and not _is_stale(run):
        return Diagnosis("running", f"running: step {step:,}, on {run.owner}", _slow(run))
    rules = (_crashed, _said, _ended, _mismatch, _hang, _silent, _disk, _late, _slow)
    findings = [finding for rule in rules for finding in rule(run)]
    if not findings and alive:
        cause = f"the run lives, in {run.owner}, but has made no step for long"
        findings = [Finding("no_progress", cause, _status(run))]
    elif not findings and run.state == "running":
        cause = "the run ended without last words: its process is gone, and status.json still says that it runs"
        findings = [Finding("vanished", cause, ["lock.json: its owner does not live"])]
    elif not findings:
        cause = run.reason or "the run folder does not say why"
        findings = [Finding("unknown", cause, _status(run))]
    what = "hangs" if alive else "hung" if run.state == "hung" else "failed"
    at = f"{what} in step {run.status.step or step:,}"
    return Diagnosis("running" if alive else "failed", at, findings)


# ---- rules -----------------------------------------------------------------------------------------


def _crashed(run: Evidence) -> list[Finding]:
    """A fault in native code. It outranks what others say: they lose their connection to a rank that died of it."""
    if not run.fatal:
        return []
    ranks = sorted(run.fatal)
    names = " and ".join(sorted({number.name for number in run.fatal.values()}))
    where = run.stack(ranks[0])
    cause = f"{_ranks(ranks)} {_was(ranks)} ended by {names}{f', in {where}' * bool(where)}"
    stacks = [
        f"logs/rank-{rank}.stacks.txt: {run.stack(rank)}" for rank in ranks[:4] if run.stack(rank)
    ]
    launched = [rank for rank in ranks if rank in run.exits]
    return [Finding("crashed", cause, [*_exits(run, launched), *stacks])]


def _said(run: Evidence) -> list[Finding]:
    """Errors that a rank understood itself."""
    texts = {"status.json": run.reason}
    texts |= {f"logs/rank-{rank}.log": text for rank, text in run.errors.items()}
    for place, text in texts.items():
        if not text or is_communication(text) or re.search(_SILENT, text):
            continue
        for kind, pattern, meaning in _SAID:
            if re.search(pattern, text):
                named = re.search(r"\brank (\d+)", text) or re.search(r"rank-(\d+)", place)
                who = f" (rank {named[1]})" if named else ""
                places = ", ".join(other for other in texts if texts[other] == text)
                cause = f"{meaning}{who}: {_shorten(text, 300)}"
                return [Finding(kind, cause, [f"{places}: {_shorten(text)}"])]
    return []


def _ended(run: Evidence) -> list[Finding]:
    """Ranks that were killed, or ended by themselves, as far as the launcher knows."""
    if re.search(_SILENT, run.reason):  # they were ended by ours, who said why
        return []
    timed_out = "imed out" in run.reason  # then torchrun kills at last who does not answer
    ends = {} if timed_out else {rank: -code for rank, code in run.exits.items() if code < 0}
    by_signal: dict[int, list[int]] = {}
    for rank, number in ends.items():
        # torchrun's own SIGTERM goes to the ranks that are left; _crashed names faults.
        if number != signal.SIGTERM and rank not in run.fatal:
            by_signal.setdefault(number, []).append(rank)
    killed = by_signal.get(signal.SIGKILL, [])
    if run.num_oom_kills and (killed or not run.exits):
        cause = (
            f"{_ranks(killed) if killed else 'a process'} {_was(killed)} killed by the kernel: the memory of the host, "
            "or of the job's cgroup, was not enough"
        )
        evidence = [f"cgroup: oom_kill rose by {run.num_oom_kills}", *_exits(run, killed)]
        return [Finding("out_of_host_memory", cause, evidence)]
    for number, ranks in by_signal.items():
        cause = f"{_ranks(ranks)} {_was(ranks)} ended by {_signal(number)}"
        if number == signal.SIGKILL:
            return [Finding("killed", f"{cause}, from outside", _exits(run, ranks))]
        if not _mismatch(run):  # where gloo ends a process
            where = run.stack(ranks[0])
            return [
                Finding("crashed", f"{cause}{f', in {where}' * bool(where)}", _exits(run, ranks))
            ]
    quiet = [rank for rank in _missing(run) if rank not in run.errors]
    quiet = [rank for rank in quiet if timed_out or not run.exits.get(rank)]
    if not quiet:
        return []
    evidence = [f"there is no flight_recorder/rank-{rank}.json" for rank in quiet[:3]]
    evidence += _status(run)
    if timed_out:
        cause = f"{_ranks(quiet)} did not answer, and left no word: stopped, locked, or the host is lost"
        return [Finding("rank_silent", cause, evidence)]
    how = "ended with exit code 0, or unseen, while others trained"
    how = how if run.exits else "left no word: killed, or ended by itself"
    return [Finding("missing_rank", f"{_ranks(quiet)} {how}", evidence)]


def _mismatch(run: Evidence) -> list[Finding]:
    found = waiting.find_mismatch(run.dumps)
    if found is None:
        return []
    number = f"#{found.seq} of {_axis(found.axis)}"
    calls = [
        f"{_ranks(ranks)} {_verb('call', ranks)} {text}{_at(found.lines[text])}"
        for text, ranks in found.calls.items()
    ]
    cause = f"ranks call different collectives, {number}: {'; '.join(calls)}"
    files = [f"flight_recorder/rank-{ranks[0]}.json" for ranks in found.calls.values()]
    return [Finding(f"mismatch_{found.differs}", cause, [f"{', '.join(files)}: {number}"])]


def _hang(run: Evidence) -> list[Finding]:
    """A rank that others wait for, by the flight recorders."""
    waits = waiting.find_waits(run.dumps)
    at = waiting.root(waits, run.dumps)
    if not waits or re.search(_SILENT, run.reason):
        return []
    if at is None:
        parts = [
            f"rank {w.rank} never entered {_what(w)}, for which {_ranks(w.waiting)} {_verb('wait', w.waiting)}"
            for w in waits[:4]
        ]
        cause = f"every rank waits for another: {'; '.join(parts)}"
        return [Finding("deadlock", cause, _dumps(run, [w.rank for w in waits[:2]]))]
    dump, stack = run.dumps[at.rank], run.stack(at.rank)
    idle = f" for {dump.idle_s:.0f} s" if dump.idle_s and dump.idle_s >= 1 else ""
    others = [r for r in run.dumps if r != at.rank and (r in at.waiting or run.dumps[r].waits)]
    cause = (
        f"rank {at.rank} on {dump.host} never entered {_what(at)}; it was in {dump.doing}{idle}; "
        f"{_ranks(others)} {_verb('wait', others)}"
    )
    in_data = "titan/data/" in dump.doing + stack
    evidence = _dumps(run, [at.rank, *at.waiting[:1]])
    evidence += [f"logs/rank-{at.rank}.stacks.txt: {stack}"] * bool(stack)
    return [Finding("hang_in_data" if in_data else "hang", cause, evidence + _status(run))]


def _silent(run: Evidence) -> list[Finding]:
    """What the heartbeat or the watchdog found."""
    if not re.search(_SILENT, run.reason):
        return []
    kind = "host_lost" if " is lost" in run.reason else "rank_silent"
    missing, cause = _missing(run), run.reason.split(". Stacks")[0]
    stacks = {rank: stack for rank in missing if (stack := run.stack(rank))}
    for rank, stack in stacks.items():  # written when it was ended: newer than its last beat
        cause = re.sub(
            rf"; rank {rank} was in .*?, step \d+",
            lambda _, rank=rank, stack=stack: f"; rank {rank} was in {stack}",
            cause,
        )
    evidence = [f"rank {rank}: {stack}" for rank, stack in [*stacks.items()][:3]]
    evidence += [f"no flight recorder of {_ranks(missing)}"] * bool(missing)
    return [Finding(kind, cause, [*_status(run), *evidence])]


def _disk(run: Evidence) -> list[Finding]:
    """A disk that is full takes no last words."""
    free = run.free_bytes
    cause = f"the disk of {run.run_dir} is full"
    return [Finding("disk_full", cause, [f"{free:,} bytes are free"])] if free < FULL_BYTES else []


def _late(run: Evidence) -> list[Finding]:
    """All have entered the same, but one long after the others."""
    found = waiting.latest(run.dumps)
    if not found or found[1] < LATE_S or waiting.find_waits(run.dumps):
        return []
    rank, lag_s, entry = found
    what = f"{waiting.describe(entry)}{_at(entry.line)}"
    cause = f"rank {rank} on {run.dumps[rank].host} entered {what} {lag_s:.0f} s after the others"
    return [Finding("slow_rank", cause, _dumps(run, [rank]))]


def _slow(run: Evidence) -> list[Finding]:
    """Ranks whose own time per step is far above the others'."""
    own: dict[int, float] = {}
    for rank, rows in run.times.items():
        values = [row.step_s if row.own_s is None else row.own_s for row in rows if row.step > 1]
        if len(values) >= 3:
            own[rank] = median(values)
    findings = []
    for rank, seconds in own.items():
        others = [value for other, value in own.items() if other != rank]
        if not others or seconds < max(SLOW * median(others), median(others) + 0.05):
            continue
        wait = median(row.data_wait_s for row in run.times[rank])
        why = f", {wait:.2f} s of it for data" if wait > seconds / 4 else ""
        cause = f"rank {rank} is slow: {seconds:.2f} s of its own per step{why}, against {median(others):.2f} s of the others"
        findings.append(Finding("slow_rank", cause, [f"logs/rank-{rank}.times.jsonl"]))
    return findings


def _is_stale(run: Evidence) -> bool:
    """No step for long, by the standards of the run."""
    step_s = [row.step_s for row in run.metrics[-20:]]
    since_s = time.time() - run.status.unix_s
    return bool(step_s) and since_s > max(STALE_S, 10 * median(step_s))


# ---- words -----------------------------------------------------------------------------------------


def _missing(run: Evidence) -> list[int]:
    return [rank for rank in range(run.world_size) if rank not in run.dumps] if run.dumps else []


def _what(wait: Wait) -> str:
    return f"{wait.what} #{wait.seq} of {_axis(wait.axis)}{_at(wait.line)}"


def _axis(axis: str) -> str:
    """`the FSDP group (dp_shard)`."""
    known = {"pp": "pipeline", "tp": "tensor-parallel", "cp": "context-parallel"}
    known |= {"dp_shard": "FSDP", "dp_replicate": "replica"}
    if axis.startswith("all ranks"):
        return axis
    return f"the {known[axis]} group ({axis})" if axis in known else f"group {axis}".strip()


def _at(line: str) -> str:
    return f" ({line})" if line else ""


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}" if ranks else "no other rank"


def _verb(verb: str, ranks: Sequence[int]) -> str:
    return f"{verb}s" if len(ranks) < 2 else verb


def _was(ranks: Sequence[int]) -> str:
    return "were" if len(ranks) > 1 else "was"


def _signal(number: int) -> str:
    known = number in {*signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"


def _exits(run: Evidence, ranks: Sequence[int]) -> list[str]:
    return [f"logs/launch-*.json: rank {rank} ended with {run.exits[rank]}" for rank in ranks[:4]]


def _dumps(run: Evidence, ranks: Sequence[int]) -> list[str]:
    found = [run.dumps[rank] for rank in dict.fromkeys(ranks) if rank in run.dumps]
    return [
        f"flight recorder of rank {d.rank} on {d.host}: in {d.doing}, step {d.step}" for d in found
    ]


def _status(run: Evidence) -> list[str]:
    return [f"status.json: {_shorten(run.reason)}"] if run.reason else []


def _shorten(text: str, limit: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 4] + " ..."
