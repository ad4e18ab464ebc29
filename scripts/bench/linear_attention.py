"""Time of linear attention on one GPU: plain torch, plain torch compiled, and the kernels of flash-linear-attention.

    python scripts/bench/linear_attention.py [--lengths 8192,32768]

Forward and backward pass of one layer's recurrence for one sequence in bf16, without projections and convolution. "theirs" is the
package's own function, which keeps what the forward pass computed; titan's operator computes it once more in the backward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.contrib.transformers import linear_attention_kernels as kernels
from titan.contrib.transformers.linear_attention import linear_attention
from titan.ops import bench


@dataclass(frozen=True)
class Layer:
    """Heads and sizes of a published model's recurrence."""

    groups: int
    heads: int
    k_size: int
    v_size: int
    gates: str
    delta: bool


LAYERS = {
    "Qwen3-Next, gated delta rule": Layer(16, 32, 128, 128, "head", True),
    "Kimi Linear, KDA": Layer(32, 32, 128, 128, "channel", True),
    "Bamba, Mamba 2": Layer(1, 128, 128, 64, "head", False),
}
DEVICE = torch.device("cuda")


def inputs(layer: Layer, length: int) -> list[Tensor | None]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    q, k = (
        F.normalize(draw(1, layer.groups, length, layer.k_size), dim=-1).bfloat16()
        for _ in range(2)
    )
    v = draw(1, layer.heads, length, layer.v_size).bfloat16()
    channels = (layer.k_size,) if layer.gates == "channel" else ()
    gates = -F.softplus(draw(1, layer.heads, length, *channels))
    betas = draw(1, layer.heads, length).sigmoid() if layer.delta else None
    return [x if x is None else x.requires_grad_() for x in (q, k, v, gates, betas)]


def theirs(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, betas: Tensor | None) -> Any:
    copies = 1 if betas is not None else v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(copies, dim=1).transpose(1, 2) for x in (q, k))
    other = [x if x is None else x.transpose(1, 2) for x in (v, gates, betas)]
    first = torch.zeros(1, v.shape[1], q.shape[-1], v.shape[-1], device=DEVICE)
    return kernels._call([q, k, *other, first], kernels._Documents(None), q.shape[-1] ** -0.5)


def step(call: Callable[..., Any], given: list[Tensor | None]) -> None:
    out = call(*given)[0]
    out.backward(out)


def measure(call: Callable[..., Any], given: list[Tensor | None]) -> str:
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    try:
        forward_s = min(bench.rounds_s(partial(call, *given), DEVICE, calls=2))
        both_s = min(bench.rounds_s(partial(step, call, given), DEVICE, calls=2))
    except Exception as error:
        torch.cuda.empty_cache()
        return f"{type(error).__name__} | | "
    gib = (torch.cuda.max_memory_allocated() - begin) / 2**30
    return f"{1e3 * forward_s:.2f} | {1e3 * both_s:.2f} | {gib:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="8192,32768")
    parser.add_argument(
        "--compiled", action="store_true", help="plain torch compiled, too: minutes"
    )
    args = parser.parse_args()
    print(
        "| layer | tokens | | forward, ms | both, ms | memory, GiB |\n|---|---|---|---|---|---|"
    )
    for name, layer in LAYERS.items():
        for length in map(int, args.lengths.split(",")):
            given = inputs(layer, length)
            calls: dict[str, Callable[..., Any]] = {}
            if kernels.is_installed():
                calls |= {"kernel": linear_attention, "theirs": theirs}
            calls["plain"] = plain
            if args.compiled:
                calls["plain, compiled"] = torch.compile(plain)
            for kind, call in calls.items():
                print(f"| {name} | {length:,} | {kind} | {measure(call, given)} |", flush=True)


def plain(*given: Any) -> Any:
    patched: Any = kernels
    known, patched.is_installed = kernels.is_installed, lambda: False
    try:
        return linear_attention(*given)
    finally:
        patched.is_installed = known


if __name__ == "__main__":
    main()
