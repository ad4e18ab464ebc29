"""Loss function that `[loss] name` chooses, and a check of a package's loss on a few tokens, which imports torch.

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
_TOKENS, _FIRST = 6, 4  # tokens of the check, and tokens in the first of its two chunks


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
    """Check the name, the options, and on a few random tokens that the loss is a sum over the valid tokens."""
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
    model = config.model.resolved[0]
    if not unknown and model is not None:
        try:
            problem = _problem_on_tokens(function, model.vocab_size)
        except Exception as error:  # a package's code may raise anything
            problem = f"raised {type(error).__name__}: {error}"
        if problem:
            yield "name", f"{section.name} {problem}; {_DOCS}"


def _problem_on_tokens(function: Callable[..., Any], vocab_size: int) -> str:
    """Return a problem of a loss that would make it wrong or different between layouts, or "" if there is none."""
    import torch

    # With a separate generator, the random numbers of the job stay the same.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TOKENS, vocab_size, generator=generator).requires_grad_()
    labels = torch.randint(vocab_size, (_TOKENS,), generator=generator)
    labels[1] = labels[4] = ignored = -100  # one ignored token in each chunk

    loss = function(logits, labels)
    if not isinstance(loss, torch.Tensor) or loss.shape != () or loss.dtype != torch.float32:
        kind = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            kind = f"{loss.dtype} of shape {tuple(loss.shape)}"
        return f"returned a {kind}, not a scalar torch.float32 tensor"
    if not loss.requires_grad:
        return "returned a loss that has no gradient in the logits"
    (gradient,) = torch.autograd.grad(loss, logits)
    with torch.no_grad():
        first = function(logits[:_FIRST], labels[:_FIRST])
        rest = function(logits[_FIRST:], labels[_FIRST:])
        only_ignored = function(logits, torch.full_like(labels, ignored))
    if not all(value.isfinite().all() for value in (loss, gradient, first, rest)):
        return "is not finite for random logits"
    size = max(value.abs() for value in (loss, first, rest))
    if abs(loss - first - rest) > 1e-3 * size:
        return (
            f"is {loss.item():.6g} for {_TOKENS} tokens, and {first:.6g} and {rest:.6g} for the first {_FIRST} and the rest: return the sum over the tokens, not a mean, since titan divides by the valid tokens of "
            "the global batch"
        )
    if gradient[labels == ignored].any() or only_ignored.item() != 0:
        return f"depends on tokens with the label {ignored}, which are not trained on: leave them out of the sum"
    return ""
