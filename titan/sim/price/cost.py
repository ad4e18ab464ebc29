"""Seconds that kernels take on some hardware.

    matmul      tiles of the output go to the SMs in waves; each tile costs its share of K and a fixed time to fill and drain;
                never faster than its bytes through memory. The best tile (and split of K) is the library's choice
    grouped     the same with the one tile that torch's kernel takes; each group's rows fill whole pairs of tiles
    attention   FLOPs that the mask leaves, at a rate by sequence length, if there are blocks of queries for all SMs
    all others  bytes at the bandwidth that kernels of that size reach; less if a fused kernel transposes

Imports no torch.
"""

from __future__ import annotations

from math import ceil

from titan.sim.price.network import Dispatch, TransferPrice, price_transfer
from titan.sim.price.profiles import Profile, on_curve
from titan.sim.record.trace import Group, Host, Kernel, Transfer

_QUERY_BLOCK = 128
"""Queries that one thread block of FlashAttention-2 handles."""
_NOT_FLASH = {"efficient", "cudnn"}
"""Words in the names of kernels that are recorded where FlashAttention-2 cannot run."""
_SPLITS = (1, 2, 4, 8)
"""Parts that a matmul's K is cut into when the output has too few tiles to fill the device."""
_GROUPED_PAIR = 2
"""Tiles, one above the other, that two SMs compute together in a grouped matmul. A group takes whole pairs, of which its
rows may fill a part (GroupMM.cu: clusters of 2 x 1; CUTLASS's grouped scheduler rounds each group up to a cluster, issue 3497)."""
_GROUPED_SMALL = 128
"""Rows or columns of a group up to which GroupMM.cu takes its small tile."""


class Cost:
    """Prices of kernels and transfers on one profile. Each distinct kernel is priced once.

    Attributes:
        profile: The hardware.
        dispatch: Choice of experts, if DeepEP dispatches the tokens.
    """

    def __init__(self, profile: Profile, dispatch: Dispatch | None = None) -> None:
        self.profile = profile
        self.dispatch = dispatch
        # Kernels compare by value, so a launch that repeats in every layer is priced once.
        self._kernels: dict[Kernel, float] = {}
        # The host's time to launch a kernel depends on the launcher: DTensor first computes shardings
        # in Python, compiled code calls the launcher directly.
        self._launches: dict[Host, float] = {
            "eager": profile.launch_us * 1e-6,
            "dtensor": profile.launch_dtensor_us * 1e-6,
            "compiled": profile.launch_compiled_us * 1e-6,
        }

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the seconds that the device takes for a kernel."""
        known = self._kernels.get(kernel)
        if known is None:
            known = self._kernels[kernel] = self._price(kernel)
        return known

    def host_s(self, kernel: Kernel) -> float:
        """Return the seconds that the host takes to compute on its own memory."""
        moved = kernel.read_bytes + kernel.write_bytes
        # The roofline of the host: the slower of arithmetic and memory.
        matmul_s = kernel.flops / (self.profile.host_tflops * 1e12)
        return max(matmul_s, moved / (self.profile.host_memory_gb_per_s * 1e9))

    def launch_s(self, kernel: Kernel) -> float:
        """Return the seconds that the host takes to launch a kernel.

        Launches beyond an operation's first come from a loop in C++.
        """
        first = self._launches[kernel.host]
        return first + (kernel.num_launches - 1) * self._launches["compiled"]

    def transfer(self, transfer: Transfer, group: Group, *, rank: int) -> TransferPrice:
        """Return latency, volume and links of a transfer, for the side of `rank`."""
        return price_transfer(transfer, group, self.profile, rank=rank, dispatch=self.dispatch)

    @property
    def launch_transfer_s(self) -> float:
        """Seconds for which a host is busy when it issues a transfer."""
        return self.profile.launch_transfer_us * 1e-6

    def _price(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel."""
        # Even an empty kernel occupies its stream for some microseconds.
        least = self.profile.kernel_min_us * 1e-6 * kernel.num_launches
        moved = kernel.read_bytes + kernel.write_bytes
        if kernel.kind == "host_copy":
            # The device's side of a copy is written or read once, and so is the host's.
            one_way = max(kernel.read_bytes, kernel.write_bytes)
            return self.profile.host_us * 1e-6 + one_way / (self.profile.host_gb_per_s * 1e9)
        busy = self._memory_s(moved)
        # A kernel that reads rows and writes columns cannot coalesce both.
        if kernel.transposes:
            busy /= self.profile.transpose_share
        # A kernel overlaps its arithmetic with its memory traffic, so the slower of the two counts.
        if kernel.kind == "matmul":
            busy = max(busy, self._matmul_s(kernel))
        elif kernel.kind in ("attention", "attention_backward"):
            busy = max(busy, self._attention_s(kernel))
        return least + busy

    def _memory_s(self, moved_bytes: float) -> float:
        """Return the seconds to move bytes through the device's memory."""
        if not moved_bytes:
            return 0.0
        # Small kernels do not fill the memory pipeline: the share of the peak grows with the bytes.
        share = on_curve(self.profile.memory_share, moved_bytes)
        return moved_bytes / (share * self.profile.memory_tb_per_s * 1e12)

    def _matmul_s(self, kernel: Kernel) -> float:
        """Return the seconds of a matmul's arithmetic, with the best tile and split of K."""
        batch, m, k, n = matmul_sizes(kernel)
        profile = self.profile
        dtype = peak_dtype(kernel.dtype, profile)
        share = profile.matmul_share.get(dtype, profile.matmul_share["bfloat16"])
        peak = profile.peak_tflops[dtype] * 1e12
        # Filling a tile takes as long in any dtype, and so a longer part of a faster matmul.
        fill_k = profile.tile_fill_k * peak / (profile.peak_tflops["bfloat16"] * 1e12)
        best = float("inf")
        # Search tiles and splits of K as cuBLAS's heuristic does. A large tile reuses more of each
        # operand, a small one wastes less of the last wave. CUTLASS's grouped kernel has no choice.
        tiles, all_splits, pair = profile.tiles, _SPLITS, 1
        if kernel.name == "aten::_grouped_mm" and profile.grouped_tiles:
            tiles = (profile.grouped_tiles[min(m, n) > _GROUPED_SMALL],)
            all_splits, pair = (1,), _GROUPED_PAIR
        for tile in tiles:
            blocks = batch * pair * ceil(m / (pair * tile.rows)) * ceil(n / tile.columns)
            for splits in all_splits:
                # SMs finish a wave together, so a wave that is filled in part takes as long as a
                # full one.
                waves = ceil(blocks * splits / profile.num_sms)
                tile_flops = 2 * tile.rows * tile.columns * (k / splits + fill_k)
                rate = peak * share * tile.rate / profile.num_sms
                seconds = waves * tile_flops / rate
                if splits > 1:  # partial sums in fp32, written and read again
                    # Each split reads and writes its part of the sums: 4 bytes each way.
                    seconds += self._memory_s(8 * splits * batch * m * n)
                best = min(best, seconds)
                # The output alone fills the device, so splitting K only adds traffic.
                if blocks >= profile.num_sms:
                    break
        return best

    def _attention_s(self, kernel: Kernel) -> float:
        """Return the seconds of attention's arithmetic."""
        profile = self.profile
        (batch, heads, queries, _), (_, _, keys, _) = kernel.shapes[:2]
        # FLOPs per query, key and channel: two matmuls forward, five backward, where the
        # scores are computed again. Each matmul costs two.
        curves, factor = profile.attention_forward_tflops, 4.0
        if kernel.kind == "attention_backward":
            curves, factor = profile.attention_backward_tflops, 10.0
        # Queries and keys share a size, values may have another one (multi-head latent attention).
        head_dims = kernel.shapes[0][3] + kernel.shapes[min(2, len(kernel.shapes) - 1)][3]
        flops = factor / 2 * batch * heads * head_dims * attended(queries, keys, kernel.causal)
        is_short = peak_dtype(kernel.dtype, profile) != "float32"
        chosen = profile.attention_kernel
        # Inputs that FlashAttention-2 does not support (a mask, other head dimensions of values than of keys) are recorded
        # as another kernel. cuDNN supports both (sdp_utils.cpp), so the memory-efficient kernel runs only where cuDNN does not come first.
        if is_short and chosen == "flash2" and _NOT_FLASH & {*kernel.name.split("_")}:
            chosen = "efficient"
        curve = curves.get(chosen, curves[profile.attention_kernel])
        rate = on_curve(curve, min(queries, keys)) * 1e12
        if kernel.causal:
            rate *= profile.attention_causal_share
        # The curves are measured in bf16. fp32 has no fused kernel with tensor cores, so scale by
        # the ratio of the peaks.
        if not is_short:
            rate *= profile.peak_tflops["float32"] / profile.peak_tflops["bfloat16"]
        # Blocks differ in length under a mask and are dealt out as SMs become free: only too few of them leave some idle.
        blocks = batch * heads * ceil(queries / _QUERY_BLOCK)
        return flops / (rate * min(1.0, blocks / profile.num_sms))


def attended(queries: int, keys: int, causal: bool) -> float:
    """Return the number of pairs of a query and a key that a mask leaves.

    A causal mask lets query i see keys 0 to i, as torch aligns it.
    """
    if not causal:
        return float(queries * keys)
    # The triangle of the first queries, then the rows that see every key.
    square = min(queries, keys)
    return square * (square + 1) / 2 + (queries - square) * keys


def matmul_sizes(kernel: Kernel) -> tuple[int, int, int, int]:
    """Return the batch, and M, K, N of a matmul (M, K) x (K, N)."""
    a, b = kernel.shapes[:2]
    assert len(a) == len(b) >= 2 and a[-1] == b[-2], (
        f"{kernel.name}: not a matrix product: {a}, {b}"
    )
    return (a[0] if len(a) == 3 else 1), a[-2], a[-1], b[-1]


def peak_dtype(dtype: str, profile: Profile) -> str:
    """Return the entry of the profile's peaks for a dtype as torch prints it.

    All float8 formats share an entry.
    """
    short = "float8" if dtype.startswith("float8") else dtype
    return short if short in profile.peak_tflops else "bfloat16"
