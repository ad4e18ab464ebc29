"""Files in which a run folder describes its run: environment.json, status.json and a log for each rank."""

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
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import titan
from titan.base.run_writer import LineHandler, run_files
from titan.base.untrusted import (
    MAX_TEXT,
    Count,
    Finite,
    InputError,
    Rank,
    parse_json,
    printable,
    read_json,
    tail_lines,
)

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
    run_files(run_dir).replace("environment.json", json.dumps(content, indent=2) + "\n")


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
    run_files(run_dir).replace("status.json", text, durable=is_last, last=is_last)


@dataclass(frozen=True)
class _Row:
    step: Count


def _last_step(run_dir: Path) -> int:
    """Return the last step of a run. status.json, written every two seconds, may be behind metrics.jsonl."""
    step = read_status(run_dir).get("step", 0)
    with suppress(InputError):
        # A crash may have torn the last line.
        for line in tail_lines(run_dir / "metrics.jsonl", limit=2**14, within=run_dir):
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


def read_status(run_dir: Path) -> dict[str, Any]:
    """Read the content of status.json; {} if the file is missing or damaged."""
    try:
        return asdict(load_status(run_dir))
    except InputError:
        return {}


def load_status(run_dir: Path) -> Status:
    """Read status.json.

    Raises:
        InputError: it is missing or damaged.
    """
    status = read_json(run_dir / "status.json", Status, limit=2**20, within=run_dir)
    return replace(status, reason=printable(status.reason, MAX_TEXT))


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
