"""Hardware profiles: complete, sourced, and in agreement with the table that MFU uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tables import tabled
from titan.base.hardware import by_name
from titan.config.errors import ConfigError
from titan.config.load import load_config
from titan.config.toml import read_toml
from titan.observe.flops import flops_per_token
from titan.sim.price.profiles import (
    _NOT_FIGURES,
    load_profile,
    on_curve,
    profile_names,
    with_figures,
)


def test_names() -> None:
    assert profile_names() == [
        "a100-80g", "b200", "b300", "cpu", "gb200", "gb300", "h100-96g-500w", "h100-sxm", "h200-sxm", "mi300x", "mi355x",
    ]  # fmt: skip


@pytest.mark.parametrize("name", profile_names())
def test_each_figure_has_a_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    figures = set(type(profile).model_fields) - _NOT_FIGURES
    if profile.matmul_alone == 1:
        figures.remove("matmul_alone")
    assert figures <= set(profile.sources)
    assert all(len(source) >= 3 for source in profile.sources.values())


@pytest.mark.parametrize("name", [name for name in profile_names() if name != "cpu"])
def test_peaks_are_those_of_mfu(name: str) -> None:
    profile, row = load_profile(name), by_name(name)
    assert {d: t * 1e12 for d, t in profile.peak_tflops.items()} == pytest.approx(
        row.peak_flops
    )
    assert profile.memory_tb_per_s * 1e12 == pytest.approx(row.memory_bandwidth)
    assert profile.memory_gib == row.memory_gib
    assert profile.sources["peak_tflops"] == row.source


def test_the_capped_h100_differs_in_what_was_set_with_rows_and_in_its_memory() -> None:
    capped, full = load_profile("h100-96g-500w"), load_profile("h100-sxm")
    differs = {f for f in type(full).model_fields if getattr(capped, f) != getattr(full, f)}
    fitted = {"matmul_share", "attention_forward_tflops", "attention_backward_tflops"}
    self = {"name", "assumes", "kin", "sources"}
    of_the_card = {
        "memory_gib",
        "memory_tb_per_s",
        "kernel_share",
        "power_w",
        "slowest_of",
        "matmul_alone",
    }
    assert differs == fitted | self | of_the_card
    # Three numbers: products in bf16 and in fp8, and one factor for attention both ways.
    factors = [
        mine[1] / theirs[1]
        for curve in ("attention_forward_tflops", "attention_backward_tflops")
        for kernel, points in getattr(full, curve).items()
        for mine, theirs in zip(getattr(capped, curve)[kernel], points, strict=True)
    ]
    assert factors == pytest.approx([factors[0]] * len(factors), abs=0.005)
    assert 0.4 < factors[0] < 1


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nbase = "h100-sxm"\nnic_gb_per_s = 25.0\n[sources]\nnic_gb_per_s = "my network"\n'
    )
    profile = load_profile(file)
    assert profile.nic_gb_per_s == 25.0
    assert profile.sources["nic_gb_per_s"] == "my network"
    assert profile.num_sms == 132
    file.write_text('name = "mine"\nbase = "mi300x"\n')
    assert (
        load_profile("mi300x").note and not load_profile(file).note
    )  # which tells of its own runs


def test_figures_are_set_relative_to_the_profiles() -> None:
    """Numbers are those of h100-sxm.toml."""
    changes = ["nic_gb_per_s=+20%", "host_tiny_us=1.2", "attention_forward_tflops=-10%"]
    found = with_figures(load_profile("h100-sxm"), [*changes, "num_sms=66"])
    assert found.nic_gb_per_s == pytest.approx(60) and found.host_tiny_us == 1.2
    assert found.attention_forward_tflops["cudnn"][0] == (512, pytest.approx(0.9 * 497))
    assert (found.num_sms, found.network) == (66, ())


@tabled("line, message")
def test_mistakes_are_told(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "mine.toml"
    key = line.split(" ")[0]
    base = "" if key == "base" else 'base = "h100-sxm"\n'
    file.write_text(f'name = "mine"\n{base}{line}\n[sources]\n{key} = "made up"\n')
    with pytest.raises(ConfigError, match=message):
        load_profile(file)


def test_a_file_without_a_name_has_its_own(tmp_path: Path) -> None:
    """A base's name would be that of another machine, of which a sweep then keeps one."""
    for stem in ("slow", "fast"):
        (tmp_path / f"{stem}.toml").write_text('base = "h100-sxm"\n', "utf-8")
        assert load_profile(tmp_path / f"{stem}.toml").name == stem


def test_curve() -> None:
    curve = ((10.0, 1.0), (1000.0, 3.0))
    assert [on_curve(curve, size) for size in (1, 10, 100, 1000, 1e6)] == [1, 1, 2, 3, 3]


def test_stragglers_grow_with_the_number_of_nodes() -> None:
    """Expected largest of 8 and of 128 normal draws: 1.424 and 2.6 deviations (order statistics' tables)."""
    # The shares are those of one device, or of the slowest of the 8 that set them.
    one, slowest_of_8 = load_profile("h100-sxm"), load_profile("h100-96g-500w")
    for profile in (one, slowest_of_8):
        factors = [profile.straggler(n) for n in (1, 8, 16, 128, 512, 4096)]
        assert factors[0] == 1.0 and factors == sorted(factors)
    assert one.straggler(8) == pytest.approx(1 + 0.015 * 1.424, abs=5e-4)
    assert one.straggler(128) == pytest.approx(1 + 0.015 * 2.60, abs=5e-4)
    assert slowest_of_8.straggler(8) == 1.0
    assert slowest_of_8.straggler(128) == pytest.approx(1 + 0.015 * (2.60 - 1.424), abs=5e-4)


HOST = (
    "host_tiny_us",
    "launch_us",
    "launch_compiled_us",
    "compiled_call_us",
    "launch_transfer_us",
)


@pytest.mark.parametrize("name", ["b300", "gb200", "gb300", "mi355x"])
def test_later_machines_price_a_job(name: str) -> None:
    from titan.config.load import load_from_argv
    from titan.sim.simulate import simulate

    job = load_from_argv(["train_configs/debug_model.toml"])
    base = {"b300": "b200", "gb200": "b200", "gb300": "gb200", "mi355x": "mi300x"}[name]
    profiles = [load_profile(name), load_profile(base)]
    # A small step waits for its host, and Grace's cores are slower than those of the machine before it.
    profiles[0] = profiles[0].model_copy(update={f: getattr(profiles[1], f) for f in HOST})
    steps = [simulate(job, world_size=2, profile=p).timeline.step_s for p in profiles]
    assert 0.5 < steps[0] / steps[1] <= 1.001  # never slower than what it came after


def test_time_of_the_host_is_that_of_published_calls() -> None:
    """nn.Linear and torch.matmul on x86 servers with H100, in tiny operations of one core (the figure's source has both)."""
    tiny_us = load_profile("h100-sxm").host_tiny_us
    assert tiny_us == pytest.approx((13.48 - 8.4) / (4.8 - 0.9), rel=0.02)
    # Grace: three published ratios to x86.
    ratio = (37.08 / 13.48 * (44.3 - 6.8) / (33 - 6.5) * 196.8 / 176.6) ** (1 / 3)
    assert load_profile("gb200").host_tiny_us == pytest.approx(tiny_us * ratio, rel=0.02)


def test_no_published_run_is_faster_than_its_products_at_the_profiles_level() -> None:
    """The model's products alone, at the share of the peak that large ones reach. Full recomputation runs those of the forward pass again."""
    folder, runs = Path("train_configs/published"), 0
    for run in read_toml(folder / "runs.toml")[0]["run"]:
        file = run["profile"]
        profile = load_profile(folder / file if file.endswith(".toml") else file)
        speed = run.get("tokens_per_s_per_gpu")
        if not speed or "ep" in run or profile.unsupported or run["id"] in ("T8", "T9", "T10"):
            continue
        config = load_config(folder / f"{run['id']}.toml")
        # A sequence of one token has no attention to speak of.
        flops = flops_per_token(config, config.model.sizes, causal=True, length=1)
        passes = 4 / 3 if run["ac"] == "full" else 1
        dtype = "float8" if any("float8" in option for option in run["options"]) else "bfloat16"
        level = profile.matmul_share[dtype] * profile.peak_tflops[dtype] * 1e12
        assert speed * flops * passes < level, run["id"]
        runs += 1
    assert runs > 100
