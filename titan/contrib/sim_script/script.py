"""Training step of a user's script, recorded in the same way as titan's own.

The protocol is one function of the script, which a real run calls as well:

    build(device, **settings) -> (step, model, optimizer) or (step, model, optimizer, tokens)

It builds its meshes from the default process group. `step()` runs a whole step, and may have
arguments with defaults. The model may be a list of modules, and the optimizer a list of optimizers.
`tokens` is the number of tokens of a step over all ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from titan.base.untrusted import InputError


@dataclass(frozen=True)
class Script:
    """Build function of a script.

    Attributes:
        file: path of the script.
        function: name of the function.
        settings: its keyword arguments.
    """

    file: str
    function: str
    settings: tuple[tuple[str, Any], ...] = ()

    def __call__(self, device: Any) -> Callable[[], Any]:
        """Import the script, and return the function that builds its program on a device."""
        return partial(self._program, self._load(), device)

    def _load(self) -> Any:
        """Return the module, imported under its own name as `python FILE` finds it.

        Raises:
            InputError: The script cannot be imported, or it has no such function.
        """
        path = Path(self.file).resolve()
        sys.path.insert(0, str(path.parent))
        try:
            module = importlib.import_module(path.stem)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.file} cannot be imported: {reason}") from error
        if not callable(getattr(module, self.function, None)):
            raise InputError(f"{self.file} has no function {self.function}")
        return module

    def _program(self, module: Any, device: Any) -> Any:
        """Return the titan.sim.record.program.Program that the script builds.

        Raises:
            InputError: The function's result does not follow the protocol.
        """
        import torch
        import torch.distributed as dist
        from torch import nn

        from titan.optim.clipping import clip_gradients
        from titan.sim.record.program import Program

        rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": world_size}
        built = getattr(module, self.function)(device, **dict(self.settings))
        parts, optimizers = [], []
        if isinstance(built, tuple) and len(built) in (3, 4):
            parts = built[1] if isinstance(built[1], list | tuple) else [built[1]]
            optimizers = built[2] if isinstance(built[2], list | tuple) else [built[2]]
        kinds = [(p, nn.Module) for p in parts] + [
            (o, torch.optim.Optimizer) for o in optimizers
        ]
        if not kinds or not callable(built[0]) or not all(isinstance(*pair) for pair in kinds):
            raise InputError(
                f"{self.function} of {self.file} must return (step, model, optimizer) or (step, model, optimizer, tokens)"
            )
        functions = (clip_gradients, nn.utils.clip_grad_norm_)
        names = (n for n, value in vars(module).items() if any(value is f for f in functions))
        clips = [(module, name) for name in names]
        return Program(
            parts,
            optimizers,
            lambda _: built[0](),
            clips=[*clips, (nn.utils, "clip_grad_norm_")],
            tokens=built[3] if len(built) == 4 else 0,
        )
