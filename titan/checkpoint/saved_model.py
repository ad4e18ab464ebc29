"""Models of checkpoints and Hugging Face folders, with their job, tokenizer and weights. Imports torch where it is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from titan.base.run_folder import RunFolder
from titan.checkpoint import CheckpointError
from titan.checkpoint.identity import read_metadata
from titan.checkpoint.manifest import METADATA, TITAN_JSON
from titan.checkpoint.manifest import NAME as MANIFEST
from titan.checkpoint.model_folders import model_folders
from titan.checkpoint.storage import Location, as_location, join, storage_of
from titan.config.errors import ConfigError
from titan.config.load import load_config, print_warnings
from titan.config.permissions import without_permissions
from titan.config.schema import CheckpointSection, JobConfig
from titan.config.task import reads_text
from titan.data import DataError
from titan.data.tokenizer import Tokenizer, open_tokenizer
from titan.data.tokenizer_files import tokenizer_path, with_tokenizer

if TYPE_CHECKING:
    from torch import nn

LOCATION_OPTION: dict[str, Any] = {
    "type": as_location,
    "help": "a run folder (its newest step), a step-N folder or its URL, or a Hugging Face folder",
}
AVERAGE_OPTION: dict[str, Any] = {
    "action": "store_true",
    "help": "take the average of the weights, which the job must keep ([average])",
}
TOKENIZER_OPTION: dict[str, Any] = {
    "default": "",
    "metavar": "PATH",
    "help": "a tokenizer's file or folder, or \"bytes\"; default: the run folder's copy",
}


def find_checkpoint(
    where: Location, *, tokenizer: str = "", trust_remote_code: bool = False
) -> tuple[JobConfig, Location]:
    """Find the job and the checkpoint of a location. The job has no permissions (titan/config/permissions.py).

    Args:
        where: a run folder or a folder of checkpoints, which stand for the newest whole step;
            or a step.
        tokenizer: path of a tokenizer for the job; "": the copy in the run folder or, without a
            copy, the job's.
        trust_remote_code: obey model.trust_remote_code of the job.

    Returns:
        The job and the step.

    Raises:
        CheckpointError: the checkpoint is damaged or missing, or its tokenizer is elsewhere.
    """
    saved, run, step = find_saved(where)
    granted = ["model.trust_remote_code"] * trust_remote_code + ["tokenizer.path"] * bool(
        tokenizer
    )
    asked = with_tokenizer(saved, run=run, path=tokenizer)
    folder = run or (step if isinstance(step, Path) else None)
    config, lost = without_permissions(asked, run=folder, granted=granted)
    if reads_text(config) and tokenizer_path(asked) != tokenizer_path(config):
        # Another tokenizer would give other text without a word.
        key = "tokenizer.path" if asked.tokenizer.path else "model.hf_assets_path"
        raise CheckpointError(str(lost[key].problem))
    # The other keys are of training, and no tool reads them here.
    spoken = ("model.trust_remote_code", "tokenizer.chat_template")
    print_warnings(str(loss.problem) for key, loss in lost.items() if key in spoken)
    return config, step


def find_saved(where: Location) -> tuple[JobConfig, Path | None, Location]:
    """Find the checkpoint of a location, and the job as it was saved, to describe it or to copy it.

    Returns:
        The job with its permissions, its run folder, if there is one, and the step.

    Raises:
        CheckpointError: the checkpoint is damaged or missing.
    """
    from titan.checkpoint.manager import CheckpointManager

    config, folder, run_dir = None, where, None
    # The run folder is the folder itself, or above checkpoint/step-N. A URL has none.
    # It holds the config of the run that wrote the checkpoint.
    for run in (where, *where.absolute().parents[:2]) if isinstance(where, Path) else ():
        if (file := RunFolder(run).config).is_file():
            config, run_dir = load_config(file), run
            if run == where:
                _, lost = without_permissions(config, run=run)
                if "checkpoint.folder" in lost:
                    raise CheckpointError(str(lost["checkpoint.folder"].problem))
                folder = CheckpointManager(config.checkpoint, run_dir=run).folder
            break
    manager = CheckpointManager(
        config.checkpoint if config else CheckpointSection(), run_dir=Path()
    )
    manager.folder = folder
    if any(storage_of(folder).exists(join(folder, mark)) for mark in (METADATA, MANIFEST)):
        manager.require_whole(step := folder)
    elif newest := manager.newest(read_only=True):
        step = newest
    else:
        raise CheckpointError(
            f"{folder} holds no checkpoint; name a run folder (with a config.toml) or a step of it"
        )
    return config or _config_within(step), run_dir, step


def require_text(config: JobConfig) -> None:
    """Check that a model is trained on text alone.

    Raises:
        DataError: it is trained on other data.
    """
    if not reads_text(config):
        raise DataError(
            f"{config.model.name} is not trained on text alone, which titan evaluate scores; titan generate takes --image or --output, "
            "and while it trains, task.options.samples writes what the model makes into samples/ of the run folder"
        )


def open_run_tokenizer(config: JobConfig) -> Tokenizer:
    """Open the tokenizer of a config from `find_checkpoint`.

    Raises:
        DataError: the tokenizer cannot be read.
    """
    try:
        return open_tokenizer(config)
    except DataError as error:
        raise DataError(f"{error}. Here, --tokenizer PATH names it") from error


def _config_within(step: Location) -> JobConfig:
    """Return the config in a step, for a step that is not in its run folder."""
    text = read_metadata(step).get("config")
    if text is None:
        raise CheckpointError(f"{step}: holds no config, and there is no config.toml above it")
    return load_text(text, name=str(join(step, TITAN_JSON)))


def load_text(text: str, *, name: str, overrides: Iterable[str] = ()) -> JobConfig:
    """Parse a job from a text.

    Args:
        text: TOML.
        name: name of the text in errors.
        overrides: overrides of the job's keys.

    Raises:
        ConfigError: the job is wrong.
    """
    # load_config reads files, and names them in its errors.
    with NamedTemporaryFile(suffix=".toml") as file:
        file.write(text.encode())
        file.flush()
        try:
            config = load_config(file.name, overrides=overrides, of_run=True)
        except ConfigError as error:
            raise ConfigError(
                replace(problem, file=name) if problem.file == file.name else problem
                for problem in error.problems
            ) from None
    places = config.source_map
    places.file = name
    for key, place in places.locations.items():
        if place.file == file.name:
            places.locations[key] = replace(place, file=name)
    return config


def is_hf_folder(where: Location) -> bool:
    """Return whether a location is a Hugging Face folder.

    A step that holds both forms of the weights is none.
    """
    if not isinstance(where, Path):
        return False
    return (where / "config.json").is_file() and not (where / METADATA).is_file()


def hf_job(where: Location, *, tokenizer: str = "") -> JobConfig:
    """Build a job with the model in a Hugging Face folder.

    Args:
        where: the folder.
        tokenizer: path of a tokenizer; "": the folder's.

    Raises:
        InputError: the folder cannot be read.
    """
    keys = model_folders().job_keys(Path(str(where))) | {"hf_assets_path": str(where)}
    config = with_tokenizer(JobConfig.model_validate({"model": keys}), run=None, path=tokenizer)
    # No run records whether its documents began with a token, so follow the tokenizer.
    data = {"add_bos": bool(open_run_tokenizer(config).begin_ids)}
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def require_average(step: Location) -> None:
    """Check that a step holds an average of the weights.

    Raises:
        CheckpointError: it holds none.
    """
    from titan.checkpoint.manager import stored_shapes

    if is_hf_folder(step) or not any(key.startswith("average.") for key in stored_shapes(step)):
        problem = "holds no average of the weights; the job needs average.enable"
        raise CheckpointError(f"{step}: {problem}")


def load_weights(
    step: Location,
    parts: Sequence[nn.Module],
    *,
    name: str,
    sizes: Any,
    average: bool = False,
    only_check: bool = False,
) -> None:
    """Load the weights of a step or a Hugging Face folder into a model.

    Args:
        step: step or folder.
        parts: the whole model, or this rank's pipeline stages.
        name: name of the model's family.
        sizes: sizes of the model.
        average: whether to load the average of the weights (`require_average`).
        only_check: compare names and shapes alone, before the weights of a model on the meta device take memory.

    Raises:
        CheckpointError: it has other weights.
    """
    from titan.checkpoint.commit import CheckpointGroup
    from titan.checkpoint.manager import load, model_state, require_shapes

    state = model_state(parts, average=average)
    if isinstance(step, Path) and is_hf_folder(step):
        folders = model_folders()
        model = folders.model_of(name, sizes)
        if only_check:
            folders.check(step, model)
        else:
            folders.load(step, state, model=model, group=CheckpointGroup())
    else:
        (require_shapes if only_check else load)(step, state)
