"""Accelerators are recognised by their whole name, and never guessed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan.observe.hardware import HARDWARE, by_name, recognise


@pytest.mark.parametrize(
    ("device_name", "profile"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200-96g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_known_devices(device_name: str, profile: str) -> None:
    found = recognise(device_name)
    assert found is not None
    assert found.name == profile


@pytest.mark.parametrize(
    "device_name",
    [
        "cpu",
        "",
        "NVIDIA H20",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",  # a slice has a part of the peak
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100",  # sold in several speeds under this name
    ],
)
def test_unknown_devices_have_no_profile(device_name: str) -> None:
    assert recognise(device_name) is None


def test_figures() -> None:
    assert by_name("h100-sxm").peak_flops["bfloat16"] == 989e12
    assert by_name("H200-SXM").memory_bandwidth == 4.8e12
    assert by_name("a100-80g").peak_flops == {
        "bfloat16": 312e12,
        "float16": 312e12,
        "tfloat32": 156e12,
        "float32": 19.5e12,
    }
    for hardware in HARDWARE:
        assert hardware.peak_flops["bfloat16"] > hardware.peak_flops["float32"] > 1e13, hardware
        assert 20 < hardware.memory_gib < 300, hardware
        assert hardware.source


def test_docs_list_every_profile() -> None:
    docs = Path(__file__).parents[2] / "docs" / "metrics.md"
    listed = docs.read_text(encoding="utf-8").split("The profiles are ")[1].split(";")[0]
    assert re.split(r",\s+|\s+and\s+", listed) == [hardware.name for hardware in HARDWARE]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no profile 'h900'; there are: h100-sxm, .*rtx-4090"):
        by_name("h900")


def test_imports_no_torch() -> None:
    code = "import sys, titan.observe.hardware, titan.observe.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
