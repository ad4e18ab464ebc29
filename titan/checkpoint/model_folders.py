"""Contract of the part that reads and writes Hugging Face folders. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from titan.checkpoint import CheckpointError
from titan.config.plug_ins import door, load_part
from titan.config.schema import JobConfig


@door("checkpoint")
class ModelFolders(Protocol):
    """Functions that read and write folders of models."""

    def job_keys(self, folder: Path) -> dict[str, Any]:
        """Return the keys of [model] for the model in a folder."""
        ...

    def num_positions(self, folder: Path) -> int | None:
        """Return the number of the model's positions, or None if the folder does not say it."""
        ...

    def unread_keys(self, file: Path, config: JobConfig) -> list[str]:
        """Return a warning about unread keys of a config.json, or an empty list."""
        ...

    def model_of(self, name: str, sizes: Any) -> Any:
        """Return the model of a family with these sizes, for `load`."""
        ...

    def check(self, path: Path, model: Any) -> object:
        """Check that a folder has exactly this model, without its weights.

        Raises:
            CheckpointError: it has another one.
        """
        ...

    def load(self, path: Path, state: Any, *, model: Any, group: Any) -> list[str]:
        """Fill the tensors "model.<parameter>" of `state`. All ranks call this together.

        Args:
            path: the folder.
            state: tensors to fill, by name.
            model: the model.
            group: the ranks' `CheckpointGroup`.

        Returns:
            Messages about what was left out.
        """
        ...

    def describe(self, config: JobConfig, tokenizer: Any) -> Any:
        """Return the export of a job's model, for `save`. Its `model` is for `load`.

        Args:
            config: the job.
            tokenizer: its tokenizer, or None.

        Raises:
            CheckpointError: the model has no such form.
        """
        ...

    def save(self, folder: Path, state: Any, export: Any, *, group: Any) -> None:
        """Write the tensors "model.<parameter>" as a folder. All ranks call this together.

        Raises:
            SaveFailed: the folder could not be written. All ranks raise it.
        """
        ...


def model_folders() -> ModelFolders:
    """Return the reader and writer of Hugging Face folders.

    Raises:
        CheckpointError: none is installed.
    """
    found = load_part(ModelFolders)
    if found is None:
        raise CheckpointError(
            "this titan was installed without titan/huggingface, which reads and writes Hugging Face folders"
        )
    return found
