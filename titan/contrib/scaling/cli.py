"""Command `titan scaling RUN... | RUNS.csv`, which fits the law of law.py."""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

from titan.base.untrusted import InputError, parse_json, read_bytes
from titan.config.options import TRUST_OPTION, command_parser, positive, put_json, whole
from titan.observe.sinks import require
from titan.sim.report.text import require_writable

from . import picture
from . import runs as reading
from .law import LEAST_SHARE, LEVEL, Fit, Law, Run, fit

SUMMARY = "Fit L(N, D) = E + A / N^a + B / D^b to finished runs. docs/scaling.md"
_POOR = 0.05  # of a loss: where the law is off by more, it is not the runs' law
_FAR = 10.0  # times the FLOPs of the largest run, from which a prediction is called far outside


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: A mistake of the user, which titan.cli reports.
    """
    usage = "RUN... | RUNS.csv [--leave-out K] [--predict N,D] [--output law.json] [--json [FILE]] [--plot FILE.png]"
    parser = command_parser("scaling", usage, summary=SUMMARY)
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folders, folders of them, or a CSV file with params, tokens, loss",
    )
    add(
        "--leave-out",
        type=whole,
        default=0,
        metavar="K",
        help="first check: predict the K runs of most FLOPs from the others",
    )
    add(
        "--predict",
        type=_size,
        action="append",
        default=[],
        metavar="N,D",
        help="predict a run, such as 8e9,1e12; may be repeated",
    )
    add(
        "--total",
        action="store_true",
        help="count all parameters of a model with experts, not those of a token",
    )
    add(
        "--draws",
        type=positive,
        default=400,
        metavar="K",
        help="draws of the bootstrap; default: 400",
    )
    add("--seed", type=whole, default=0, help="seed of the draws; default: 0")
    add("--output", type=Path, metavar="FILE.json", help="write the law, for `titan budget`")
    picture.add_option(parser, "draw losses over FLOPs, and what the law leaves")
    parser.add_json()
    add("--trust-remote-code", **TRUST_OPTION)
    options = parser.parse_args(argv)
    require("scipy", extra="scaling", asked_by="titan scaling")
    require_writable(options, "output")
    picture.require_option(options)
    runs, shared = reading.read(
        options.runs, total=options.total, trust_remote_code=options.trust_remote_code
    )
    kept = runs[: max(0, len(runs) - options.leave_out)]
    left = runs[len(kept) :]
    reading.require_enough(kept, left_out=len(left))
    lines, checked = [], []
    if left:
        check = fit(kept, draws=options.draws, seed=options.seed)
        checked = [predicted(check, run) for run in left]
        lines.append(
            f"checked: a law of the {len(kept)} smaller runs predicts the {len(left)} largest"
        )
    # The law that is kept, drawn and asked is that of all runs.
    found = fit(runs, draws=options.draws, seed=options.seed)
    wanted = [predicted(found, Run("", n, d, 0.0)) for n, d in options.predict]
    lines += [*map(_line, checked), *_report(found, runs), *map(_line, wanted)]
    law = vars(found) | {
        "law": found.law._asdict(),
        "intervals": {constant: found.interval(constant) for constant in Law._fields},
        "level": LEVEL,
        "runs": [run._asdict() for run in runs],
        "versions": {name: version(name) for name in ("titan-pretrain", "numpy", "scipy")},
        "shared": shared,
        "params": "total" if options.total else "active",
        "seed": options.seed,
    }
    if not put_json(law | {"checked": checked, "predictions": wanted}, options.json):
        print("\n".join(lines))
    if options.output:
        put_json(law, options.output, indent=1)
        print(f"wrote {options.output}")
    if options.plot:
        picture.draw_law(found, runs, options.plot)
    return 0


def _size(text: str) -> tuple[float, float]:
    """Parse parameters and tokens of a run, such as 8e9,1e12."""
    try:
        params, tokens = map(float, text.split(","))
    except ValueError:
        params = tokens = 0.0
    if not 1e4 <= params < 1e18 or not 1e4 <= tokens < 1e18:  # 8,1 means billions
        raise argparse.ArgumentTypeError(
            f"expected parameters and tokens, such as 8e9,1e12, got {text[:40]!r}"
        )
    return params, tokens


def _report(found: Fit, runs: list[Run]) -> list[str]:
    """Return the lines about the fit."""
    lines = [f"{len(runs)} runs of {runs[0].flops:.2g} to {runs[-1].flops:.2g} FLOPs (6 N D)"]
    for name, value in found.law._asdict().items():
        low, high = found.interval(name)
        lines.append(f"  {name}  {value:.4g}  ({low:.4g} to {high:.4g}, {LEVEL:.0%})")
    worst = max(zip(found.errors, runs, strict=True), key=lambda pair: abs(pair[0]))
    lines.append(f"  the law is off by at most {worst[0]:+.2%}, in {worst[1].name}")
    if abs(worst[0]) > _POOR:
        lines.append(
            "  that is more than runs differ by seeds: these losses do not follow the law, so do not extrapolate with it"
        )
    if (again := len(runs) - len({run[1:] for run in runs})) > 0:
        lines.append(
            f"  {again} runs equal another one in N, D and loss: copies make intervals too narrow"
        )
    if 1.01 * LEAST_SHARE * min(run.loss for run in runs) > found.law.E:
        lines.append(
            "  E is as small as it may be: these runs do not show where the loss stops falling, so predictions may be far too low"
        )
    if reading.is_line(runs):
        lines.append(
            "  tokens grow with parameters in all runs, so the law cannot tell A / N^a from B / D^b, and intervals are too narrow: "
            "add runs with other tokens per parameter"
        )
    return lines


def predicted(found: Fit, run: Run) -> dict[str, Any]:
    """Return what the law expects of a run that it was not fitted to.

    Args:
        found: The law.
        run: Its loss is 0 if it is not known.
    """
    loss, *interval = found.predict(run.params, run.tokens)
    expected = {"expected": loss, "interval": interval, "times": run.flops / found.largest}
    return run._asdict() | expected


def _line(row: dict[str, Any]) -> str:
    """Return the line about a prediction."""
    expected, measured, (low, high) = row["expected"], row["loss"], row["interval"]
    text = f"N {row['params']:.3g}, D {row['tokens']:.3g}: loss {expected:.4f} ({low:.4f} to {high:.4f}, {LEVEL:.0%})"
    if measured:
        where = "inside" if low <= measured <= high else "OUTSIDE"
        text += f"; measured {measured:.4f} in {row['name']}: {measured / expected - 1:+.2%}, {where}"
    if row["times"] > _FAR:
        text += f"; {times(row['times'])} times the largest run: the interval is {high - low:.2f} nats wide"
    return text


def times(factor: float) -> str:
    """Return a factor as text, such as 1,200 or 2.7e18."""
    return f"{factor:,.0f}" if factor < 1e6 else f"{factor:.1e}".replace("e+", "e")


def load_law(file: Path) -> Fit:
    """Return the law of a file of `titan scaling --output`.

    Raises:
        InputError: The file is wrong.
    """
    if file.suffix.lower() == ".csv":
        fix = f"titan scaling {file} --output law.json"
        raise InputError(
            f"{file}: that is a CSV of runs, to which a law is fitted first: {fix}"
        )
    return parse_json(read_bytes(file), Fit, name=f"{file}: no law of titan scaling")
