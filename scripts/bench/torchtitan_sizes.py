"""Sizes of titan's Llama as TorchTitan 0.2.2 writes them. Imports TorchTitan's model arguments alone."""

from __future__ import annotations

from typing import Any

from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs


def arguments(sizes: Any) -> TransformerModelArgs:
    """titan's sizes in TorchTitan's words; its width of the SwiGLU is a factor of 8/3 dim, rounded up to a multiple."""
    return TransformerModelArgs(
        dim=sizes.dim,
        n_layers=sizes.n_layers,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        vocab_size=sizes.vocab_size,
        ffn_dim_multiplier=sizes.ffn_dim / int(8 * sizes.dim / 3),
        multiple_of=2,  # the factor may round to one less
        norm_eps=sizes.norm_eps,
        rope_theta=sizes.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=sizes.rope_factor or 1.0),
    )
