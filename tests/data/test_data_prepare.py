"""`titan prepare`: the same bytes for any number of workers and after any interruption, and reading them back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import make_texts, write_jsonl
from tests.support.commands import command
from tests.support.fineweb_edu import write_files
from tests.support.loaders import build_loader, build_validation_loader
from titan.checks.rules import check
from titan.config import schema as s
from titan.config.schema import JobConfig
from titan.data import DataError, writer
from titan.data.shards import TokenShards, read_index, token_dtype
from titan.data.sources import in_validation
from titan.data.tokenizer import bytes_tokenizer

main = command("prepare")
SCRIPT = Path(__file__).parents[2] / "examples/cluster/prepare.sbatch"


def prepare(output: Path, corpus: Path, *options: str) -> int:
    fixed = ["--tokenizer", "bytes", "--shard-tokens", "5000", "--validation-fraction", "0.1"]
    return main([*f"--input {corpus} --output {output} --workers 1".split(), *fixed, *options])


def content(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != "lock"
    }


def expected_documents(texts: list[str], *, held_out: bool) -> list[int]:
    chosen = [text for text in texts if in_validation(text, fraction=0.1) == held_out]
    return [token for text in chosen for token in (256, *text.encode(), 257)]


@pytest.fixture
def prepared(tmp_path: Path, corpus: Path) -> Path:
    assert prepare(tmp_path / "one", corpus) == 0
    return tmp_path / "one"


def test_shards_hold_every_document_in_order(prepared: Path, texts: list[str]) -> None:
    index = json.loads((prepared / "index.json").read_text())
    assert index["dtype"] == "uint16"
    assert (index["bos_id"], index["eos_id"], index["vocab_size"]) == (256, 257, 258)
    assert index["fingerprint"] == bytes_tokenizer().fingerprint
    for split, held_out in [("train", False), ("validation", True)]:
        shards = index["splits"][split]
        parts = [np.fromfile(prepared / shard["file"], dtype="<u2") for shard in shards]
        assert np.concatenate(parts).tolist() == expected_documents(texts, held_out=held_out)
        assert [len(part) for part in parts] == [shard["tokens"] for shard in shards]
        assert all(part[0] == 256 and part[-1] == 257 for part in parts), (
            "a shard ends within a document"
        )
        assert [int((part == 256).sum()) for part in parts] == [
            shard["documents"] for shard in shards
        ]
        assert [int((part < 256).sum()) for part in parts] == [
            shard["bytes"] for shard in shards
        ]
    assert len(index["splits"]["train"]) > 5
    assert all(shard["tokens"] <= 5000 for shard in index["splits"]["train"])


def test_the_array_of_the_examples(tmp_path: Path) -> None:
    """The script as a shell runs it for each task, with other text: every document is in the shards of one task."""
    (tmp_path / "corpus").mkdir()
    for number in range(5):
        write_jsonl(tmp_path / f"corpus/{number}.jsonl", make_texts(40, seed=number))
    text = SCRIPT.read_text()
    assert "--array=0-7 " in text and "\nPARTS=8\n" in text
    text = text.replace("*.jsonl.gz", "*.jsonl").replace("=8", "=2")
    text = text.replace("assets/llama3", "bytes").replace("titan prepare", '"$@" prepare')
    for number in (1, 0):
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(number)}
        titan = [sys.executable, "-m", "titan.cli"]
        subprocess.run(
            ["bash", "-c", text, "", *titan], env=environment, cwd=tmp_path, check=True
        )
        tokens = np.fromfile(
            tmp_path / f"shards/{number}/train-00000.bin", dtype="<u2"
        ).tolist()
        own = [text for file in range(number, 5, 2) for text in make_texts(40, seed=file)]
        assert tokens == [token for text in own for token in (256, *text.encode(), 257)]


def test_any_number_of_workers_gives_the_same_bytes(
    prepared: Path, corpus: Path, tmp_path: Path
) -> None:
    assert prepare(tmp_path / "three", corpus, "--workers", "3") == 0
    assert content(tmp_path / "three") == content(prepared)


def test_a_finished_folder_is_left_alone_and_another_is_refused(
    prepared: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in prepared.iterdir()}
    assert prepare(prepared, corpus) == 0
    assert {file.name: file.stat().st_mtime_ns for file in prepared.iterdir()} == before
    shown = capsys.readouterr().out
    assert "train: " in shown and "[validation]\n  enable = true" in shown
    assert prepare(prepared, corpus, "--no-bos") == 2
    assert "other options" in capsys.readouterr().err


@pytest.mark.parametrize("writes", [1, 4, 9])
def test_a_run_that_broke_off_continues_to_the_same_bytes(
    prepared: Path, corpus: Path, tmp_path: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off right after a shard got its name: before or after progress.json knew of it."""
    import titan.data.writer as writer

    done, folder = 0, tmp_path / "broken"
    real = writer.write_index

    def write_index(*arguments: Any) -> None:
        nonlocal done
        done += 1
        if done == writes:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(writer, "write_index", write_index)
    assert prepare(folder, corpus) == 75
    monkeypatch.undo()
    assert not (folder / "index.json").exists()
    with pytest.raises(DataError, match=r"run it again" if writes > 1 else r"no index\.json"):
        read_index(folder / "index.json")
    kept = {file.name: file.stat().st_mtime_ns for file in folder.glob("train-*.bin")}
    assert prepare(folder, corpus) == 0
    assert content(folder) == content(prepared)
    unchanged = [
        name for name, stamp in kept.items() if (folder / name).stat().st_mtime_ns == stamp
    ]
    assert len(unchanged) >= len(kept) - 1, "closed shards were written again"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_killed_at_any_moment_it_continues_to_the_same_bytes(tmp_path: Path, kind: str) -> None:
    corpus = tmp_path / "big"
    texts = [f"{number} " + "some text " * (number % 300) for number in range(3000)]
    if kind == "parquet":
        write_files(corpus, texts, group=100)
    else:
        corpus.mkdir()
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (corpus / "big.jsonl").write_text("".join(lines))
    options = f"--input {corpus} --tokenizer bytes --shard-tokens 100000".split()
    code = "import sys; from titan.cli import main; sys.exit(main(['prepare', *sys.argv[1:]]))"
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", code, *options, *f"--output {folder} --workers 2".split()]
    kills = 0
    for shards_wanted in (1, 8):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list(folder.glob("train-*.bin"))) < shards_wanted:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kills += process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        # It ends only when the workers, which hold the pipe, have ended too.
        process.communicate(timeout=30)
    assert kills >= 1
    assert main([*options, *f"--output {folder} --workers 1".split()]) == 0
    assert main([*options, *f"--output {tmp_path}/whole --workers 1".split()]) == 0
    assert content(folder) == content(tmp_path / "whole")


def test_workers_start_as_work_comes(
    prepared: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And shards may have as many tokens as they have by default."""
    started, start = [], writer._Worker.__init__
    monkeypatch.setattr(
        writer._Worker, "__init__", lambda *a: (started.append(a), start(*a))[1]
    )
    assert prepare(tmp_path / "many", corpus, "--workers", "40") == 0
    assert 0 < len(started) < 5 and content(tmp_path / "many") == content(prepared)
    assert prepare(tmp_path / "big", corpus, f"--shard-tokens={2**27}") == 0
    monkeypatch.setattr("titan.base.hardware.fitting_processes", lambda: 9)
    assert prepare(tmp_path / "more", corpus, "--workers", "40") == 2


@pytest.mark.parametrize(("code", "why"), [(-9, "memory"), (-11, "by SIGSEGV"), (3, "code 3,")])
def test_a_dead_worker_is_explained(code: int, why: str) -> None:
    assert why in writer._describe_end(code)


def test_reading_across_shards(prepared: Path, texts: list[str]) -> None:
    shards = TokenShards(prepared, split="train")
    tokens = expected_documents(texts, held_out=False)
    assert shards.num_tokens == len(tokens)
    for start, count in [(0, 10), (4990, 11_000), (len(tokens) - 5, 5), (0, len(tokens))]:
        part = shards.read(start, count=count)
        assert part.dtype == np.int64
        assert part.tolist() == tokens[start : start + count]


def section(prepared: Path) -> tuple[s.TrainingSection, s.DataSection]:
    training = s.TrainingSection(
        dataset="shards", dataset_path=str(prepared), seq_len=32, local_batch_size=2
    )
    return training, s.DataSection(shuffle=False)


def test_training_and_validating_on_shards(prepared: Path, texts: list[str]) -> None:
    training, data = section(prepared)
    loader = build_loader(
        training, data=data, tokenizer=bytes_tokenizer(), rank=0, world=1, seed=0
    )
    with closing(loader):
        [batch] = loader.next_step()
    tokens = expected_documents(texts, held_out=False)
    assert batch.tokens_BS.tolist() == [tokens[:32], tokens[32:64]]
    validation = build_validation_loader(
        s.ValidationSection(local_batch_size=1),
        training=training,
        data=data,
        tokenizer=bytes_tokenizer(),
        rank=0,
        world=1,
    )
    [batch] = validation.validation_batches(1)
    assert batch.tokens_BS.tolist() == [expected_documents(texts, held_out=True)[:32]]


def test_shards_of_another_tokenizer_or_damaged_are_refused(prepared: Path) -> None:
    training, data = section(prepared)
    other = bytes_tokenizer()
    other.fingerprint = "other"
    with pytest.raises(DataError, match=r"tokenized with another tokenizer .*titan prepare"):
        build_loader(training, data=data, tokenizer=other, rank=0, world=1, seed=0)
    file = prepared / "train-00002.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00002\.bin has \d+ bytes, index\.json says"):
        TokenShards(prepared, split="train")
    (prepared / "index.json").write_text("{}")
    with pytest.raises(DataError, match=r"index\.json"):
        TokenShards(prepared, split="train")


def test_shards_without_validation_say_so(tmp_path: Path, corpus: Path) -> None:
    assert prepare(tmp_path / "plain", corpus, "--validation-fraction", "0") == 0
    training, data = section(tmp_path / "plain")
    with pytest.raises(DataError, match="prepare it again with --validation-fraction"):
        build_validation_loader(
            s.ValidationSection(),
            training=training,
            data=data,
            tokenizer=bytes_tokenizer(),
            rank=0,
            world=1,
        )


def test_ids_take_two_bytes_as_long_as_they_fit() -> None:
    assert token_dtype(65_536).itemsize == 2
    assert token_dtype(65_537).itemsize == 4


@pytest.mark.parametrize(
    ("kinds", "is_refused"), [(["shards"], False), (["shards", "text"], True)]
)
def test_validation_of_shards_needs_no_fraction(kinds: list[str], is_refused: bool) -> None:
    job = {
        "validation": {"enable": True},
        "training": {"dataset": "shards", "dataset_path": "x"},
    }
    job |= {"data": {"sources": [{"type": kind, "path": "x"} for kind in kinds]}}
    problems = [p.key for p in check(JobConfig.model_validate(job))]
    assert ("validation.dataset" in problems) == is_refused
