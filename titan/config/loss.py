"""Loss function that `[loss] name` chooses, and checks of its name and options.

A package registers a function under the entry-point group `titan.losses`. docs/optimizers.md says what titan expects of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from .errors import Violations, choose
from .plug_ins import load_plug_in, plug_ins_by_name
from .schema import JobConfig, LossSection

BUILT_IN = "cross_entropy"
_DOCS = 'docs/optimizers.md, "A custom loss", says what titan expects'


def loss_function(section: LossSection) -> Callable[..., Any] | None:
    """Return a package's loss with its options, or None for the cross entropy.

    Raises:
        KeyError: the loss is not installed.
        ConfigError: its package cannot be imported.
    """
    if section.name == BUILT_IN:
        return None
    entry = plug_ins_by_name("titan.losses")[section.name]
    return partial(load_plug_in(entry), **section.options)


def check_loss(config: JobConfig) -> Violations:
    """Check the name and the options."""
    section = config.loss
    if section.name == BUILT_IN:
        if section.options:
            yield "options", "cross_entropy has none; set loss.name to the loss of a package"
        return
    try:
        function = loss_function(section)
    except KeyError:
        names = [BUILT_IN, *plug_ins_by_name("titan.losses")]
        yield "name", f'unknown loss "{section.name}"{choose(section.name, names)}'
        return
    assert isinstance(function, partial)
    if not callable(function.func):
        yield "name", f"{section.name} is no function; {_DOCS}"
        return
    parameters = signature(function.func).parameters.values()
    known = [p.name for p in parameters if p.kind == Parameter.KEYWORD_ONLY]
    takes_all = any(p.kind == Parameter.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_all else [name for name in section.options if name not in known]
    for name in unknown:
        hint = choose(name, known) if known else "; it has none"
        yield f"loss.options.{name}", f"unknown option of {section.name}{hint}"
