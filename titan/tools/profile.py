"""Command `titan profile RUN`: the account of the time that a training step loses (account.py)."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from titan.base.run_folder import RunFolder
from titan.base.untrusted import InputError
from titan.commands import load_command
from titan.config.options import put_json
from titan.config.toml import read_toml

from .account import account, page
from .tables import parser_of
from .trace_files import ODD, find_traces, read_trace


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code, 2 for the user's mistakes."""
    options = parser_of("profile").parse_args(argv)
    try:
        paths = find_traces(options.run, step=options.step, rank=options.rank)
    except OSError as error:
        raise InputError(str(error)) from None
    # Eight ranks at most: a large trace takes seconds.
    found = [(path, read_trace(path)) for path in paths[:8]]
    if options.rank is None:  # the one that waits longest knows for whom
        found.sort(key=lambda each: -sum(each[1].exposed_ms))
    traces = {path.name.partition(".")[0]: trace for path, trace in found}
    run = RunFolder(options.run)
    job = options.job or run.config
    simulated = options.hardware and _simulate(job, len(paths), options.hardware)
    path = found[0][0]
    try:
        facts = account(
            traces,
            run.rows()[1:],
            tokens=options.tokens,
            simulated=simulated,
            job=read_toml(job)[0] if options.job or job.exists() else {},
        )
    except ODD as error:  # events of another form than those of torch
        raise InputError(f"{path}: not a trace of torch's profiler: {error!r}") from None
    if not put_json({"trace": str(path)} | facts, options.json):
        print(path, *page(facts), sep="\n")
    return 0


def _simulate(job: Path, world_size: int, hardware: str) -> Any:
    """Return the facts of `titan sim`."""
    words = [str(job), f"--world-size={world_size}", f"--hardware={hardware}", "--json=-"]
    with redirect_stdout(StringIO()) as out:
        load_command("sim")(words)
    return json.loads(out.getvalue())
