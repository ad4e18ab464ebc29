"""Sinks of metrics: TensorBoard and Weights & Biases, which are extras.

metrics.py opens them and guards their failures.
"""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from titan.base.rows import Row
from titan.base.run_writer import require_inside, write_text_atomically
from titan.base.untrusted import InputError
from titan.config.schema import MetricsSection
from titan.observe.columns import curves

_LOG = logging.getLogger("titan")
_AGAIN_S = 60.0  # from an error of TensorBoard to the next file: a full disk would get one for each row


class Sink(Protocol):
    """Protocol of a receiver of rows of metrics."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class MissingExtra(InputError):
    """Error: an optional package is not installed. The user can fix this, so the exit code is 2."""


def require(package: str, *, extra: str, asked_by: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: name of the package.
        extra: extra of titan-pretrain that installs it.
        asked_by: config key or command that needs it.

    Raises:
        MissingExtra: it is not installed. The message has the command that installs it.
    """
    if find_spec(package) is None:
        raise MissingExtra(f"{asked_by} needs {package}: pip install 'titan-pretrain[{extra}]'")


class TensorBoardSink:
    """TensorBoard's event files.

    A resume hides the events of later steps (`purge_step`), as it cuts metrics.jsonl. After an error, TensorBoard's thread
    has ended. Then a new file begins, at the earliest a minute later.
    """

    def __init__(self, folder: Path, *, within: Path, resume_step: int) -> None:
        self._folder, self._within, self._next_step = folder, within, resume_step + 1
        self._writer: Any = None
        self._tried_s, self._reason = -math.inf, ""

    def _use(self, add: Callable[[Any], None]) -> None:
        """Call `add` with the open writer."""
        from torch.utils.tensorboard.writer import SummaryWriter

        if self._writer is None and time.monotonic() - self._tried_s < _AGAIN_S:
            raise OSError(self._reason)
        try:
            if self._writer is None:
                self._tried_s = time.monotonic()
                require_inside(self._folder / "events", self._within)
                self._writer = SummaryWriter(str(self._folder), purge_step=self._next_step)
            add(self._writer)
        except Exception as error:
            self._writer, self._reason = None, str(error)
            raise

    def write(self, row: Row) -> None:
        def add(writer: Any) -> None:
            for tag, value in curves(row).items():
                writer.add_scalar(tag, value, row["step"])
            writer.flush()  # otherwise a crash loses two minutes of curves

        self._use(add)
        self._next_step = row["step"] + 1

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        def add(writer: Any) -> None:
            for number, (prompt, text) in enumerate(texts.items()):
                # Markdown: four spaces keep a text unchanged.
                lines = "".join(f"    {line}\n" for line in (prompt + text).splitlines())
                writer.add_text(f"samples/prompt_{number}", lines, step)

        self._use(add)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """Run of Weights & Biases.

    It logs offline, below <run>/wandb, if there is no login or WANDB_MODE asks for it. The run
    folder keeps the run's id, so that a resume continues the same curves.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        section: MetricsSection,
        resume_step: int,
        job_config: dict[str, Any] | None,
    ) -> None:
        import wandb

        # Without a login wandb.init would ask for a key, and a batch job would hang. W&B knows where it keeps keys.
        wandb.setup(settings=wandb.Settings(silent=True))
        mode: Any = os.environ.get("WANDB_MODE")
        if not mode:
            mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
            if mode == "offline":
                _LOG.warning(
                    "Weights & Biases found no login (wandb login): it logs offline, below %s; wandb sync --append uploads it",
                    run_dir / "wandb",
                )
        self._run = wandb.init(
            dir=run_dir,
            project=section.wandb_project,
            name=section.wandb_run_name or run_dir.resolve().name,
            id=_run_id(run_dir / "wandb" / "run-id.txt", fresh=resume_step == 0),
            # Offline runs cannot be looked up; `wandb sync --append` joins them later.
            resume="allow" if mode == "online" else None,
            mode=mode,
            config=job_config,
            # console="off": W&B would otherwise take over stdout, and with it the progress bar.
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )
        # W&B's own counter of steps cannot go back to the step that a run resumes from.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        self._run.log({"step": row["step"]} | curves(row))

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path, *, fresh: bool) -> str:
    if not fresh and path.exists():
        return path.read_text(encoding="utf-8").strip()
    # W&B takes any id that is new in the project.
    run_id = uuid.uuid4().hex[:8]
    write_text_atomically(path, run_id, within=path.parents[1])
    return run_id
