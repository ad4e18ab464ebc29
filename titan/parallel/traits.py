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


class ModelSizes:
    """Base class of the sizes of a family, with what a model has none of unless its sizes say so.

    titan gives the sizes of another package's family the names that they lack (titan/config/model.py).

    Attributes:
        num_experts: routed experts of a block.
        num_shared_experts: experts that all tokens go to.
        expert_dim: width of an expert.
        n_dense_layers: first blocks, which have no experts.
        load_balance_coeff: step of the routing bias.
        num_mtp_modules: modules of multi-token prediction.
        tied_embeddings: whether the output layer is the embedding.
        original_context: positions that the frequencies were made for, before they were stretched.
        table_positions: positions that the model has in a table.
        fixes_positions: whether the largest position decides what the model computes.
        reach: tokens before a token that a short convolution needs.
        heads_of_blocks: attention heads of each block, if blocks have other numbers.
        refuses: techniques that the model cannot have, each with the reason. None: titan checks all of them.
        score: how a router scores experts; None: the family has a router of another kind.
        num_groups: groups of experts, of which a token goes to the best `top_groups`; 0: no groups.
        group_top_k: experts whose scores add up to that of their group.
        rope_factor: factor by which YaRN stretches the context.
        facts: values that decide what the model computes, in place of the fields.
    """

    num_experts: Any = 0
    num_shared_experts: Any = 0
    expert_dim: Any = 0
    n_dense_layers: Any = 0
    load_balance_coeff: Any = 0.0
    num_mtp_modules: Any = 0
    tied_embeddings: Any = False
    original_context: Any = 0
    table_positions: Any = 0
    fixes_positions: Any = False
    reach: Any = 0
    heads_of_blocks: Any = ()
    refuses: Any = None
    score: Any = None
    num_groups: Any = 0
    top_groups: Any = 0
    group_top_k: Any = 1
    rope_factor: Any = 1
    facts: Any = None

    @property
    def num_blocks(self: Any) -> int:
        """Return the number of blocks, those of multi-token prediction included."""
        return self.n_layers

    @property
    def num_active_params(self: Any) -> int:
        """Return the number of parameters that act on one token."""
        return self.num_params

    def window_of(self, layer: int) -> int:
        """Return the number of keys that a query of a layer sees, its own included. 0: all keys up to its own."""
        return 0

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return False


class UnknownSizes(ModelSizes):
    """Sizes in place of those of a [model] section with a mistake, so that all other rules are checked."""

    n_layers = n_heads = n_kv_heads = ffn_dim = vocab_size = 0


def add_defaults(sizes: Any) -> None:
    """Add the defaults of `ModelSizes` that a class of sizes lacks.

    Args:
        sizes: an object of the class, such as a flavor of a user's family.
    """
    for name, default in vars(ModelSizes).items():
        if not name.startswith("_") and not hasattr(sizes, name):
            setattr(type(sizes), name, default)


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
            name
            for name, m in modules.items()
            if type(m).__name__ in ("ModuleList", "ModuleDict")
        ]
        raise ValueError(
            f"{type(model).__name__} has no blocks in `{container}`; containers of blocks are {', '.join(lists) or 'nowhere in it'}"
        )
    return modules[container], found
