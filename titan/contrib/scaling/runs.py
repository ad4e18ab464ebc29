"""Runs that a law is fitted to, from run folders or a CSV file."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import correlation
from typing import Any

from titan.base.rows import Row, number
from titan.base.run_folder import METRICS, RunFolder
from titan.base.untrusted import InputError, printable, read_text
from titan.checkpoint.identity import sources_of
from titan.config.load import load_config
from titan.config.permissions import without_permissions
from titan.config.schema import JobConfig, ShardsSource, reads_chats, streams
from titan.data.sources import open_documents
from titan.data.special_tokens import fingerprint
from titan.data.tokenizer import build_tokenizer
from titan.data.tokenizer_files import tokenizer_path

from .law import Law, Run

LEAST = len(Law._fields) + 1
_SHORT = {"n": "params", "d": "tokens"}
_READ = 2**24  # bytes of a file of text that are compared
_LAST = 0.05  # share of a run's rows whose mean loss is its final loss


def final_loss(rows: list[Row]) -> float | None:
    """Return a run's last validation loss, or the mean of its last training losses; None if there is none."""
    validations = [x for row in rows if (x := number(row.get("validation_loss"))) is not None]
    if validations:
        return validations[-1]
    last = rows[-max(1, round(_LAST * len(rows))) :]
    losses = [x for row in last if (x := number(row.get("loss_mean"))) is not None]
    return sum(losses) / len(losses) if losses else None


def read(
    paths: Sequence[Path], *, trust_remote_code: bool = False
) -> tuple[list[Run], dict[str, Any]]:
    """Read runs, sorted by their FLOPs, and what all of them were trained on.

    Args:
        paths: run folders, folders of run folders, or one CSV file.
        trust_remote_code: obey model.trust_remote_code of the runs' jobs.

    Raises:
        InputError: A file is wrong, or runs differ in text or tokenizer.
    """
    if len(paths) == 1 and paths[0].suffix.lower() == ".csv":
        runs, shared = _of_csv(paths[0]), {}
    else:
        folders = {folder.resolve() for path in paths for folder in folders_of(path)}
        granted = ["model.trust_remote_code"] * trust_remote_code
        found = [of_folder(folder, granted=granted) for folder in sorted(folders)]
        shared = require_shared([text_settings(config) for _, config, _ in found])
        runs = [run for run, _, _ in found]
    return sorted(runs, key=lambda run: run.flops), shared


def require_enough(runs: Sequence[Run]) -> None:
    """Raise InputError if a law cannot be fitted to runs."""
    sizes, lengths = ({getattr(run, field) for run in runs} for field in ("params", "tokens"))
    if len(runs) < LEAST or min(len(sizes), len(lengths)) < 3:
        has = f"{len(runs)} runs with {len(sizes)} numbers of params, {len(lengths)} of tokens"
        raise InputError(f"{has}: the law needs {LEAST} runs, and three numbers of each")


def is_line(runs: Sequence[Run]) -> bool:
    """Return whether tokens grow with parameters so evenly that the law's two terms cannot be told apart."""
    logs = ([math.log(getattr(run, field)) for run in runs] for field in ("params", "tokens"))
    return abs(correlation(*logs)) > 0.998  # below, intervals hold the truth in simulated fits


def folders_of(path: Path) -> list[Path]:
    """Return a run folder, or those in a folder of them."""
    if RunFolder(path).metrics.is_file():
        return [path]
    if inside := sorted(file.parent for file in path.glob(f"*/{METRICS}")):
        return inside
    hint = RunFolder.near(path, METRICS)
    if path.is_file():
        raise InputError(f"{path}: expected run folders, or one file that ends in .csv")
    raise InputError(f"{path}: no run, and no folder of runs{hint}")


def of_folder(folder: Path, *, granted: Sequence[str] = ()) -> tuple[Run, JobConfig, list[Row]]:
    """Return a finished run, its job and its rows."""
    run = RunFolder(folder)
    config = load_config(run.config)
    obeyed, _ = without_permissions(config, run=folder, granted=granted)
    sizes = obeyed.model.sizes
    rows = [row for row in run.rows() if number(row.get("tokens"))]
    steps = steps_of(config)
    if not rows or rows[-1]["step"] < steps:
        done = rows[-1]["step"] if rows else 0
        raise InputError(
            f"{folder}: step {done} of {steps}: only finished runs have a final loss"
        )
    if not (loss := final_loss(rows)):
        raise InputError(f"{folder}: its last rows have no loss: did it diverge?")
    params, tokens = float(sizes.num_active_params), float(rows[-1]["tokens"])
    return Run(folder.name, params, tokens, loss), config, rows


def steps_of(config: JobConfig) -> int:
    """Return the steps of a whole run. It may have been stopped early on the schedule of a longer one."""
    return max(config.training.steps, config.lr_scheduler.total_steps or 0)


def text_settings(config: JobConfig) -> dict[str, Any]:
    """Return the settings of a job that all runs must share, since losses on other text or tokens do not compare.

    A text and a tokenizer are known by their content. Their paths stand in for it where the files are gone.
    """
    section = config.tokenizer
    where = tokenizer_path(config)
    tokenizer: dict[str, Any] = {"name": section.name, "path": where}
    template = section.chat_template
    with suppress(InputError, OSError):
        opened = build_tokenizer(section, hf_assets_path=config.model.hf_assets_path)
        tokenizer, template = {"identity": opened.identity}, opened.chat_template
    path = config.training.dataset_path
    found = [source for _, source in sources_of(config, "training")]
    chats = any(map(reads_chats, found))
    return {
        "training.seq_len": config.training.seq_len,
        "data.validation_fraction": config.data.validation_fraction,
        "training.dataset": config.training.dataset,
        "training.dataset_path": path and ([*map(_text_of, found)] or path),
        "data.sources": [*map(_text_of, config.data.sources)],
        "tokenizer.chat_template": fingerprint(template) if chats else "",
        "tokenizer": tokenizer,
    }


def text_of_validation(config: JobConfig) -> dict[str, Any]:
    """Return the settings of a job that runs must share for their validation losses to compare."""
    section = config.validation
    found = sources_of(config, "validation") if section.dataset else ()
    return {
        "validation.dataset": section.dataset,
        "validation.dataset_path": [_text_of(source) for _, source in found]
        or section.dataset_path,
        "validation.seq_len": section.seq_len or config.training.seq_len,
    }


def _text_of(source: Any) -> dict[str, Any]:
    """Return the options of a source, with what its files hold in place of their path."""
    options = source.model_dump(mode="json")
    if hasattr(source, "path") and not streams(source):
        with suppress(InputError, OSError, TypeError, LookupError):
            if isinstance(source, ShardsSource):
                files = [*Path(source.path).expanduser().glob("*.bin")]
            else:
                identity: Any = open_documents(source).identity
                files = [Path(file) for file, *_ in identity[-1]]
            options["path"] = sorted(map(_content, files))
    return options


@cache
def _content(file: Path) -> str:
    """Return a digest of a file's size and its first 16 MiB."""
    with file.open("rb") as opened:
        digest = hashlib.sha256(opened.read(_READ)).hexdigest()
    return f"{file.stat().st_size} bytes, {digest[:16]}"


def require_shared(settings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of all runs, which must agree: losses on other text or tokens do not compare."""
    for key in settings[0] if settings else ():
        values = list(dict.fromkeys(str(each[key]) for each in settings))
        if len(values) > 1:
            shown = ", ".join(map(repr, values[:3]))
            raise InputError(f"runs differ in {key}: {shown:.300}: their losses do not compare")
    return settings[0] if settings else {}


def _of_csv(file: Path) -> list[Run]:
    """Return the runs of a CSV file with columns params (or N), tokens (or D), loss, and perhaps name."""
    rows = csv.DictReader(read_text(file).removeprefix("\ufeff").splitlines())
    try:
        names = [name.strip().lower() for name in rows.fieldnames or ()]
        rows.fieldnames = [_SHORT.get(name, name) for name in names]
        if len({*rows.fieldnames}) < len(names):
            raise InputError(f"{file}: two of the columns {', '.join(names)} mean the same")
        return [_run(row, f"{file}:{rows.line_num}") for row in rows]
    except csv.Error as error:
        raise InputError(f"{file}:{rows.line_num}: {error}") from None


def _run(row: Mapping[Any, Any], where: str) -> Run:
    """Return the run of a row."""
    if None in row:
        raise InputError(f"{where}: has more fields than the header")
    numbers = []
    for field in Run._fields[1:]:
        text = row.get(field) or ""
        numbers.append(number_in(text))
        if not 0 < numbers[-1] < 1e18:
            shown = printable(text) or "missing"
            raise InputError(f"{where}: {field} is {shown}, not a number above zero")
    run = Run(row.get("name") or where, *numbers)
    if run.params < 1e4 or run.tokens < run.params / 10:
        sizes = f"{run.params:g} parameters and {run.tokens:g} tokens"
        raise InputError(
            f"{where}: {sizes}: are these millions and billions? Write 70e6 for 70 million"
        )
    return run


def number_in(text: str) -> float:
    """Return the number that a text is; no number (nan) if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
