"""Hooks of a run: titan's own, and those of other packages.

All of them are entry points of the group "titan.hooks", titan's own in its pyproject.toml:

    [project.entry-points."titan.hooks"]
    my_hook = "my_package.hooks:MyHook"       # called with the run, returns a titan.run.hook.Hook, or None: this run needs none
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from titan.base.untrusted import InputError
from titan.config.plug_ins import load_plug_in, plug_ins
from titan.run.hook import Hook
from titan.run.progress import RunProgress

HookFactory = Callable[[RunProgress], Hook | None]


def load_hooks() -> dict[str, HookFactory]:
    """Import all hooks. Return their classes or functions by name, in the order of the classes' priorities.

    Raises:
        InputError: titan's own hooks are not registered.
    """
    loaded: dict[str, Any] = {
        entry.name: load_plug_in(entry) for entry in plug_ins("titan.hooks")
    }
    if "metrics" not in loaded:
        fix = f"install it again ({sys.executable} -m pip install ...)"
        raise InputError(
            f"the installation of titan is older than its code, and has no hooks: {fix}"
        )
    # A function has no priority before it returns a hook.
    return dict(
        sorted(loaded.items(), key=lambda item: getattr(item[1], "priority", Hook.priority))
    )


def standard_hooks(trainer: RunProgress) -> list[Hook]:
    """Return the hooks of `titan train`, in the order of their priorities and then of their names.

    Args:
        trainer: the run.
    """
    built: list[tuple[int, str, Hook]] = []
    # Every rank builds them in the same order, too: some communicate.
    for name, factory in load_hooks().items():
        hook = factory(trainer)
        if hook is not None:
            built.append((hook.priority, name, hook))
    return [hook for *_, hook in sorted(built, key=lambda row: row[:2])]
