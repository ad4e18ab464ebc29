"""Calibration: a machine that takes exactly what the formulas say gets its own figures back."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan.cli import main
from titan.contrib.calibrate.device import LARGE, fit, to_toml
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile, on_curve


@pytest.mark.parametrize(("share", "fp8"), [(0.67, 0.60), (0.41, 0.35)])
def test_figures_come_back(share: float, fp8: float, tmp_path: Path) -> None:
    base = load_profile("h100-sxm")
    machine = base.model_copy(
        update={
            "matmul_share": base.matmul_share | {"bfloat16": share, "float8": fp8},
            "memory_share": ((1e5, 0.2), (1e6, 0.5), (1e7, 0.7), (1e8, 0.8), (1e9, 0.85)),
            "attention_forward_tflops": {
                "cudnn": tuple((n, 0.7 * v) for n, v in base.attention_forward_tflops["cudnn"])
            },
            "attention_causal_share": {"cudnn": ((512, 0.5), (4096, 0.8), (16384, 0.9))},
            "kernel_min_us": 4.0,
        }
    )
    figures = fit(base, Cost(machine).kernel_s, sizes=LARGE, dtypes=("bfloat16", "float8"))
    file = tmp_path / "mine.toml"
    file.write_text(to_toml("mine", base.name, figures, note="a test"))
    calibrated = load_profile(file)
    assert calibrated.matmul_share["bfloat16"] == pytest.approx(share, rel=0.01)
    assert calibrated.matmul_share["float8"] == pytest.approx(fp8, rel=0.01)
    assert (
        calibrated.matmul_share["float32"] == base.matmul_share["float32"]
    )  # was not measured
    assert calibrated.kernel_min_us == pytest.approx(4.0)
    for size in (10**5, 10**6, 10**7, 10**8, 10**9):
        assert on_curve(calibrated.memory_share, size) == pytest.approx(on_curve(machine.memory_share, size), rel=0.01)  # fmt: skip
    for length in (512, 4096, 16384):
        for curve in ("attention_forward_tflops", "attention_backward_tflops", "attention_causal_share"):  # fmt: skip
            found, true = (getattr(p, curve)["cudnn"] for p in (calibrated, machine))
            assert on_curve(found, length) == pytest.approx(on_curve(true, length), rel=0.01)
    assert calibrated.sources["matmul_share"] == "a test" and calibrated.num_sms == base.num_sms


def test_a_card_with_faster_memory_than_its_base() -> None:
    """An H200, measured from an H100's profile."""
    base, rates = load_profile("h100-sxm"), (0.5, 2.0, 3.6, 4.2, 4.3)  # TB/s
    machine = base.model_copy(
        update={
            "memory_tb_per_s": 4.8,
            "memory_share": tuple(
                (float(n), rate / 4.8) for n, rate in zip(LARGE.moved, rates, strict=True)
            ),
        }
    )
    figures = fit(base, Cost(machine).kernel_s, sizes=LARGE, dtypes=("bfloat16",))
    found = [figures["memory_tb_per_s"] * share for _, share in figures["memory_share"]]
    assert found == pytest.approx(rates, rel=0.01)


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--calibrate", str(tmp_path / "none" / "mine.toml")]) == 2
    assert "--calibrate: there is no folder" in capsys.readouterr().err
