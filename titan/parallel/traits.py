"""Traits of a model's modules that titan.parallel reads, as data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BlockTraits:
    """Traits of a block, in its attribute `traits`. A block without that attribute has the defaults.

    A function's name is its path within the block, such as "moe.combine".

    Attributes:
        compiled: functions to compile, if the block cannot be compiled whole. Empty: the whole block is compiled.
        varying: compiled functions whose first argument has another number of tokens each time.
        recomputed: compiled functions that a selective checkpoint recomputes whole: their results would take more
            memory than they save time.
    """

    compiled: tuple[str, ...] = ()
    varying: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()

    def within(self, path: str, *before: str) -> BlockTraits:
        """Return the traits of a module that has this module as a child.

        Args:
            path: name of this module within the parent.
            before: functions of the parent itself to compile, before those of the child.
        """
        names = {name: f"{path}.{name}" for name in self.compiled}
        return BlockTraits(
            compiled=(*before, *names.values()),
            varying=frozenset(names[name] for name in self.varying),
            recomputed=frozenset(names[name] for name in self.recomputed),
        )


def traits_of(block: Any) -> BlockTraits:
    """Return the traits of a block, or the defaults.

    Args:
        block: any module.
    """
    return getattr(block, "traits", BlockTraits())


@dataclass(frozen=True)
class ModelEnds:
    """Names of the modules before and after a model's blocks.

    Attributes:
        first: modules before the blocks. The first of them is the embedding.
        last: modules after the blocks.
    """

    first: tuple[str, ...] = ("tok_embeddings",)
    last: tuple[str, ...] = ("norm", "output")

    @property
    def embedding(self) -> str:
        """Return the name of the first module, which takes the model's inputs."""
        return self.first[0]


USUAL_ENDS = ModelEnds()


def ends_of(sizes: Any) -> ModelEnds:
    """Return the ends of a model.

    Args:
        sizes: config of a model family. It may name the ends in `first_modules` and `last_modules`.
    """
    named = {end: getattr(sizes, f"{end}_modules", None) for end in ("first", "last")}
    return ModelEnds(**{end: names for end, names in named.items() if names})


def blocks_in(model: Any, container: str) -> tuple[Any, dict[str, Any]]:
    """Return a container of blocks, and the blocks by their names in it.

    Args:
        model: the model, an nn.Module.
        container: name of a ModuleDict or ModuleList in it.

    Raises:
        ValueError: the model has no such container, or it is empty.
    """
    modules = dict(model.named_modules())
    found = dict(modules[container].named_children()) if container in modules else {}
    if not found:
        lists = [
            name for name, m in modules.items() if type(m).__name__ in ("ModuleList", "ModuleDict")
        ]
        raise ValueError(
            f"{type(model).__name__} has no blocks in `{container}`; containers of blocks are {', '.join(lists) or 'nowhere in it'}"
        )
    return modules[container], found
