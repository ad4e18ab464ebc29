"""Description of a model of `transformers`: its config.json, and the sizes that the model itself has on meta.

It imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titan.config.toml import table_beside
from titan.models.common.moe_config import MoEConfig

FIELDS = table_beside(__file__, "fields.toml")
NAMES: dict[str, list[str]] = FIELDS["names"]
"""Names that config classes give a field, by what it means."""
NOTES: list[str] = FIELDS["notes"]
"""Fields that are of a file or of a call, and do not decide what a model computes."""


def rope_types(content: dict[str, Any]) -> set[Any]:
    """Return the kinds of rotary embeddings that a config.json names, of all layers or by kind of layer."""
    table = content.get("rope_parameters") or {}
    tables = [table, *(entry for entry in table.values() if isinstance(entry, dict))]
    return {entry.get("rope_type") for entry in tables}


class HeadNumbers(NamedTuple):
    """Attention heads of a block: all 0 if it has none.

    Attributes:
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: channels of a query.
    """

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0


class ModelSource(NamedTuple):
    """Source of a model: what it is built from.

    Attributes:
        hf: content of config.json, with all defaults, as JSON.
        plan: styles of [model.plan], which take precedence over the derived ones.
        code: folder whose own Python code defines the model. Empty: transformers does.
    """

    hf: str
    plan: tuple[tuple[str, str], ...] = ()
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(MoEConfig):
    """Sizes of a model of transformers, read from the module on meta.

    Attributes:
        source: what the model is built from.
        first_modules: names of the modules before the blocks, the embedding first.
        final_modules: names of the modules after the blocks.
        params: number of parameters, of all blocks and ends.
        params_of_blocks: number of parameters of each block.
        experts_of_blocks: number of parameters of each block's routed experts.
        matmul_params: number of parameters in matmuls that act on one token, with the output layer.
        recurrent_flops: operations of all linear recurrences for one token, forward.
        index_width: channels of the queries of all indexers.
        index_params: parameters of their matrices.
        index_heads: heads of one of them.
        choices: tokens or blocks that are chosen for a query in all layers.
        stage: what their training is at: "dense", "indexer" or "joint" (section.py).
        reach: tokens before a token that a short convolution needs.
        heads_of_blocks: attention heads of each block. n_heads and n_kv_heads are those of the block with most.
        windows: keys that a query of each block sees, by a window or a choice, 0 for all, 1 for a block without attention.
        refuses: techniques that the model cannot have, each with the reason.
        table_positions: positions that the model has in a table. 0: any number.
    """

    source: ModelSource
    first_modules: tuple[str, ...]
    final_modules: tuple[str, ...]
    params: int
    params_of_blocks: tuple[int, ...]
    experts_of_blocks: tuple[int, ...]
    matmul_params: int
    heads_of_blocks: tuple[HeadNumbers, ...]
    windows: tuple[int, ...]
    recurrent_flops: int = 0
    index_width: int = 0
    index_params: int = 0
    index_heads: int = 0
    choices: int = 0
    stage: str = "joint"
    reach: int = 0
    refuses: tuple[tuple[str, str], ...] = ()
    table_positions: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of config.json that decide what the model computes."""
        content = json.loads(self.source.hf)
        return {
            k: v for k, v in content.items() if k not in NOTES and not k.endswith("_token_id")
        }

    @property
    def last_modules(self) -> tuple[str, ...]:
        """Return the names of the modules after the blocks."""
        return self.final_modules

    @property
    def fixes_positions(self) -> bool:
        """Return whether max_position_embeddings decides what the model computes."""
        return bool(
            self.table_positions or "longrope" in rope_types(json.loads(self.source.hf))
        )

    def trained_by(self, config: Any) -> TransformersConfig:
        """Return the sizes in the stage of a job, or of one of its phases."""
        return replace(self, stage=config.sparse_attention.stages[0])

    def window_of(self, layer: int) -> int:
        """Return the number of keys that a query of a layer sees, its own included. 0: all keys up to its own."""
        return self.windows[layer] if self.stage == "joint" else 0

    def attention_width(self, layer: int) -> int:
        """Return the number of channels of the queries of a layer."""
        return self.heads_of_blocks[layer].heads * self.heads_of_blocks[layer].head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return self.experts_of_blocks[layer] > 0

    @property
    def num_expert_params(self) -> int:
        """Return the number of parameters of one expert."""
        return max(self.experts_of_blocks) // max(1, self.num_experts)

    @property
    def num_block_params(self) -> int:
        """Return the number of parameters of the last block."""
        return self.params_of_blocks[-1]

    def block_params(self, layer: int, *, active: bool = False) -> int:
        """Return the number of parameters of a block, or of those that act on one token."""
        experts = self.experts_of_blocks[layer] if active else 0
        unused = experts * (self.num_experts - self.top_k) // max(1, self.num_experts)
        return self.params_of_blocks[layer] - unused

    @property
    def num_params(self) -> int:
        """Return the number of parameters. Tied embeddings count once."""
        return self.params

    @property
    def num_active_params(self) -> int:
        """Return the number of parameters that act on one token."""
        layers = range(self.n_layers)
        return self.params - sum(
            self.block_params(n) - self.block_params(n, active=True) for n in layers
        )

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the floating-point operations of forward and backward for one token, of active parameters only.

        Args:
            seq_len: tokens of a sequence.
            causal: count only the pairs of queries and keys that a causal mask leaves.
        """
        products = 6 * self.matmul_params + 3 * self.recurrent_flops
        is_dense = self.stage == "dense"
        # Inputs of an indexer get no gradient, and a frozen one computes none.
        products -= (4 if is_dense else 2) * self.index_params
        if not is_dense:
            # All keys are scored, once in each direction, where attention computes two products.
            products += 6 * self.index_width * (seq_len // 2 if causal else seq_len)
        return products + self.attention_flops_per_token(seq_len, causal=causal)
