"""Kinds of modules that the techniques look for. A class of yours belongs to a kind by its attributes. Only sequence modules derive.

apply_ep, the overlap of experts, float8, document masks and context parallelism find their modules with `modules_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

if TYPE_CHECKING:
    from .block_attention import AttentionSpec

T = TypeVar("T")


@runtime_checkable
class ExpertModule(Protocol):
    """Module that sends each token to some of its experts. Expert parallelism replaces the function that sends them."""

    dispatcher: Callable[..., Tensor]


@runtime_checkable
class FillsBuffers(Protocol):
    """Module that computes its buffers, which were built on meta."""

    def reset_buffers(self) -> None:
        """Fill the buffers, in place."""
        ...


@runtime_checkable
class ReservesPositions(Protocol):
    """Model that computes the rotations of all positions once, for a whole run."""

    def reserve_positions(self, length: int) -> None:
        """Make room for sequences of this length."""
        ...


class RouteSource(Protocol):
    """Source of routes in place of the router's choice, which also observes the routes taken."""

    def get(self, moe: Any, tokens: Tensor) -> Tensor | None:
        """Return the experts of a module's input (B, S, D) as ids (T, K), or None to let the router choose."""
        ...

    def put(self, moe: Any, ids_TK: Tensor) -> None:
        """Observe the experts that tokens took."""
        ...


@runtime_checkable
class RoutedExperts(Protocol):
    """Module that counts the tokens of each expert in its buffer `loads`, and asks its sources which experts a token takes."""

    route_sources: list[RouteSource]


@runtime_checkable
class RouterModule(Protocol):
    """Module that chooses the experts of each token."""

    choose: Callable[..., Tensor]


@runtime_checkable
class GroupedExperts(Protocol):
    """Stacked experts, which multiply tokens of these dtypes in one kernel for all experts.

    Attributes:
        grouped_dtypes: the dtypes.
        grouped: the function of the kernel.
        w1: weights of the gate, (E, F, D).
    """

    grouped_dtypes: tuple[torch.dtype, ...]
    grouped: Callable[..., Tensor]
    w1: nn.Parameter


@runtime_checkable
class Float8Layer(Protocol):
    """torchao's linear layer that multiplies in float8.

    Attributes:
        config: its Float8LinearConfig.
        linear_mm_config: settings of its three matmuls.
    """

    config: Any
    linear_mm_config: Any


@runtime_checkable
class MaskedAttention(Protocol):
    """Attention that says which keys a query sees."""

    spec: AttentionSpec


@runtime_checkable
class ScaledAttention(Protocol):
    """Attention with a factor of its scores, None for 1 / sqrt(head size)."""

    scale: float | None


@runtime_checkable
class SharesModules(Protocol):
    """Model that names modules which every pipeline stage has, such as rotary embeddings."""

    on_all_stages: Sequence[str]


class SequenceModule(nn.Module):
    """Base class of modules that carry something over positions, such as linear attention and short convolutions."""

    def hold(self, part: Any) -> None:
        """Compute with the part of the sequence that this rank holds, a `SequencePart`. Context parallelism calls it. A class that lacks it raises NotImplementedError."""
        raise NotImplementedError

    def starts(self, document_ids_BS: Tensor) -> Tensor | None:
        """Return where a document starts in the rank's part of the sequence, as booleans. A class that lacks it raises NotImplementedError."""
        raise NotImplementedError


def is_kind(module: object, kind: type[T]) -> TypeIs[T]:
    """Return whether a module is of a kind, by its class or its attributes."""
    return isinstance(module, kind)


def modules_of(model: nn.Module, kind: type[T]) -> dict[str, T]:
    """Return the modules of a kind in a model, by name."""
    return {name: module for name, module in model.named_modules() if is_kind(module, kind)}


def stacked_experts(module: Any) -> Any:
    """Return the module that holds the parameters of all experts: the child `experts`, or the module itself."""
    return dict(module.named_children()).get("experts", module)
