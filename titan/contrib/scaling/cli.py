"""Command `titan scaling RUN... | RUNS.csv`, which fits the law of law.py."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

from titan.base.untrusted import parse_json, read_bytes
from titan.config.options import TRUST_OPTION, command_parser, positive, whole
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
    usage = (
        "RUN... | RUNS.csv [--leave-out K] [--predict N,D] [--out law.json] [--plot FILE.png]"
    )
    parser = command_parser("scaling", usage, summary=SUMMARY)
    add = parser.add_argument
    about = "run folders, folders of them, or a CSV file with params, tokens, loss"
    add("runs", nargs="+", type=Path, metavar="RUN", help=about)
    about = "first check: predict the K runs of most FLOPs from the others"
    add("--leave-out", type=whole, default=0, metavar="K", help=about)
    about = "predict a run, such as 8e9,1e12; may be repeated"
    add("--predict", type=_size, action="append", default=[], metavar="N,D", help=about)
    about = "count all parameters of a model with experts, not those of a token"
    add("--total", action="store_true", help=about)
    about = "draws of the bootstrap; default: 400"
    add("--draws", type=positive, default=400, metavar="K", help=about)
    add("--seed", type=whole, default=0, help="seed of the draws; default: 0")
    add("--out", type=Path, metavar="FILE.json", help="write the law, for `titan budget`")
    picture.add_option(parser, "draw losses over FLOPs, and what the law leaves")
    add("--trust-remote-code", **TRUST_OPTION)
    options = parser.parse_args(argv)
    require("scipy", extra="scaling", asked_by="titan scaling")
    require_writable(options, "out")
    picture.require_option(options)
    runs, shared = reading.read(
        options.runs, total=options.total, trust_remote_code=options.trust_remote_code
    )
    kept = runs[: max(0, len(runs) - options.leave_out)]
    left = runs[len(kept) :]
    reading.require_enough(kept, left_out=len(left))
    if left:
        check = fit(kept, draws=options.draws, seed=options.seed)
        print(
            f"checked: a law of the {len(kept)} smaller runs predicts the {len(left)} largest"
        )
        for run in left:
            print(prediction(check, run))
    # The law that is kept, drawn and asked is that of all runs.
    found = fit(runs, draws=options.draws, seed=options.seed)
    print("\n".join(_report(found, runs)))
    for params, tokens in options.predict:
        print(prediction(found, Run("", params, tokens, 0.0)))
    if options.out:
        content = vars(found) | {
            "law": found.law._asdict(),
            "intervals": {constant: found.interval(constant) for constant in Law._fields},
            "level": LEVEL,
            "runs": [run._asdict() for run in runs],
            "versions": {name: version(name) for name in ("titan-pretrain", "numpy", "scipy")},
            "shared": shared,
            "params": "total" if options.total else "active",
            "seed": options.seed,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {options.out}")
    if options.plot:
        picture.draw_law(found, runs, options.plot)
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


def prediction(found: Fit, run: Run) -> str:
    """Return the line about a run that the law was not fitted to.

    Args:
        found: The law.
        run: Its loss is 0 if it is not known.
    """
    loss, low, high = found.predict(run.params, run.tokens)
    text = f"N {run.params:.3g}, D {run.tokens:.3g}: loss {loss:.4f} ({low:.4f} to {high:.4f}, {LEVEL:.0%})"
    if run.loss:
        where = "inside" if low <= run.loss <= high else "OUTSIDE"
        text += f"; measured {run.loss:.4f} in {run.name}: {run.loss / loss - 1:+.2%}, {where}"
    if (times := run.flops / found.largest) > _FAR:
        text += (
            f"; {times:.0f} times the largest run: the interval is {high - low:.2f} nats wide"
        )
    return text


def load_law(file: Path) -> Fit:
    """Return the law of a file of `titan scaling --out`.

    Raises:
        InputError: The file is wrong.
    """
    return parse_json(read_bytes(file), Fit, name=f"{file}: no law of titan scaling")
