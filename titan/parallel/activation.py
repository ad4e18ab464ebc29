"""Recompute a block's activations in the backward pass rather than keep them (activation checkpointing).

    full       keep each block's input, recompute the block (arXiv:1604.06174)
    every n    full, for every n-th block only
    by op      keep what is expensive to recompute, recompute the rest (selective, arXiv:2205.05198)

What "by op" keeps is a list of operations, see sac_save_list.py.

Recomputation runs the same kernels on the same inputs, so losses and gradients are the same bits.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .offload import Offloader
from .random_numbers import require_restored
from .sac_save_list import GROUPS, Rule, SaveListError, parse_rule
from .selective import Decision, selective_checkpoint_contexts
from .torch_compat import (
    checkpoint_wrapper,
    traced_module_path,
)


def apply_ac(
    model: nn.Module,
    *,
    container: str = "layers",
    every: int = 1,
    blocks: Container[int] | None = None,
    keep: Sequence[str] = (),
    keep_modules: Sequence[str] = (),
    by_op: bool = False,
    preserve_rng_state: bool = True,
    contexts: Callable[[nn.Module], Callable[[], Any] | None] = lambda block: None,
) -> None:
    """Wrap every `every`-th block in `model.<container>` (a ModuleDict or ModuleList), in place.

    Blocks count by their place in the container, also on a pipeline stage.

    Args:
        model: has the container.
        container: name of the blocks' container.
        every: 1 for each block, 2 for every second one.
        blocks: numbers of the blocks to wrap, which are their names in the container; None: any.
        keep: operations whose results are kept; none: full.
        keep_modules: patterns of module names within a block ("feed_forward.w*") whose matrix products and
            attention are kept too, and not counted.
        by_op: go through operations one by one even if nothing is kept.
        preserve_rng_state: recompute with the random numbers of the forward pass, without which the gradients of
            blocks that draw some (dropout) are wrong; others save a little with False.
        contexts: gives, for a block, a function that makes the context of its forward pass and that of the
            recomputation, or None.

    Raises SaveListError for an operation that torch does not have and for a pattern that no module of a block matches, and ValueError for a
    module that draws random numbers without `preserve_rng_state`.
    """
    if every < 1:
        raise ValueError(f"every is {every}: 1 is each block, 2 every second one")
    require_restored(model, preserve_rng_state=preserve_rng_state)
    # torch.compile would warn, in five lines, that in-place operations must not be recomputed; blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    selection = _selection(tuple(keep), tuple(keep_modules))
    # One for all blocks, or torch.compile would compile each by itself; and a partial of a function, for it takes no method.
    context_fn = partial(_contexts, selection)
    parent = model.get_submodule(container)
    for place, (name, block) in enumerate(list(parent.named_children()), 1):
        if place % every == 0 and (blocks is None or int(name) in blocks):
            settings: dict[str, Any] = {}
            of_block = contexts(block)
            if of_block is not None:
                settings = {"context_fn": of_block}
            if keep or keep_modules or by_op:
                selection.watch(block)
                both = context_fn if of_block is None else partial(_contexts, selection, of_block)
                # With modules to watch a recomputation runs to its end, so that it leaves what it has entered.
                settings = {"context_fn": both, "early_stop": not keep_modules}
            wrapped = checkpoint_wrapper(block, preserve_rng_state=preserve_rng_state, **settings)
            parent.register_module(name, wrapped)


def _existing(entry: str) -> Rule:
    """Return what an entry means. Raises SaveListError if torch lacks the operation."""
    rule = parse_rule(entry)
    for name in rule.names:
        namespace, _, operation = name.partition(".")
        # A group names operations of several versions of torch.
        if len(rule.names) == 1 and not hasattr(getattr(torch.ops, namespace), operation):
            raise SaveListError(
                f"torch has no operation '{name}'; use a name like aten.mm, or one of {', '.join(GROUPS)}"
            )
    return rule


class _Selection:
    """What blocks keep of their results."""

    def __init__(self, keep: Sequence[str], keep_modules: Sequence[str]) -> None:
        self.rules: defaultdict[str, list[Rule]] = defaultdict(list)
        for rule in map(_existing, keep):
            for name in rule.names:
                self.rules[name].append(rule)
        moves = any(rule.host for rules in self.rules.values() for rule in rules)
        self.offloader = Offloader() if moves else None
        self.keep_modules = keep_modules
        self.depth = 0  # of modules to be kept that are running

    def watch(self, block: nn.Module) -> None:
        """Record when those modules of a block run whose results are kept."""
        for pattern in self.keep_modules:
            # Names within a block, as `named_modules` of the block gives them.
            names = [name for name, _ in block.named_modules() if name]
            matching = [name for name in names if fnmatchcase(name, pattern)]
            if not matching:
                raise SaveListError(
                    f"no module of a block matches '{pattern}'; it has {', '.join(names)}"
                )
            for name in matching:
                block.get_submodule(name).register_forward_pre_hook(self._enter)
                block.get_submodule(name).register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        # A compiler is asked where it is, see _in_kept_module.
        if not torch.compiler.is_compiling():
            self.depth += 1

    def _leave(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.depth -= 1

    def _in_kept_module(self, within: str) -> bool:
        if self.depth:
            return True
        names = [within + name for name in traced_module_path()] if self.keep_modules else ()
        return any(fnmatchcase(n, pattern) for n in names for pattern in self.keep_modules)

    def contexts(self, within: str) -> Any:
        """Return the contexts of one forward pass and its recomputation, which count operations in the same way.

        within: name of the module that is run, with a dot; "" if it is the block.
        """
        counts: Counter[tuple[tuple[str, ...], bool]] = Counter()
        self.depth = 0  # a module that raised was not left, and its caller may go on

        def decide(name: str, recomputes: bool) -> Decision:
            expensive = name in GROUPS["matmul"] or name in GROUPS["attention"]
            if expensive and self._in_kept_module(within):
                return "keep"
            rules = self.rules.get(name, ())
            # The forward pass and the recomputation count separately, so that both keep the same calls.
            for names in {rule.names for rule in rules}:
                counts[names, recomputes] += 1
            kept = [rule for rule in rules if rule.keeps(counts[rule.names, recomputes] - 1)]
            return ("host" if kept[0].host else "keep") if kept else "recompute"

        host = self.offloader.run() if self.offloader else None
        return selective_checkpoint_contexts(decide, host=host)


@cache
def _selection(keep: tuple[str, ...], keep_modules: tuple[str, ...]) -> _Selection:
    """Return one selection for all models of a process that keep the same: compiled code is valid for one object alone."""
    return _Selection(keep, keep_modules)


def keeps_some(block: nn.Module) -> bool:
    """Return whether a block was wrapped to keep some results and recompute others."""
    return selection_of(block) is not None


def selection_of(block: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return what lets a function of a block keep and recompute by itself what the block would; None: the block keeps all
    or nothing.

    The parts of a block that are compiled by themselves need it: what is recomputed within a program only its compiler can
    decide. Each part counts its operations from the start.
    """
    settings = getattr(getattr(block, "checkpoint_fn", None), "keywords", {})
    context_fn = settings.get("context_fn")
    if not isinstance(context_fn, partial) or context_fn.func is not _contexts:
        return None
    selection = context_fn.args[0]
    inside: nn.Module = getattr(block, "_checkpoint_wrapped_module", block)
    names = {module: f"{name}." for name, module in inside.named_modules() if name}

    def select(function: Callable[..., Any]) -> Callable[..., Any]:
        within = names.get(getattr(function, "__self__", inside), "")
        options = {**settings, "context_fn": partial(_contexts, selection, within=within)}

        def selected(*args: Any) -> Any:
            return checkpoint(function, *args, **options)

        selected.__code__ = _renamed(selected.__code__, function.__qualname__)
        return selected

    return select


@cache
def _renamed(code: CodeType, name: str) -> CodeType:
    """Return one code object for each name: torch.compile keeps its programs by code object, and would take another part of
    a block for a recompilation of the first."""
    return code.replace(co_name=name)


def _contexts(
    selection: _Selection, others: Callable[[], Any] | None = None, *, within: str = ""
) -> Any:
    contexts = selection.contexts(within)
    return (
        contexts
        if others is None
        else tuple(_Both(*pair) for pair in zip(others(), contexts, strict=True))
    )


class _Both(AbstractContextManager[None]):
    """Enter two contexts."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)
