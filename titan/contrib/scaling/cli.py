"""Command `titan scaling RUN... | RUNS.csv`, which fits the law of law.py."""

from __future__ import annotations

import argparse
import json
import math
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from titan.config.options import TRUST_OPTION, command_parser, positive, whole
from titan.observe.sinks import require
from titan.sim.report.text import require_writable
from titan.untrusted import InputError, read_json

from . import runs as reading
from .law import CONSTANTS, LEAST_SHARE, LEVEL, Fit, Law, Run, fit

SUMMARY = "Fit L(N, D) = E + A / N^a + B / D^b to finished runs. docs/scaling.md"
FORMAT = 1
_POOR = 0.05  # of a loss: where the law is off by more, it is not the runs' law
_FAR = 10.0  # times the FLOPs of the largest run, from which a prediction is called far outside


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: A mistake of the user, which titan.cli reports.
    """
    usage = "RUN... | RUNS.csv [--leave-out K] [--predict N,D] [--out law.json] [--plot FILE.png]"
    parser = command_parser("scaling", usage, summary=SUMMARY)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders, folders of them, or a CSV file with params, tokens, loss")  # fmt: skip
    add(
        "--leave-out",
        type=whole,
        default=0,
        metavar="K",
        help="first check: predict the K runs of most FLOPs from the others",
    )
    add("--predict", type=_size, action="append", default=[], metavar="N,D", help="predict a run, such as 8e9,1e12; may be repeated")  # fmt: skip
    add("--total", action="store_true", help="count all parameters of a model with experts, not those of a token")  # fmt: skip
    add("--draws", type=positive, default=400, metavar="K", help="draws of the bootstrap; default: 400")  # fmt: skip
    add("--seed", type=whole, default=0, help="seed of the draws; default: 0")
    add("--out", type=Path, metavar="FILE.json", help="write the law, for `titan budget`")
    add("--plot", type=Path, metavar="FILE.png", help="draw losses over FLOPs, and what the law leaves")  # fmt: skip
    add("--trust-remote-code", **TRUST_OPTION)
    options = parser.parse_args(argv)
    require("scipy", extra="scaling", asked_by="titan scaling")
    if options.plot:
        require("matplotlib", extra="plot", asked_by="--plot")
    require_writable(options, "out", "plot")
    runs, shared = reading.read(
        options.runs, total=options.total, trust_remote_code=options.trust_remote_code
    )
    kept, left = (runs[:-options.leave_out], runs[-options.leave_out :]) if options.leave_out else (runs, [])  # fmt: skip
    reading.require_enough(kept, left_out=len(left))
    if left:
        check = fit(kept, draws=options.draws, seed=options.seed)
        print(f"checked: a law of the {len(kept)} smaller runs predicts the {len(left)} largest")
        for run in left:
            print(prediction(check, run, largest=kept[-1].flops))
    # The law that is kept, drawn and asked is that of all runs.
    found = fit(runs, draws=options.draws, seed=options.seed)
    print("\n".join(_report(found, runs)))
    for params, tokens in options.predict:
        print(prediction(found, Run("", params, tokens, 0.0), largest=runs[-1].flops))
    if options.out:
        about = {"shared": shared, "params": "total" if options.total else "active", "seed": options.seed}  # fmt: skip
        text = json.dumps(_as_json(found, runs) | about, indent=1)
        options.out.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {options.out}")
    if options.plot:
        from .picture import draw

        draw(found, runs, options.plot)
        print(f"wrote {options.plot}")
    return 0


def _size(text: str) -> tuple[float, float]:
    """Parse parameters and tokens of a run, such as 8e9,1e12."""
    try:
        params, tokens = map(float, text.split(","))
    except ValueError:
        params = tokens = 0.0
    if not 0 < params < 1e18 or not 0 < tokens < 1e18:
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
        lines.append("  that is more than runs differ by seeds: these losses do not follow the law, so do not extrapolate with it")  # fmt: skip
    if (again := len(runs) - len({run[1:] for run in runs})) > 0:
        lines.append(f"  {again} runs equal another one in N, D and loss: copies make intervals too narrow")  # fmt: skip
    if 1.01 * LEAST_SHARE * min(run.loss for run in runs) > found.law.E:
        lines.append("  E is as small as it may be: these runs do not show where the loss stops falling, so predictions may be far too low")  # fmt: skip
    if reading.is_line(runs):
        lines.append("  tokens grow with parameters in all runs, so the law cannot tell A / N^a from B / D^b, and intervals are too narrow: add runs with other tokens per parameter")  # fmt: skip
    return lines


def prediction(found: Fit, run: Run, *, largest: float) -> str:
    """Return the line about a run that the law was not fitted to.

    Args:
        found: The law.
        run: Its loss is 0 if it is not known.
        largest: FLOPs of the largest run that the law was fitted to.
    """
    loss, low, high = found.predict(run.params, run.tokens)
    text = f"N {run.params:.3g}, D {run.tokens:.3g}: loss {loss:.4f} ({low:.4f} to {high:.4f}, {LEVEL:.0%})"
    if run.loss:
        where = "inside" if low <= run.loss <= high else "OUTSIDE"
        text += f"; measured {run.loss:.4f} in {run.name}: {run.loss / loss - 1:+.2%}, {where}"
    if (times := run.flops / largest) > _FAR:
        text += f"; {times:.0f} times the largest run: the interval is {high - low:.2f} nats wide"
    return text


def _as_json(found: Fit, runs: list[Run]) -> dict[str, Any]:
    """Return all that is needed to use the law, and to fit it again."""
    return {
        "format": FORMAT,
        "law": found.law._asdict(),
        "intervals": {constant: found.interval(constant) for constant in CONSTANTS},
        "level": LEVEL,
        "runs": [run._asdict() for run in runs],
        "errors": found.errors,
        "draws": [list(law) for law in found.draws],
        "versions": {name: version(name) for name in ("titan-pretrain", "numpy", "scipy")},
    }


def load_law(file: Path) -> tuple[Fit, dict[str, Any]]:
    """Return the law of a file of `titan scaling --out`, and the file's other content.

    Raises:
        InputError: The file is wrong.
    """
    content: Any = read_json(file, dict)
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, and this titan reads {FORMAT}")
        law = Law(**{name: float(content["law"][name]) for name in CONSTANTS})
        draws = [Law(*map(float, constants)) for constants in content["draws"]]
        errors = [float(error) for error in content["errors"]]
        if not draws or not errors:
            raise ValueError("no draws")
        content["runs"] = [Run(**run) for run in content["runs"]]
        largest = max(run.flops for run in content["runs"])
        if not all(math.isfinite(each) for each in (largest, *errors, *law, *chain(*draws))):
            raise ValueError("a number that is not finite")
        if any(min(constants) < 0 or not constants.E for constants in (law, *draws)):
            raise ValueError("a constant below zero")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file}: no law of titan scaling: {error}") from None
    return Fit(law, draws, errors), content
