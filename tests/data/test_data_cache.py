"""The cache of tokenized text: written once, by one process, whatever becomes of the others."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.jobs import job
from titan.checks.machine import check_machine
from titan.config import schema as s
from titan.data import cache as cache_module
from titan.data.cache import cached_shards, default_cache_folder, exclusive
from titan.data.shards import TokenShards
from titan.data.sources import Documents, open_documents
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import bytes_tokenizer
from titan.data.writer import TokenizationSpec
from titan.data.writer import write_shards as write

CONTEXT = multiprocessing.get_context("spawn")


def spec(**changes: Any) -> TokenizationSpec:
    tokenizer = bytes_tokenizer()
    options: dict[str, Any] = {
        "special_tokens": SpecialTokens.of(tokenizer),
        "validation_fraction": 0.0,
    } | changes
    return TokenizationSpec(tokenizer=tokenizer, **options)


def build(cache: str, marks: str, delay_s: float) -> None:
    """Tokenize three documents slowly; leaves a file for each time the text is read."""

    def read() -> Iterator[str]:
        (Path(marks) / f"read-{os.getpid()}").touch()
        for text in ("one", "two", "three"):
            time.sleep(delay_s)
            yield text

    documents = Documents(name="slow", identity=["slow"], read=read)
    folder = cached_shards(documents, spec=spec(), cache_folder=cache)
    assert TokenShards(folder, split="train").num_tokens == 3 * 2 + len("onetwothree")


def wait_for_reader(marks: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 30
    while not list(marks.glob(f"read-{process.pid}")):
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.01)


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def test_one_process_tokenizes_and_the_others_wait(cache: str, marks: Path) -> None:
    processes = [CONTEXT.Process(target=build, args=(cache, str(marks), 0.3)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(list(marks.iterdir())) == 1


def test_a_killed_process_holds_up_nobody(cache: str, marks: Path) -> None:
    stuck = CONTEXT.Process(target=build, args=(cache, str(marks), 600.0))
    stuck.start()
    wait_for_reader(marks, stuck)
    assert stuck.pid is not None
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.join(30)
    build(cache, str(marks), 0.0)  # it would wait for the dead one's 600 seconds
    assert len(list(marks.iterdir())) == 2


def test_the_lock_waits_for_a_living_process(tmp_path: Path, cache: str, marks: Path) -> None:
    holder = CONTEXT.Process(target=build, args=(cache, str(marks), 0.3))
    holder.start()
    wait_for_reader(marks, holder)
    [folder] = (Path(cache) / "tokens").iterdir()
    with exclusive(folder):
        assert (folder / "index.json").is_file(), (
            "the lock was given while another process was writing"
        )
    holder.join(30)


def test_long_text_is_tokenized_by_workers_into_the_same_shards(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    documents = open_documents(s.JsonlSource(path=str(corpus)))
    short = cached_shards(documents, spec=spec(), cache_folder=str(tmp_path / "short"))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(cache_module, "_SHORT_BYTES", 0)
    monkeypatch.setattr(cache_module, "usable_cores", lambda: 2)
    workers = []
    monkeypatch.setattr(
        cache_module,
        "write_shards",
        lambda *a, **b: workers.append(b["workers"]) or write(*a, **b),
    )
    long = cached_shards(documents, spec=spec(), cache_folder=str(tmp_path / "long"))
    assert workers == [2]
    assert "all ranks wait; `titan prepare` does it ahead of a run\n" in capfd.readouterr().err
    names = sorted(file.name for file in short.iterdir())
    assert names == sorted(file.name for file in long.iterdir()) and "train-00000.bin" in names
    for name in names:
        assert (short / name).read_bytes() == (long / name).read_bytes()


def test_an_entry_is_found_again_unless_something_differs(corpus: Path, cache: str) -> None:
    documents = open_documents(s.JsonlSource(path=str(corpus)))
    first = cached_shards(documents, spec=spec(), cache_folder=cache)
    unread = Documents(
        name="", identity=documents.identity, read=lambda: pytest.fail("read again")
    )
    assert cached_shards(unread, spec=spec(), cache_folder=cache) == first
    others = {
        cached_shards(documents, spec=spec(validation_fraction=0.5), cache_folder=cache),
        cached_shards(
            documents, spec=spec(special_tokens=SpecialTokens(256, None)), cache_folder=cache
        ),
    }
    corpus.write_text('{"text": "new"}\n')
    others.add(
        cached_shards(
            open_documents(s.JsonlSource(path=str(corpus))), spec=spec(), cache_folder=cache
        )
    )
    assert len(others | {first}) == 4


def test_the_default_folder_is_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "titan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_folder() == Path.home() / ".cache" / "titan"


def test_a_user_without_a_home_is_told_before_the_cache_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home(user_id: int) -> NoReturn:
        raise KeyError(user_id)

    (tmp_path / "x.txt").write_text("some text")
    (tmp_path / "file").touch()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_home)
    assert default_cache_folder() == Path("/.cache/titan")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))

    def problems(**changes: Any) -> list[str]:
        return [str(p) for p in check_machine(job(tmp_path, **changes)) if "folder" in p.key]

    text = {"dataset": "text", "dataset_path": str(tmp_path / "x.txt")}
    [problem] = problems(training=text)
    assert re.search(r"data\.cache_folder: cannot be written \(.*file is a file", problem)
    assert not problems(training=text, data={"cache_folder": str(tmp_path / "cache")})
    assert not problems(training={"dataset": "synthetic"})
