"""How fast the simulator is, and how good the layouts are that it finds.

    python scripts/bench/simulator.py time [8b] [pipeline] [405b] [16384] [few] [sweep]     default: all of them
    python scripts/bench/simulator.py auto llama3_8b:16 qwen3_30b_a3b:16 [--simulate 24] [--hardware h100-sxm] [--section.key=value ...]
    python scripts/bench/simulator.py spaces

`time` starts each case as a separate process, with an empty trace cache (cold) or the one it left (warm). CPU time and memory are
those of all its processes together (Linux).

`auto` compares the layout that `parallelism.layout = "auto"` chooses with the best of a full `titan plan`, of jobs in train_configs/.
The plan is of the job as it is. "auto" gets the job without its degrees and without its recomputation, and with its global batch. One
row for each job: the speeds by simulation, in tokens/s/GPU, and their ratio. The exit code is 1 if a ratio is below 95%.

`spaces` simulates all layouts of the spaces in tests/sim/planner_spaces.json again, with which tests/sim/test_planner_spaces.py
compares what plan and auto find. Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from titan.config.load import load_from_argv
from titan.sim.price.profiles import load_profile
from titan.sim.search.auto import choose
from titan.sim.search.candidates import LayoutSearch
from titan.sim.search.plan import plan
from titan.sim.search.variants import simulate_variants

ROOT = Path(__file__).parents[2]
SPACES = ROOT / "tests" / "sim" / "planner_spaces.json"
PIPELINE = """llama3_8b.toml --world-size 8 --hardware h100-sxm --model.overrides "{n_layers = 14}"
    --parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 4
    --parallelism.pipeline_parallel_schedule Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 4
    --training.local_batch_size"""
FEW = """llama3_8b.toml --world-size 64 --compile.enable=false --hardware h100-sxm,h200-sxm,b200,a100-80g
    --sweep parallelism.tensor_parallel_degree=1,2,4 --sweep training.local_batch_size=1,2
    --sweep activation_checkpoint.mode=none,selective,full"""
SWEEP = f"""{FEW} --sweep parallelism.data_parallel_replicate_degree=1,2,4,8
    --sweep training.seq_len=4096,8192 --sweep parallelism.fsdp_reshard_after_forward=default,never"""
# What is asked for, its name, and the arguments of `titan sim`.
CASES = (
    ("8b", "8B, 8 GPUs", "published/R1.toml --world-size 8 --hardware h100-96g-500w"),
    ("pipeline", "8B, 4 stages, 8 microbatches", f"{PIPELINE} 8"),
    ("pipeline", "8B, 4 stages, 64 microbatches", f"{PIPELINE} 64"),
    (
        "405b",
        "405B, 512 GPUs, 8 stages, compiled",
        "published/R9.toml --world-size 512 --hardware h100-96g-500w",
    ),
    (
        "16384",
        "405B, 16,384 GPUs, compiled",
        "llama3_405b.toml --world-size 16384 --hardware h100-sxm",
    ),
    ("few", "72 variants of 8B: 18 programs on four kinds of hardware", FEW),
    ("sweep", "1,152 variants of 8B: 288 programs", SWEEP),
)


# ---- time ------------------------------------------------------------------------------------------


def timed(what: str, arguments: list[str], cache: str) -> None:
    """Run `titan sim`, and print what it took."""
    start_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "titan.cli", "sim", *arguments],
            env=os.environ | {"XDG_CACHE_HOME": cache},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT / "train_configs",
        )
        peak_gib = 0.0
        while process.poll() is None:
            peak_gib = max(peak_gib, _memory_gib())
            time.sleep(0.2)
        took_s = time.monotonic() - start_s
        with suppress(ChildProcessError):  # its children are ours now
            while True:
                os.wait()
        output.seek(0)
        last = output.read().strip().splitlines()[-1].strip()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = f"{took_s:8.1f} s {cpu_s:8.1f} CPU-s {peak_gib:6.2f} GiB"
    print(f"{what:<64} {figures}   exit {process.returncode}   {last}", flush=True)


def _memory_gib() -> float:
    """Return the memory of all descendants of this process; pages they share count once."""
    parents, kib = {}, 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
    for number in parents:
        ancestor = parents[number]
        while ancestor in parents and ancestor != str(os.getpid()):
            ancestor = parents[ancestor]
        with suppress(OSError):
            if ancestor == str(os.getpid()):
                text = Path(f"/proc/{number}/smaps_rollup").read_text()
                kib += int(text.partition("Pss:")[2].split()[0])
    return kib / 2**20


def time_cases(wanted: list[str]) -> int:
    """Time the cases that are asked for."""
    # Processes that outlive their parents become ours, so that their time counts.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    for name, what, arguments in CASES:
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                timed(f"{what}, {state}", shlex.split(arguments), cache)
    return 0


# ---- layouts ---------------------------------------------------------------------------------------


def left_open(job: Path) -> str:
    """Return a job without degrees and recomputation."""
    text = re.sub(
        r"^\[activation_checkpoint\]\n([^\[\n].*\n|\n)*", "", job.read_text(), flags=re.M
    )
    return re.sub(r"^(\w*degree|pipeline_\w+|fsdp_reshard\w+) *=.*\n", "", text, flags=re.M)


def compare(name: str, ranks: int, more: list[str], options: argparse.Namespace) -> float:
    """Print the row of a job, and return the ratio of the two speeds."""
    job, profile = ROOT / f"train_configs/{name}.toml", load_profile(options.hardware)
    argv = [str(job), *more]
    search = LayoutSearch(argv, load_from_argv(argv), profile, world_size=ranks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, job.name)
        path.write_text(left_open(job))
        whole = f"--training.global_batch_size={search.global_batch}"
        words = [str(path), "--parallelism.layout=auto", whole, *more]
        start_s = time.monotonic()
        config = load_from_argv(words)
        choice = choose(words, config, profile, world_size=ranks, simulate=True)
        wall_s = time.monotonic() - start_s
        # Models that the formula alone decides are simulated here.
        (chosen,) = simulate_variants(
            words, [choice.settings], world_size=ranks, profiles=[profile]
        )
    start_s = time.monotonic()
    point, best = plan(search, budget=options.simulate).ranked[0]
    plan_s = time.monotonic() - start_s
    share = chosen.speed * chosen.fits / max(best.speed, chosen.speed * chosen.fits)
    about = choice.settings["parallelism.layout_reason"].partition(": ")[0]
    cells = (
        " ".join([name, *more]),
        ranks,
        f"{search.global_batch:,}",
        about,
        f"{chosen.speed:,.0f}",
        f"{point}, ZeRO-{point.zero}, batch {point.batch}, AC {point.recompute}",
        f"{best.speed:,.0f}",
        f"{share:.1%}",
        f"{wall_s:.0f}",
        f"{len(search.seen)} in {plan_s:.0f}",
    )
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return share


def compare_all(options: argparse.Namespace, more: list[str]) -> int:
    """Compare "auto" with `titan plan` on each job."""
    shares = []
    for text in options.jobs:
        name, _, ranks = text.partition(":")
        shares.append(compare(name, int(ranks), more, options))
    return int(min(shares) < 0.95)


def simulate_spaces() -> int:
    """Simulate all layouts of the stored spaces, up to the tensor parallelism that they have."""
    spaces = json.loads(SPACES.read_text())
    for space in spaces.values():
        job = space["job"]
        most = max((row["point"]["tp"] for row in space["rows"]), default=1)
        profile, config = load_profile(space["hardware"]), load_from_argv(job)
        search = LayoutSearch(
            job, config, profile, world_size=space["world"], held=space["held"]
        )
        points = [p for p in search.points if p.tp <= most and search.legal(p)]
        variants = search(map(search.settings, points))
        space["rows"] = [
            {
                "point": asdict(point),
                "speed": round(variant.speed, 1),
                "needed_gib": round(variant.needed_gib, 3),
                "fits": variant.fits,
                "tight": variant.is_tight,
            }
            for point, variant in zip(points, variants, strict=True)
        ]
    SPACES.write_text(json.dumps(spaces) + "\n")
    return 0


def main() -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("time", "auto", "spaces"))
    parser.add_argument("jobs", nargs="*", metavar="CASE or NAME:RANKS")
    parser.add_argument("--simulate", type=int, default=24)
    parser.add_argument("--hardware", default="h100-sxm")
    options, more = parser.parse_known_args()
    if options.what == "time":
        return time_cases(options.jobs)
    return compare_all(options, more) if options.what == "auto" else simulate_spaces()


if __name__ == "__main__":
    sys.exit(main())
