"""LLaVA (arXiv:2304.08485, 2310.03744): a ViT as an encoder of pictures, a projector, and a Llama as decoder.

The ViT (arXiv:2010.11929, in CLIP's form) encodes pictures. Two layers project each patch to the decoder's width, and
the decoder reads the patches in the positions of image tokens.

N pictures of all sequences, I of a sequence, P patches of a picture, C values of a patch, T tokens of the ViT: a class
token and the patches, W width of the ViT. The other letters are those of models/llama3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.models.llama3.model import Llama

from .config import LlavaConfig


class PatchEmbedding(nn.Module):
    """Embedding of the ViT: patches at its width, behind a class token, plus learned positions."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        width, side = config.vision_dim, config.patch_size
        # The weight of CLIP's convolution, whose stride is its width: it is a matmul of each patch.
        self.patches = nn.Parameter(torch.empty(width, 3, side, side))
        self.class_token = nn.Parameter(torch.empty(width))
        self.positions = nn.Parameter(torch.empty(1 + config.num_patches, width))

    def forward(self, images_NPC: Tensor) -> Tensor:
        """Return the embedded tokens, (N, T, W)."""
        x_NPW = F.linear(images_NPC.to(self.patches.dtype), self.patches.flatten(1))
        first_N1W = self.class_token.expand(len(x_NPW), 1, -1)
        return torch.cat([first_N1W, x_NPW], dim=1) + self.positions


class VisionAttention(nn.Module):
    """Attention of the ViT, in which every token of a picture sees all others."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        width = config.vision_dim
        self.head_dim, self.num_tokens = width // config.vision_heads, 1 + config.num_patches
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_NTW: Tensor) -> Tensor:
        """Compute attention, (N, T, W) to (N, T, W). No token sees the padding after the picture's tokens."""
        q_NHTK, k_NHTK, v_NHTK = (
            w(x_NTW).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        k_NHTK, v_NHTK = k_NHTK[:, :, : self.num_tokens], v_NHTK[:, :, : self.num_tokens]
        # Not InnerAttention: context parallelism splits the decoder's sequences, but not pictures.
        o_NHTK = F.scaled_dot_product_attention(q_NHTK, k_NHTK, v_NHTK)
        return self.wo(o_NHTK.transpose(1, 2).flatten(-2))


class VisionFeedForward(nn.Module):
    """Two linear layers with CLIP's approximation of GELU between them."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.vision_dim, config.vision_ffn_dim)
        self.w2 = nn.Linear(config.vision_ffn_dim, config.vision_dim)

    def forward(self, x_NTW: Tensor) -> Tensor:
        """Apply the layers, (N, T, W) to (N, T, W)."""
        h_NTF = self.w1(x_NTW)
        return self.w2(h_NTF * torch.sigmoid(1.702 * h_NTF))


class VisionBlock(nn.Module):
    """Block of the ViT: attention, then feed-forward, each with a norm before it and added to the residual stream."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        norm = {"normalized_shape": config.vision_dim, "eps": config.vision_norm_eps}
        self.attention_norm, self.ffn_norm = nn.LayerNorm(**norm), nn.LayerNorm(**norm)
        self.attention, self.feed_forward = VisionAttention(config), VisionFeedForward(config)

    def forward(self, x_NTW: Tensor) -> Tensor:
        """Return the residual stream after the block, (N, T, W)."""
        h_NTW = x_NTW + self.attention(self.attention_norm(x_NTW))
        return h_NTW + self.feed_forward(self.ffn_norm(h_NTW))


class Vision(nn.Module):
    """ViT that encodes pictures."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.embed = PatchEmbedding(config)
        self.norm = nn.LayerNorm(config.vision_dim, eps=config.vision_norm_eps)
        self.layers = nn.ModuleDict(
            {str(i): VisionBlock(config) for i in range(config.vision_layers)}
        )

    def forward(self, images_BIPC: Tensor) -> Tensor:
        """Encode pictures (B, I, P, C) to tokens (N, T, W), without a last norm."""
        x_NTW = self.norm(self.embed(images_BIPC.flatten(0, 1)))
        for block in self.layers.values():
            x_NTW = block(x_NTW)
        return x_NTW


class Place(nn.Module):
    """Placement of projected patches among the token embeddings."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.num_patches = config.num_patches

    def forward(self, x_BSD: Tensor, features_NTD: Tensor, image_index_BS: Tensor) -> Tensor:
        """Replace token embeddings by patches.

        Args:
            x_BSD: token embeddings.
            features_NTD: projected tokens of the ViT.
            image_index_BS: index of the patch, among the I x P of its sequence, for each position. Negative: keep x.

        Returns:
            Embeddings, (B, S, D).
        """
        image_BS, patch_BS = (
            image_index_BS // self.num_patches,
            image_index_BS % self.num_patches,
        )
        # + 1 skips the class token. Padding may follow the patches of a picture.
        place_BS = image_BS * features_NTD.shape[1] + 1 + patch_BS
        features_BFD = features_NTD.view(len(x_BSD), -1, features_NTD.shape[-1])
        index_BSD = place_BS.clamp(min=0)[..., None].expand(-1, -1, features_BFD.shape[-1])
        return torch.where(
            image_index_BS[..., None] < 0, x_BSD, features_BFD.gather(1, index_BSD)
        )


class Projector(nn.Module):
    """Projector of the ViT's tokens to the decoder's width, with their placement among the token embeddings."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.vision_dim, config.dim)
        self.w2 = nn.Linear(config.dim, config.dim)
        self.place = Place(config)

    def forward(self, x_NTW: Tensor, x_BSD: Tensor, image_index_BS: Tensor) -> Tensor:
        """Project tokens of the ViT and return the embeddings, (B, S, D); see `Place`."""
        return self.place(x_BSD, self.w2(F.gelu(self.w1(x_NTW))), image_index_BS)


class Llava(Llama):
    """Decoder of LLaVA, from token ids and pictures to logits."""

    def __init__(self, config: LlavaConfig) -> None:
        super().__init__(config)
        self.sizes = config
        self.vision: nn.Module | None = Vision(config)
        self.projector: nn.Module | None = Projector(config)
        # Children are in the order in which they run: vision and projector before the blocks.
        for name in ("layers", "norm", "output"):
            self.add_module(name, self._modules.pop(name))

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        images: Tensor | None = None,
        image_index_BS: Tensor | None = None,
    ) -> Tensor:
        """Compute logits.

        A pipeline stage without the embedding needs neither `images` nor `image_index_BS`.

        Args:
            tokens_BS: as for Llama.
            positions_BS: as for Llama.
            document_ids_BS: as for Llama.
            images: pictures of each sequence, (B, I, P, C).
            image_index_BS: index of the patch, among the I x P of its sequence, for each position, int64. -1: a token of text.

        Returns:
            Logits, (B, S, V), in the dtype of the weights.
        """
        cos_sin = self.rotary_cos_sin(positions_BS, tokens_BS.shape[1], tokens_BS.device)
        x_BSD = tokens_BS if self.tok_embeddings is None else self.embed(tokens_BS)
        if self.vision is not None and self.projector is not None and images is not None:
            x_BSD = self.projector(self.vision(images), x_BSD, image_index_BS)
        return self.decode(x_BSD, cos_sin, document_ids_BS)

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial weights: Llama's, and zero for biases."""
        if name.endswith(".bias"):
            return 0.0
        # Patches, positions and features are of order one at any size, as embeddings are.
        order_one = {
            "vision.embed.class_token": 1.0,
            "vision.embed.positions": 1.0,
            "vision.embed.patches": self.sizes.patch_dim**-0.5,
            "projector.w1.weight": self.sizes.vision_dim**-0.5,
            "projector.w2.weight": self.sizes.dim**-0.5,
        }
        if name in order_one:
            return order_one[name]
        return super().init_std(name.removeprefix("vision."))
