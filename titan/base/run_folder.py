"""Run folder: its readers (`RunFolder`), and the writers of environment.json, status.json and a log for each rank."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AllowInfNan, Field

import titan
from titan.base.rows import Row, read_rows
from titan.base.run_writer import LineHandler, run_files
from titan.base.untrusted import (
    MAX_TEXT,
    Count,
    Finite,
    InputError,
    Rank,
    parse_json,
    printable,
    read_bytes,
    read_json,
    tail_lines,
)

CONFIG, METRICS, EVENTS = "config.toml", "metrics.jsonl", "events.jsonl"
STATUS, ENVIRONMENT = "status.json", "environment.json"
SIGNS = (METRICS, STATUS, CONFIG, ENVIRONMENT)
"""Names of files of which every run folder has at least one."""
# Up to the year 5138. A part of an account is negative for a while after `repeat`.
_Seconds = Annotated[float, AllowInfNan(False), Field(gt=-1e11, lt=1e11)]
T = TypeVar("T")
State = Literal["running", "done", "stopped", "failed", "hung"]

# Variables that change the behaviour of a run. Only listed variables are written, so no secret can slip through.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_RESTART_COUNT",
)
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "PYTORCH_", "FI_", "UCX_")
_PACKAGES = ("numpy", "pydantic", "tiktoken", "tokenizers", "datasets", "torchao", "triton")


def write_environment(run_dir: Path, *, device_names: Iterable[str], world_size: int) -> None:
    """Write environment.json, with the facts to repeat a run: versions, source, machine, settings.

    Args:
        run_dir: run folder.
        device_names: names of the ranks' devices.
        world_size: number of ranks.
    """
    import torch

    content = {
        "titan": titan.__version__,
        "git": git_state(Path(titan.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: version(name) for name in _PACKAGES if find_spec(name)},
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "device_names": list(device_names),
        "world_size": world_size,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
        "written_unix_s": round(time.time(), 3),
    }
    run_files(run_dir).replace(ENVIRONMENT, json.dumps(content, indent=2) + "\n")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the source tree and whether files differ from it, or None outside a checkout."""

    def git(*arguments: str) -> str:
        # On a network file system git may take long, and the run must start.
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=10
        )

    try:
        # An installed copy may be inside another project's checkout, in its virtual environment. That commit is not titan's.
        git("ls-files", "--error-unmatch", "__init__.py")
        commit, changes = git("rev-parse", "HEAD").strip(), git("status", "--porcelain")
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def write_status(
    run_dir: Path,
    *,
    state: State,
    exit_code: int | None = None,
    step: int | None = None,
    reason: str = "",
    kind: str = "",
    rank: int = 0,
    **facts: Any,
) -> None:
    """Write status.json: the state of the run, and its exit code (null while it runs). It raises no OSError.

    torchrun turns every exit code but 0 into 1; this file keeps the real one.

    Args:
        run_dir: run folder.
        state: state of the run.
        exit_code: exit code of the run; None while it runs.
        step: number of the step; None: the last one that the folder tells of, for a process that
            has trained none.
        reason: cause of a failure, for people.
        kind: kind of a failure (titan/base/errors.py).
        rank: rank that noticed the failure.
        **facts: more of a run that goes on, such as `seconds`, its account of time.
    """
    if step is None:
        step = _last_step(run_dir)
    # Only failures have a kind.
    content = {"state": state, "exit_code": exit_code, "step": step, "reason": reason} | facts
    if kind:
        content |= {"kind": kind, "rank": rank}
    text = json.dumps(content | {"unix_s": round(time.time(), 3)}, indent=2) + "\n"
    # While running, this is written every few seconds, and training must not wait for the disk.
    is_last = state != "running"
    run_files(run_dir).replace(STATUS, text, durable=is_last, last=is_last)


@dataclass(frozen=True)
class _Row:
    step: Count


def _last_step(run_dir: Path) -> int:
    """Return the last step of a run. status.json, written every two seconds, may be behind metrics.jsonl."""
    step = RunFolder(run_dir).status.step
    with suppress(InputError):
        # A crash may have torn the last line.
        for line in tail_lines(run_dir / METRICS, limit=2**14, within=run_dir):
            with suppress(InputError):
                step = max(step, parse_json(line, _Row, name="").step)
    return step


@dataclass(frozen=True)
class Status:
    """Content of status.json. Types are checked when it is read, since anyone may have written it.

    Attributes:
        state: a `State`, or empty without a file.
        exit_code: exit code of the run; None while it runs.
        step: number of the step.
        reason: cause of a failure, for people.
        kind: kind of a failure (titan/base/errors.py).
        rank: rank that noticed the failure.
        unix_s: time of the write.
    """

    state: str = ""
    exit_code: int | None = None
    step: Count = 0
    reason: str = ""
    kind: str = ""
    rank: Rank = 0
    unix_s: Finite = 0.0


@dataclass(frozen=True)
class _Event:
    """Fields of an event that are read again, with the types to check: anyone may have written the file."""

    event: str
    unix_s: _Seconds
    step: Count
    state: str = ""
    restarts: Count = 0
    lost_steps: Count = 0
    seconds: dict[str, _Seconds] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run, as its readers find it. Anyone may have written it, so no link out of it is followed.

    Attributes:
        path: the folder.
    """

    path: Path

    @staticmethod
    def find(paths: Iterable[Path]) -> list[Path]:
        """Return run folders. Replica groups take the place of their run's folder, and runs that of a folder that is no run."""
        found: list[Path] = []
        for path in paths:
            groups = [file.parent for file in path.glob(f"group-[0-9]*/{STATUS}")]
            is_run = (path / CONFIG).exists() or (path / STATUS).exists()
            runs = [] if is_run else sorted(file.parent for file in path.glob(f"*/{STATUS}"))
            found += sorted(groups, key=lambda group: int(group.name[6:])) or runs or [path]
        return found

    @staticmethod
    def near(folder: Path, *signs: str) -> str:
        """Return a hint for the error about a folder that is no run: the runs near it.

        Args:
            folder: the folder.
            *signs: names of files of which a run has one; by default, those of any run.
        """
        near = sorted({f.parent for s in signs or SIGNS for f in folder.parent.glob(f"*/{s}")})
        return f"; runs near it: {', '.join(map(str, near[:5]))}" if near else ""

    @property
    def config(self) -> Path:
        """Return the file of the job."""
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        """Return the file of the rows of metrics."""
        return self.path / METRICS

    def rows(self) -> list[Row]:
        """Return the rows of metrics, none if there is no file.

        Raises:
            InputError: the file cannot be read.
        """
        return read_rows(self.metrics) if self.metrics.exists() else []

    def events(self) -> list[Row]:
        """Return the events of the run, oldest first, without torn and odd lines. A missing file has no events."""
        rows, path = [], self.path / EVENTS
        with suppress(InputError):
            for line in read_bytes(path, within=self.path).splitlines():
                # A line that is no JSON was torn by a crash.
                with suppress(InputError):
                    parse_json(line, _Event, name=path)
                    rows.append(parse_json(line, dict[str, Any], name=path))
        return rows

    def facts(self, kind: type[T]) -> T:
        """Return environment.json, or the part of it that a dataclass names.

        Raises:
            InputError: it is missing or damaged.
        """
        return read_json(self.path / ENVIRONMENT, kind, within=self.path)

    def load_status(self) -> Status:
        """Return the content of status.json.

        Raises:
            InputError: it is missing or damaged.
        """
        status = read_json(self.path / STATUS, Status, limit=2**20, within=self.path)
        return replace(status, reason=printable(status.reason, MAX_TEXT))

    @property
    def status(self) -> Status:
        """Return the content of status.json, or an empty one if the file is missing or damaged."""
        try:
            return self.load_status()
        except InputError:
            return Status()


def open_rank_log(run_dir: Path, rank: int) -> logging.Handler:
    """Append the records of this process's logger "titan" to logs/rank-N.log.

    Returns:
        The handler. Call `logging.getLogger("titan").removeHandler` with it at the end.
    """
    handler = LineHandler(run_files(run_dir), f"logs/rank-{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logger = logging.getLogger("titan")
    logger.addHandler(handler)
    # Without a level Python logs warnings and errors only.
    logger.setLevel(logging.INFO)
    if (
        rank
    ):  # Python's warnings are the same on all ranks: only rank 0 shows them on the terminal
        logging.captureWarnings(True)
        logging.getLogger("py.warnings").addHandler(handler)
    return handler
