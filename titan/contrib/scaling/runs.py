"""Settings that runs must share so that their losses compare, and the losses in their rows."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from titan.base.rows import Row, number
from titan.base.run_folder import CONFIG, RunFolder
from titan.base.untrusted import InputError
from titan.checkpoint.identity import sources_of
from titan.config.schema import JobConfig, ShardsSource, reads_chats, streams
from titan.data.sources import open_documents
from titan.data.special_tokens import fingerprint
from titan.data.tokenizer import build_tokenizer
from titan.data.tokenizer_files import tokenizer_path

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


def folders_of(path: Path) -> list[Path]:
    """Return a run folder, or those in a folder of them."""
    if RunFolder(path).config.is_file():
        return [path]
    if inside := sorted(file.parent for file in path.glob(f"*/{CONFIG}")):
        return inside
    hint = RunFolder.near(path, CONFIG)
    raise InputError(f"{path}: no run, and no folder of runs{hint}")


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


def require_shared(settings: list[dict[str, Any]]) -> None:
    """Raise InputError if the settings of runs differ: losses on other text or tokens do not compare."""
    for key in settings[0]:
        values = list(dict.fromkeys(str(each[key]) for each in settings))
        if len(values) > 1:
            shown = ", ".join(map(repr, values[:3]))
            raise InputError(f"runs differ in {key}: {shown:.300}: their losses do not compare")
