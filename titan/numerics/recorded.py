"""Recorded steps of a run, in `recorded/step-N.json` of its folder. The hook of titan/numerics/recording.py writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "recorded"
FORMAT = 1  # another one after a change of the projections


@dataclass(frozen=True)
class RecordedTensor:
    """Whole tensor of a recorded step, see titan/numerics/recorder.py.

    Attributes:
        kind: "batch", "weight" before the step, "output", "choice" and "cut" (`Recorder`), "output gradient", "gradient" or "update".
        name: module or parameter; "tokens" or "labels" of the batch.
        dtype: dtype of the tensor.
        norm: its norm. None: not known.
        sums: its projections, each by chunks of the first dimension.
        copies: ranks whose copy of a part differs from the first rank's, each with that rank.
        line: file and line of the module's forward pass.
    """

    kind: str
    name: str
    dtype: str
    norm: float | None
    sums: list[list[float]]
    copies: list[list[int]] = field(default_factory=list)
    line: str = ""


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step.

    Attributes:
        step: its number.
        loss: mean over the valid targets of the global batch.
        grad_norm: global gradient norm before clipping.
        axes: sizes of the layout's axes.
        computes_in: dtype of the parameters that the forward pass reads.
        about: versions and other facts of the run.
        tensors: in the order of the forward pass.
    """

    step: int
    loss: float
    grad_norm: float
    axes: dict[str, int]
    computes_in: str
    about: dict[str, Any]
    tensors: Sequence[RecordedTensor]


def write_step(folder: Path, step: RecordedStep) -> None:
    """Write a step into a run folder."""
    from titan.base.run_writer import run_files  # needs pydantic, which helpers alone do not

    tensors = {"tensors": [vars(tensor) for tensor in step.tensors]}
    content = json.dumps({"format": FORMAT} | vars(step) | tensors)
    run_files(folder).replace(f"{FOLDER}/step-{step.step}.json", f"{content}\n", durable=True)


def read_steps(folder: Path) -> list[RecordedStep]:
    """Read the recorded steps of a run folder, in their order.

    Raises:
        InputError: there are none, or a file is not one.
    """
    from titan.base.untrusted import InputError

    def read(path: Path) -> RecordedStep:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if (found := content.pop("format")) != FORMAT:
                raise ValueError(f"format {found}, and this titan reads format {FORMAT}")
            content["tensors"] = [RecordedTensor(**tensor) for tensor in content["tensors"]]
            return RecordedStep(**content)
        except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise InputError(f"{path} is no recorded step: {error}") from error

    steps = [read(path) for path in (folder / FOLDER).glob("step-*.json")]
    if not steps:
        raise InputError(
            f"{folder} has no recorded steps: train with --debug.record_steps=1,2,3"
        )
    return sorted(steps, key=lambda step: step.step)
