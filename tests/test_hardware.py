"""Accelerators are recognised by their whole name, and never guessed."""

import re
from pathlib import Path

import pytest

from tests.support.tables import table, tabled
from titan.base import hardware
from titan.base.hardware import HARDWARE, by_name, recognise

# **dict.fromkeys(: A slice and a laptop part have another peak; "H100" alone is sold in several speeds.
KNOWN = table(__file__, "known")


@pytest.mark.parametrize("device_name", KNOWN)
def test_the_whole_name_of_a_device_counts(device_name: str) -> None:
    row = recognise(device_name)
    assert (row and row.name) == KNOWN[device_name]


def test_figures() -> None:
    assert by_name("h100-sxm").peak_flops["bfloat16"] == 989e12
    assert by_name("H200-SXM").memory_bandwidth == 4.8e12
    a100 = {"bfloat16": 312e12, "float16": 312e12, "tfloat32": 156e12, "float32": 19.5e12}
    assert by_name("a100-80g").peak_flops == a100
    # NVFP4 is NVIDIA's from Blackwell on; the Ultra kind is half as fast again.
    four_bits = {
        d.name: d.peak_flops["nvfp4"] / d.peak_flops["mxfp8"]
        for d in HARDWARE
        if "nvfp4" in d.peak_flops
    }
    assert four_bits == pytest.approx(
        {"b200": 2, "b300": 2.92, "gb200": 2, "gb300": 3}, abs=0.01
    )
    for device in HARDWARE:
        assert device.peak_flops["bfloat16"] > device.peak_flops["float32"] > 1e13, device
        assert 20 < device.memory_gib < 300, device
        assert device.source


def test_docs_list_every_profile() -> None:
    docs = Path(__file__).parents[1] / "docs" / "evaluation.md"
    listed = docs.read_text(encoding="utf-8").split("The profiles are ")[1].split(";")[0]
    assert re.split(r",\s+|\s+and\s+", listed) == [hardware.name for hardware in HARDWARE]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no profile 'h900'; there are: h100-sxm, .*rtx-4090"):
        by_name("h900")


NVIDIA, CPU_NODES = ["nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"], ["0", "0"]


@tabled("version, nvidia, amd, variables, count")
def test_accelerators_are_counted_without_torch(
    version: str,
    nvidia: list[str],
    amd: list[str],
    variables: dict[str, str],
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "dev").mkdir()
    for name in nvidia:
        (tmp_path / "dev" / name).touch()
    for number, gpu_id in enumerate(CPU_NODES + amd):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{gpu_id}\n")
    monkeypatch.setattr(hardware, "version", lambda name: version)
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / path.lstrip("/"))
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hardware.count_accelerators() == count
