"""`data.skip`: the tokens of documents become padding, and every other token stays where it was."""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import SMALL, job, with_changes
from tests.support.trainers import Trainer, run_to_end
from titan.checkpoint.identity import changed_settings
from titan.cli import main
from titan.config.render import to_toml
from titan.config.schema import JsonlSource
from titan.contrib.megatron.data import MegatronTokens
from titan.contrib.megatron.tests.test_data import draw_documents, options, write_by_hand
from titan.data import DataError
from titan.data.base import SOURCE_SHIFT
from titan.data.reading import PIECE_CHARS
from titan.data.shards import PADDING, TokenShards
from titan.data.sources import source_names
from titan.losses.loss import IGNORED
from titan.tasks.next_token import NextToken

LEFT_OUT = {0: [0, 7], 1: [7, 33, 49]}  # rows by source


def prepared(folder: Path) -> dict[str, Any]:
    """Return two sources of shards, of several files."""
    drawn = random.Random(0)
    texts = [f"{drawn.randrange(10**9):09}" * (1 + n * n % 9) for n in range(50)]
    for name in ("a", "b"):
        lines = [json.dumps({"text": text[:: -1 if name == "b" else 1]}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        words = [f"--input={folder}/{name}.jsonl", f"--output={folder}/{name}"]
        assert main(["prepare", *words, "--tokenizer=bytes", "--shard-tokens=500"]) == 0
    return {"sources": [{"type": "shards", "path": f"{folder}/{name}"} for name in ("a", "b")]}


def entries() -> list[str]:
    return [f"{'ab'[source]}:{row}" for source, rows in LEFT_OUT.items() for row in rows]


def test_sources_have_names_of_their_own() -> None:
    paths = ("a.jsonl", "a-2.jsonl", "x/a.jsonl", "a*.jsonl")
    names = source_names([JsonlSource(path=path) for path in paths])
    assert names[:2] == ["a", "a-2"] and len({*names}) == 4


def samples_of(data: dict[str, Any]) -> Any:
    task = NextToken(job(data=data, tokenizer={"name": "bytes"}))
    return task.dataset("train", rank=0, world=1)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_only_these_documents_are_padding(packing: str, tmp_path: Path) -> None:
    data = {**prepared(tmp_path), "packing": packing}
    before, numbers = samples_of(data), np.arange(300)
    lines = tmp_path / "skip.txt"
    lines.write_text("\n".join(entries()[2:]))
    after = samples_of({**data, "skip": [*entries()[:2], str(lines)]})
    wanted = [(source << SOURCE_SHIFT) + n for source, rows in LEFT_OUT.items() for n in rows]
    of_these = np.isin(before.documents(numbers), wanted)
    assert len(np.unique(before.documents(numbers)[of_these])) == len(wanted)
    expected = np.where(of_these, IGNORED, before.get(numbers))
    assert (after.get(numbers) == expected).all() and PADDING == IGNORED


def test_a_document_over_several_files(tmp_path: Path) -> None:
    long = "long " * (PIECE_CHARS // 4)
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps({"text": t}) for t in ("a", long, "b"))
    )
    words = [f"--input={tmp_path}/t.jsonl", f"--output={tmp_path}/t", "--tokenizer=bytes"]
    assert main(["prepare", *words, f"--shard-tokens={PIECE_CHARS}"]) == 0
    shards = TokenShards(tmp_path / "t", split="train")
    count = {"start": 0, "count": shards.num_tokens}
    documents, before = shards.documents(**count), shards.read(**count)
    assert len(shards.ends) > 1
    for row in (1, 2):
        shards = TokenShards(tmp_path / "t", split="train")
        shards.leave_out([row])
        assert (shards.read(**count) == np.where(documents == row, PADDING, before)).all()


def run_of(folder: Path, **data: Any) -> Any:
    training = {"seq_len": 32, "local_batch_size": 2, "steps": 4, "dataset": "jsonl"}
    training["dataset_path"] = f"{folder}/a.jsonl"
    base = with_changes(SMALL, training=training, tokenizer={"name": "bytes"}, data=data)
    return job(folder / "run", base=with_changes(base, checkpoint={"interval": 2}))


def test_from_now_on(tmp_path: Path) -> None:
    """A run that goes on trains on the same samples without the document, says so, and keeps the rows of a file."""
    prepared(tmp_path)
    first = run_of(tmp_path, shuffle=False, cache_folder=f"{tmp_path}/cache")
    trainer = Trainer(first)
    samples = [trainer.loader.make_batch(n) for n in range(8)]
    while trainer.step < 2:
        trainer.train_one_step()
    trainer.close()
    document = trainer.loader.samples.documents(np.array([4]))[0, 9]
    (tmp_path / "bad").write_text(f"a:{document}\n")
    data = {
        "shuffle": False,
        "cache_folder": f"{tmp_path}/cache",
        "skip": str(tmp_path / "bad"),
    }
    second = run_of(tmp_path, **data)
    changed = changed_settings(to_toml(first), second, sequences=(2, 2))
    assert changed == {"data.skip": ([], [f"a:{document}"])}
    assert f'skip = ["a:{document}"]' in to_toml(second)
    trainer = Trainer(second)
    assert trainer.step == 2
    [batch] = trainer.loader.next_step()
    labels, before = batch.labels_BS, samples[4].labels_BS
    is_left_out = labels != before
    assert is_left_out.any() and not is_left_out.all()
    assert (labels[is_left_out] == IGNORED).all() and batch.first_sample == 4
    run_to_end(trainer)


@pytest.mark.parametrize(
    "skip, why",
    [
        ("a:50", "data.skip names rows of 'a': there is no row 50; they end at 49"),
        ("b:1", "data.skip names 'b'; the sources are a"),
    ],
)
def test_rows_that_are_not_there(skip: str, why: str, tmp_path: Path) -> None:
    prepared(tmp_path)
    with pytest.raises(DataError, match=why):
        NextToken(run_of(tmp_path, skip=skip)).dataset("train", rank=0, world=1)


def test_refused(tmp_path: Path) -> None:
    random_ids = NextToken(job(base=with_changes(SMALL, data={"skip": "synthetic:1"})))
    with pytest.raises(DataError, match="names rows of 'synthetic': the documents have no"):
        random_ids.dataset("train", rank=0, world=1)
    (tmp_path / "bad").write_text("a:1\nb\n")
    for entry, why in {
        f"{tmp_path}/bad": "'b' is not SOURCE:ROW",
        "a:x": "'a:x' is not SOURCE:ROW",
        "a:-1": "'a:-1' is not SOURCE:ROW",
        "a": "a: cannot be read: No such file",
    }.items():
        with pytest.raises(ValueError, match=why):
            job(data={"skip": [entry]})


@pytest.mark.parametrize("split", ["train", "validation"])
def test_documents_of_megatrons_files(split: str, tmp_path: Path) -> None:
    """They are numbered by the index, not by tokens that end them."""
    documents = draw_documents(40)
    path = str(write_by_hand(tmp_path / "a", documents))
    shards = MegatronTokens(path, options(split, validation_fraction=0.25))
    own = [[*chain(*d)] for d in (documents[:30] if split == "train" else documents[30:])]
    everything: Any = {"start": 0, "count": shards.num_tokens}
    numbers = np.repeat(np.arange(len(own)), [*map(len, own)])
    assert (shards.documents(**everything) == numbers).all()
    shards.leave_out([3, 0])
    expected = np.where(np.isin(numbers, [0, 3]), PADDING, [*chain(*own)])
    assert (shards.read(**everything) == expected).all()
