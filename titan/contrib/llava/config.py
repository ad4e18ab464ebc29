"""Sizes of LLaVA 1.5 (arXiv:2310.03744, and the config.json of llava-hf/llava-1.5-7b-hf and 13b). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from titan.models.common.config import LlamaConfig, flavors_by
from titan.models.llama3.config import FLAVORS as LLAMA


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(LlamaConfig):
    """Sizes of LLaVA: its decoder, a Llama, and its encoder of pictures, a ViT.

    Attributes:
        vision_dim: width of the ViT.
        vision_layers: blocks of the ViT. LLaVA reads the output of CLIP's last block but one, so 23 of 24.
        vision_heads: heads of the ViT.
        vision_ffn_dim: width of the ViT's feed-forward layers.
        image_size: side of a picture in pixels.
        patch_size: side of a patch in pixels.
        image_token: id that stands in a text for a patch.
        vision_norm_eps: epsilon of the ViT's norms.
    """

    # Modules that a pipeline puts on its first stage, before the blocks.
    first_modules: ClassVar[tuple[str, ...]] = ("tok_embeddings", "vision", "projector")

    vision_dim: int
    vision_layers: int
    vision_heads: int
    vision_ffn_dim: int
    image_size: int
    patch_size: int
    image_token: int
    vision_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    @property
    def num_patches(self) -> int:
        """Return the number of patches of a picture, each of which takes one position of the decoder."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self) -> int:
        """Return the number of values of a patch: three colours of each pixel."""
        return 3 * self.patch_size**2

    def images_in(self, seq_len: int) -> int:
        """Return how many pictures fit into a sequence of `seq_len` positions, each with a begin token and one token of text."""
        return (seq_len + 1) // (self.num_patches + 2)

    @property
    def _vision_matmul_params(self) -> int:
        """Return the number of matrix parameters in the ViT's blocks."""
        width = self.vision_dim
        return self.vision_layers * (4 * width**2 + 2 * width * self.vision_ffn_dim)

    @property
    def num_vision_params(self) -> int:
        """Return the number of parameters of encoder and projector."""
        width, dim = self.vision_dim, self.dim
        # A block has biases of five matrices of this width and one of the feed-forward width, and two norms with biases.
        rest = self.vision_layers * (9 * width + self.vision_ffn_dim)
        # Patches; the class token, whose position is the first; positions; the norm before the blocks.
        embed = width * (self.patch_dim + 1 + (1 + self.num_patches) + 2)
        return embed + self._vision_matmul_params + rest + (width + dim + 2) * dim

    @property
    def num_params(self) -> int:
        """Return the number of parameters."""
        return super().num_params + self.num_vision_params

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the operations of forward and backward for one position of a sequence, as `LlamaConfig` counts them.

        A sequence holds as many pictures as fit. The cost of encoding them is spread over its positions.

        Args:
            seq_len: positions of a sequence.
            causal: as for `LlamaConfig`; the ViT's attention is never causal.
        """
        tokens = self.num_patches + 1
        # Every patch sees all others, so `causal` does not halve this.
        blocks = 6 * self._vision_matmul_params
        blocks += 12 * self.vision_layers * self.vision_dim * tokens
        ends = 6 * (self.vision_dim * (self.patch_dim + self.dim) + self.dim**2)
        image = tokens * blocks + self.num_patches * ends
        share = self.images_in(seq_len) * image // seq_len
        return super().flops_per_token(seq_len, causal=causal) + share


def _with_vision(decoder: LlamaConfig, **changes: Any) -> LlavaConfig:
    return LlavaConfig(**(vars(decoder) | changes))


# Vicuna (Llama 2 with a larger vocabulary) with CLIP ViT-L/14 at 336 pixels, without its last block
_llava = flavors_by(
    "dim n_layers n_heads n_kv_heads ffn_dim",
    LlavaConfig,
    vocab_size=32_064,
    vision_dim=1024,
    vision_layers=23,
    vision_heads=16,
    vision_ffn_dim=4096,
    image_size=336,
    patch_size=14,
    image_token=32_000,
)
FLAVORS: dict[str, LlavaConfig] = {
    # titan's own: Llama's of that name, and pictures of four patches
    "tiny": _with_vision(
        LLAMA["tiny"],
        vision_dim=32,
        vision_layers=2,
        vision_heads=4,
        vision_ffn_dim=96,
        image_size=8,
        patch_size=4,
        image_token=2047,
    ),
    # The demo's: describes pictures of 32 x 32 pixels in bytes, after three minutes on two CPU cores.
    "demo": _with_vision(
        LLAMA["demo"],
        dim=128,
        n_layers=3,
        n_heads=4,
        n_kv_heads=4,
        head_dim=32,
        ffn_dim=256,
        init_std=0.08,  # 1 / sqrt(dim): with less, attention begins to work only late in so short a run
        vision_dim=128,
        vision_layers=2,
        vision_heads=4,
        vision_ffn_dim=256,
        image_size=32,
        patch_size=8,
        image_token=263,
    ),
    # LLaVA 1.5
    "7B": _llava(4096, 32, 32, 32, 11_008),
    "13B": _llava(5120, 40, 40, 40, 13_824),
}
