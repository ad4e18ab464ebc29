"""Prices of kernels: quantisation, floors, masks; and published rates that no constant was set with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan.config.errors import ConfigError
from titan.sim.price.cost import Cost, attended, matmul_sizes
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Kernel, KernelKind

H100 = Cost(load_profile("h100-sxm"))
LEAST_S = 2.5e-6


def matmul(m: int, k: int, n: int, *, dtype: str = "bfloat16", batch: int = 0) -> Kernel:
    a, b = ((batch, m, k), (batch, k, n)) if batch else ((m, k), (k, n))
    size = 1 if dtype.startswith("float8") else 2
    times = max(1, batch)
    moved = times * size * (m * k + k * n), times * 2 * m * n
    return Kernel("aten::mm", "matmul", (a, b), dtype, 2 * m * k * n * times, *moved)


def attention(
    b: int, h: int, q: int, kv: int, *, causal: bool, kind: KernelKind = "attention"
) -> Kernel:
    shapes = ((b, h, q, 128), (b, h, kv, 128), (b, h, kv, 128))
    return Kernel("flash", kind, shapes, "bfloat16", 4 * b * h * q * kv * 128, causal=causal)


def test_waves_are_whole() -> None:
    """One tile more than fills the device costs another wave."""
    rows, columns = 128, 256
    full = H100.kernel_s(matmul(rows * 66, 8192, columns * 2)) - LEAST_S  # 132 tiles
    more = H100.kernel_s(matmul(rows * 66 + 1, 8192, columns * 2)) - LEAST_S
    assert 1.3 < more / full <= 2.0  # small tiles and splits of K soften it
    peak = 989e12 * 0.67
    one_wave = 2 * rows * 66 * columns * 2 * (8192 + 192) / peak
    assert full == pytest.approx(one_wave)


def test_large_products_reach_the_share() -> None:
    kernel = matmul(65536, 16384, 16384)
    rate = kernel.flops / H100.kernel_s(kernel)
    assert 0.96 * 0.67 * 989e12 < rate < 0.67 * 989e12


def test_narrow_products_are_bound_by_memory() -> None:
    kernel = matmul(16, 16384, 16384)
    moved = kernel.read_bytes + kernel.write_bytes
    assert H100.kernel_s(kernel) == pytest.approx(moved / (0.9 * 3.35e12) + LEAST_S)


def test_splitting_k_fills_the_device() -> None:
    """256 x 256 outputs are 2 tiles; one SM each would take 8 times as long."""
    kernel = matmul(256, 65536, 256)
    one_tile = 2 * 64 * 64 * 65536 / (989e12 * 0.67 * 0.5 / 132)
    assert H100.kernel_s(kernel) < one_tile / 4


def test_float8() -> None:
    big = matmul(16384, 8192, 28672), matmul(16384, 8192, 28672, dtype="float8_e4m3fn")
    small = matmul(1024, 512, 1024), matmul(1024, 512, 1024, dtype="float8_e4m3fn")
    gain_big, gain_small = (H100.kernel_s(a) / H100.kernel_s(b) for a, b in (big, small))
    assert 1.6 < gain_big < 1979 * 0.60 / (989 * 0.67)
    assert 1.0 <= gain_small < 1.4  # filling tiles and launching take as long


@pytest.mark.parametrize(("m", "n", "k", "gain"), [(8192, 8192, 8192, 1.92), (65536, 8192, 7168, 1.88)])  # fmt: skip
def test_measured_gain_of_float8(m: int, n: int, k: int, gain: float) -> None:
    """Rates of single products on a 500 W H100 (FBGEMM, pull request 2546), far above those of a training run in both dtypes."""
    h100 = Cost(load_profile("h100-96g-500w"))
    bf16, fp8 = (h100.kernel_s(matmul(m, k, n, dtype=t)) for t in ("bfloat16", "float8_e4m3fn"))
    assert bf16 / fp8 == pytest.approx(gain, rel=0.05)


def test_measured_products_on_b200() -> None:
    """Two of SimuMax's measured shapes, of which only the highest of all 514 rates went into the profile."""
    b200 = Cost(load_profile("b200"))
    for shape, share, tolerance in (((4096, 8192, 10240), 0.645, 0.10), ((4096, 5120, 576), 0.32, 0.15)):  # fmt: skip
        kernel = matmul(*shape)
        assert kernel.flops / b200.kernel_s(kernel) / 2250e12 == pytest.approx(share, rel=tolerance)


def test_batches_multiply_tiles() -> None:
    assert matmul_sizes(matmul(128, 64, 256, batch=132)) == (132, 128, 64, 256)
    one, many = (H100.kernel_s(matmul(128, 8192, 256, batch=b)) for b in (132, 264))
    assert (many - LEAST_S) / (one - LEAST_S) == pytest.approx(2.0)


def grouped(groups: int, m: int, k: int, n: int) -> Kernel:
    """Return a product of torch._grouped_mm, with m rows in each group."""
    moved = 2 * groups * (m * k + k * n), 2 * groups * m * n
    shapes = ((groups, m, k), (groups, k, n))
    name, flops = "aten::_grouped_mm", 2 * groups * m * k * n
    return Kernel(name, "matmul", shapes, "bfloat16", flops, *moved, num_launches=2)


def test_groups_take_whole_pairs_of_tiles() -> None:
    """GroupMM.cu on Hopper: pairs of 128 x 256, or of 64 x 128 where a group has up to 128 rows or columns."""

    fast = load_profile("h100-sxm").model_copy(update={"memory_tb_per_s": 1e3})  # arithmetic alone
    cost = Cost(fast)

    def seconds(m: int, n: int) -> float:
        return cost.kernel_s(grouped(66, m, 8192, n)) - 2 * LEAST_S

    assert seconds(129, 256) == seconds(256, 256) == pytest.approx(seconds(512, 256) / 2)
    assert seconds(512, 1408) == seconds(512, 1536) > seconds(512, 1280)
    # 66 pairs of small tiles are one wave, at three quarters of the rate.
    wave_s = 2 * 64 * 128 * (8192 + 192) / (0.75 * 0.67 * 989e12 / 132)
    assert seconds(1, 128) == seconds(128, 128) == pytest.approx(wave_s)
    assert seconds(129, 128) == pytest.approx(2 * wave_s)
    # 640 rows are five tiles of a batched product, and three pairs of a grouped one.
    batch = replace(grouped(66, 640, 8192, 512), name="aten::bmm")
    assert cost.kernel_s(batch) - 2 * LEAST_S == pytest.approx(1.06 * seconds(640, 512) * 5 / 6)


def test_published_grouped_products() -> None:
    large = grouped(16, 128_000, 7168, 7168)
    h200 = Cost(load_profile("h200-sxm"))
    assert large.flops / h200.kernel_s(large) == pytest.approx(
        704e12, rel=0.04
    )  # pytorch 156203, which set the rate of the large tile
    # cublasLt's grouped kernel on an H100 (pytorch 185530); CUTLASS's is faster below 4,096 (182631).
    for size, groups, ms in ((512, 128, 0.163), (1024, 64, 0.295), (1024, 128, 0.565), (2048, 64, 1.940)):  # fmt: skip
        share = H100.kernel_s(grouped(groups, size, size, size)) / (ms * 1e-3)
        assert (0.45 if size == 512 else 0.8) < share < 1


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "pairs"),
    [(4, 4, False, 16), (4, 4, True, 10), (2, 4, True, 3), (4, 2, True, 3 + 4), (1, 1, True, 1)],
)
def test_attended(queries: int, keys: int, causal: bool, pairs: int) -> None:
    assert attended(queries, keys, causal) == pairs


@pytest.mark.parametrize(("kernel", "forward", "backward"), [("auto", 600, 518), ("flash2", 370, 318), ("flash3", 646, 559)])  # fmt: skip
def test_attention_at_published_rates(kernel: str, forward: float, backward: float) -> None:
    """FlashAttention-3's figures. What torch runs on an H100 is cuDNN's kernel."""
    h100 = Cost(load_profile("h100-sxm").with_attention(kernel))
    whole = attention(2, 16, 8192, 8192, causal=False)
    assert whole.flops / (h100.kernel_s(whole) - LEAST_S) == pytest.approx(forward * 1e12)
    half = attention(2, 16, 8192, 8192, causal=True)
    assert h100.kernel_s(half) == pytest.approx(h100.kernel_s(whole) / 2 / 0.9, rel=0.01)
    back = attention(2, 16, 8192, 8192, causal=False, kind="attention_backward")
    assert 2.5 * whole.flops / (h100.kernel_s(back) - LEAST_S) == pytest.approx(backward * 1e12)


def latent(length: int, kind: KernelKind, *, name: str = "efficient", dtype: str = "bfloat16") -> Kernel:  # fmt: skip
    """Return the attention of DeepSeek-V3: 128 heads, keys of 192 and values of 128."""
    qk, v = (2, 128, length, 192), (2, 128, length, 128)
    return Kernel(f"aten::_scaled_dot_product_{name}_attention", kind, (qk, qk, v), dtype, causal=True)  # fmt: skip


@pytest.mark.parametrize(
    ("length", "forward_ms", "backward_ms"),
    [(2048, 0.625, 2.151), (4096, 2.248, 7.293), (8192, 8.588, 28.563), (16384, 35.826, 114.721)],
)
def test_published_latent_attention(length: int, forward_ms: float, backward_ms: float) -> None:
    """cuDNN 9.27 on an H200 (NVIDIA's cudnn-frontend, attention_training/results/dsv3/h200), which torch 2.11 to 2.15 runs there."""
    h200 = Cost(load_profile("h200-sxm"))
    assert h200.kernel_s(latent(length, "attention")) == pytest.approx(forward_ms / 1e3, rel=0.2)
    back = latent(length, "attention_backward")
    assert h200.kernel_s(back) == pytest.approx(backward_ms / 1e3, rel=0.06)


def test_what_flash_attention_2_does_not_take_is_half_as_fast() -> None:
    """xFormers' kernel (xformers issue 1074), for values of another size, and for masks on an A100."""
    flash2, a100 = load_profile("h100-sxm").with_attention("flash2"), load_profile("a100-80g")
    for cost, name in ((Cost(flash2), "efficient"), (Cost(a100), "efficient"), (Cost(a100), "cudnn")):  # fmt: skip
        ours, as_flash = (cost.kernel_s(latent(8192, "attention", name=n)) for n in (name, "flash"))
        assert ours == pytest.approx(2 * as_flash, rel=0.01)
    # In 32 bits the peak decides, whatever the kernel's name.
    names = ("efficient", "flash")
    ours, as_flash = (Cost(a100).kernel_s(latent(8192, "attention", name=n, dtype="float32")) for n in names)  # fmt: skip
    assert ours == as_flash


def test_a_kernel_that_the_hardware_has_not_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="a100-80g has no figures of cudnn, only of efficient, flash2"
    ):
        load_profile("a100-80g").with_attention("cudnn")


def test_blocks_of_a_ring_add_up() -> None:
    """Two ranks' share of a causal square: a causal block each, and one whole block."""
    square = H100.kernel_s(attention(1, 32, 16384, 16384, causal=True))
    causal = H100.kernel_s(attention(1, 32, 8192, 8192, causal=True))
    whole = H100.kernel_s(attention(1, 32, 8192, 8192, causal=False))
    assert 2 * causal + whole == pytest.approx(square, rel=0.06)  # whole blocks run a little faster


def test_too_few_blocks_leave_sms_idle() -> None:
    few, many = attention(1, 1, 8192, 8192, causal=False), attention(1, 33, 8192, 8192, causal=False)  # fmt: skip
    per_head = [H100.kernel_s(few), H100.kernel_s(many) / 33]
    assert per_head[0] / per_head[1] == pytest.approx(132 / 64, rel=0.03)


def test_bytes() -> None:
    big = Kernel("add", "pointwise", read_bytes=2 << 30, write_bytes=1 << 30)
    assert H100.kernel_s(big) == pytest.approx((3 << 30) / (0.9 * 3.35e12) + LEAST_S)
    tiny = Kernel("add", "pointwise", read_bytes=64, write_bytes=64)
    assert H100.kernel_s(tiny) == pytest.approx(LEAST_S, rel=0.01)
    middle = Kernel("add", "pointwise", read_bytes=10**7)
    assert H100.kernel_s(middle) == pytest.approx(1e7 / (0.75 * 3.35e12) + LEAST_S)


def test_transposing_takes_longer() -> None:
    """2.2 and 1.4 TB/s were measured on an H100 of 2.4 TB/s, with and without."""
    h100, moved = Cost(load_profile("h100-96g-500w")), 4 * 16384 * 14336
    cast = Kernel("fused", "pointwise", read_bytes=moved // 2, write_bytes=moved // 2)
    for transposes, rate in ((False, 2.2e12), (True, 1.4e12)):
        seconds = h100.kernel_s(replace(cast, transposes=transposes))
        assert moved / seconds == pytest.approx(rate, rel=0.03)


def test_host_copies_go_over_pcie() -> None:
    copy = Kernel("copy_", "host_copy", read_bytes=55 * 10**9, write_bytes=55 * 10**9)
    assert H100.kernel_s(copy) == pytest.approx(1.0, rel=1e-4)


def test_launches() -> None:
    eager = Kernel("add", "pointwise")
    compiled = Kernel("fused", "pointwise", host="compiled")
    many = Kernel("_foreach_add", "optimizer", num_launches=11)
    assert H100.launch_s(eager) == pytest.approx(6e-6)
    assert H100.launch_s(compiled) == pytest.approx(4e-6)
    assert H100.launch_s(many) == pytest.approx(46e-6)
    assert H100.kernel_s(many) == pytest.approx(11 * LEAST_S)


def test_prices_are_kept() -> None:
    cost = Cost(load_profile("h100-sxm"))
    kernel = matmul(4096, 4096, 4096)
    assert cost.kernel_s(kernel) == cost.kernel_s(kernel) > 0


@pytest.mark.parametrize("name", ["a100-80g", "b200", "cpu", "h100-96g-500w", "h200-sxm", "mi300x"])
def test_every_profile_prices_every_kind(name: str) -> None:
    cost = Cost(load_profile(name))
    kernels = [
        matmul(4096, 4096, 4096),
        matmul(4096, 4096, 4096, dtype="float8_e4m3fn"),
        matmul(4096, 4096, 4096, dtype="float32"),
        attention(1, 32, 8192, 8192, causal=True),
        attention(1, 32, 8192, 8192, causal=True, kind="attention_backward"),
        *(
            Kernel("x", kind, read_bytes=10**8)
            for kind in ("pointwise", "gather", "optimizer", "copy", "host_copy")
        ),
    ]
    assert all(0 < cost.kernel_s(kernel) < 60 for kernel in kernels)
