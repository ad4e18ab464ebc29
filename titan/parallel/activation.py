"""Activation checkpointing: the backward pass recomputes a block's activations instead of keeping them.

    full       keep each block's input, recompute the block (arXiv:1604.06174)
    every n    full, for every n-th block only
    by op      keep results that are expensive to recompute, recompute the others (selective, arXiv:2205.05198)

An example "by op": a Llama block (width 4096, 32 query heads and 8 key/value heads of 128, feed-forward width 14336) with
the default list of sac_save_list.py, ("matmul/2", "attention", "network", "scales"). "matmul/2" counts the block's matmuls in
the order in which they run, and keeps every second one. The columns are KiB for each token, in bf16:

    operation       wq   wk   wv   attention   wo   w1   w3   w2
    matmul number   0    1    2    -           3    4    5    6
    kept            8    -    2    8           -    28   -    8

With its input (8), the block keeps 62 KiB for each token, and the logsumexp of attention. The recomputation runs in the same
order: the matmuls 1, 3 and 5, norms, SiLU and sums run again, and the results of the others are read from memory.

A recomputation runs the same kernels on the same inputs, so losses and gradients are the same bits.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .random_numbers import require_no_draws, require_restored
from .sac_save_list import GROUPS, Rule, SaveListError, parse_rule
from .selective import selective_checkpoint_contexts
from .torch_compat import checkpoint_wrapper
from .traits import blocks_in


def apply_ac(
    model: nn.Module,
    *,
    container: str = "layers",
    every: int = 1,
    blocks: Container[int] | None = None,
    keep: Sequence[str] = (),
    by_op: bool = False,
    preserve_rng_state: bool = True,
    contexts: Callable[[nn.Module], Callable[[], Any] | None] = lambda block: None,
) -> None:
    """Wrap every `every`-th block in `model.<container>` (a ModuleDict or ModuleList), in place.

    Blocks count by their place in the container, also on a pipeline stage.

    Args:
        model: a model that has the container.
        container: name of the container of the blocks.
        every: 1 for each block, 2 for every second one.
        blocks: numbers of the blocks to wrap, which are their names in the container. None: any.
        keep: operations whose results are kept, as entries of a save list. None of them: full recomputation.
        by_op: decide operation by operation even if nothing is kept.
        preserve_rng_state: recompute with the random numbers of the forward pass. Blocks that draw random numbers (dropout) need
            it for right gradients. Other blocks save a little time with False.
        contexts: returns, for a block, a function that makes the context of its forward pass and that of its recomputation,
            or None.

    Raises:
        SaveListError: torch lacks an operation.
        ValueError: there is no block, or none is chosen; or a module draws random numbers, and `preserve_rng_state` is False.
    """
    if every < 1:
        raise ValueError(f"every is {every}: 1 is each block, 2 every second one")
    require_restored(model, preserve_rng_state=preserve_rng_state)
    # torch.compile would warn, in five lines, that in-place operations must not be recomputed; blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    selection = _selection(tuple(keep))
    # One function for all blocks, or torch.compile would compile every block again. A partial, as torch.compile takes no method.
    context_fn = partial(_contexts, selection)
    parent, found = blocks_in(model, container)
    chosen = {
        name: block
        for place, (name, block) in enumerate(found.items(), 1)
        if place % every == 0 and (blocks is None or int(name) in blocks)
    }
    if not chosen:
        raise ValueError(
            f"no block of {container} ({', '.join(found)}) is chosen by `every` = {every} and `blocks`"
        )
    for name, block in chosen.items():
        settings: dict[str, Any] = {}
        if not preserve_rng_state:
            require_no_draws(block, f"{container}.{name}")
        of_block = contexts(block)
        if of_block is not None:
            settings = {"context_fn": of_block}
        if keep or by_op:
            both = context_fn if of_block is None else partial(_contexts, selection, of_block)
            settings = {"context_fn": both}
        wrapped = checkpoint_wrapper(block, preserve_rng_state=preserve_rng_state, **settings)
        parent.register_module(name, wrapped)


def _existing(entry: str) -> Rule:
    """Return the rule of an entry. Raises SaveListError if torch lacks the operation."""
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
    """The operations whose results blocks keep."""

    def __init__(self, keep: Sequence[str]) -> None:
        self.rules: defaultdict[str, list[Rule]] = defaultdict(list)
        for rule in map(_existing, keep):
            for name in rule.names:
                self.rules[name].append(rule)

    def contexts(self) -> Any:
        """Return the contexts of one forward pass and its recomputation, which count operations alike."""
        counts: Counter[tuple[tuple[str, ...], bool]] = Counter()

        def keeps(name: str, recomputes: bool) -> bool:
            rules = self.rules.get(name, ())
            # The forward pass and the recomputation count separately, so that both keep the same calls.
            for names in {rule.names for rule in rules}:
                counts[names, recomputes] += 1
            return any(rule.keeps(counts[rule.names, recomputes] - 1) for rule in rules)

        return selective_checkpoint_contexts(keeps)


_selection = cache(_Selection)
"""The selection of these results: one object for all models of the process, since compiled code is valid for one only."""


def unwrapped(block: Any) -> nn.Module:
    """Return a block without the wrapper of torch's activation checkpointing."""
    return getattr(block, "_checkpoint_wrapped_module", block)


def selection_of(block: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Return a decorator that checkpoints a function of a block by the block's own save list.

    Functions of a block that are compiled separately need it: only the compiler of a program can decide what the program
    recomputes. Each function counts its operations from the start.

    Args:
        block: a block, wrapped or not.

    Returns:
        The decorator, or None if the block keeps all results or none.
    """
    settings = getattr(getattr(block, "checkpoint_fn", None), "keywords", {})
    context_fn = settings.get("context_fn")
    if not isinstance(context_fn, partial) or context_fn.func is not _contexts:
        return None
    # Without the contexts of other parts, which see the whole block.
    options: Any = {**settings, "context_fn": partial(_contexts, context_fn.args[0])}

    def select(function: Callable[..., Any]) -> Callable[..., Any]:
        def selected(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(function, *args, **options, **kwargs)

        selected.__code__ = _renamed(selected.__code__, function.__qualname__)
        return selected

    return select


@cache
def _renamed(code: CodeType, name: str) -> CodeType:
    """Return one code object for each name.

    torch.compile keeps its programs by code object. It would take another function of a block for a recompilation of the first.
    """
    return code.replace(co_name=name)


def _contexts(selection: _Selection, others: Callable[[], Any] | None = None) -> Any:
    contexts = selection.contexts()
    return (
        contexts
        if others is None
        else tuple(_Both(*pair) for pair in zip(others(), contexts, strict=True))
    )


class _Both(AbstractContextManager[None]):
    """Two contexts, entered one after the other."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)
