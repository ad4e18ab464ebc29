"""Kinds of modules that the techniques look for. A class of yours belongs to a kind by its attributes. Only sequence modules derive.

apply_ep, the overlap of experts, float8, document masks and context parallelism find their modules with `modules_of`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class ExpertModule(Protocol):
    """Module that sends each token to some of its experts. Expert parallelism replaces the function that sends them."""

    dispatcher: Any


@runtime_checkable
class RoutedExperts(Protocol):
    """Module that counts the tokens of each expert in its buffer `loads`, and asks its sources which experts a token takes."""

    route_sources: list[Any]


@runtime_checkable
class GroupedExperts(Protocol):
    """Stacked experts, which multiply tokens of these dtypes in one kernel for all experts."""

    grouped_dtypes: tuple[Any, ...]


@runtime_checkable
class MaskedAttention(Protocol):
    """Attention that says which keys a query sees."""

    spec: Any


class SequenceModule(nn.Module):
    """Base class of modules that carry something over positions, such as linear attention and short convolutions."""

    def hold(self, part: Any) -> None:
        """Compute with the part of the sequence that this rank holds, a `SequencePart`. Context parallelism calls it. A class that lacks it raises NotImplementedError."""
        raise NotImplementedError

    def starts(self, document_ids_BS: Tensor) -> Tensor | None:
        """Return where a document starts in the rank's part of the sequence, as booleans. A class that lacks it raises NotImplementedError."""
        raise NotImplementedError


def modules_of(model: nn.Module, kind: Any) -> dict[str, Any]:
    """Return the modules of a kind in a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def stacked_experts(module: nn.Module) -> Any:
    """Return the module that holds the parameters of all experts: the child `experts`, or the module itself."""
    return dict(module.named_children()).get("experts", module)
