"""Seconds that kernels take on some hardware.

    matmul      tiles of the output go to the SMs in waves; each tile costs its share of K and a fixed time to fill and drain;
                never faster than its bytes through memory. The best tile (and split of K) is what the library would choose
    attention   FLOPs that the mask leaves, at a rate by sequence length, if there are blocks of queries for all SMs
    all others  bytes at the bandwidth that kernels of that size reach; less if a fused kernel transposes

Imports no torch.
"""

from __future__ import annotations

from math import ceil

from .network import TransferPrice, price_transfer
from .profiles import Profile, on_curve
from .trace import Group, Host, Kernel, Transfer

_QUERY_BLOCK = 128
"""Queries that one thread block of FlashAttention-2 handles."""
_SPLITS = (1, 2, 4, 8)
"""Parts that a matrix product's K is cut into when the output has too few tiles to fill the device."""


class Cost:
    """Prices of one profile, each computed once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._kernels: dict[Kernel, float] = {}
        self._launches: dict[Host, float] = {
            "eager": profile.launch_us * 1e-6,
            "dtensor": profile.launch_dtensor_us * 1e-6,
            "compiled": profile.launch_compiled_us * 1e-6,
        }

    def kernel_s(self, kernel: Kernel) -> float:
        """How long the device takes."""
        known = self._kernels.get(kernel)
        if known is None:
            known = self._kernels[kernel] = self._price(kernel)
        return known

    def host_s(self, kernel: Kernel) -> float:
        """How long the host takes to compute what it has in its own memory."""
        moved = kernel.read_bytes + kernel.write_bytes
        products_s = kernel.flops / (self.profile.host_tflops * 1e12)
        return max(products_s, moved / (self.profile.host_memory_gb_per_s * 1e9))

    def launch_s(self, kernel: Kernel) -> float:
        """How long the host takes; launches beyond an operation's first come from a loop in C++."""
        first = self._launches[kernel.host]
        return first + (kernel.num_launches - 1) * self._launches["compiled"]

    def transfer(self, transfer: Transfer, group: Group, *, rank: int) -> TransferPrice:
        """Latency, volume and links; of a send or recv, on the side of `rank`."""
        return price_transfer(transfer, group, self.profile, rank=rank)

    @property
    def launch_transfer_s(self) -> float:
        return self.profile.launch_transfer_us * 1e-6

    def _price(self, kernel: Kernel) -> float:
        least = self.profile.kernel_min_us * 1e-6 * kernel.num_launches
        moved = kernel.read_bytes + kernel.write_bytes
        if kernel.kind == "host_copy":
            # The device's side of a copy is written or read once, and so is the host's.
            one_way = max(kernel.read_bytes, kernel.write_bytes)
            return self.profile.host_us * 1e-6 + one_way / (self.profile.host_gb_per_s * 1e9)
        busy = self._memory_s(moved)
        if kernel.transposes:
            busy /= self.profile.transpose_share
        if kernel.kind == "matmul":
            busy = max(busy, self._matmul_s(kernel))
        elif kernel.kind in ("attention", "attention_backward"):
            busy = max(busy, self._attention_s(kernel))
        return least + busy

    def _memory_s(self, moved_bytes: float) -> float:
        if not moved_bytes:
            return 0.0
        share = on_curve(self.profile.memory_share, moved_bytes)
        return moved_bytes / (share * self.profile.memory_tb_per_s * 1e12)

    def _matmul_s(self, kernel: Kernel) -> float:
        batch, m, k, n = matmul_sizes(kernel)
        profile = self.profile
        dtype = peak_dtype(kernel.dtype, profile)
        share = profile.matmul_share.get(dtype, profile.matmul_share["bfloat16"])
        peak = profile.peak_tflops[dtype] * 1e12
        # Filling a tile takes as long in any dtype, and so a longer part of a faster product.
        fill_k = profile.tile_fill_k * peak / (profile.peak_tflops["bfloat16"] * 1e12)
        best = float("inf")
        for tile in profile.tiles:
            blocks = batch * ceil(m / tile.rows) * ceil(n / tile.columns)
            for splits in _SPLITS:
                waves = ceil(blocks * splits / profile.num_sms)
                tile_flops = 2 * tile.rows * tile.columns * (k / splits + fill_k)
                rate = peak * share * tile.rate / profile.num_sms
                seconds = waves * tile_flops / rate
                if splits > 1:  # partial sums in fp32, written and read again
                    seconds += self._memory_s(8 * splits * batch * m * n)
                best = min(best, seconds)
                if blocks >= profile.num_sms:
                    break
        return best

    def _attention_s(self, kernel: Kernel) -> float:
        profile = self.profile
        (batch, heads, queries, _), (_, _, keys, _) = kernel.shapes[:2]
        curve, factor = profile.attention_forward_tflops, 4.0
        if kernel.kind == "attention_backward":
            curve, factor = profile.attention_backward_tflops, 10.0
        head_dims = kernel.shapes[0][3] + kernel.shapes[min(2, len(kernel.shapes) - 1)][3]
        flops = factor / 2 * batch * heads * head_dims * attended(queries, keys, kernel.causal)
        rate = on_curve(curve, min(queries, keys)) * 1e12
        if kernel.causal:
            rate *= profile.attention_causal_share
        if peak_dtype(kernel.dtype, profile) == "float32":
            rate *= profile.peak_tflops["float32"] / profile.peak_tflops["bfloat16"]
        # Blocks differ in length under a mask and are dealt out as SMs become free: only too few of them leave some idle.
        blocks = batch * heads * ceil(queries / _QUERY_BLOCK)
        return flops / (rate * min(1.0, blocks / profile.num_sms))


def attended(queries: int, keys: int, causal: bool) -> float:
    """Pairs of a query and a key that a mask leaves; a causal one lets query i see keys 0 to i, as torch aligns it."""
    if not causal:
        return float(queries * keys)
    square = min(queries, keys)
    return square * (square + 1) / 2 + (queries - square) * keys


def matmul_sizes(kernel: Kernel) -> tuple[int, int, int, int]:
    """Batch, and M, K, N of a product (M, K) x (K, N)."""
    a, b = kernel.shapes[:2]
    assert len(a) == len(b) >= 2 and a[-1] == b[-2], (
        f"{kernel.name}: not a matrix product: {a}, {b}"
    )
    return (a[0] if len(a) == 3 else 1), a[-2], a[-1], b[-1]


def peak_dtype(dtype: str, profile: Profile) -> str:
    """The entry of the profile's peaks for a dtype as torch prints it: all float8 formats are one."""
    short = "float8" if dtype.startswith("float8") else dtype
    return short if short in profile.peak_tflops else "bfloat16"
