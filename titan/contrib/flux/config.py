"""Sizes of Flux.1, a transformer that turns noise into pictures. Imports no torch.

The numbers come from the models' config.json. The blocks of two streams are those of Stable Diffusion 3 (arXiv:2403.03206).
A sample is a sequence of context positions (encodings of a text, or a label) and of patches of a picture. The first
`n_double` blocks keep separate weights for context and patches. The other blocks have one set of weights for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan.models.common.config import flavors_by
from titan.parallel.traits import ModelSizes

TIME_CHANNELS = 256  # sines and cosines of the time


@dataclass(frozen=True, kw_only=True)
class FluxConfig(ModelSizes):
    """Sizes of Flux.1.

    Attributes:
        dim: model width.
        n_layers: number of blocks of both kinds.
        n_double: blocks of two streams, which come first.
        n_heads: heads of attention.
        ffn_dim: width of the feed-forward layers.
        in_channels: channels of a patch.
        context_dim: channels of a context position.
        pooled_dim: channels of the vector that stands for the whole context.
        rope_axes: channels of a head that rotate with a position's index, row and column.
        rope_theta: base of the rotary frequencies.
        guidance_embed: whether the model takes a guidance strength as input.
        gate_init_std: standard deviation of the initial weights of modulations and of the output layer. With 0 every
            block begins as the identity (adaLN-Zero, arXiv:2212.09748).
    """

    dim: int
    n_layers: int
    n_double: int
    n_heads: int
    ffn_dim: int
    in_channels: int = 64
    context_dim: int = 4096
    pooled_dim: int = 768
    rope_axes: tuple[int, ...] = (16, 56, 56)
    rope_theta: float = 10_000.0
    guidance_embed: bool = False
    gate_init_std: float = 0.0
    vocab_size = 0

    @property
    def head_dim(self) -> int:
        """Return the number of channels of a head."""
        return self.dim // self.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Return the number of key/value heads: each query head has its own."""
        return self.n_heads

    @property
    def num_block_matrix_params(self) -> int:
        """Return the number of matrix parameters that act on one position in a block. Both kinds of blocks have the same number."""
        return 4 * self.dim**2 + 2 * self.dim * self.ffn_dim

    @property
    def num_modulation_params(self) -> int:
        """Return the number of matrix parameters, over all blocks, that turn the time into shifts, scales and gates."""
        n_single = self.n_layers - self.n_double
        return (2 * 6 * self.n_double + 3 * n_single) * self.dim**2

    @property
    def num_params_in_blocks(self) -> int:
        """Return the number of parameters of all blocks."""
        n_single = self.n_layers - self.n_double
        # Biases of modulations, projections and feed-forward layers, and the norms of heads. A block of one stream has one
        # bias for both of its outputs.
        double = 2 * ((6 + 4 + 1) * self.dim + self.ffn_dim + 2 * self.head_dim)
        single = (3 + 3 + 1) * self.dim + self.ffn_dim + 2 * self.head_dim
        matrices = (2 * self.n_double + n_single) * self.num_block_matrix_params
        return (
            matrices + self.num_modulation_params + self.n_double * double + n_single * single
        )

    @property
    def num_block_params(self) -> int:
        """Return the number of parameters of a block, averaged over both kinds."""
        return self.num_params_in_blocks // self.n_layers

    @property
    def num_embedding_params(self) -> int:
        """Return the number of parameters before the blocks: of patches, context, time, guidance and the pooled vector."""
        times = 1 + self.guidance_embed
        inputs = self.in_channels + self.context_dim + self.pooled_dim + times * TIME_CHANNELS
        return (inputs + (1 + times) * self.dim + 2 + 2 + 2 * times) * self.dim

    @property
    def num_params(self) -> int:
        """Return the number of parameters."""
        last = 2 * (self.dim + 1) * self.dim + (self.dim + 1) * self.in_channels
        return self.num_params_in_blocks + self.num_embedding_params + last

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the floating-point operations of forward and backward for one position.

        Each matrix parameter that acts on the position costs 6 operations. Attention costs 12 x layers x width x seq_len.
        Modulations are computed once a sample. The embedder and the output layer, about 0.1% of the total, are left out.

        Args:
            seq_len: positions of a sequence.
            causal: ignored, since attention always sees all positions.
        """
        per_position = self.n_layers * (
            6 * self.num_block_matrix_params + 12 * self.dim * seq_len
        )
        return per_position + 6 * self.num_modulation_params // seq_len


_flux = flavors_by("dim n_layers n_double n_heads ffn_dim", FluxConfig)
_SMALL = {"in_channels": 16, "context_dim": 16, "pooled_dim": 16}
FLAVORS: dict[str, FluxConfig] = {
    # titan's own, for tests
    "tiny": _flux(64, 4, 2, 4, 256, **_SMALL, rope_axes=(4, 6, 6)),
    # The demo's: learns to draw shapes on two CPU cores.
    "demo": _flux(128, 6, 2, 4, 512, **_SMALL, rope_axes=(4, 14, 14)),
    # TorchTitan v0.2.2's of that name
    "flux-debug": _flux(1536, 4, 2, 12, 6144),
    # Flux.1 schnell; Flux.1 dev with guidance_embed = true
    "12B": _flux(3072, 57, 19, 24, 12_288),
}
