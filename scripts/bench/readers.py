"""Cost of reading a long run: `titan watch`, `titan plot`, and a resume.

    python scripts/bench/readers.py --rows 10000,100000,1000000 --checkpoints 10000 --rounds 3

A run folder is generated with that many rows of metrics, a hundredth as many events, and empty step folders of checkpoints. Each
reader runs in a process that has imported what it needs, and measures itself: CPU seconds, bytes read from files, and how far the
peak of its memory grew. "json_lines" parses all of metrics.jsonl with the standard library. Medians of the rounds, which take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROW = """{"step": %d, "loss": 2.417362, "grad_norm": 1.0, "lr": 0.0003, "tokens": 524288000, "tokens_per_s": 913427.31, "step_s": 0.5, \
"eta_s": 51201.5, "data_wait_s": 0.0001, "mfu": 0.4, "memory_gib": 60.1, "memory_kind": "reserved", "tflops": 400.5, "loss_z": 0.1, \
"validation_s": 0.0, "checkpoint_s": 0.0, "num_skipped": 0, "goodput": 0.9, "slowest_rank": 3, "slowest_rank_s": 0.51, \
"median_rank_s": 0.5, "unix_s": 1700000000.5, "time_s": 50.5}
"""
EVENT = """{"event": "checkpoint", "step": %d, "unix_s": 1700000000.5, "seconds": {"trained": 50.5}, "restarts": 0, "lost_steps": 0}
"""


def write_run(folder: Path, *, rows: int, checkpoints: int) -> None:
    """Write a run folder."""
    folder.mkdir()
    (folder / "status.json").write_text("{}")
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(ROW % step for step in range(1, rows + 1))
    with (folder / "events.jsonl").open("w") as file:
        file.writelines(EVENT % step for step in range(0, rows, 100))
    for step in range(checkpoints):
        place = folder / "checkpoint" / f"step-{step + 1}"
        place.mkdir(parents=True)
        (place / "manifest.json").touch()


# ---- the readers: each returns the work, when its imports are done -----------------------------


def watch(folder: Path) -> Callable[[], object]:
    from titan.contrib.watch.reading import RunReader

    return lambda: json.dumps(RunReader(folder, name="run").data())


def watch_again(folder: Path) -> Callable[[], object]:
    from titan.contrib.watch.reading import RunReader

    reader = RunReader(folder, name="run")
    answer = reader.data()
    line = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1]
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line)
    return lambda: reader.data((answer["generation"], answer["total"]))


def plot(folder: Path) -> Callable[[], object]:
    from titan.tools.plot import read_metrics

    return lambda: read_metrics(folder / "metrics.jsonl")


def json_lines(folder: Path) -> Callable[[], object]:
    return lambda: [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def resume(folder: Path) -> Callable[[], object]:
    from titan.base.rows import cut_after
    from titan.base.run_folder import RunFolder
    from titan.checkpoint.manifest import list_steps

    # A resume from the last checkpoint but one: the newest rows go.
    step = sum(1 for _ in (folder / "metrics.jsonl").open("rb")) - 10

    def work() -> None:
        list_steps(str(folder / "checkpoint"))
        cut_after(folder / "metrics.jsonl", step=step)
        RunFolder(folder).events()

    return work


READERS = (watch, watch_again, plot, resume, json_lines)


def measure_here(name: str, folder: Path) -> None:
    """Print CPU seconds, bytes read and growth of the peak, in MiB, of one reader in this process."""

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    def peak_mib() -> float:
        # Not getrusage's, which begins at the parent's.
        [line] = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
        return int(line.split()[1]) / 1024

    work = globals()[name](folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is in memory now
    peak, num_bytes, begin = peak_mib(), bytes_read(), time.process_time()
    work()
    cpu_s = time.process_time() - begin
    print(json.dumps([cpu_s, (bytes_read() - num_bytes) / 1e6, peak_mib() - peak]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", default="10000,100000,1000000")
    add("--checkpoints", type=int, default=10_000)
    add("--rounds", type=int, default=3)
    add("--reader", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        return measure_here(args.reader, args.folder)
    print("| rows | reader | CPU s | MB read | peak grows, MiB |\n|--:|---|--:|--:|--:|")
    for rows in map(int, args.rows.split(",")):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "run"
            write_run(folder, rows=rows, checkpoints=args.checkpoints)
            figures: dict[str, list[list[float]]] = {}
            for _ in range(args.rounds):
                for reader in READERS:
                    command = [sys.executable, __file__, "--reader", reader.__name__]
                    done = subprocess.run(
                        [*command, "--folder", str(folder)], capture_output=True, env=os.environ
                    )
                    if done.returncode:
                        sys.exit(f"{reader.__name__} failed:\n{done.stderr.decode()[-2000:]}")
                    figures.setdefault(reader.__name__, []).append(json.loads(done.stdout))
            for reader, turns in figures.items():
                cpu, read, peak = (
                    statistics.median(column) for column in zip(*turns, strict=True)
                )
                print(
                    f"| {rows:,} | {reader} | {cpu:.3f} | {read:.2f} | {peak:.1f} |", flush=True
                )


if __name__ == "__main__":
    main()
