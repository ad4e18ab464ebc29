"""Rules of Hugging Face folders. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec

from titan.config.errors import RuleViolation
from titan.config.model import family
from titan.config.schema import JobConfig


def check_form(config: JobConfig) -> Iterator[RuleViolation]:
    """Check that the model's family has a huggingface.py, if such folders are read or written."""
    name = config.model.name
    with suppress(KeyError):  # the rules of [model] report it
        package = family(name)
        spec = package.__spec__
        is_folder = spec and spec.submodule_search_locations  # it may be one file
        if not is_folder or not find_spec(f"{package.__name__}.huggingface"):
            for key in ("initial_load_in_hf", "last_save_in_hf"):
                if vars(config.checkpoint)[key]:
                    reason = f'the package of model family "{name}" has no huggingface.py'
                    yield key, f"{reason}; use false, or add one (docs/architecture.md)"
