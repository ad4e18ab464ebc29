"""Save figures that a change of the code must not change, and compare them with those of now.

    python scripts/golden.py save FILE [PART ...]        at the commit to start from
    python scripts/golden.py compare FILE [PART ...]     after the change; exit code 1 and a line per difference

Parts (all of them if none is named):
    runs      `titan train` of small jobs on one and two ranks: rows of metrics, the recorded last step (what `titan diff`
              compares), and the same from a run that stopped halfway and resumed. Bit for bit.
    sims      `titan sim --json` of shipped jobs and layouts, to the last digit, and the order of collectives of
              each rank and stream (`--trace`)
    errors    the config errors of tests/config as (file, line, key) and exit code
Figures are bits of one machine and one torch: save and compare on the same ones. The accuracy page and docs/parity.md
have their own commands (scripts/sim_accuracy.py, pytest tests/parity).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titan.config.toml import tomllib

ROOT = Path(__file__).parents[1]
JOB = "train_configs/debug_model.toml"
# Columns of metrics.jsonl that hold time or memory of this run.
ROW_KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss", "bits_per_byte")

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def jobs(part: str) -> Iterator[tuple[str, int, str, list[str]]]:
    """Yield name, ranks, job file and settings of the rows of a part of golden.toml."""
    for name, row in TABLE[part].items():
        yield name, row["ranks"], row.get("job", JOB), row.get("settings", "").split()


def titan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a titan command. Raises SystemExit with its output if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "titan.cli", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{result.stdout}\n{result.stderr}")
    return result


def runs() -> Iterator[tuple[str, Any]]:
    """Yield each small run's rows and its recorded last step (titan/numerics/recorder.py), resumed and not."""
    for name, ranks, job, settings in jobs("runs"):
        common = TABLE["small" if job == JOB else "other"].split()
        with tempfile.TemporaryDirectory() as folder:
            for last in ("", "--training.steps=3"):
                run_dir = f"{folder}/resumed" if last else f"{folder}/whole"
                command = ["train", job, *common, f"--job.dump_folder={run_dir}"]
                command += [*settings, f"--nproc={ranks}"]
                command.append("--debug.record_steps=[6]")
                if last:
                    titan(*command, last)
                titan(*command)
                yield f"{name}, {Path(run_dir).name}", _run_figures(Path(run_dir))


def _run_figures(run_dir: Path) -> dict[str, Any]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k in ROW_KEYS} for line in lines]
    recorded = json.loads((run_dir / "recorded" / "step-6.json").read_text())["tensors"]
    tensors = {f"{t['kind']} of {t['name']}": [t["norm"], t["sums"]] for t in recorded}
    return {"rows": rows, "tensors": tensors}


def sims() -> Iterator[tuple[str, Any]]:
    """Yield each simulation's JSON, and the order of collectives by rank and stream."""
    for name, ranks, job, settings in jobs("sims"):
        with tempfile.TemporaryDirectory() as folder:
            out, trace = f"{folder}/sim.json", f"{folder}/trace.json"
            command = [f"--world-size={ranks}", "--hardware=h100-sxm", "--no-cache"]
            titan("sim", job, *settings, *command, f"--json={out}", f"--trace={trace}")
            figures = json.loads(Path(out).read_text())
            figures.pop("wall_s")
            events = json.loads(Path(trace).read_text())["traceEvents"]
            yield name, {"json": figures, "collectives": _collectives(events)}


def _collectives(events: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return for each rank and stream how many collectives there are, and a digest of their order."""
    order: dict[str, list[Any]] = {}
    for event in events:
        details = event.get("args", {})
        if event["ph"] == "X" and "group" in details:
            call = (event["name"], details["group"], details.get("bytes"), details.get("phase"))
            order.setdefault(f"rank {event['pid']}, stream {event['tid']}", []).append(call)
    return {
        place: [len(calls), hashlib.sha256(repr(calls).encode()).hexdigest()[:16]]
        for place, calls in order.items()
    }


def errors() -> Iterator[tuple[str, Any]]:
    """Yield the config errors of the tests' mistakes, which tests/config/errors.json keeps, too."""
    sys.path.insert(0, str(ROOT))
    from tests.support.golden_errors import errors as cases

    yield from cases().items()


PARTS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "runs": runs,
    "sims": sims,
    "errors": errors,
}


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each value that is not the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from differences(before.get(key), now.get(key), f"{where} > {key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{where} > {number}")
    elif before != now:
        yield f"{where}: {before} before, {now} now"


def main() -> int:
    """Save or compare; return the exit code."""
    verb, path, *names = sys.argv[1:]
    file = Path(path)
    kept = json.loads(file.read_text()) if file.exists() else {}
    count = 0
    for part in names or PARTS:
        figures = kept.setdefault(part, {}) if verb == "save" else kept[part]
        for name, value in PARTS[part]():
            value = json.loads(json.dumps(value))
            if verb == "save":
                figures[name] = value
                file.write_text(json.dumps(kept, indent=1))
                print(f"{part}: {name}: saved", flush=True)
                continue
            lines = list(differences(figures.get(name), value))
            count += len(lines)
            print(
                f"{part}: {name}: {'equal' if not lines else f'{len(lines)} differences'}",
                flush=True,
            )
            for line in lines[:10]:
                print(f"   {line}")
    print(f"{count} differences" if verb == "compare" else f"saved {file}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
