"""Ledger of measurements (`titan reproduce ID --record FILE`): what published jobs reach on people's machines, beside the predictions.

`ledger.toml` has the data, and `ledger.md` is the page made of it. A measurement of the same job, machine and person replaces the
earlier one. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from titan.config.errors import ConfigError, Problem, did_you_mean, key_text
from titan.config.toml import format_value, read_toml
from titan.untrusted import MAX_TEXT, printable, read_json

_SPEED = "tokens_per_s_per_gpu"
_Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
_Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Measurement(BaseModel):
    """Measured speed and memory of a published job. `titan reproduce ID --measured RUN --record FILE` writes one, without `who`."""

    model_config = ConfigDict(extra="forbid")

    id: _Text
    tokens_per_s_per_gpu: _Figure
    memory_gib: _Figure | None = None
    hardware: _Text
    who: _Text
    date: date
    torch: _Text
    titan: str = ""
    gpus: int = 0
    devices: list[str] = []
    machine: str = ""


class LedgerRow(Measurement):
    """Measurement with its prediction, as ledger.toml has it."""

    predicted_tokens_per_s_per_gpu: _Figure
    predicted_low: _Figure
    predicted_high: _Figure
    predicted_memory_gib: _Figure


def read_measurement(file: Path, *, name: str, gpus: int) -> Measurement:
    """Read the measurement of a published run from a TOML or JSON file.

    Args:
        file: The file, with the fields of `Measurement`.
        name: ID of the published run.
        gpus: Its number of GPUs.

    Raises:
        ConfigError: The file cannot be used.
        InputError: It is not JSON.
    """
    is_json = file.suffix == ".json"
    values, lines = (read_json(file, dict[str, Any]), {}) if is_json else read_toml(file)
    measured = _checked(Measurement, {"id": name} | values, file, lines)
    expected = {"id": name, "gpus": gpus}
    problems = [
        Problem(str(file), lines.get((key,), 0), key, f"is {getattr(measured, key)}, not {one}")
        for key, one in expected.items()
        if key in values and values[key] != one
    ]
    if problems:
        raise ConfigError(problems)
    return measured


def ledger_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder's ledger; none if there is no ledger.

    Raises:
        ConfigError: The ledger has a mistake, such as one made by hand.
    """
    file = folder / "ledger.toml"
    values, lines = read_toml(file) if file.exists() else ({}, {})
    rows = values.get("measurement", [])
    if values.keys() - {"measurement"} or not isinstance(rows, list):
        message = "has tables [[measurement]] only, as titan reproduce writes them"
        raise ConfigError([Problem(str(file), 0, "", message)])
    for number, row in enumerate(rows):
        _checked(LedgerRow, row, file, lines, above=("measurement", number))
    return rows


def _checked(
    model: type[Measurement],
    values: Any,
    file: Path,
    lines: Mapping[Any, int],
    above: tuple[str | int, ...] = (),
) -> Measurement:
    """Return values as a model. Raises ConfigError with the lines of the file; `above` are the keys that lead to the values."""
    problems: list[Problem] = []
    try:
        # As JSON, which lets a date be TOML's or a text.
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        for one in error.errors():
            place = (*above, *one["loc"])
            hint = did_you_mean(str(place[-1]), model.model_fields)
            say = {"missing": "is missing", "extra_forbidden": f"unknown key{hint}"}
            message = say.get(one["type"], one["msg"])
            problems.append(
                Problem(str(file), lines.get(place, lines.get(above, 0)), key_text(place), message)
            )
    raise ConfigError(problems)


def add(folder: Path, measured: Measurement, predicted: dict[str, float]) -> tuple[Path, bool]:
    """Add a measurement with its prediction to a folder's ledger, or replace the earlier one.

    Args:
        folder: Folder of ledger.toml and ledger.md.
        measured: The measurement.
        predicted: "tokens_per_s_per_gpu", "low", "high", "memory_gib".

    Returns:
        The page, and whether the measurement replaced one.
    """
    data = folder / "ledger.toml"
    rows = ledger_rows(folder)
    row = measured.model_dump(mode="json", exclude_defaults=True)
    row |= {f"predicted_{key}": round(value, 2) for key, value in predicted.items()}
    others = [other for other in rows if _key(other) != _key(row)]
    every = sorted([*others, row], key=_key)
    tables = (
        "\n".join(f"{key} = {format_value(value)}" for key, value in one.items()) for one in every
    )
    text = "".join(f"\n[[measurement]]\n{table}\n" for table in tables)
    data.write_text(f"# Written by titan reproduce ID --record FILE.\n{text}", encoding="utf-8")
    page = folder / "ledger.md"
    page.write_text("\n".join(_page(every)) + "\n", encoding="utf-8")
    return page, len(others) < len(rows)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["id"], row["hardware"], row["who"]


def _page(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page."""
    inside = sum(r["predicted_low"] <= r[_SPEED] <= r["predicted_high"] for r in rows)
    yield f"""# Measured and predicted

`titan reproduce ID --record FILE` writes this page from ledger.toml. Predictions are of the day of the record.

{inside} of {len(rows)} measured speeds are in the interval of their prediction.

| job | machine | who | date | torch | tokens/s/GPU measured | predicted | interval | error | GiB measured | predicted | error |
|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|"""
    for row in rows:
        names = ("id", "hardware", "who", "date", "torch")
        cells = [printable(row[name]).replace("|", "/") for name in names]
        interval = f"{row['predicted_low']:,.0f} to {row['predicted_high']:,.0f}"
        for key, form, more in ((_SPEED, ",.0f", [interval]), ("memory_gib", ".1f", [])):
            here, predicted = row.get(key), row[f"predicted_{key}"]
            measured, error = (
                (f"{here:{form}}", f"{predicted / here - 1:+.1%}") if here else ("", "")
            )
            cells += [measured, f"{predicted:{form}}", *more, error]
        yield f"| {' | '.join(cells)} |"
