"""What a model's modules say of themselves to titan.parallel, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BlockTraits:
    """What a block is to those that wrap it, in its attribute `traits`. A block without that attribute has the defaults.

    Functions are named by their path within the block, such as "moe.combine".

    Attributes:
        compiled: the functions to compile, if the block cannot be compiled whole; empty: the whole block.
        varying: of these, the ones whose first argument has another number of rows each time.
        recomputed: of these, the ones that a selective checkpoint runs again as a whole, since their results would take more memory than
            they save time.
    """

    compiled: tuple[str, ...] = ()
    varying: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()

    def within(self, path: str, *before: str) -> BlockTraits:
        """Return the traits of a module that has this one as a child. before: functions of its own to compile."""
        names = {name: f"{path}.{name}" for name in self.compiled}
        return BlockTraits(
            compiled=(*before, *names.values()),
            varying=frozenset(names[name] for name in self.varying),
            recomputed=frozenset(names[name] for name in self.recomputed),
        )


def traits_of(block: Any) -> BlockTraits:
    """Return what a block says of itself."""
    return getattr(block, "traits", BlockTraits())


@dataclass(frozen=True)
class ModelEnds:
    """Names of the modules before and after a model's blocks. The first one is the embedding."""

    first: tuple[str, ...] = ("tok_embeddings",)
    last: tuple[str, ...] = ("norm", "output")

    @property
    def embedding(self) -> str:
        """Return the name of the module that the inputs go through."""
        return self.first[0]


USUAL_ENDS = ModelEnds()


def ends_of(sizes: Any) -> ModelEnds:
    """Return the ends that a family's config names, in `first_modules` and `last_modules`, or the usual ones."""
    named = {end: getattr(sizes, f"{end}_modules", None) for end in ("first", "last")}
    return ModelEnds(**{end: names for end, names in named.items() if names})
