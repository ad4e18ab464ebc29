"""Golden figures of config errors: which file, line and key each mistake of tests/config/errors.json is reported at.

`errors()` checks every job of that file again, and a sample of drawn layouts. tests/config/test_config_errors.py compares the result with
what is saved. After a change that is meant: `python -m tests.support.golden_errors`, and read the difference.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.drawn_layouts import draw
from titan.checks import machine
from titan.checks.rules import load_to_run
from titan.config.errors import ConfigError, Problem

SAVED = Path(__file__).parents[1] / "config" / "errors.json"
NUM_LAYOUTS = 2000
Job = dict[str, Any]
"""A row of errors.json. job: what job.toml holds; files: other files; argv, ranks and environment: how it is checked; problems and exit: the
result. `<<9 x 5000>>` in a text stands for 5000 nines."""


def jobs() -> list[Job]:
    """Return the rows of errors.json."""
    return json.loads(SAVED.read_text())["jobs"]


def expand(text: str) -> str:
    return re.sub(r"<<(.+?) x (\d+)>>", lambda match: match[1] * int(match[2]), text)


def argv(job: Job) -> list[str]:
    return [expand(word) for word in job.get("argv", ["job.toml"])]


@contextlib.contextmanager
def environment(job: Job) -> Iterator[None]:
    """Set a row's environment variables; null stands for a variable that is missing."""
    variables = {**dict.fromkeys(("RANK", "WORLD_SIZE")), **job.get("environment", {})}
    with patch.dict(os.environ):
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = expand(value)
        yield


def make_folder(folder: Path) -> None:
    """Fill a folder with one of everything that a job may name wrongly."""
    for name in ("empty", "junk", "ranks", "saved/step-5"):
        (folder / name).mkdir(parents=True)
    (folder / "file").write_text("text")
    (folder / "junk" / "tokenizer.json").write_text("{")
    (folder / "junk" / "index.json").write_text('{"format": 7}')
    (folder / "ranks" / "tokenizer.model").write_text("no rank\n")
    (folder / "saved" / "step-5" / ".metadata").write_text("")


def write_files(job: Job, folder: Path) -> None:
    """Write a row's job.toml and its other files."""
    for name, text in {"job.toml": job.get("job", ""), **job.get("files", {})}.items():
        data = expand(text).encode("utf-8", errors="surrogateescape")
        (folder / name).write_bytes(data)


def problems_of(job: Job) -> list[Problem]:
    """Return what is wrong with a row whose files are in the current folder."""
    with environment(job):
        try:
            load_to_run(argv(job), world_size=job.get("ranks", 1), here=True, warn=False)
        except ConfigError as error:
            return error.problems
    return []


def errors() -> dict[str, Any]:
    """Return the rows of errors.json with today's results, and the keys that each drawn layout is refused for."""
    results = []
    before = Path.cwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(machine, "count_accelerators", lambda: 0),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        os.chdir(folder)
        try:
            make_folder(Path())
            for job in jobs():
                write_files(job, Path())
                places = [[p.file, p.line, p.key] for p in problems_of(job)]
                results.append(job | {"exit": 2 if places else 0, "problems": places})
        finally:
            os.chdir(before)
    return {"jobs": results, "layouts": _layouts()}


def _layouts() -> dict[str, list[str]]:
    """Return the keys by the number of a drawn layout, of those that are refused."""
    source = random.Random(0)
    cases = [draw(source) for _ in range(NUM_LAYOUTS)]
    keys = {
        str(n): [problem.key for problem in case.problems()] for n, case in enumerate(cases)
    }
    return {number: refused for number, refused in keys.items() if refused}


def save() -> None:
    """Write today's results to errors.json, a line each."""
    result = errors()
    rows = ",\n".join(json.dumps(job) for job in result["jobs"])
    layouts = ",\n".join(
        f"{json.dumps(n)}: {json.dumps(keys)}" for n, keys in result["layouts"].items()
    )
    SAVED.write_text(f'{{"jobs": [\n{rows}\n], "layouts": {{\n{layouts}\n}}}}\n')


if __name__ == "__main__":
    save()
