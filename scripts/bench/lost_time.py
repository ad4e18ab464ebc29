"""Is a lost millisecond a gained one? `python scripts/bench/lost_time.py FOLDER [NAME ...]`

Each row of lost_time.toml makes a run slow as a user does: by keys of the job, or by the hook of tests/support/slow_hooks.py. The slow run and
the quick one are trained in turn, each in its own processes, and `titan profile` makes the account of the slow one. A line for each row has
its first cause, the share of the step that the account states, the share that the quick run gains, both medians, and the quick run's own
first cause. On a shared machine
the seconds of the wall say little, so the gain is in those of the CPU unless the slow run waits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from titan.base.rows import read_rows
from titan.cli import main as titan
from titan.config.toml import tomllib

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Row = dict[str, Any]


def install_hook(folder: Path) -> None:
    """Write the metadata of a package whose hook makes a run slow."""
    metadata = folder / "slow_hooks-0.1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slow-hooks\nVersion: 0.1\n"
    )
    entry = "[titan.hooks]\nslow = tests.support.slow_hooks:Slow\n"
    (metadata / "entry_points.txt").write_text(entry)


def run_titan(words: list[str], variables: Row) -> None:
    """Run a command in this process, without its output."""
    os.environ |= variables
    with redirect_stdout(StringIO()):
        sys.exit(titan(words))


def train(folder: Path, row: Row, side: str) -> tuple[Path, float]:
    """Train the slow or the quick run of a row. Return its folder and the seconds of a step: of the CPU, or of the wall if it waits."""
    run, job = folder / side, folder / "job.toml"
    shutil.rmtree(run, ignore_errors=True)
    job.write_text(TABLE["job"])
    words = ["train", str(job), "--quiet", f"--nproc={row.get('ranks', 1)}"]
    keys = [f"job.dump_folder={run}", *row.get("both", []), *row.get(side, [])]
    variables = {"SLOW": "", **row.get("env", {})}
    if side == "quick" and variables["SLOW"]:
        variables["SLOW"] += "-quick"
    # Processes that have imported torch: an import costs more than the run.
    context = get_context("forkserver")
    context.set_forkserver_preload(["titan.run.train"])
    arguments = [*words, *map("--{}".format, keys)], variables
    process = context.Process(target=run_titan, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, f"{run} has failed: {process.exitcode}"
    rows = read_rows(run / "metrics.jsonl")[1:]
    if not row.get("waits"):
        return run, min(each["slow/cpu_s"] for each in rows)
    pauses_s = sum(each["checkpoint_s"] for each in rows) / rows[-1]["step"]
    return run, median(each["step_s"] for each in rows) + pauses_s


def account_of(run: Path, row: Row) -> tuple[str, float]:
    """Return the first cause of a run's account, and the share of the step that it loses."""
    file, job = run / "account.json", run / "meant.toml"
    job.write_text(f"[training]\nmixed_precision_param = '{row.get('meant', 'auto')}'")
    with redirect_stdout(StringIO()):
        titan(["profile", str(run), f"--json={file}", f"--job={job}"])
    facts = json.loads(file.read_text())
    cause, places = next(iter(facts["lost_ms"].items()))
    # Of the traced steps: on a machine with other work, the steps without a trace differ.
    return cause, sum(places.values()) / (facts["step_ms"] - facts["unattributed_ms"])


def compare(folder: Path, row: Row) -> tuple[str, float, float, str]:
    """Train a pair. Return the first cause, the share that it loses by the account, the share that the quick run gains, and its account."""
    run, slow_s = train(folder, row, "slow")
    cause, stated = account_of(run, row)
    run, quick_s = train(folder, row, "quick")
    healthy = "{} {:.1%}".format(*account_of(run, row))
    return cause, stated, 1 - quick_s / slow_s, healthy


def main() -> None:
    """Train all pairs, and print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[*TABLE["row"]])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    folder = options.folder.absolute()
    install_hook(folder)
    # For this process and its children, which inherit sys.path, and for the ranks that they start.
    paths = [str(folder), str(ROOT)]
    sys.path += paths
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    found: dict[str, list[tuple[str, float, float, str]]] = {name: [] for name in options.names}
    for _ in range(options.pairs):
        for name, pairs in found.items():
            pairs.append(compare(folder, TABLE["row"][name]))
            print(name, *pairs[-1], file=sys.stderr, flush=True)
    print(
        "| slowness | first cause | stated | gained | ratio | the quick run |\n|---|---|---|---|---|---|"
    )
    for name, pairs in found.items():
        causes = ", ".join({cause for cause, *_ in pairs})
        stated, gained = median(p[1] for p in pairs), median(p[2] for p in pairs)
        shares = f"{stated:.1%} | {gained:.1%} | {stated / gained:.2f}"
        print(f"| {name} | {causes} | {shares} | {pairs[-1][3]} |")


if __name__ == "__main__":
    main()
