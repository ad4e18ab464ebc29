"""Small corpora for the tests of titan.data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def make_texts(count: int, *, seed: int = 0) -> list[str]:
    """Documents of 3 to 40 words; each begins with its number, so that all differ."""
    generator = random.Random(seed)
    return [
        " ".join([f"{number}:", *generator.choices(WORDS, k=generator.randrange(3, 40))])
        for number in range(count)
    ]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    return path


@pytest.fixture
def texts() -> list[str]:
    """400 documents."""
    return make_texts(400)


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> Path:
    """The 400 documents as JSON Lines."""
    return write_jsonl(tmp_path / "corpus.jsonl", texts)


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture
def hub(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local dataset folder of three files, as `datasets` loads it (no network)."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    folder = tmp_path / "hub"
    folder.mkdir()
    for number, (begin, end) in enumerate([(0, 150), (150, 160), (160, 400)]):
        write_jsonl(folder / f"part-{number}.jsonl", texts[begin:end])
    return folder
