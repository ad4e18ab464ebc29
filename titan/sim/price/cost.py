"""Seconds that kernels take on some hardware.

    matmul      a roofline, times the measured ratio of products of that shape (measured.py) at the level that the card sustains
    grouped     as one product of all groups' rows, each group rounded up to whole tiles
    recurrence  measured times of linear attention, or the bytes that its kernels move
    attention   FLOPs that the mask leaves, at a rate by length, less with fewer heads than fill the device
    all others  bytes at the bandwidth that kernels of that size reach; less if a fused kernel transposes, and no more than
                PyTorch's own kernels reach if none is fused

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log
from statistics import fmean, linear_regression
from typing import Any

from titan.config.schema import JobConfig
from titan.sim.record.trace import (
    RECURRENCE_CHUNK,
    Group,
    Kernel,
    Transfer,
    attention_flops,
    visible_keys,
)
from titan.sim.routing import layer_shares
from titan.sim.section import assumptions

from .attention import under_mask
from .measured import SPAN_S, Tables, tables
from .network import Dispatch, TransferPrice, price_transfer
from .profiles import Profile, on_curve

_QUERY_BLOCK = 128
"""Queries that one thread block of FlashAttention-2 handles."""
_MASKS = {"efficient": "dense", "cudnn": "dense", "varlen": "varlen", "overrideable": "flex"}
"""Forms of masks by a word in the names of recorded operations (titan.sim.record.device). "dense" is all that FlashAttention does not take."""
_GROUPED_FILL_K = 192
"""Time that a tile of torch's grouped product needs to start and end, as a length of the sum: 512 TFLOPS on H100 of 500 W in a published
profile (classes of TTS-eager-minimal-b16), where the rates of plain products would give 610."""
_MANY_HEADS = 256
"""Heads over a batch that fill a device, at the lengths whose rates a profile's curves have."""

_RECURRENCE_SHARE = 0.65
"""Rate of flash-linear-attention's kernels over that of a copy: 2.4 ns for a position of a head of 128 channels on H100 (gated delta rule),
where TensorRT-LLM measured 1.8 to 2.6."""
_RECURRENCE_BACKWARD = 3.0
"""Time of its backward pass over its forward pass: 2.6 to 3.6 in Helion's benchmarks of H100 and B200."""
_RECURRENCE_CHUNK_S = 2e-6
"""Time of a step along the chunks, which bounds few heads of long sequences: 8 heads on H100, as SGLang measured."""


@dataclass(eq=False)
class Cost:
    """Prices of kernels and transfers on one profile. Each distinct kernel is priced once.

    Attributes:
        profile: the hardware.
        dispatch: choice of experts, if DeepEP dispatches the tokens.
        unevenness: exponent of the power law by which experts' rows differ (`routing_exponent`).
        document_keys: mean number of keys that a query sees in packed documents; 0 without a
            document mask.
        alone: whether the job has one card.
        tables: measured tables of the card, if it has any.
    """

    profile: Profile
    dispatch: Dispatch | None = None
    unevenness: float = 0.0
    document_keys: float = 0.0
    alone: bool = False

    def __post_init__(self) -> None:
        card = self.profile.measured
        self.tables: Tables | None = tables(card) if card else None
        # Kernels compare by value, so a launch that repeats in every layer is priced once.
        self._kernels: dict[Kernel, float] = {}

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the seconds that the device takes for a kernel."""
        known = self._kernels.get(kernel)
        if known is None:
            known = self._kernels[kernel] = self._price(kernel)
        return known

    def flops(self, kernel: Kernel) -> float:
        """Return the FLOPs that a kernel computes: in attention, those that the mask leaves."""
        if "attention" not in kernel.kind:
            return kernel.flops
        visible = visible_keys(kernel)
        if self.document_keys and kernel.causal:
            # A block of queries computes whole blocks of keys.
            visible = min(visible, self.document_keys + _QUERY_BLOCK / 2)
        whole = attention_flops(kernel.kind, kernel.shapes)
        return whole * visible / kernel.shapes[1][2]

    def host_s(self, kernel: Kernel) -> float:
        """Return the seconds that the host takes to compute on its own memory."""
        moved = kernel.read_bytes + kernel.write_bytes
        # The roofline of the host: the slower of arithmetic and memory.
        matmul_s = kernel.flops / (self.profile.host_tflops * 1e12)
        return max(matmul_s, moved / (self.profile.host_memory_gb_per_s * 1e9))

    def launch_s(self, kernel: Kernel) -> float:
        """Return the seconds that the launches of a kernel take themselves. Launches beyond the first come from a loop in C++."""
        is_compiled = kernel.host == "compiled"
        first = self.profile.launch_compiled_us if is_compiled else self.profile.launch_us
        return (first + (kernel.num_launches - 1) * self.profile.launch_us) * 1e-6

    def transfer(self, transfer: Transfer, group: Group, *, rank: int) -> TransferPrice:
        """Return latency, volume and links of a transfer, for the side of `rank`."""
        return price_transfer(transfer, group, self.profile, rank=rank, dispatch=self.dispatch)

    @property
    def launch_transfer_s(self) -> float:
        """Seconds that the issue of a transfer takes itself."""
        return self.profile.launch_transfer_us * 1e-6

    @property
    def compiled_call_s(self) -> float:
        """Seconds to call compiled code: guards, autograd's function, and the wrapper around the kernels."""
        return self.profile.compiled_call_us * 1e-6

    @property
    def tiny_s(self) -> float:
        """Seconds of a tiny operation on the host, the unit of a trace's paces."""
        return self.profile.host_tiny_us * 1e-6

    def _price(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel."""
        # Even an empty kernel occupies its stream for some microseconds.
        least = self.profile.kernel_min_us * 1e-6 * kernel.num_launches
        if kernel.kind == "host_copy":
            # The device's side of a copy is written or read once, and so is the host's.
            one_way = max(kernel.read_bytes, kernel.write_bytes)
            return self.profile.host_us * 1e-6 + one_way / (self.profile.host_gb_per_s * 1e9)
        # A kernel overlaps its arithmetic with its memory traffic, so the slower of the two counts.
        if kernel.kind == "matmul":
            return self._matmul_s(kernel, least)
        busy = self._memory_s(kernel)
        if kernel.kind in ("attention", "attention_backward"):
            busy = max(busy, self._attention_s(kernel))
        if kernel.kind == "recurrence":
            busy = self._recurrence_s(kernel)
        return least + busy

    def _memory_s(self, kernel: Kernel) -> float:
        """Return the seconds to move a kernel's bytes through the device's memory."""
        moved = kernel.read_bytes + kernel.write_bytes
        if not moved:
            return 0.0
        profile = self.profile
        # Small kernels do not fill the memory pipeline: the share of the peak grows with the bytes.
        rate = on_curve(profile.memory_share, moved) * profile.memory_tb_per_s
        if kernel.host != "compiled" and profile.eager_tb_per_s:
            rate = min(rate, profile.eager_tb_per_s)
        rate = min(rate, profile.kernel_share.get(kernel.name, 1) * profile.memory_tb_per_s)
        # A kernel that reads rows and writes columns cannot coalesce both.
        if kernel.transposes:
            rate *= profile.transpose_share
        return moved / (rate * 1e12)

    def _matmul_s(self, kernel: Kernel, least: float) -> float:
        """Return the seconds of a product."""
        batch, m, k, n = matmul_sizes(kernel)
        profile = self.profile
        dtype = peak_dtype(kernel.dtype, profile)
        share = profile.matmul_share.get(dtype, profile.matmul_share["bfloat16"])
        flops, rows = 2.0 * batch * m * n * k, batch * m
        if kernel.name == "aten::_grouped_mm" and profile.grouped_rows:
            # A group takes whole tiles, of which its rows may fill a part.
            rows = batch * ceil(m / profile.grouped_rows) * profile.grouped_rows
            flops *= rows / (batch * m) * (1 + _GROUPED_FILL_K / k)
            if self.tables:
                flops /= self.tables.uneven_share(m, self.unevenness)
        elif self.alone and dtype == "bfloat16":
            share *= profile.matmul_alone
        peak = profile.peak_tflops[dtype] * 1e12
        moved_s = (kernel.read_bytes + kernel.write_bytes) / (profile.memory_tb_per_s * 1e12)
        ratio = self.tables.product_ratio(dtype, rows, n, k) if self.tables else None
        if ratio is None or self.tables is None:
            return least + max(self._memory_s(kernel), flops / (peak * share))
        level = share / self.tables.large_share[dtype]
        return ratio * (max(flops / (peak * level), moved_s) + SPAN_S * kernel.num_launches)

    def _attention_s(self, kernel: Kernel) -> float:
        """Return the seconds of attention's arithmetic."""
        profile = self.profile
        (batch, heads, queries, width), (_, _, keys, _) = kernel.shapes[:2]
        curves, suffix = profile.attention_forward_tflops, ""
        if kernel.kind == "attention_backward":
            curves, suffix = profile.attention_backward_tflops, "_backward"
        head_dims = width + kernel.shapes[min(2, len(kernel.shapes) - 1)][3]
        length = min(queries, keys)
        if self.document_keys and kernel.causal:
            # Rates are those of sequences as long as the documents.
            length = min(length, round(2 * self.document_keys))
        is_short = peak_dtype(kernel.dtype, profile) != "float32"
        runs = self.attention_kernel(kernel) if is_short else profile.attention_kernel
        chosen = profile.rates_of(runs)
        rate = on_curve(curves[chosen], length) * 1e12
        if kernel.causal:
            rate *= on_curve(profile.attention_causal_share[chosen], length)
        # The curves are measured in bf16. fp32 has no fused kernel with tensor cores, so scale by
        # the ratio of the peaks.
        if not is_short:
            rate *= profile.peak_tflops["float32"] / profile.peak_tflops["bfloat16"]
        # The curves are those of head dim 128. Without a measured share, the tables compare another
        # one with it.
        head_dim, known_dim = head_dims // 2, 128
        shares = profile.attention_head_dim_share.get(chosen + suffix)
        if shares:
            rate *= on_curve(shares, head_dim)
            known_dim = min(head_dim, 128)
        return self.flops(kernel) / (
            rate * self._filled(batch * heads, head_dim, known_dim, length)
        )

    def attention_kernel(self, kernel: Kernel) -> str:
        """Return the kernel that runs a recorded operation of attention, as attention.py names it."""
        mask = next((mask for word, mask in _MASKS.items() if word in kernel.name), "")
        profile = self.profile
        if mask != "flex" and peak_dtype(kernel.dtype, profile) == "float32":
            return "efficient"
        runs = under_mask(profile.attention_kernel, mask)
        # sdp_utils.cpp: cuDNN takes head dims up to a limit.
        is_large = max(shape[-1] for shape in kernel.shapes) > profile.cudnn_head_dim
        return under_mask("flash2", mask) if runs == "cudnn" and is_large else runs

    def _recurrence_s(self, kernel: Kernel) -> float:
        """Return the seconds of linear attention: those of its kind that were measured, else the bytes that its kernels move."""
        (batch, length, _, k_size), (_, _, heads, v_size), gates, *betas = kernel.shapes
        # The backward pass computes the forward pass again.
        passes = 1 + _RECURRENCE_BACKWARD if kernel.name.endswith("backward") else 1
        kind = "kda" if len(gates) == 4 else "gdn"
        numbers = _recurrence_numbers(k_size, v_size, len(gates) == 4, bool(betas))
        measured_s = self.tables and self.tables.recurrence_s(kind, batch * heads, length)
        if measured_s:
            return (
                passes
                * measured_s
                * numbers
                / _recurrence_numbers(128, 128, kind == "kda", True)
            )
        moved = 2 * batch * length * heads * numbers
        rate = on_curve(self.profile.memory_share, moved) * self.profile.memory_tb_per_s * 1e12
        chunks_s = length / RECURRENCE_CHUNK * _RECURRENCE_CHUNK_S
        return passes * max(moved / (rate * _RECURRENCE_SHARE), chunks_s)

    def _filled(self, heads: int, width: int, many_width: int, length: int) -> float:
        """Return the rate of attention with these heads, as a share of the rate with many heads of `many_width` channels."""
        if self.tables is None:
            # Blocks differ in length under a mask and are dealt out as SMs become free: only too
            # few of them leave some idle.
            return min(1.0, heads * ceil(length / _QUERY_BLOCK) / self.profile.num_sms)
        many = self.tables.attention_tflops(many_width, _MANY_HEADS, length)
        # More than that, few heads of long sequences only run cooler in a burst.
        return min(1.0, self.tables.attention_tflops(width, heads, length) / many)


def _recurrence_numbers(k_size: int, v_size: int, by_channel: bool, delta: bool) -> float:
    """Return the 16-bit numbers that the kernels of linear attention read and write for a position of a head.

    The pass along the chunks and the output read queries, keys and values and exchange the states.
    The delta rule makes corrected keys and values before, from a matrix for each chunk. Gates of
    channels are in 32 bits, and read by each of four kernels.
    """
    numbers = 3 * k_size + 3 * v_size + 2 * k_size * v_size / RECURRENCE_CHUNK
    if delta:
        numbers += 4 * k_size + 3 * v_size + 2 * RECURRENCE_CHUNK
    return numbers + (8 * k_size if by_channel else 0)


def routing_exponent(config: JobConfig, model: Any) -> float:
    """Return the exponent of the power law that tokens follow over experts, 0 if they spread evenly.

    A file's exponent is that of the line through its shares on logarithmic axes, in the mean over
    layers.

    Raises:
        ConfigError: the file of simulator.routing is wrong.
    """
    routing = assumptions(config).routing
    if not model.num_experts or routing == "even":
        return 0.0
    if config.debug.moe_force_load_balance:
        return 0.0
    if routing.startswith("zipf:"):
        return float(routing[5:])
    places = [log(place) for place in range(1, model.num_experts + 1)]
    slopes = []
    for shares in layer_shares(
        routing, model.num_experts, config.parallelism.expert_parallel_degree
    ):
        logs = [log(max(share, 1e-9)) for share in sorted(shares, reverse=True)]
        slopes.append(-linear_regression(places, logs).slope)
    return fmean(slopes)


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
