"""Flux.1 as a plain nn.Module: a transformer over the patches of a noisy picture and the positions of its context.

It predicts the velocity from the picture to the noise (rectified flow, arXiv:2209.03003; arXiv:2403.03206). Time, and a
vector that stands for the context, act through modulation: each block computes shifts, scales and gates of them. The first
blocks have two streams, context and patches, with separate weights and joint attention. The other blocks apply one set of
weights to both, and compute attention and the feed-forward layer in parallel.

The file knows nothing of parallelism: titan/parallel/ works on it from outside (see models/llama3/model.py).

B batch, S patches, T context positions, J = T + S, D model, C channels of a patch, H heads, K head dim, A axes
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan.models.common.attention import InnerAttention
from titan.models.common.rotary import rope_frequencies, rotate_pairs

from .config import TIME_CHANNELS, FluxConfig

_EPS = 1e-6
Rotations = tuple[Tensor, Tensor]


def time_channels(time_B: Tensor) -> Tensor:
    """Return cosines and sines of 1000 x time in 128 frequencies from 1 to 1/10,000, (B, 256) fp32 (arXiv:1706.03762)."""
    half = TIME_CHANNELS // 2
    powers = torch.arange(half, dtype=torch.float32, device=time_B.device) / half
    angles = 1000 * time_B.float()[:, None] * torch.exp(-math.log(10_000) * powers)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def modulated(x_BSD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
    """Normalize each position, then scale and shift it.

    Args:
        x_BSD: the stream.
        shift_B1D: shift of each channel.
        scale_B1D: scale of each channel, minus 1.
    """
    return F.layer_norm(x_BSD, x_BSD.shape[-1:], eps=_EPS) * (1 + scale_B1D) + shift_B1D


class Embedder(nn.Module):
    """Projections of patches, context, time and pooled context to the model's width."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.patches = nn.Linear(config.in_channels, config.dim)
        self.context = nn.Linear(config.context_dim, config.dim)
        vectors = {"time": TIME_CHANNELS, "pooled": config.pooled_dim}
        if config.guidance_embed:
            vectors["guidance"] = TIME_CHANNELS
        for name, size in vectors.items():
            self.add_module(f"{name}_in", nn.Linear(size, config.dim))
            self.add_module(f"{name}_out", nn.Linear(config.dim, config.dim))

    def forward(
        self, patches_BSC: Tensor, context_BTC: Tensor, vectors: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the inputs of the model.

        Args:
            patches_BSC: noisy patches.
            context_BTC: encodings of the context.
            vectors: inputs that are one vector a sample, (B, channels), by name.

        Returns:
            Patches (B, S, D), context (B, T, D), and the vector that modulations read, (B, D), in the dtype of the weights.
        """
        dtype = self.patches.weight.dtype

        def embed(name: str, vector_BC: Tensor) -> Tensor:
            into, out = self.get_submodule(f"{name}_in"), self.get_submodule(f"{name}_out")
            return out(F.silu(into(vector_BC.to(dtype))))

        sum_BD = torch.stack([embed(name, vector) for name, vector in vectors.items()]).sum(0)
        # Every modulation begins with this silu, so it is applied once.
        return (
            self.patches(patches_BSC.to(dtype)),
            self.context(context_BTC.to(dtype)),
            F.silu(sum_BD),
        )


class Heads(nn.Module):
    """Projections to queries, keys and values. Queries and keys are normalized within each head."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq, self.wk, self.wv = (nn.Linear(config.dim, config.dim) for _ in range(3))
        self.q_norm = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=_EPS)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (B, S, H, K) each."""
        # -1 for the number of heads: under tensor parallelism each rank holds some of them.
        q, k, v = (
            w(x_BSD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        return self.q_norm(q), self.k_norm(k), v


def attend(inner: nn.Module, heads: tuple[Tensor, ...], rotations: Rotations) -> Tensor:
    """Compute attention among all positions.

    Args:
        inner: the inner attention.
        heads: queries, keys and values, (B, J, H, K) each.
        rotations: cos and sin for `rotate_pairs`.

    Returns:
        The output, (B, J, H x K).
    """
    q, k, v = heads
    rotated = rotate_pairs(q, rotations), rotate_pairs(k, rotations), v
    return inner(*(x.transpose(1, 2) for x in rotated)).transpose(1, 2).flatten(-2)


class GeluFeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim)
        self.w2 = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply the layers, (B, S, D) to (B, S, D)."""
        return self.w2(F.gelu(self.w1(x_BSD), approximate="tanh"))


class OneStream(nn.Module):
    """One stream of a two-stream block: the weights of context or of patches."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.modulation = nn.Linear(config.dim, 6 * config.dim)
        self.heads = Heads(config)
        self.wo = nn.Linear(config.dim, config.dim)
        self.feed_forward = GeluFeedForward(config)

    def forward(self, x_BSD: Tensor, o_BSD: Tensor, modulation: tuple[Tensor, ...]) -> Tensor:
        """Add attention and the feed-forward layer to the stream.

        Args:
            x_BSD: the stream.
            o_BSD: output of attention, before its projection.
            modulation: gate of attention; shift, scale and gate of the feed-forward layer.

        Returns:
            The stream after the block, (B, S, D).
        """
        gate, shift, scale, ffn_gate = modulation
        x_BSD = x_BSD + gate * self.wo(o_BSD)
        return x_BSD + ffn_gate * self.feed_forward(modulated(x_BSD, shift, scale))


class DoubleBlock(nn.Module):
    """Block of two streams with joint attention (MM-DiT, arXiv:2403.03206, section 4)."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.context_stream, self.patch_stream = OneStream(config), OneStream(config)
        self.inner_attention = InnerAttention(causal=False)

    def forward(
        self, x_BSD: Tensor, c_BTD: Tensor, vector_BD: Tensor, rotations: Rotations
    ) -> tuple[Tensor, Tensor]:
        """Run the block.

        Args:
            x_BSD: patches.
            c_BTD: context.
            vector_BD: vector that modulations read.
            rotations: cos and sin of the context's positions, then of the patches'.

        Returns:
            Patches and context after the block.
        """
        streams, inputs = (self.context_stream, self.patch_stream), (c_BTD, x_BSD)
        parts = [s.modulation(vector_BD)[:, None].chunk(6, dim=-1) for s in streams]
        heads = [
            stream.heads(modulated(h, part[0], part[1]))
            for stream, h, part in zip(streams, inputs, parts, strict=True)
        ]
        joined = tuple(torch.cat(pair, dim=1) for pair in zip(*heads, strict=True))
        o_BJD = attend(self.inner_attention, joined, rotations)
        length = c_BTD.shape[1]
        c_BTD = self.context_stream(c_BTD, o_BJD[:, :length], parts[0][2:])
        return self.patch_stream(x_BSD, o_BJD[:, length:], parts[1][2:]), c_BTD


class Joint(nn.Module):
    """Attention and a feed-forward layer in parallel, with their outputs added."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.heads = Heads(config)
        self.inner_attention = InnerAttention(causal=False)
        self.w1 = nn.Linear(config.dim, config.ffn_dim)
        self.wo = nn.Linear(config.dim, config.dim)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BJD: Tensor, rotations: Rotations) -> Tensor:
        """Return the sum of both outputs, (B, J, D)."""
        o_BJD = attend(self.inner_attention, self.heads(x_BJD), rotations)
        return self.wo(o_BJD) + self.w2(F.gelu(self.w1(x_BJD), approximate="tanh"))


class SingleBlock(nn.Module):
    """Block of one stream, with context and patches in one sequence (parallel layers as in arXiv:2302.05442)."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.modulation = nn.Linear(config.dim, 3 * config.dim)
        self.joint = Joint(config)

    def forward(self, x_BJD: Tensor, vector_BD: Tensor, rotations: Rotations) -> Tensor:
        """Return the sequence after the block, (B, J, D)."""
        shift, scale, gate = self.modulation(vector_BD)[:, None].chunk(3, dim=-1)
        return x_BJD + gate * self.joint(modulated(x_BJD, shift, scale), rotations)


class ModulatedNorm(nn.Module):
    """Modulated norm before the output layer."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.modulation = nn.Linear(config.dim, 2 * config.dim)

    def forward(self, x_BSD: Tensor, vector_BD: Tensor) -> Tensor:
        """Return the normalized patches, (B, S, D)."""
        scale, shift = self.modulation(vector_BD)[:, None].chunk(2, dim=-1)
        return modulated(x_BSD, shift, scale)


class Flux(nn.Module):
    """Flux.1, from noisy patches to velocities."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedder(config)
        self.layers = nn.ModuleDict(
            {
                str(i): (DoubleBlock if i < config.n_double else SingleBlock)(config)
                for i in range(config.n_layers)
            }
        )
        self.norm = ModulatedNorm(config)
        self.output = nn.Linear(config.dim, config.in_channels)
        self._fan_in = {name: p.shape[-1] for name, p in self.named_parameters()}

    def forward(
        self,
        patches_BSC: Tensor,
        *,
        positions_BSA: Tensor,
        context_BTC: Tensor,
        pooled_BC: Tensor,
        time_B: Tensor,
        guidance_B: Tensor | None = None,
    ) -> Tensor:
        """Predict the velocity of each patch.

        Args:
            patches_BSC: noisy patches.
            positions_BSA: index, row and column of each patch, int64. Context positions are all at 0.
            context_BTC: encodings of the context.
            pooled_BC: one vector for the whole context.
            time_B: 0 for a picture, 1 for noise.
            guidance_B: guidance strength, needed if `guidance_embed` is set.

        Returns:
            Velocities, (B, S, C), in the dtype of the weights.
        """
        vectors = {"time": time_channels(time_B), "pooled": pooled_BC}
        if self.config.guidance_embed:
            assert guidance_B is not None, "a model with guidance_embed wants guidance_B"
            vectors["guidance"] = time_channels(guidance_B)
        x_BSD, c_BTD, vector_BD = self.tok_embeddings(patches_BSC, context_BTC, vectors)
        length = c_BTD.shape[1]
        rotations = self._rotations(F.pad(positions_BSA, (0, 0, length, 0)))
        blocks = list(self.layers.values())
        for block in blocks[: self.config.n_double]:
            x_BSD, c_BTD = block(x_BSD, c_BTD, vector_BD, rotations)
        x_BJD = torch.cat([c_BTD, x_BSD], dim=1)
        for block in blocks[self.config.n_double :]:
            x_BJD = block(x_BJD, vector_BD, rotations)
        return self.output(self.norm(x_BJD[:, length:], vector_BD))

    def _rotations(self, positions_BJA: Tensor) -> Rotations:
        """Return cos and sin for `rotate_pairs`, (B, J, 1, K) each in fp32: each axis rotates its own channels."""
        config, device = self.config, positions_BJA.device
        sizes = enumerate(config.rope_axes)
        angles = torch.cat(
            [
                positions_BJA[..., axis, None].float()
                * rope_frequencies(size, config.rope_theta, None, device)
                for axis, size in sizes
            ],
            dim=-1,
        )[..., None, :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def init_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial weights. None: all ones (norms of heads). Biases begin at zero."""
        if "_norm." in name:
            return None
        if name.endswith(".bias"):
            return 0.0
        if ".modulation." in name or name.startswith("output."):
            return self.config.gate_init_std
        return self._fan_in[name] ** -0.5
