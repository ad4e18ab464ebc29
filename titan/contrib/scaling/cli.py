"""Command `titan scaling RUN... | RUNS.csv`, which fits the law of law.py."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

from titan.config.options import TRUST_OPTION, put_json, table_parser
from titan.config.toml import table_beside
from titan.observe.sinks import require
from titan.sim.report.text import require_writable

from . import picture
from . import runs as reading
from .law import LEAST_SHARE, LEVEL, Fit, Law, Run, fit

_POOR = 0.05  # of a loss: where the law is off by more, it is not the runs' law
_FAR = 10.0  # times the FLOPs of the largest run, from which a prediction is called far outside
_ON_A_LINE = (
    "  tokens grow with parameters in all runs, so the law cannot tell A / N^a from B / D^b, and intervals are too narrow: "
    "add runs with other tokens per parameter"
)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: A mistake of the user, which titan.cli reports.
    """
    parser = table_parser(
        "scaling", table_beside(__file__, "commands.toml")["scaling"], size=_size
    )
    parser.add_json()
    parser.add_argument("--trust-remote-code", **TRUST_OPTION)
    options = parser.parse_args(argv)
    require("scipy", extra="scaling", asked_by="titan scaling")
    require_writable(options, "output")
    picture.require_option(options)
    runs, shared = reading.read(options.runs, trust_remote_code=options.trust_remote_code)
    # The law that is kept, drawn and asked is that of all runs.
    kept = runs[: max(0, len(runs) - options.leave_out)]
    reading.require_enough(kept)
    lines, checked = [], []
    if left := runs[len(kept) :]:
        check = fit(kept, draws=options.draws)
        checked = [_predicted(check, run) for run in left]
        lines = [
            f"checked: a law of the {len(kept)} smaller runs predicts the {len(left)} largest"
        ]
    found = fit(runs, draws=options.draws)
    wanted = [_predicted(found, Run("", n, d, 0.0)) for n, d in options.predict]
    lines += [*map(_line, checked), *_report(found), *map(_line, wanted)]
    law = vars(found) | {
        "law": found.law._asdict(),
        "intervals": {constant: found.interval(constant) for constant in Law._fields},
        "level": LEVEL,
        "runs": [run._asdict() for run in runs],
        "shared": shared,
    }
    if not put_json(law | {"checked": checked, "predictions": wanted}, options.json):
        print("\n".join(lines))
    if options.output:
        put_json(law, options.output, indent=1)
        print(f"wrote {options.output}")
    if options.plot:
        picture.draw_law(found, options.plot)
    return 0


def _size(text: str) -> list[float]:
    """Parse parameters and tokens of a run, such as 8e9,1e12."""
    size = [reading.number_in(number) for number in text.split(",")]
    if len(size) != 2 or not all(1e4 <= number < 1e18 for number in size):  # 8,1 means billions
        problem = f"expected parameters and tokens, such as 8e9,1e12, got {text[:40]!r}"
        raise ArgumentTypeError(problem)
    return size


def _report(found: Fit) -> list[str]:
    """Return the lines about the fit."""
    runs, errors = found.runs, found.errors
    lines = [f"{len(runs)} runs of {runs[0].flops:.2g} to {runs[-1].flops:.2g} FLOPs (6 N D)"]
    for name, value in found.law._asdict().items():
        low, high = found.interval(name)
        lines.append(f"  {name}  {value:.4g}  ({low:.4g} to {high:.4g}, {LEVEL:.0%})")
    worst, run = max(zip(errors, runs, strict=True), key=lambda pair: abs(pair[0]))
    lines.append(f"  the law is off by at most {worst:+.2%}, in {run.name}")
    if abs(worst) > _POOR:
        lines.append(
            "  that is more than runs differ by seeds: these losses do not follow the law, so do not extrapolate with it"
        )
    if 1.01 * LEAST_SHARE * min(run.loss for run in runs) > found.law.E:
        lines.append(
            "  E is as small as it may be: these runs do not show where the loss stops falling, so predictions may be far too low"
        )
    if reading.is_line(runs):
        lines.append(_ON_A_LINE)
    return lines


def _predicted(found: Fit, run: Run) -> dict[str, Any]:
    """Predict a run that the law was not fitted to. Its loss is 0 if it is not known."""
    loss, *interval = found.predict(run.params, run.tokens)
    times = found.times(run.params, run.tokens)
    return run._asdict() | {"expected": loss, "interval": interval, "times": times}


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
