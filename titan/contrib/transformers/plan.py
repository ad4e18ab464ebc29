"""Tensor-parallel plan of a model of transformers, derived from its own plan and from one forward pass on meta.

transformers names a style for the matrices of attention and feed-forward layers (`base_model_tp_plan`). titan's styles also split the
sequence between them, so all other modules with parameters need one, too. The forward pass shows where a module gets its input
from: the region of attention or feed-forward layer that it is in, or another module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from titan.config.errors import did_you_mean
from titan.parallel.module_kinds import ExpertModule, is_kind
from titan.parallel.tensor import style_names

from .config import FIELDS
from .errors import WrongKeyError
from .sparse_attention import sparse_of

Styles = dict[str, str]
"""Styles of modules, by name or pattern."""
COLUMNS = ("colwise", "colwise_gather_output", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "packed_rowwise")


@dataclass
class Part:
    """A module, and its call in the forward pass on meta.

    Attributes:
        name: its name.
        module: the module.
        is_late: whether it runs after the first block began.
        input: its first tensor.
        output: what it returned.
        attention: its call of transformers' attention interface.
        recurrence: operations of its linear recurrence for one token, forward. None: it has none.
        sources: linear layers whose outputs its input holds, each with the dimension of their channels; "": attention.
        is_cut: code cuts the row of all its output channels into pieces, as of a fused matrix.
        roles: linear layers of the queries, the keys and the values of its attention.
    """

    name: str
    module: nn.Module
    is_late: bool = False
    input: Tensor | None = None
    output: Any = None
    attention: Any = None
    recurrence: int | None = None
    sources: dict[str, int] = field(default_factory=dict)
    is_cut: bool = False
    roles: tuple[set[str], ...] = (set(), set(), set())


class _Underivable(ValueError):
    """Module without a style. The message names it."""


def derive_plan(
    model: Any, parts: list[Part], given: Styles, *, whole_heads: bool = False
) -> tuple[Styles, str]:
    """Return the style of each module by pattern, and the reason why there is no plan, or "".

    Args:
        model: the `TransformersModel`.
        parts: modules and their calls, of the forward pass on meta.
        given: styles of [model.plan], which take precedence.
        whole_heads: each rank computes all heads of attention, from all columns of its matrices.

    Raises:
        WrongKeyError: `given` names no module, or no style.
    """
    _check_given(model, given)
    try:
        styles = _Plan(model, parts, given, whole_heads=whole_heads).styles()
    except _Underivable as error:
        return {}, str(error)
    return {**given, **_by_pattern(styles)}, ""


def _check_given(model: nn.Module, given: Styles) -> None:
    """Raise WrongKeyError if a pattern of [model.plan] matches no module, or its style does not exist."""
    names = [name for name, _ in model.named_modules() if name]
    stars, known = sorted({_star(name) for name in names}), [*style_names(), "experts"]
    problems = []
    for pattern, style in given.items():
        # A small model of `titan certify` has fewer blocks.
        if not any(fnmatchcase(name, _star(pattern)) for name in names):
            problems.append(
                (f"model.plan.{pattern}", f"no module has this name{_near(pattern, stars)}")
            )
        elif style.split(":")[0] not in known:
            problems.append(
                (f"model.plan.{pattern}", f"unknown style {style}{_near(style, known)}")
            )
    if problems:
        raise WrongKeyError(*problems)


def _near(word: str, known: list[str]) -> str:
    return did_you_mean(word, known) or f"; there are {', '.join(known)}"


class _Plan:
    """Derivation of one model's plan."""

    def __init__(
        self, model: Any, parts: list[Part], given: Styles, *, whole_heads: bool
    ) -> None:
        self.model, self.given, self.whole_heads = model, given, whole_heads
        self.parts = {part.name: part for part in parts}
        own = getattr(model.base, "_tp_plan", None)
        theirs = model.base.config.base_model_tp_plan or own or {}
        # Their names begin at the base model, which may hold the blocks in another module.
        self.theirs = {
            re.sub(r"^.*?(layers|h|blocks)\.\*", "layers.*", k): v for k, v in theirs.items()
        }
        self.found: Styles = {}

    def styles(self) -> Styles:
        """Return the style of each module by name.

        Raises:
            _Underivable: a module has no style.
        """
        config = self.model.config
        for name in config.first_modules:
            given = self.parts[name].input if name in self.parts else None
            if name == "tok_embeddings":
                style: str | None = "vocab_embedding"
            elif given is None or not self._is_plain(name):
                style = None
            else:  # a norm of embeddings, or positions, which each rank looks up for all tokens
                style = "token_weights" if given.is_floating_point() else "cut_sequence"
            self._put(name, style)
        for name in config.final_modules:
            self._put(name, "vocab_output" if name == "output" else "sequence")
        for number, block in self.model.layers.items():
            if any(True for _ in block.parameters(recurse=False)):
                raise _Underivable(f"layers.{number} holds parameters outside of its modules")
            for child, module in block.named_children():
                self._child(f"layers.{number}.{child}", module)
        return self.found

    def _is_plain(self, name: str) -> bool:
        """Return whether a module before the blocks is a norm, or looks positions up as they are."""
        module = self.model.get_submodule(name)
        return type(module) is nn.Embedding or "norm" in type(module).__name__.lower()

    def _put(self, name: str, style: str | None) -> None:
        if any(fnmatchcase(name, pattern) for pattern in self.given):
            return
        if style is None:
            kind = type(self.model.get_submodule(name)).__name__
            raise _Underivable(
                f'no style can be derived for {name} ({kind}): give it one, as [model.plan] "{_star(name)}" = "..."'
            )
        self.found[name] = style

    def _their_style(self, name: str) -> str:
        found = next(
            (s for pattern, s in self.theirs.items() if fnmatchcase(name, pattern)), ""
        )
        parent, _, leaf = name.rpartition(".")
        if found or any(pattern.startswith(f"{_star(parent)}.") for pattern in self.theirs):
            return found
        return next((s for s, names in FIELDS["styles"].items() if leaf in names), "")

    def _child(self, name: str, module: nn.Module) -> None:
        """Find the styles of a child of a block."""
        inside = {
            f"{name}.{n}" if n else name: m
            for n, m in module.named_modules()
            if any(True for _ in m.parameters(recurse=False))
        }
        if not inside:
            return
        within = [p for n, p in self.parts.items() if f"{n}.".startswith(f"{name}.")]
        if any(part.recurrence is not None for part in within):
            self._recurrence(name, inside)
            return
        experts = [n for n, m in inside.items() if is_kind(m, ExpertModule)]
        attends = (part for part in within if part.attention is not None)
        attention = next(attends, Part(name, module))  # a feed-forward layer has none
        style = self._their_style(name)
        if experts:
            if attention.attention is not None:
                raise _Underivable(f"{name} has experts and attention in one module")
            self._put(name, "local_tokens")
            for expert in experts:
                self._put(expert, "experts")
        elif isinstance(module, nn.Linear) and style in (*COLUMNS, *ROWS):
            # A feed-forward layer whose matrices are the block's own children.
            self._put(name, "gather_colwise" if style in COLUMNS else "rowwise")
        elif attention.attention or any(
            self._their_style(n) in (*COLUMNS, *ROWS) for n in inside
        ):
            self._region(name, inside, attention)
        elif any(isinstance(m, nn.modules.conv._ConvNd) for m in inside.values()):
            self._put(name, None)
        elif name in inside and len(inside) == 1:
            self._put(name, "token_weights")
        else:
            self._put(name, "local_tokens")

    def _recurrence(self, name: str, inside: dict[str, nn.Module]) -> None:
        """Find the styles in linear attention.

        Its matrices are split, and so are the heads of the recurrence. Between them each rank has all channels, whose order is the
        model's own.
        """
        own = self.parts[name]
        if own.recurrence is None:
            raise _Underivable(f"{name} has linear attention inside of another module")
        self._put(name, "gather_whole" if name in inside else "gather_input")
        ends = [n for n in inside if n in self.parts and self.parts[n].output is own.output]
        if not ends:
            raise _Underivable(f"{name} changes the output of its last matrix")
        if own.recurrence:  # a convolution alone has no heads
            self._put(f"{name}.recurrence", "own_heads")
        whole: tuple[str, ...] = ()  # modules with all that is in them
        for inner, module in inside.items():
            if inner == name or inner.startswith(whole):
                continue
            part = self.parts.get(inner)
            reads_region = part is not None and part.input is own.input
            if isinstance(module, nn.Linear) and (inner in ends or reads_region):
                self._put(inner, "rowwise_split" if inner in ends else "colwise_gather")
            else:
                self._put(inner, "replicated")
                whole = (*whole, f"{inner}.")

    def _region(self, name: str, inside: dict[str, nn.Module], attention: Part) -> None:
        """Find the styles in attention or a feed-forward layer, whose input is all-gathered over the sequence."""
        own = self.parts[name]
        call, (queries, keys, values) = attention.attention, attention.roles
        own_parameters = dict(own.module.named_parameters(recurse=False))
        indexer = f"{name}.indexer"
        if sparse_of(own.module) and any(n.startswith(indexer) for n in inside):
            self._put(indexer, "replicated")  # all of it, since each rank chooses for all heads
            inside = {n: m for n, m in inside.items() if not n.startswith(indexer)}
        for n, parameter in own_parameters.items():
            if call is None or len(parameter) != call.heads:
                raise _Underivable(
                    f"{name} ({type(own.module).__name__}) holds the parameter {n} outside of its modules"
                )
        if not any(self._their_style(n) in COLUMNS for n in inside):
            raise _Underivable(
                f"transformers names no plan for {name} ({type(own.module).__name__}); [model.plan] may"
            )
        linear = {
            n: self._their_style(n) for n, m in inside.items() if isinstance(m, nn.Linear)
        }
        columns = {n for n, style in linear.items() if style in COLUMNS}
        rows = {n for n, style in linear.items() if style in ROWS}
        # Of a fused matrix, a rank's columns would be parts of different things.
        shares_heads = call is not None and call.kv_heads < call.heads
        is_fused = any(self.parts[n].is_cut for n in columns if n in self.parts)
        is_fused = is_fused or (shares_heads and bool(columns & queries & keys))
        if call is not None:
            is_fused |= self.whole_heads
        else:  # their plan may say more than the cuts
            is_fused |= any(self._their_style(n) == "colwise_gather_output" for n in inside)
        number = (
            f":{call.kv_heads}"
            if call and call.kv_heads != self.model.config.n_kv_heads
            else ""
        )
        gather = "gather_whole" if is_fused else "gather_heads"
        self._put(name, gather if own_parameters else "gather_input")
        for inner in (n for n in inside if n != name):
            part = self.parts.get(inner)
            if part is None or part.input is None:
                self._put(inner, None)
                continue
            reads_region = part.input is own.input
            if inner in columns and is_fused:
                self._put(inner, "colwise_gather" if reads_region else "replicated")
            elif inner in columns and not reads_region:
                self._put(inner, "colwise_part")
            elif inner in columns:
                is_shared = shares_heads and inner in keys | values and inner not in queries
                self._put(inner, f"kv_colwise{number}" if is_shared else "colwise")
            elif inner in rows:
                self._put(inner, "rowwise_split" if is_fused else "rowwise")
            elif not is_fused and self._is_width_norm(part, columns):
                is_of_keys = shares_heads and bool({*part.sources} & (keys | values))
                parts = call.heads if call is not None else part.input.shape[-1]
                parts = call.kv_heads if call is not None and is_of_keys else parts
                # All ranks have the one key/value head.
                is_whole = is_of_keys and parts == 1
                self._put(inner, "partial" if is_whole else f"width_norm:{parts}")
            else:  # after the last matrix, a rank has its own tokens
                is_whole = is_fused and not rows & part.sources.keys()
                self._put(inner, "replicated" if is_whole else "partial")

    def _is_width_norm(self, part: Part, columns: set[str]) -> bool:
        """Return whether a module normalizes over all channels that the ranks share, of split matrices or of attention."""
        if part.input is None or isinstance(part.module, nn.Linear):
            return False
        last = part.input.ndim - 1
        sizes = {p.numel() for p in part.module.parameters(recurse=False)}
        is_of_width = sizes == {part.input.shape[-1]}
        return is_of_width and any(
            dim == last for name, dim in part.sources.items() if name in {*columns, ""}
        )


def _star(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def _by_pattern(styles: Styles) -> Styles:
    """Return styles by pattern, where all blocks agree, and by name elsewhere."""
    kinds: dict[str, set[str]] = {}
    for name, style in styles.items():
        kinds.setdefault(_star(name), set()).add(style)
    agree = {pattern for pattern, found in kinds.items() if len(found) == 1}
    plan = {}
    for name, style in sorted(styles.items(), key=lambda found: -found[0].count(".")):
        pattern = _star(name)
        plan[pattern if pattern in agree else name] = style
    return plan
