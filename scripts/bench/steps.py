"""Speed and memory of a training step on one accelerator: titan, TorchTitan, and a bare PyTorch loop, on the same model.

    python scripts/bench/steps.py --model 1B --variants eager,compile --against titan,torchtitan,bare --json OUT.json

Each run is a process of its own, and runs alternate (titan, TorchTitan, bare, titan, ...), so that what the machine does meanwhile
hits all of them. Same for all: Llama 3's shapes with an output layer of its own (TorchTitan's model ties nothing), batch, random
tokens of 258 kinds, bf16 compute with fp32 weights, fused AdamW, clipping; loss and norm are read every few steps only, which is when the
clock is read. The first steps are not counted; a run's figure is the median of its windows, a row's the median of its runs.

    titan         `python -m titan.train` on the job file
    before        the same with titan of an earlier commit: BEFORE names a folder with its titan/ and models/
    torchtitan    `python -m torchtitan.train` on the same job file, its step untouched; torchtitan_spec.py says what is put in
    bare          bare_loop.py, what one would write without a framework

A variant is made of parts: eager, or compile, and with it ac (full) or sac (selective), float8 (tensorwise), and accumulate4 (four
micro-batches a step, not for bare); for titan alone also documents (masks), muon, chunk8192 (tokens that the loss takes at once) and
the kernels of attention, cudnn, flash, fa3 and fa4. OUT.json gathers the runs
of several calls and those in it are not repeated, so that a long table can be measured in short calls; no run
is begun that would probably not end within --limit-s. The exit code is 1 if a row failed, also in an earlier call: --retry repeats it.

The last column sets titan's rows beside expected.json, which the simulator made before any of them ran:

    python scripts/bench/steps.py --model 1B --variants eager,compile --expect h100-sxm,h200-sxm

wheels.txt beside this file lists what TorchTitan, float8 and titan need on a machine that has torch 2.11 alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from titan.base.hardware import by_name, recognise
from titan.base.rows import read_rows
from titan.config.schema import ModelSection
from titan.config.toml import format_value, read_toml

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"
NUM_TOKENS = 258  # kinds of token in the random batches: those of titan's byte tokenizer


@dataclass(frozen=True)
class Model:
    """A row of steps.toml: a flavor of a family, what is changed of it, and its batch."""

    flavor: str
    batch: int
    overrides: dict[str, int] = field(default_factory=dict)
    family: str = "llama3"
    small_batch: int | None = None
    architecture: str = ""

    def batch_on(self, memory_gib: float) -> int:
        """Return the sequences a step on a card; 0 GiB: no card."""
        return self.small_batch or self.batch if 0 < memory_gib < 100 else self.batch

    @property
    def section(self) -> dict[str, Any]:
        if self.architecture:
            which, tied = {"architecture": self.architecture}, "tie_word_embeddings"
        else:
            which, tied = {"flavor": self.flavor}, "tied_embeddings"
        return {"name": self.family, **which, "overrides": {**self.overrides, tied: False}}

    @property
    def sizes(self) -> Any:
        return ModelSection.model_validate(self.section).sizes


TABLES = read_toml(HERE / "steps.toml")[0]
MODELS = {name: Model(**row) for name, row in TABLES["models"].items()}
PARTS: dict[str, dict[str, dict[str, Any]]] = TABLES["parts"]
OWN: dict[str, list[str]] = TABLES["own"]
COMMANDS = {
    "titan": ["-m", "titan.train", "job.toml", "titan.toml"],
    "before": ["-m", "titan.train", "job.toml", "titan.toml"],
    "torchtitan": [
        *("-m", "torchtitan.train", "--job.config_file=job.toml"),
        "--experimental.custom_import=torchtitan_spec",
    ],
    "bare": [str(HERE / "bare_loop.py"), "job.toml", "titan.toml"],
}


def write_job(
    folder: Path, args: argparse.Namespace, variant: str, *, emulate: bool = False
) -> None:
    """job.toml, which titan and TorchTitan read alike, and titan.toml, titan's own words for the model and the tokens.

    emulate: float8 by torch's own operations, for a machine without a GPU.
    """
    sections = deepcopy(TABLES["job"])
    # For TorchTitan; titan.toml has the last word.
    sections["model"] = {"name": "llama3", "flavor": args.model}
    sections["metrics"] = {"log_freq": math.gcd(args.warm_up, args.steps)}
    training = sections["training"]
    training |= {"local_batch_size": args.batch, "seq_len": args.seq_len}
    training["steps"] = args.warm_up + args.steps
    parts = variant.split("+")
    for part in parts:
        for section, keys in PARTS[part].items():
            sections.setdefault(section, {}).update(keys)
    if "accumulate4" in parts:
        training["global_batch_size"] = 4 * args.batch
    if "float8" in parts and emulate:
        sections["quantize.linear.float8"]["emulate"] = True
    own = {"model": MODELS[args.model].section, "tokenizer": {"name": "bytes"}}
    for name, content in (("job.toml", sections), ("titan.toml", own)):
        lines = []
        for section, keys in content.items():
            lines += [f"[{section}]", *(f"{k} = {format_value(v)}" for k, v in keys.items())]
        (folder / name).write_text("\n".join(lines) + "\n")


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(*paths: str) -> dict[str, str]:
    """Return the variables of a process that is the only rank: it finds the modules of `paths` and of this folder first."""
    search = [*paths, str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in search if path),
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }


def run(
    folder: Path, args: argparse.Namespace, contestant: str, *, limit_s: float
) -> dict[str, Any]:
    """Run a contestant's process on the job in `folder`; its figures, or what it failed with."""
    # In front of an installed titan, and of the one that this script belongs to. titan finds models/ beside itself.
    before = [str(Path(os.environ["BEFORE"]).resolve())] if contestant == "before" else []
    environment = rank_environment(*before)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(args.cache.resolve())
    begin = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, *COMMANDS[contestant]]
        options: dict[str, Any] = {"stdout": log, "stderr": log, "timeout": limit_s}
        code = subprocess.run(command, cwd=folder, env=environment, **options).returncode
    wall_s = round(time.monotonic() - begin, 1)
    if code:
        text = (folder / "log.txt").read_text(errors="replace")
        out_of_memory = "out of memory" in text or "OutOfMemoryError" in text
        tail = "\n".join(text.splitlines()[-20:])
        return {"wall_s": wall_s, "error": "out of memory" if out_of_memory else tail}
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["step"] > args.warm_up]
    return {
        "wall_s": wall_s,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
        "windows": [round(row["tokens_per_s"], 1) for row in rows],
        "reserved_gib": max(row["memory_gib"] for row in rows),
        "active_gib": max(row["memory_active_gib"] or 0 for row in rows) or None,
        "loss": rows[-1]["loss"],
    }


def of_card(field: str) -> str:
    """Return what nvidia-smi says of the first card, or nothing."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    output = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return output.partition("\n")[0]


def machine() -> dict[str, Any]:
    """Where and with what these runs are made."""
    return {
        "device": of_card("name") or "CPU",
        "python": sys.version.split()[0],
        **{name: _version(name) for name in ("torch", "torchao", "torchtitan")},
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", ""),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def row_of(model: str, seq_len: int, batch: int, variant: str) -> str:
    """Return the key of a row in expected.json."""
    return f"{model}, {seq_len}, {batch}, {variant}"


def expect(args: argparse.Namespace, names: list[str]) -> None:
    """Add to expected.json what `titan sim` says of titan's rows on these cards."""
    known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name, variant in product(names, args.variants):
        if {"cudnn", "flash", "fa3", "fa4"} & {*variant.split("+")}:
            print(
                f"{variant}: the simulator takes the profile's kernel of attention, not the job's"
            )
            continue
        args.batch = MODELS[args.model].batch_on(by_name(name).memory_gib)
        with tempfile.TemporaryDirectory() as folder:
            write_job(Path(folder), args, variant)
            job = [
                f"{folder}/job.toml",
                f"{folder}/titan.toml",
                f"--json={folder}/predicted.json",
            ]
            command = [sys.executable, "-m", "titan.cli", "sim", *job]
            command += ["--world-size=1", f"--hardware={name}"]
            done = subprocess.run(command, capture_output=True, text=True)
            predicted = Path(folder, "predicted.json")
            if not predicted.exists():
                print(f"{name}, {variant}: {done.stderr.strip()}")
                continue
            figures = json.loads(predicted.read_text())
        row = row_of(args.model, args.seq_len, args.batch, variant)
        known.setdefault(name, {})[row] = round(figures["tokens_per_s_per_gpu"])
        print(f"{name}, {row}: {known[name][row]:,} tokens/s", flush=True)
        EXPECTED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def table(results: dict[str, Any]) -> str:
    """The runs of a file as Markdown, one row for each model, batch, variant and contestant."""
    hardware = recognise(results["machine"]["device"])
    expected = json.loads(EXPECTED.read_text()).get(hardware.name, {}) if hardware else {}
    peak = hardware.peak_flops.get("bfloat16") if hardware else None
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in results["runs"]:
        keys = ("model", "seq_len", "batch", "variant", "contestant")
        rows.setdefault(tuple(entry[key] for key in keys), []).append(entry)
    speeds = {
        row: statistics.median(run["tokens_per_s"] for run in runs)
        for row, runs in rows.items()
        if not any("error" in run for run in runs)
    }
    lines = [
        "| model | sequence | batch | variant | | tokens/s (least to most of the runs) | MFU, full attention | MFU, causal | reserved, GiB "
        "| active, GiB | titan / this | titan sim, tokens/s | measured / sim |",
        "|---" * 13 + "|",
    ]
    for row, runs in rows.items():
        start = "| " + " | ".join(map(str, row)) + " | "
        if row not in speeds:
            error = next(run["error"] for run in runs if "error" in run)
            lines.append(f"{start}{error.splitlines()[-1].replace('|', '/')} | | | | | | | |")
            continue
        speed, of_runs = speeds[row], [run["tokens_per_s"] for run in runs]
        flops = [MODELS[row[0]].sizes.flops_per_token(row[1], causal=c) for c in (False, True)]
        mfu = [f"{speed * f / peak:.1%}" if peak else "-" for f in flops]
        memory = [[run[key] or 0 for run in runs] for key in ("reserved_gib", "active_gib")]
        of_titan = speeds.get((*row[:-1], "titan"))
        simulated = expected.get(row_of(*row[:-1])) if row[-1] == "titan" else None
        cells = [
            f"{speed:,.0f} ({min(of_runs):,.0f} to {max(of_runs):,.0f})",
            *mfu,
            *(f"{max(gib):.1f}" if max(gib) else "-" for gib in memory),
            f"{of_titan / speed:.3f}" if of_titan else "-",
            f"{simulated:,.0f} | {speed / simulated:.3f}" if simulated else "- | -",
        ]
        lines.append(f"{start}{' | '.join(cells)} |")
    return "\n".join(lines)


def measure(args: argparse.Namespace, results: dict[str, Any], folder: Path) -> bool:
    """Add the runs that are missing to `results`, writing the file after each. Return whether none of them failed, now or earlier."""
    passed = True
    end = time.monotonic() + args.limit_s
    expected_s: dict[tuple[str, str], float] = {}
    for variant, number, contestant in product(args.variants, range(args.rounds), args.against):
        key = {
            name: getattr(args, name)
            for name in ("model", "batch", "seq_len", "warm_up", "steps")
        }
        key |= {"variant": variant, "contestant": contestant, "round": number}
        known = [done for done in results["runs"] if key.items() <= done.items()]
        if args.retry and known and "error" in known[0]:
            results["runs"].remove(known.pop())
        if known:
            passed = passed and "error" not in known[0]
            continue
        name = f"{variant}, round {number + 1}, {contestant}"
        left_s = end - time.monotonic()
        if left_s < expected_s.get((variant, contestant), 30):
            print(f"{name}, and what follows: no time left; run the same command again")
            return passed
        where = folder / f"{variant}-{number}-{contestant}"
        shutil.rmtree(where, ignore_errors=True)  # of a call that was stopped
        where.mkdir(parents=True)
        write_job(where, args, variant, emulate=results["machine"]["device"] == "CPU")
        try:
            figures = run(where, args, contestant, limit_s=left_s)
        except subprocess.TimeoutExpired:
            print(
                f"{name}: stopped after {left_s:.0f} s (--limit-s); run the same command again"
            )
            return passed
        expected_s[variant, contestant] = 1.1 * figures["wall_s"]
        passed = passed and "error" not in figures
        results["runs"].append(key | figures)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        said = figures.get("error") or f"{figures['tokens_per_s']:,.0f} tokens/s"
        print(f"{name}: {said} ({figures['wall_s']:.0f} s)", flush=True)
    return passed


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def one_of(known: dict[str, Any], separator: str = "") -> Any:
        def names(text: str) -> list[str]:
            chosen = text.split(",")
            for name in chosen:
                for part in name.split(separator) if separator else [name]:
                    if part not in known:
                        raise argparse.ArgumentTypeError(f"{part!r}: use {', '.join(known)}")
            return chosen

        return names

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="1B")
    add(
        "--variants",
        type=one_of(PARTS, "+"),
        default="eager,compile,compile+sac,compile+float8",
    )
    add("--against", type=one_of(COMMANDS), default="titan,torchtitan,bare")
    add("--json", type=Path, help="where the runs are gathered")
    add("--batch", type=int, help="sequences a step; default: what fits the card")
    add(
        "--expect", metavar="CARD,...", help="run nothing; simulate titan's rows on these cards"
    )
    add("--seq-len", type=int, default=8192)
    add("--rounds", type=int, default=3, help="runs of each row")
    add("--warm-up", type=int, default=5, help="steps that are not counted")
    add("--steps", type=int, default=20, help="steps that are counted")
    add("--retry", action="store_true", help="repeat runs that failed")
    add("--limit-s", type=float, default=560, help="seconds this call may take")
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "titan-steps-inductor")
    add("--keep", type=Path, help="keep the runs' folders, with their logs, here")
    args = parser.parse_args(argv)
    memory_gib = float(of_card("memory.total") or 0) / 1024
    args.batch = args.batch or MODELS[args.model].batch_on(memory_gib)
    if args.expect:
        args.against = ["titan"]
    elif not args.json:
        parser.error("--json is missing")
    if MODELS[args.model].family != "llama3" and not {"titan", "before"}.issuperset(
        args.against
    ):
        parser.error(f"{args.model} is for titan alone: --against titan")
    for variant, contestant in product(args.variants, args.against):
        for part in variant.split("+"):
            if contestant not in OWN.get(part, COMMANDS):
                parser.error(
                    f"{part} is for {', '.join(sorted(OWN[part]))}, not for {contestant}"
                )
    if min(args.warm_up, args.steps) < 1:
        parser.error("--warm-up and --steps must be at least 1: the first step compiles")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.expect:
        expect(args, args.expect.split(","))
        return
    if "torchtitan" in args.against and find_spec("torchtitan") is None:
        print(
            "torchtitan is not installed and is left out; the top of this script says what it needs"
        )
        args.against.remove("torchtitan")
    if "before" in args.against and not os.environ.get("BEFORE"):
        print(
            "before is left out: BEFORE names no folder with titan/ and models/ of an earlier commit"
        )
        args.against.remove("before")
    results: dict[str, Any] = {"machine": machine(), "runs": []}
    if args.json.exists():
        before = json.loads(args.json.read_text())
        if before["machine"] != results["machine"]:
            sys.exit(
                f"{args.json}: runs of {before['machine']}, and this is {results['machine']}; name another file"
            )
        results = before
    with tempfile.TemporaryDirectory() as folder:
        passed = measure(args, results, args.keep.resolve() if args.keep else Path(folder))
    print(f"\n{results['machine']}\n\n{table(results)}")
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
