"""A family of models that is not like ours: Llama with traits, each of which a job switches on by `model.overrides.traits`.

What differs between micro-batches follows the ids of their documents: rows of `mixed_batch` with ids from `OTHER` on are of the other
kind, on every rank and every pipeline stage alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.layouts import Layout, global_batch
from titan.data.base import TensorBatch
from titan.data.packing import Batch
from titan.models.llama3 import FLAVORS as LLAMA
from titan.models.llama3 import TENSOR_PLAN as LLAMA_PLAN
from titan.models.llama3 import LlamaConfig
from titan.models.llama3.model import Attention, Block, Llama

OTHER = 100
TENSOR_PLAN = {
    "layers.*.spare": "token_weights",
    "layers.*.tower": "token_weights",
    **LLAMA_PLAN,
}


@dataclass(frozen=True, kw_only=True)
class AwkwardConfig(LlamaConfig):
    """Sizes, and the names of the traits with commas between them."""

    traits: str = ""

    def has(self, trait: str) -> bool:
        return trait in self.traits.split(",")


class OddLinear(nn.Linear):
    """A linear layer that overrides forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2)


def mixed_batch(layout: Layout, step: int) -> TensorBatch:
    """Two kinds of rows, of which each micro-batch has one: the first four, and the last four."""
    tokens, labels, documents = global_batch(step)
    kinds = (torch.arange(len(documents)) >= len(documents) // 2).long()
    return Batch(
        tokens_BS=tokens, labels_BS=labels, document_ids_BS=documents + OTHER * kinds[:, None]
    )


class DroppingAttention(Attention):
    """Drop inputs of attention, which each tensor-parallel rank holds."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.drop = nn.Dropout(0.2)

    def forward(self, x_BSD: Tensor, *args: Any) -> Tensor:
        return super().forward(self.drop(x_BSD), *args)


class AwkwardBlock(Block):
    """A block of Llama with the traits of a block."""

    def __init__(self, config: AwkwardConfig, layer: int, **kwargs: Any) -> None:
        super().__init__(config, layer, **kwargs)
        self.config, self.kind = config, [False]
        if config.has("unused"):
            self.spare = nn.Linear(config.dim, config.dim, bias=False)
        if config.has("tower"):
            self.tower = nn.Linear(config.dim, config.dim, bias=False)
        self.dropout = nn.Dropout(0.2 if config.has("dropout") else 0.0)
        if config.has("subclass"):
            self.feed_forward.w2 = OddLinear(config.ffn_dim, config.dim, bias=False)
        if config.has("buffer"):
            self.register_buffer("scale", torch.empty(()))

    def forward(self, x_BSD: Tensor, cos_sin: Any, document_ids_BS: Tensor | None) -> Tensor:
        x_BSD = super().forward(x_BSD, cos_sin, document_ids_BS)
        config = self.config
        if config.has("tower") and self.kind[0]:
            x_BSD = x_BSD + self.tower(x_BSD)
        if config.has("functional"):
            x_BSD = F.dropout(x_BSD, 0.2, self.training)
        return self.dropout(x_BSD) * (self.scale if config.has("buffer") else 1)

    def reset_buffers(self) -> None:
        if self.config.has("buffer"):
            self.scale.fill_(0.5)


class Awkward(Llama):
    """Llama with the traits of a model."""

    def __init__(self, config: AwkwardConfig) -> None:
        kind = DroppingAttention if config.has("replicated") else Attention
        super().__init__(config, block=AwkwardBlock, attention=kind)
        self.kind = [False]  # whether the micro-batch is of the other kind
        layers: Any = self.layers
        for block in layers.values():
            block.kind = self.kind
        # Before titan makes a mask of the ids.
        self.register_forward_pre_hook(self.see_kind, with_kwargs=True)
        if config.has("max_norm"):
            self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, max_norm=1.0)
        if config.has("shared"):
            layers["2"].feed_forward.w1.weight = layers["0"].feed_forward.w1.weight
        if config.has("padding"):
            self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, padding_idx=7)

    def see_kind(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids_BS = kwargs.get("document_ids_BS")
        self.kind[0] = ids_BS is not None and bool(ids_BS.max() >= OTHER)

    def decode(
        self, x_BSD: Tensor, cos_sin: Any, document_ids_BS: Tensor | None, **kwargs: Any
    ) -> Tensor:
        other = self.kind[0]
        config: Any = self.config
        blocks = self.layers
        if config.has("skips") and not other:
            self.layers = nn.ModuleDict({k: b for k, b in blocks.items() if k != "1"})
        if config.has("exits") and other:
            self.layers = nn.ModuleDict({k: b for k, b in blocks.items() if int(k) < 2})
        try:
            out_BSV = super().decode(x_BSD, cos_sin, document_ids_BS, **kwargs)
        finally:
            self.layers = blocks
        if config.has("soft_cap") and self.output is not None:
            out_BSV = 2 * torch.tanh(out_BSV / 2)
        return out_BSV


def build_model(config: AwkwardConfig) -> Awkward:
    return Awkward(config)


FLAVORS = {
    "tiny": AwkwardConfig(
        **{f: getattr(LLAMA["tiny"], f) for f in LlamaConfig.__dataclass_fields__}
    )
}


def install() -> None:
    """Register the family in this process, as an installed package would be."""
    from importlib.metadata import EntryPoint

    from titan.config import model

    entry = EntryPoint("awkward", __name__, "titan.models")
    model.plug_in_families = lambda: {"awkward": entry}
    for cached in (model.families, model.family, model.check_module):
        cached.cache_clear()


def awkward(layout: Layout, *traits: str) -> Layout:
    """Return a layout that trains the family with these traits, on two kinds of micro-batches."""
    overrides = (("traits", ",".join(traits)), *layout.overrides)
    return replace(layout, model=("awkward", "tiny"), overrides=overrides, batch=mixed_batch)
