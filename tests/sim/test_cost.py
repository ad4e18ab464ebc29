"""Prices of kernels: quantisation, floors, masks; and published rates that no constant was set with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from tests.support.commands import command
from tests.support.tables import tabled
from titan.config.errors import ConfigError
from titan.config.load import load_from_argv
from titan.sim.documents import document_keys
from titan.sim.price.attention import attention_kernel_of
from titan.sim.price.cost import Cost, matmul_sizes, routing_exponent
from titan.sim.price.measured import tables
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Kernel, KernelKind, attention_flops, visible_keys
from titan.sim.routing import step_loads
from titan.sim.simulate import simulate

H100 = Cost(load_profile("h100-sxm"), alone=True)
LEAST_S = 2.5e-6


def matmul(m: int, k: int, n: int, *, dtype: str = "bfloat16", batch: int = 0) -> Kernel:
    a, b = ((batch, m, k), (batch, k, n)) if batch else ((m, k), (k, n))
    size = 1 if dtype.startswith("float8") else 2
    times = max(1, batch)
    moved = times * size * (m * k + k * n), times * 2 * m * n
    return Kernel("aten::mm", "matmul", (a, b), dtype, 2 * m * k * n * times, *moved)


def attention(
    b: int,
    h: int,
    q: int,
    kv: int,
    *,
    causal: bool,
    kind: KernelKind = "attention",
    dim: int = 128,
) -> Kernel:
    shapes = ((b, h, q, dim), (b, h, kv, dim), (b, h, kv, dim))
    flops = attention_flops(kind, shapes)
    return Kernel("flash", kind, shapes, "bfloat16", flops, causal=causal)


def test_large_products_reach_the_share() -> None:
    """The profile's share is the level of products beyond a TFLOP; single shapes are some percent above or below."""
    sizes = (2048, 4096, 8192, 16384, 65536)
    kernels = [matmul(m, k, n) for m in (4096, 16384) for k in sizes for n in sizes]
    rates = [k.flops / H100.kernel_s(k) for k in kernels if k.flops > 1e12]
    assert median(rates) == pytest.approx(0.74 * 989e12, rel=0.05)
    assert max(rates) / min(rates) < 1.4


def test_only_a_card_without_neighbours_is_faster() -> None:
    """A job of one rank is priced at the level of one card, a larger job at that of all, and profiles do not inherit the difference."""
    config = load_from_argv(["train_configs/debug_model.toml"])
    h100, kernel = load_profile("h100-sxm"), matmul(16384, 8192, 8192)
    alone, beside = (simulate(config, world_size=n, profile=h100).cost for n in (1, 2))
    assert beside.kernel_s(kernel) / alone.kernel_s(kernel) == pytest.approx(
        0.74 / 0.67, rel=0.01
    )
    rows = grouped(16, 8192, 7168, 7168)  # no cuBLAS kernels
    assert beside.kernel_s(rows) == alone.kernel_s(rows)
    b200 = load_profile("b200")
    assert Cost(b200, alone=True).kernel_s(kernel) == Cost(b200).kernel_s(kernel)


def test_narrow_products_are_bound_by_memory() -> None:
    kernel = matmul(16, 16384, 16384)
    moved = kernel.read_bytes + kernel.write_bytes
    assert H100.kernel_s(kernel) == pytest.approx(moved / (0.9 * 3.35e12), rel=0.05)


def test_float8() -> None:
    big = matmul(16384, 8192, 28672), matmul(16384, 8192, 28672, dtype="float8_e4m3fn")
    small = matmul(1024, 512, 1024), matmul(1024, 512, 1024, dtype="float8_e4m3fn")
    gain_big, gain_small = (H100.kernel_s(a) / H100.kernel_s(b) for a, b in (big, small))
    assert 1.6 < gain_big < 2.1
    assert gain_small < 1.4  # launching takes as long


def test_batches_are_rows() -> None:
    assert matmul_sizes(matmul(128, 64, 256, batch=132)) == (132, 128, 64, 256)
    one, many = (H100.kernel_s(matmul(128, 8192, 256, batch=b)) for b in (132, 264))
    assert many / one == pytest.approx(2.0, rel=0.03)


def grouped(groups: int, m: int, k: int, n: int) -> Kernel:
    """Return a product of torch._grouped_mm, with m rows in each group."""
    moved = 2 * groups * (m * k + k * n), 2 * groups * m * n
    shapes = ((groups, m, k), (groups, k, n))
    name, flops = "aten::_grouped_mm", 2 * groups * m * k * n
    return Kernel(name, "matmul", shapes, "bfloat16", flops, *moved, num_launches=2)


def test_groups_take_whole_pairs_of_tiles() -> None:
    """GroupMM.cu on Hopper: pairs of tiles of 128 rows. On an A100 it is a loop of products, which need none."""
    fast = load_profile("h100-sxm").model_copy(
        update={"memory_tb_per_s": 1e3}
    )  # arithmetic alone
    seconds = {m: Cost(fast).kernel_s(grouped(64, m, 8192, 2048)) for m in (129, 256, 257, 512)}
    assert seconds[129] == seconds[256] < seconds[257] == seconds[512]
    a100 = Cost(load_profile("a100-80g"))
    some, more = (a100.kernel_s(grouped(64, m, 8192, 2048)) for m in (257, 512))
    assert some < 0.6 * more


def test_published_grouped_products() -> None:
    """704 TFLOPS alone on an H200 (pytorch 156203), where no level of sustained load holds."""
    large, h200 = grouped(16, 128_000, 7168, 7168), load_profile("h200-sxm")
    burst = h200.model_copy(update={"matmul_share": tables("h200").large_share})
    assert large.flops / Cost(burst).kernel_s(large) == pytest.approx(704e12, rel=0.1)
    # cublasLt's grouped kernel on an H100 (pytorch 185530); CUTLASS's is faster below 4,096 (182631).
    for size, groups, ms in ((512, 128, 0.163), (1024, 64, 0.295), (1024, 128, 0.565), (2048, 64, 1.940)):  # fmt: skip
        share = H100.kernel_s(grouped(groups, size, size, size)) / (ms * 1e-3)
        assert (0.45 if size == 512 else 0.8) < share < 1


def test_uneven_routes_slow_grouped_products() -> None:
    """81% of the rate with 512 rows an expert under a power law on H100, nearly all of it with many rows or mild routes."""
    share = tables("h100").uneven_share
    assert share(512, 1.01) == share(512, 1.2) == pytest.approx(0.81)
    assert share(512, 0.0) == 1.0 and share(512, 0.18) > 0.96 and share(4096, 1.01) > 0.9
    uneven = Cost(H100.profile, unevenness=1.01)
    ratio = uneven.kernel_s(grouped(64, 512, 4096, 2048)) / H100.kernel_s(
        grouped(64, 512, 4096, 2048)
    )
    assert ratio == pytest.approx(1 / 0.81, rel=0.03)


@tabled("card, kind, heads, ms")
def test_published_linear_attention(card: str, kind: str, heads: int, ms: float) -> None:
    """8,192 tokens in Qwen3.5 (TensorRT-LLM 1.3) and Kimi K3 (SGLang 0.5), in aiconfigurator-core 0.12. Without a table, by bytes."""
    states = (1, 8192, heads, 128)
    gates = states if kind == "kda" else states[:3]
    shapes = (states, states, gates, states[:3])
    kernel = Kernel("titan::linear_attention", "recurrence", shapes)
    cost = Cost(load_profile(card))
    assert cost.kernel_s(kernel) == pytest.approx(ms * 1e-3, rel=0.06)
    other = Cost(cost.profile.model_copy(update={"measured": ""}))
    if card == "h100-sxm":  # kernels on a B200 do not follow its bandwidth
        assert other.kernel_s(kernel) == pytest.approx(ms * 1e-3, rel=0.45)


@tabled("queries, keys, causal, pairs")
def test_visible_keys(queries: int, keys: int, causal: bool, pairs: int) -> None:
    """The queries of one of two ranks see half of the pairs that all queries see, which are 10 of 4 by 4."""
    kernel = attention(1, 1, queries, keys, causal=causal)
    assert visible_keys(kernel) * queries == pairs


@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [("auto", 600, 518), ("flash2", 370, 318), ("flash3", 646, 559)],
)
def test_attention_at_published_rates(kernel: str, forward: float, backward: float) -> None:
    """FlashAttention-3's figures. What torch runs on an H100 is cuDNN's kernel."""
    h100 = Cost(load_profile("h100-sxm").with_attention(kernel))
    whole = attention(8, 32, 8192, 8192, causal=False)
    assert whole.flops / (h100.kernel_s(whole) - LEAST_S) == pytest.approx(forward * 1e12)
    back = attention(8, 32, 8192, 8192, causal=False, kind="attention_backward")
    assert 2.5 * whole.flops / (h100.kernel_s(back) - LEAST_S) == pytest.approx(backward * 1e12)


def attention_tflops(
    cost: Cost, dim: int, kind: KernelKind = "attention", heads: int = 32
) -> float:
    """Return the rate of causal attention of two sequences of 8,192 tokens."""
    kernel = attention(2, heads, 8192, 8192, causal=True, kind=kind, dim=dim)
    passes = 5 if kind == "attention_backward" else 2
    flops = 2 * passes * 2 * heads * dim * 8192 * 8193 / 2
    return flops / (cost.kernel_s(kernel) - LEAST_S) / 1e12


def test_attention_of_head_dim_64_as_traced() -> None:
    """cuDNN in titan's 1B step on one H100, torch 2.11, 28 November 2026. Its rates at head dim 128 would be 460 and 397 here."""
    assert attention_tflops(H100, 64) == pytest.approx(423, rel=0.005)
    assert attention_tflops(H100, 64, "attention_backward") == pytest.approx(347, rel=0.005)
    # Between the head dims of the curves, and beyond them.
    rates = [attention_tflops(H100, dim, heads=128) for dim in (32, 64, 96, 128, 256)]
    assert rates[0] == pytest.approx(rates[1]) and rates[3] == pytest.approx(rates[4])
    assert rates[1] < rates[2] < rates[3]


def test_attention_overlaps_its_memory_traffic() -> None:
    kernel = attention(2, 32, 8192, 8192, causal=True)
    moving = replace(kernel, read_bytes=kernel.read_bytes + 10**8)  # 0.04 ms
    assert H100.kernel_s(moving) == H100.kernel_s(kernel)
    assert H100.kernel_s(replace(kernel, read_bytes=10**12)) > 0.3


def test_attention_without_a_curve_follows_the_tables() -> None:
    """FlashAttention-2 on an H100, and cuDNN on a B200, whose tables are cuDNN's."""
    flash2 = Cost(load_profile("h100-sxm").with_attention("flash2"))
    for cost, card in ((flash2, "h100"), (Cost(load_profile("b200")), "b200")):
        few, many = (
            tables(card).attention_tflops(dim, n, 8192) for dim, n in ((64, 64), (128, 256))
        )
        assert attention_tflops(cost, 64) / attention_tflops(
            cost, 128, heads=128
        ) == pytest.approx(few / many, rel=0.001)


def test_a_causal_mask_costs_short_sequences_more() -> None:
    """It leaves half of the work; short sequences lose more of their rate than long ones."""
    halves = [
        H100.kernel_s(attention(8, 32, n, n, causal=True))
        / H100.kernel_s(attention(8, 32, n, n, causal=False))
        for n in (1024, 2048, 4096, 8192)
    ]
    assert halves == sorted(halves, reverse=True)
    assert halves[0] > 0.75 and halves[-1] == pytest.approx(0.5 / 0.97, rel=0.01)


def latent(length: int, kind: KernelKind, *, name: str = "efficient", dtype: str = "bfloat16") -> Kernel:  # fmt: skip
    """Return the attention of DeepSeek-V3: 128 heads, keys of 192 and values of 128."""
    qk, v = (2, 128, length, 192), (2, 128, length, 128)
    shapes, full_name = (qk, qk, v), f"aten::_scaled_dot_product_{name}_attention"
    return Kernel(full_name, kind, shapes, dtype, attention_flops(kind, shapes), causal=True)


@pytest.mark.parametrize(
    ("length", "forward_ms", "backward_ms"),
    [(4096, 2.248, 7.293), (8192, 8.588, 28.563), (16384, 35.826, 114.721)],
)
def test_published_latent_attention(length: int, forward_ms: float, backward_ms: float) -> None:
    """cuDNN 9.27 on an H200 (NVIDIA's cudnn-frontend, attention_training/results/dsv3/h200), which torch 2.11 to 2.15 runs there."""
    h200 = Cost(load_profile("h200-sxm"))
    assert h200.kernel_s(latent(length, "attention")) == pytest.approx(
        forward_ms / 1e3, rel=0.2
    )
    back = latent(length, "attention_backward")
    assert h200.kernel_s(back) == pytest.approx(backward_ms / 1e3, rel=0.06)


def test_what_flash_attention_2_does_not_take_is_half_as_fast() -> None:
    """xFormers' kernel (xformers issue 1074), for values of another size, and for masks on an A100."""
    flash2, a100 = load_profile("h100-sxm").with_attention("flash2"), load_profile("a100-80g")
    for cost, name in ((Cost(flash2), "efficient"), (Cost(a100), "efficient"), (Cost(a100), "cudnn")):  # fmt: skip
        ours, as_flash = (
            cost.kernel_s(latent(8192, "attention", name=n)) for n in (name, "flash")
        )
        assert ours == pytest.approx(2 * as_flash, rel=0.01)
    # In 32 bits the peak decides, whatever the kernel's name.
    names = ("efficient", "flash")
    ours, as_flash = (
        Cost(a100).kernel_s(latent(8192, "attention", name=n, dtype="float32")) for n in names
    )
    assert ours == as_flash


def test_a_kernel_that_the_hardware_has_not_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="a100-80g has no figures of cudnn, only of efficient, flash2"
    ):
        load_profile("a100-80g").with_attention("cudnn")


def test_few_heads_leave_the_device_idle() -> None:
    few, many = (attention(1, heads, 1024, 1024, causal=True) for heads in (4, 256))
    per_head = [H100.kernel_s(few) / 4, H100.kernel_s(many) / 256]
    assert 3 < per_head[0] / per_head[1] < 10
    # Without tables, blocks of queries over SMs.
    amd = Cost(load_profile("mi300x"))
    few, many = (attention(1, heads, 8192, 8192, causal=False) for heads in (1, 38))
    per_head = [amd.kernel_s(few), amd.kernel_s(many) / 38]
    assert per_head[0] / per_head[1] == pytest.approx(304 / 64, rel=0.03)


@tabled("name, gb, ms")
def test_kernels_with_a_rate_of_their_own(name: str, gb: float, ms: float) -> None:
    """In the same trace. The rate follows the memory of a card."""
    kernel = Kernel(name, "optimizer", read_bytes=int(gb * 5e8), write_bytes=int(gb * 5e8))
    assert H100.kernel_s(kernel) == pytest.approx(ms * 1e-3, rel=0.01)
    half = Cost(H100.profile.model_copy(update={"memory_tb_per_s": 3.35 / 2}))
    assert half.kernel_s(kernel) == pytest.approx(2 * H100.kernel_s(kernel), rel=0.01)


def test_bytes() -> None:
    big = Kernel("add", "pointwise", read_bytes=2 << 30, write_bytes=1 << 30)
    assert H100.kernel_s(big) == pytest.approx((3 << 30) / (0.9 * 3.35e12) + LEAST_S)
    tiny = Kernel("add", "pointwise", read_bytes=64, write_bytes=64)
    assert H100.kernel_s(tiny) == pytest.approx(LEAST_S, rel=0.01)
    middle = Kernel("add", "pointwise", read_bytes=10**7)
    assert H100.kernel_s(middle) == pytest.approx(1e7 / (0.75 * 3.35e12) + LEAST_S)


def test_pytorchs_own_kernels_do_not_fill_a_fast_memory() -> None:
    """3.5 of 8 TB/s on a B200; fused kernels have more loads in flight."""
    b200 = Cost(load_profile("b200"))
    own = Kernel("add", "pointwise", read_bytes=2 << 30, write_bytes=1 << 30)
    assert (3 << 30) / b200.kernel_s(own) == pytest.approx(3.5e12, rel=0.01)
    fused = replace(own, name="fused", host="compiled")
    assert b200.kernel_s(fused) == pytest.approx((3 << 30) / (0.9 * 8e12) + LEAST_S)


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
    assert H100.launch_s(eager) == pytest.approx(2.5e-6)
    assert H100.launch_s(compiled) == pytest.approx(6.5e-6)
    assert H100.launch_s(many) == pytest.approx(11 * 2.5e-6)
    assert H100.kernel_s(many) == pytest.approx(11 * LEAST_S)


@pytest.mark.parametrize(
    "name", ["a100-80g", "b200", "cpu", "h100-96g-500w", "h200-sxm", "mi300x"]
)
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


def test_the_exponent_of_a_jobs_routes(tmp_path: Path) -> None:
    """The exponent is the setting's, 0 for even routes, or the slope of counted shares."""

    def exponent(*settings: str) -> float:
        config = load_from_argv(["train_configs/demo_moe.toml", *settings])
        return routing_exponent(config, config.model.sizes)

    experts = load_from_argv(["train_configs/demo_moe.toml"]).model.sizes.num_experts
    counted = tmp_path / "experts.json"
    counts = [round(1e6 * (n + 1) ** -0.5) for n in range(experts)]
    counted.write_text(json.dumps({"loads": [counts, counts[::-1]]}), "utf-8")
    assert exponent("--simulator.routing=zipf:0.7") == 0.7
    assert exponent("--simulator.routing=even") == 0.0
    assert (
        exponent("--simulator.routing=zipf:0.7", "--debug.moe_force_load_balance=true") == 0.0
    )
    assert exponent(f"--simulator.routing={counted}") == pytest.approx(0.5, rel=0.01)


# ---- the order of torch's kernels, and packed documents -----------------------------------------------


@tabled("card, torch_version, kernel")
def test_torchs_order_of_kernels(card: str, torch_version: str, kernel: str) -> None:
    profile = load_profile(card).with_attention("auto", torch_version=torch_version)
    assert profile.attention_kernel == kernel


@tabled("backend, mask, torch_version, kernel")
def test_kernels_of_backends_and_masks(
    backend: str, mask: str, torch_version: str, kernel: str
) -> None:
    h100 = {"torch_version": torch_version, "capability": 9.0}
    assert attention_kernel_of(backend, mask, **h100) == kernel


@pytest.mark.parametrize(
    ("card", "kernel", "rates"),
    [
        ("b200", "FlexAttention", "flash2"),
        ("b200", "flash4", "cudnn"),
        ("b300", "flash2", "cudnn"),
        ("a100-80g", "cudnn", "flash2"),
        ("h100-sxm", "flash3", "flash3"),
    ],
)
def test_kernels_without_rates_are_priced_as_the_likest(
    card: str, kernel: str, rates: str
) -> None:
    assert load_profile(card).rates_of(kernel) == rates


def test_head_dims_that_cudnn_does_not_take() -> None:
    """On a B200, 256 is FlashAttention-2's, and 192 with values of 128 is cuDNN's."""
    b200, flash2 = load_profile("b200"), load_profile("b200").with_attention("flash2")
    large = attention(2, 32, 4096, 4096, causal=True, dim=256)
    assert Cost(b200).kernel_s(large) == Cost(flash2).kernel_s(large)
    mla = latent(4096, "attention")
    assert Cost(b200).kernel_s(mla) < 0.5 * Cost(flash2).kernel_s(mla)


def packed(tokens: int) -> Cost:
    return Cost(load_profile("h100-sxm"), document_keys=(tokens + 1) / 2)


def test_packed_documents_cost_what_their_lengths_leave() -> None:
    whole = attention(1, 32, 65536, 65536, causal=True)
    # A rank of eight under context parallelism has an eighth of the work.
    share = attention(1, 32, 8192, 65536, causal=True)
    assert H100.kernel_s(share) == pytest.approx(H100.kernel_s(whole) / 8, rel=0.02)
    for cost in (packed(4096), packed(512)):
        assert cost.kernel_s(share) < 0.5 * H100.kernel_s(share)
    # Work by FLOPs: 4,096 of 65,536 tokens. No faster than the kernel's rate on such lengths.
    short = H100.kernel_s(attention(16, 32, 4096, 4096, causal=True))
    assert 1 < packed(4096).kernel_s(whole) / short < 1.1
    assert packed(65536).kernel_s(whole) == pytest.approx(H100.kernel_s(whole), rel=0.01)


def test_document_lengths_are_those_of_the_shards(tmp_path: Path) -> None:
    text, folder = tmp_path / "text.jsonl", tmp_path / "shards"
    rows = [json.dumps({"text": "a" * (length - 2)}) for length in (100, 300, 600)]
    text.write_text("\n".join(rows))
    fixed = f"--tokenizer bytes --workers 1 --input {text}".split()
    assert command("prepare")([*fixed, "--output", str(folder)]) == 0
    job = ["train_configs/debug_model.toml", "--training.dataset=shards"]
    job += [f"--training.dataset_path={folder}", "--training.seq_len=500"]
    masked = [*job, "--data.document_mask"]
    assert document_keys(load_from_argv(job)) == 0
    # Begin and end tokens are two of 100, 300 and 600 tokens, which fill two sequences of 500.
    lengths = (100, 300, 100, 500)
    mean = sum(n * (n + 1) / 2 for n in lengths) / 1000
    assert document_keys(load_from_argv(masked)) == pytest.approx(mean)
    stated = [*masked, "--simulator.document_tokens=64"]
    assert document_keys(load_from_argv(stated)) == 32.5
    unknown = ["train_configs/debug_model.toml", "--data.document_mask"]
    assert document_keys(load_from_argv(unknown)) is None


@tabled("routing, mean, most")
def test_loads_of_named_routings(routing: str, mean: float, most: float) -> None:
    """Eight experts on four ranks. The hot ones get 3/4 of the tokens, and an eighth of the rest each."""
    loads = step_loads(routing, 8, 4, 10**9)
    assert sum(loads) / len(loads) == pytest.approx(mean, rel=2e-3)
    assert max(loads) == pytest.approx(most, rel=2e-3)
