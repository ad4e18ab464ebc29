"""Text that is read while a process in the background tokenises it: the batches of text that was there before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.data.gated_source import GatedSource
from tests.data.test_data_loader import (
    SEQ_LEN,
    TOKENIZER,
    Job,
    step_rows,
    training,
    validation_loader,
)
from titan.config import schema as s
from titan.data import DataError, cache, writer
from titan.data.loader import Loader, build_loader
from titan.data.order import derive_key, permute

# Rows in the text, at most, of which 24 are a step.
STEPS = 75


def use_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_FIRST_SHARD_TOKENS", 2000)
    monkeypatch.setattr(cache, "_SHARD_TOKENS", 9000)
    monkeypatch.setattr(cache, "usable_cores", lambda: 2)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_shards(monkeypatch)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "gate").write_text("0")
    return tmp_path / "gate"


def open_gate(gate: Path, documents: int = 1000) -> None:
    temporary = gate.with_name("new")
    temporary.write_text(str(documents))
    temporary.replace(gate)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def readers(gate: Path) -> set[int]:
    return {int(file.name.split("-")[1]) for file in gate.parent.glob("reader-*")}


def job(gate: Path, folder: Path, **options: object) -> Job:
    made = Job(cache=str(folder), **options)
    # A source of a plug-in, which the schema does not know.
    made.data = made.data.model_copy(update={"sources": [GatedSource(gate=str(gate))]})
    return made


@pytest.fixture(scope="module")
def whole_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds all of the text."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "gate").write_text("1000")
    with pytest.MonkeyPatch.context() as patch:
        use_small_shards(patch)
        samples = job(folder / "gate", folder).loader((1, 24, 1), 0).samples
        wait_until(lambda: samples.num_samples)
    return folder


@pytest.fixture
def whole(gate: Path, whole_cache: Path) -> list[np.ndarray]:
    """The steps of a run that finds all of the text in the cache."""
    loaders = job(gate, whole_cache).loaders((1, 24, 1))
    assert 0 < (loaders[0].samples.num_samples or 0) < 24 * STEPS
    steps = [step_rows(loaders) for _ in range(STEPS)]
    assert not readers(gate)
    return steps


@pytest.mark.parametrize("share", [(1, 24, 1), (2, 6, 2), (4, 6, 1)])
def test_batches_come_while_text_is_read_and_are_those_of_the_whole(
    gate: Path, tmp_path: Path, whole: list[np.ndarray], share: tuple[int, int, int]
) -> None:
    open_gate(gate, 80)
    loaders = job(gate, tmp_path / "cache").loaders(share)
    for expected in whole[:2]:
        np.testing.assert_array_equal(step_rows(loaders), expected)
    assert not list((tmp_path / "cache").glob("tokens/*/index.json"))
    open_gate(gate, 200)
    for expected in whole[2:5]:
        np.testing.assert_array_equal(step_rows(loaders), expected)
    open_gate(gate)
    # Into the second epoch.
    for expected in whole[5:]:
        np.testing.assert_array_equal(step_rows(loaders), expected)
    assert len(readers(gate)) == 1, "one process of all ranks tokenises"


def test_a_shard_is_shuffled_alone_in_the_first_epoch_and_all_in_the_second(
    gate: Path, whole_cache: Path, whole: list[np.ndarray]
) -> None:
    as_it_lies = job(gate, whole_cache, shuffle=False).loader((1, 1, 1), 0).samples
    length = as_it_lies.num_samples
    assert length is not None
    rows = as_it_lies.get(np.arange(length))[:, :-1]
    key = derive_key(derive_key(5, "train", 0), "epoch", 0)
    # The first shard has the documents that fit into 2,000 tokens.
    ends = (as_it_lies._shards.ends - 1) // SEQ_LEN  # pyright: ignore
    assert len(ends) > 4 and 1900 // SEQ_LEN < ends[0] <= 2000 // SEQ_LEN
    seen = np.concatenate(whole)
    first = permute(np.arange(ends[0]), length=int(ends[0]), key=key)
    np.testing.assert_array_equal(seen[: ends[0]], rows[first])
    for begin, end in pairwise(ends):
        assert sorted(map(bytes, seen[begin:end])) == sorted(map(bytes, rows[begin:end]))
    assert (seen[: ends[1]] != rows[: ends[1]]).any()
    second = derive_key(derive_key(5, "train", 0), "epoch", 1)
    expected = rows[permute(np.arange(100), length=length, key=second)]
    np.testing.assert_array_equal(seen[length : length + 100], expected)


def test_a_killed_writer_is_replaced(gate: Path, tmp_path: Path, whole: list[np.ndarray]) -> None:
    open_gate(gate, 80)
    loaders = job(gate, tmp_path / "cache").loaders((2, 12, 1))
    np.testing.assert_array_equal(step_rows(loaders), whole[0])
    [shard] = (tmp_path / "cache").glob("tokens/*/train-00000.bin")
    written = shard.stat().st_mtime_ns
    [reader] = readers(gate)
    os.kill(reader, signal.SIGKILL)
    open_gate(gate)
    for expected in whole[1:20]:
        np.testing.assert_array_equal(step_rows(loaders), expected)
    assert len(readers(gate)) == 2 and shard.stat().st_mtime_ns == written


def test_the_writer_ends_with_its_run_and_the_next_goes_on(
    gate: Path, tmp_path: Path, whole: list[np.ndarray]
) -> None:
    open_gate(gate, 200)
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from tests.data import test_data_growing as here
here.cache._FIRST_SHARD_TOKENS, here.cache._SHARD_TOKENS = 2000, 9000
loader = here.job(Path({str(gate)!r}), Path({str(tmp_path / "cache")!r})).loader((1, 24, 1), 0)
loader.next_step()
print("stepped", flush=True)
input()
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True)
    assert run.stdout is not None and run.stdout.readline() == "stepped\n"
    [reader] = readers(gate)
    # A second run beside it waits for the same text, and takes over.
    beside = job(gate, tmp_path / "cache").loaders((3, 8, 1))
    np.testing.assert_array_equal(step_rows(beside), whole[0])
    assert readers(gate) == {reader}
    run.kill()
    run.communicate()
    wait_until(lambda: not Path(f"/proc/{reader}").exists())
    open_gate(gate)
    for expected in whole[1:50]:
        np.testing.assert_array_equal(step_rows(beside), expected)
    assert len(readers(gate)) == 2


def test_a_position_far_ahead_waits_for_its_text(
    gate: Path, tmp_path: Path, whole: list[np.ndarray]
) -> None:
    open_gate(gate, 80)
    loaders = job(gate, tmp_path / "cache").loaders((3, 4, 2))
    for loader in loaders:
        loader.load_state_dict({"position": 24 * 12})
    threading.Timer(0.5, open_gate, (gate,)).start()
    for expected in whole[12:15]:
        np.testing.assert_array_equal(step_rows(loaders), expected)


def test_validation_waits_for_all_of_the_text(gate: Path, tmp_path: Path) -> None:
    slow = job(gate, tmp_path / "cache", validation_fraction=0.2)
    open_gate(gate, 80)
    validation = validation_loader(slow.data)
    [_] = slow.loader((1, 24, 1), 0).next_step()
    threading.Timer(0.5, open_gate, (gate,)).start()
    batches = list(validation.validation_batches(3))
    assert list((tmp_path / "cache").glob("tokens/*/index.json"))
    again = list(validation_loader(slow.data).validation_batches(3))
    assert all((a.tokens_BS == b.tokens_BS).all() for a, b in zip(batches, again, strict=True))
    assert len(readers(gate)) == 1


def test_a_blend_of_growing_and_finished_text(gate: Path, tmp_path: Path, corpus: Path) -> None:
    def loader(folder: Path) -> Loader:
        sources = [GatedSource(gate=str(gate)), s.JsonlSource(path=str(corpus), weight=0.5)]
        data = s.DataSection(cache_folder=str(folder)).model_copy(update={"sources": sources})
        share = {"rank": 0, "world": 1, "seed": 5}
        section = training(local_batch_size=24)
        return build_loader(section, data=data, tokenizer=TOKENIZER, **share)

    open_gate(gate, 80)
    growing = loader(tmp_path / "a")
    steps = [step_rows([growing]) for _ in range(2)]
    assert growing.samples.num_samples is None
    open_gate(gate)
    steps += [step_rows([growing]) for _ in range(30)]
    wait_until(lambda: growing.samples.num_samples)
    there = loader(tmp_path / "a")
    for expected in steps:
        np.testing.assert_array_equal(step_rows([there]), expected)


def test_damaged_text_is_an_error_when_it_is_needed(
    gate: Path, tmp_path: Path, whole: list[np.ndarray], capfd: pytest.CaptureFixture[str]
) -> None:
    open_gate(gate)
    made = job(gate, tmp_path / "cache")
    damaged = GatedSource(gate=str(gate), damaged_at=200)
    made.data = made.data.model_copy(update={"sources": [damaged]})
    loaders = made.loaders((1, 24, 1))
    with pytest.raises(DataError, match=r"^line 200 is damaged$"):
        for expected in whole:
            np.testing.assert_array_equal(step_rows(loaders), expected)
    # The text before it was trained on.
    assert loaders[0].state_dict()["position"] >= 4 * 24
    assert "line 200 is damaged" in capfd.readouterr().err


def test_a_writer_that_is_always_killed_is_an_error(
    gate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cache.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9, b"")
    )
    loader = job(gate, tmp_path / "cache").loader((1, 24, 1), 0)
    with pytest.raises(DataError, match=r"was killed 3 times \(-9\); is memory running out"):
        loader.next_step()


def test_text_without_a_single_sequence_is_an_error(gate: Path, tmp_path: Path) -> None:
    open_gate(gate)
    made = job(gate, tmp_path / "cache")
    loader = made.loader((1, 1, 1), 0, seq_len=10**6)
    with pytest.raises(DataError, match="but one sequence needs 1000001"):
        loader.next_step()


@pytest.mark.parametrize("num_bytes", [10**7, None])
def test_short_text_and_text_of_unknown_size_are_there_before_the_first_step(
    gate: Path, tmp_path: Path, num_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_CHUNK_PIECES", 256)  # which the source changes
    monkeypatch.setattr(cache, "_SHARD_TOKENS", 2**26)
    open_gate(gate)
    made = job(gate, tmp_path / "cache")
    short = GatedSource(gate=str(gate), num_bytes=num_bytes)
    made.data = made.data.model_copy(update={"sources": [short]})
    samples = made.loader((1, 1, 1), 0).samples
    assert readers(gate) == {os.getpid()} and samples.num_samples
    # One shard, so that all of it has one permutation.
    assert len(list((tmp_path / "cache").glob("tokens/*/train-*.bin"))) == 1
