"""Checkpoints: saving, loading and conversion.

manager.py        decides when to save, which steps to keep, and which step to resume from
commit.py         writes one step, all of it or nothing
formats.py        versions of the files' formats, which are read first
manifest.py       hashes of a step's files, and the check for damage
tensor_index.py   tensors.json: the file and bytes of each tensor
tensors.py        DCP's reader and writer on our storage
state.py          names and values of everything that a step contains
staging.py        copies in host memory, which are written while training goes on
storage.py        local folders and URLs
model_folders.py  Hugging Face folders, by an entry point (hf_folders.py)
"""

from titan.base.failure import RunFailure
from titan.base.untrusted import InputError


class CheckpointError(InputError):
    """Error about a checkpoint that is missing, damaged or does not fit. The message is for the user."""

    kind = "checkpoint_damaged"


class SaveFailed(RunFailure, RuntimeError):
    """Error about a checkpoint that some rank could not write. The message says which rank, and why."""

    kind = "save_failed"
