"""`titan download`, against a server on loopback that speaks the hub's protocol."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub import Hub, serve

pytest.importorskip("huggingface_hub")

WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"a pickle",
    "README.md": b"hello",
}
REPOS = {"models/some/model": FILES, "datasets/some/text": {"data/a.jsonl": b'{"text": "a"}\n'}}


def titan(hub: Hub, folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. A process each time: huggingface_hub reads its environment when it is imported."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    settings |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "titan.cli", "download", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def names(folder: Path) -> set[str]:
    return {
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and ".cache" not in p.parts
    }


def test_weights_and_tokenizer_come_without_pickles(tmp_path: Path) -> None:
    with serve(Hub(REPOS)) as hub:
        code, out, err = titan(hub, tmp_path, "some/model")
        assert code == 0, err
        assert "3 files" in out and "all files have the hashes" in out
        folder = tmp_path / "assets" / "model"
        assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
        assert all((folder / name).read_bytes() == FILES[name] for name in names(folder))
        # The second call fetches nothing again.
        hub.requests.clear()
        last = "all files have the hashes that the hub gives\n"
        assert titan(hub, tmp_path, "some/model", "--quiet") == (0, last, "")
        assert not [
            path for method, path, _ in hub.requests if method == "GET" and "resolve" in path
        ]


def test_parts_of_a_model_and_a_dataset(tmp_path: Path) -> None:
    with serve(Hub(REPOS)) as hub:
        assert titan(hub, tmp_path, "some/model", "--only", "tokenizer", "--output", "t")[0] == 0
        assert names(tmp_path / "t") == {"config.json", "tokenizer.json"}
        assert titan(hub, tmp_path, "some/text", "--dataset", "--output", "d")[0] == 0
        assert names(tmp_path / "d") == {"data/a.jsonl"}
        code, _, err = titan(hub, tmp_path, "some/model", "--include", "*.gguf")
        assert code == 2 and "none of 5 files matches *.gguf; there are config.json" in err


def test_a_file_that_was_cut_off_is_resumed(tmp_path: Path) -> None:
    content = WEIGHTS * 20  # the library writes 10 MB at a time
    repos = {"models/some/model": {"model.safetensors": content}}
    with serve(Hub(repos, cut=15_000_000)) as hub:
        assert titan(hub, tmp_path, "some/model")[0] == 0
        ranges = [of for _, path, of in hub.requests if path.endswith("model.safetensors")]
        assert "bytes=10485760-" in [of.split("-")[0] + "-" for of in ranges if of], ranges
        assert (tmp_path / "assets/model/model.safetensors").read_bytes() == content


def test_a_file_with_other_bytes_is_deleted(tmp_path: Path) -> None:
    with serve(Hub(REPOS, spoil=True)) as hub:
        code, _, err = titan(hub, tmp_path, "some/model", "--only", "weights")
        assert code == 1
        assert "model.safetensors: differs from the hub's file and was deleted" in err
        assert not names(tmp_path / "assets" / "model") & {"model.safetensors", "config.json"}


def test_what_the_hub_refuses_is_one_line(tmp_path: Path) -> None:
    with serve(Hub(REPOS, gated={"models/some/model": "secret"})) as hub:
        code, _, err = titan(hub, tmp_path, "some/model", HF_TOKEN="")
        assert code == 2 and err.count("\n") == 1 and "HF_TOKEN" in err
        assert titan(hub, tmp_path, "some/model", HF_TOKEN="secret")[0] == 0
        code, _, err = titan(hub, tmp_path, "some/other")
        assert code == 2 and err.count("\n") == 1 and "no such repository" in err
        code, _, err = titan(hub, tmp_path, "no id at all")
        assert code == 2 and "is no id of the hub" in err
    # The server is gone now, as the hub is on a machine without internet.
    code, _, err = titan(hub, tmp_path, "some/model", "--output", "again")
    assert code == 2 and "the hub cannot be reached" in err and "without internet" in err


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    with serve(Hub({"models/some/model": {"../config.json": b"{}"}})) as hub:
        code, _, err = titan(hub, tmp_path, "some/model", "--include", "*", "--output", "in")
        assert code == 2 and "a path out of its folder" in err
        assert not (tmp_path / "config.json").exists()
