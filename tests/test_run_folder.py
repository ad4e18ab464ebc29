"""environment.json, status.json, rank logs, and the memory of this process."""

import json
import logging
from pathlib import Path

import pytest

import titan
from titan.base.run_folder import open_rank_log, write_environment, write_status
from titan.observe.memory import peak_memory


def test_environment_has_what_matters_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    write_environment(tmp_path, device_names=["CPU"], world_size=2)
    text = (tmp_path / "environment.json").read_text()
    content = json.loads(text)
    assert content["titan"] == titan.__version__ and "cudnn" in content
    assert (content["world_size"], content["device_names"]) == (2, ["CPU"])
    assert content["variables"]["NCCL_DEBUG"] == "WARN"
    assert content["variables"]["OMP_NUM_THREADS"] == "3"
    assert "hunter2" not in text
    git = content["git"]  # none in an installed copy, or without the command
    assert git is None or (len(git["commit"]) == 40 and isinstance(git["dirty"], bool))


def test_status_is_replaced_whole(tmp_path: Path) -> None:
    write_status(tmp_path, state="running")
    assert json.loads((tmp_path / "status.json").read_text())["exit_code"] is None
    write_status(tmp_path, state="stopped", exit_code=75, step=40, reason="SIGTERM")
    content = json.loads((tmp_path / "status.json").read_text())
    assert content.pop("unix_s") > 1e9
    assert content == {"state": "stopped", "exit_code": 75, "step": 40, "reason": "SIGTERM"}
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_rank_log(tmp_path: Path) -> None:
    handler = open_rank_log(tmp_path, 3)
    logging.getLogger("titan.data").info("opened %d files\x1b[2J", 7)
    logging.getLogger("titan").removeHandler(handler)
    handler.close()
    text = (tmp_path / "logs" / "rank-3.log").read_text()
    assert text.endswith("INFO    titan.data: opened 7 files\\u001b[2J\n")


def test_peak_memory_of_this_process() -> None:
    import torch

    before = peak_memory()
    if torch.accelerator.is_available():
        assert before.kind == "device" and before.active_gib is not None
        return
    assert before.kind == "rss" and before.active_gib is None
    assert 0.05 < before.reserved_gib < 64
    block = bytearray(300 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    grown = peak_memory().reserved_gib
    # The peak may have lain above what is resident now, so it need not grow by the whole block.
    assert before.reserved_gib <= grown < before.reserved_gib + 0.5
