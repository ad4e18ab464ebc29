"""Recompute a block's activations in the backward pass rather than keep them (activation
checkpointing).

    full       keep each block's input, recompute the block (arXiv:1604.06174)
    every n    full, for every n-th block only
    by op      keep what is expensive to recompute, recompute the rest (selective, arXiv:2205.05198)

What "by op" keeps is a list of operations, each by its name ("aten.mm") or as one of the groups below, and with "/2" only
every second one of them, counted in the order they run in a block. The default list keeps, of a Llama block: q, v, w1 and w2,
attention, and what came over the network; and runs again: k, o and w3, and everything elementwise.

Recomputation runs the same kernels on the same inputs, so losses and gradients are the same bits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from .torch_compat import checkpoint_wrapper, selective_checkpoint_contexts, traced_module_path

GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm", "aten._grouped_mm"),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_attention_math",
    ),
    # Not all-gathers: their results are large, and gathering again overlaps with what is recomputed before.
    "network": ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single"),
    # The largest absolute values that float8 scales by: a few numbers each, for a pass over the tensor.
    "scales": ("aten.max", "aten.amax"),
}
DEFAULT_KEEP = ("matmul/2", "attention", "network", "scales")


class KeepError(ValueError):
    """Report that an operation or a module to be kept does not exist. The message is for the
    user."""


def apply_ac(
    model: nn.Module,
    *,
    container: str = "layers",
    every: int = 1,
    keep: Sequence[str] = (),
    keep_modules: Sequence[str] = (),
    preserve_rng_state: bool = True,
    contexts: Callable[[nn.Module], Callable[[], Any] | None] = lambda block: None,
) -> None:
    """Wrap every `every`-th block in `model.<container>` (a ModuleDict or ModuleList), in place.

    keep: operations whose results are kept, as above; none: full. keep_modules: patterns of module names within a block
    ("feed_forward.w*") whose matrix products and attention are kept too, and not counted. Blocks count by their place in
    the container, also on a pipeline stage. contexts: gives, for a block, a function that makes the context of its forward pass and
    that of the recomputation, or None. preserve_rng_state: recompute with the random numbers of the forward pass, without
    which the gradients of blocks that draw some (dropout) are wrong; others save a little with False.
    Raises KeepError for an operation that torch does not have and for a pattern that no module of a block matches.
    """
    if every < 1:
        raise ValueError(f"every is {every}: 1 is each block, 2 every second one")
    # torch.compile would warn, in five lines, that in-place operations must not be recomputed; blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    selection = _Selection(keep, keep_modules)
    # One for all blocks, or torch.compile would compile each by itself; and a partial of a function, for it takes no method.
    context_fn = partial(_contexts, selection)
    blocks = model.get_submodule(container)
    for place, (name, block) in enumerate(list(blocks.named_children()), 1):
        if place % every == 0:
            settings: dict[str, Any] = {}
            of_block = contexts(block)
            if of_block is not None:
                settings = {"context_fn": of_block}
            if keep or keep_modules:
                selection.watch(block)
                both = context_fn if of_block is None else partial(_contexts, selection, of_block)
                # With modules to watch a recomputation runs to its end, so that it leaves what it has entered.
                settings = {"context_fn": both, "early_stop": not keep_modules}
            wrapped = checkpoint_wrapper(block, preserve_rng_state=preserve_rng_state, **settings)
            blocks.register_module(name, wrapped)


def _rule(entry: str) -> tuple[tuple[str, ...], int]:
    """Return the operations that an entry names, and of how many one is kept: "matmul/2" is every
    second product."""
    name, slash, every = entry.partition("/")
    if slash and not (every.isdecimal() and int(every)):
        raise KeepError(
            f"'{entry}': after the slash comes a number such as 2, to keep every second one"
        )
    # A group stands for several operations, which are counted together.
    operations = GROUPS.get(name, (name,))
    if name not in GROUPS:
        namespace, _, operation = name.partition(".")
        if not operation or not hasattr(getattr(torch.ops, namespace), operation):
            raise KeepError(
                f"torch has no operation '{name}'; use a name like aten.mm, or one of {', '.join(GROUPS)}"
            )
    return operations, int(every or 1)


class _Selection:
    """What blocks keep of their results."""

    def __init__(self, keep: Sequence[str], keep_modules: Sequence[str]) -> None:
        rules = dict(_rule(entry) for entry in keep)
        self.rules = {name: (names, every) for names, every in rules.items() for name in names}
        self.keep_modules = keep_modules
        self.depth = 0  # of modules to be kept that are running

    def watch(self, block: nn.Module) -> None:
        """Record when those modules of a block run whose results are kept."""
        for pattern in self.keep_modules:
            # Names within a block, as `named_modules` of the block gives them.
            names = [name for name, _ in block.named_modules() if name]
            matching = [name for name in names if fnmatchcase(name, pattern)]
            if not matching:
                raise KeepError(
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

    def _in_kept_module(self) -> bool:
        if self.depth:
            return True
        names = traced_module_path() if self.keep_modules else ()
        return any(fnmatchcase(n, pattern) for n in names for pattern in self.keep_modules)

    def policy(self) -> Any:
        """Decide for one forward pass and its recomputation, which count operations in the same way."""
        counts: Counter[tuple[tuple[str, ...], bool]] = Counter()

        def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            # str(func) is "aten.mm.default": without the overload.
            name = str(func).rsplit(".", 1)[0]
            expensive = name in GROUPS["matmul"] or name in GROUPS["attention"]
            if expensive and self._in_kept_module():
                return CheckpointPolicy.MUST_SAVE
            # PREFER, not MUST: a compiler may still keep a result that is cheaper to keep.
            if name not in self.rules:
                return CheckpointPolicy.PREFER_RECOMPUTE
            group, every = self.rules[name]
            # The forward pass and the recomputation count separately, so that both keep the same calls.
            counts[group, ctx.is_recompute] += 1
            keep = (counts[group, ctx.is_recompute] - 1) % every == 0
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return policy


def keeps_some(block: nn.Module) -> bool:
    """Return whether a block was wrapped to keep some results and recompute others."""
    context_fn = getattr(getattr(block, "checkpoint_fn", None), "keywords", {}).get("context_fn")
    return isinstance(context_fn, partial) and context_fn.func is _contexts


def _contexts(selection: _Selection, others: Callable[[], Any] | None = None) -> Any:
    contexts = selective_checkpoint_contexts(selection.policy())
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
