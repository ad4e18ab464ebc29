"""Substitutes for the modules of `TransformersModel` inside of transformers' own module objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class StandIn:
    """Placeholder for a child of `TransformersModel` in transformers' own module.

    A missing child returns its input, or zero for ids: what comes before the blocks is not used on a later stage.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.model._modules[self.name]
        if module is not None:
            return module(*args, **kwargs)
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return x if x.is_floating_point() else x.new_zeros((), dtype=torch.get_default_dtype())

    def __getitem__(self, key: Any) -> Any:
        return self.model._modules[self.name][key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("model", "name"):
            raise AttributeError(name)
        return getattr(self.model._modules[self.name], name)


class Blocks:
    """All blocks of a model, of which a pipeline stage has some."""

    def __init__(self, model: Any, blocks: nn.ModuleList) -> None:
        self.model = model
        self.entries = [Entry(model, str(n), block) for n, block in enumerate(blocks)]

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: int | slice) -> Any:
        found = self.entries[index]
        return [entry.get() for entry in found] if isinstance(found, list) else found.get()


class Entry:
    """A block, or what stands for it where a pipeline stage lacks it."""

    def __init__(self, model: Any, name: str, block: nn.Module) -> None:
        simple = (bool, int, float, str)
        self.__dict__.update({k: v for k, v in vars(block).items() if isinstance(v, simple)})
        self.model, self.name = model, name

    def get(self) -> Any:
        blocks = self.model.layers
        if self.name in blocks and self.model.received is None:
            return blocks[self.name]
        return self

    def __call__(self, hidden_BSD: Tensor, *args: Any, **kwargs: Any) -> Any:
        blocks = self.model.layers
        if self.name in blocks:
            if self.name == next(iter(blocks)):
                hidden_BSD = self.model.received
            return blocks[self.name](hidden_BSD, *args, **kwargs)
        size = self.model.returns
        return (hidden_BSD, *[None] * (size - 1)) if size else hidden_BSD
