"""Save, load and convert checkpoints.

manager.py        when to save, what to keep, what to resume from
commit.py         writes one step, whole or not at all
manifest.py       hashes of a step's files; what is damaged
tensor_index.py   tensors.json: which tensor is in which bytes of which file
tensors.py        DCP's reader and writer on our storage
state.py          names and values of everything that a step holds
staging.py        copies on the host, written while training goes on
storage.py        local folders and URLs
huggingface.py, export.py, convert.py   Hugging Face folders, both ways
"""

from titan.untrusted import InputError


class CheckpointError(InputError):
    """Report a checkpoint that is missing, damaged or does not fit. The message is for the user."""

    def __init__(self, message: object, *, kind: str = "checkpoint_damaged") -> None:
        super().__init__(message)
        self.kind = kind  # titan/health/errors.py


class SaveFailed(RuntimeError):
    """Report that a checkpoint could not be written on some rank. The message says where and why."""

    def __init__(self, message: object, *, kind: str = "save_failed") -> None:
        super().__init__(message)
        self.kind = kind
