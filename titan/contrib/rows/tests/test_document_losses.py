"""Documents of a step by their loss: what was planted comes first, on each layout and after a resume in another one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.jobs import SMALL, degrees_of, job, with_changes
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.base.untrusted import InputError
from titan.cli import main
from titan.config.schema import JobConfig
from titan.contrib.rows.document_losses import DocumentLosses, hook
from titan.contrib.rows.ranking import RankedDocument, lines, rank
from titan.data import DataError
from titan.data.base import SOURCE_SHIFT
from titan.data.sources import in_validation
from titan.tasks.next_token import NextToken

SEQ, BATCH, STEPS, FIRST = 32, 16, 24, 14
COPIES = "zqj"
PLANTED = {
    "a repeated token": "~" * 50,
    "another language": "Жълтата дюля беше щастлива",
    "binary": "".join(chr(128 + 7 * n % 120) for n in range(30)),
    "shifted labels": "uif!dbu!tbu!po!uif!nbu/!uif!eph!sbo!up!uif!usff/",
    "copies": COPIES,
}
LAYOUTS: dict[str, Mapping[str, int]] = {
    "one process": {},
    "FSDP2": {"dp_shard": 2},
    "CP": {"cp": 2},
    "PP": {"pp": 2, "dp_shard": 1},
}
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "saw",
    "dog",
    "run",
    "to",
    "an",
    "old",
    "tree",
]


def documents() -> tuple[list[str], dict[int, str]]:
    """Return documents in the order of training, and what was planted by its step."""
    drawn, found, planted = random.Random(0), list[str](), {}
    waiting, tokens = [*PLANTED.items()], 0
    while tokens < STEPS * SEQ * BATCH + SEQ:
        step = 1 + tokens // (SEQ * BATCH)
        inside = tokens % (SEQ * BATCH)
        text = " ".join(drawn.choices(WORDS, k=12))
        if waiting and step == FIRST + 2 * (len(PLANTED) - len(waiting)) and inside > 99:
            name, text = waiting.pop(0)
            planted[step] = name
            copies = 200 if text == COPIES else 1
            found += [text] * (copies - 1)
            tokens += (copies - 1) * (len(text) + 2)
        found.append(text)
        tokens += len(text.encode()) + 2  # with the tokens that begin and end it
    return found, planted


def config_of(folder: Path, axes: Mapping[str, int], **changes: Any) -> JobConfig:
    file = folder / "text.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()[0]))
    training = {
        "seq_len": SEQ,
        "local_batch_size": 4,
        "global_batch_size": BATCH,
        "steps": STEPS,
    }
    base = with_changes(
        SMALL,
        training={**training, "dataset": "jsonl", "dataset_path": str(file)},
        tokenizer={"name": "bytes"},
        data={"shuffle": False, "cache_folder": str(folder / "cache")},
        optimizer={"lr": 1e-2},
        lr_scheduler={"warmup_steps": 2, "decay_ratio": 0.0},
        parallelism=degrees_of(axes),
        debug={"document_losses": STEPS + 1},
    )
    return job(folder / "run", base=with_changes(base, **changes))


def measured(run: Path) -> list[RankedDocument]:
    rows = json.loads((run / "documents.json").read_text())["rows"]
    return [RankedDocument(**row) for row in rows]


def train(config: JobConfig, raised_at: int = 0, stopped_at: int = STEPS) -> dict[int, Any]:
    """Train, and return the table and the loss of each later step, of the weights before it."""
    trainer, found = PoolTrainer(config), {}
    ranking = trainer.hook(DocumentLosses)
    assert ranking is not None
    schedule = trainer.train_step.set_learning_rate

    def spiked(step: int) -> float:
        rate = schedule(step)
        for group in trainer.train_step.optimizer.param_groups:
            group["lr"] *= 30 if step == raised_at else 1
        return rate

    trainer.train_step.set_learning_rate = spiked
    try:
        while trainer.step < stopped_at:
            ranking.wanted = max(trainer.step + 1, FIRST)
            trainer.train_one_step()
            if trainer.step == ranking.wanted and trainer.rank == 0:
                found[trainer.step] = measured(trainer.run_dir), trainer.result.loss
        assert trainer.train_step.group_sums.count == 0  # a run of one source has no groups
    finally:
        trainer.close()
    return found


def require_planted(tables: Mapping[int, Any]) -> None:
    texts, planted = documents()
    assert len(planted) == len(PLANTED) and planted.keys() <= tables.keys()
    for step, (rows, loss) in tables.items():
        tokens = sum(row.tokens for row in rows)
        assert sum(row.loss * row.tokens for row in rows) / tokens == pytest.approx(
            loss, rel=1e-5
        )
        if step not in planted:
            continue
        first, *others = rows
        text, number = PLANTED[planted[step]], int(first.row.removeprefix("text:"))
        assert texts[number] == text == first.text, (planted[step], first)
        assert first.where.endswith(f"text.jsonl:{number + 1}")
        if text != COPIES:  # of which the step is full
            assert lines([first, *others])[0] == f"1 of {len(others) + 1} rows stand out"


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_planted_is_first(name: str, pool: Pool, tmp_path: Path) -> None:
    config, axes = config_of(tmp_path, LAYOUTS[name]), LAYOUTS[name]
    tables = pool.run(math.prod(axes.values()), train, config)[0]
    require_planted(tables)
    (tmp_path / "alone").mkdir()
    alone = pool.run(1, train, config_of(tmp_path / "alone", {}), 0, FIRST)[0]
    numbers = {row.row: (row.gradient, row.share) for row in tables[FIRST][0][:10]}
    expected = {row.row: (row.gradient, row.share) for row in alone[FIRST][0][:10]}
    assert numbers.keys() == expected.keys()
    for row, pair in expected.items():
        assert numbers[row] == pytest.approx(pair, rel=1e-3, abs=1e-4)


def test_resumed_in_another_layout(pool: Pool, tmp_path: Path) -> None:
    saves = {"checkpoint": {"interval": FIRST - 2}}
    config = config_of(tmp_path, {"dp_shard": 2}, **saves)
    assert pool.run(2, train, config, 0, FIRST - 1) == [{}, {}]
    assert (tmp_path / f"run/checkpoint/step-{FIRST - 2}").is_dir()
    require_planted(pool.run(4, train, config_of(tmp_path, {"cp": 2, "tp": 2}, **saves))[0])


def test_after_a_step_of_too_high_a_rate_no_row_stands_out(pool: Pool, tmp_path: Path) -> None:
    config, [found] = config_of(tmp_path, {}), [{}]
    quiet, spike = FIRST + 1, FIRST + 3  # without anything planted
    [found] = pool.run(1, train, config, spike - 1, spike)
    assert found[spike][1] > 2 * found[quiet][1]
    for step in (quiet, spike):
        assert lines(found[step][0])[0] == "no row stands out"


def audited(folder: Path, *words: str) -> int:
    keys = ["--parallelism.data_parallel_shard_degree=1", f"--data.cache_folder={folder}/cache"]
    return main(["audit", f"{folder}/run", "--rows", "--nproc=1", *keys, *words])


def test_the_command(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, with conversions of layout; from the checkpoint before the step, and from a later one if there is none; with what steers a terminal escaped."""
    saves = {"checkpoint": {"interval": FIRST - 1, "keep_latest_k": 0}}
    config = config_of(tmp_path, {"dp_shard": 2}, **saves)
    step = FIRST + 2
    tables = pool.run(2, train, config, 0, step)[0]
    assert audited(tmp_path, f"--step={step}", "--against=2", f"--json={tmp_path}/f") == 0
    found = json.loads((tmp_path / "f").read_text())
    assert [found[key]["weights_after_step"] for key in (str(step), "2")] == [
        step - 1,
        FIRST - 1,
    ]
    for row, expected in zip(found[str(step)]["rows"], tables[step][0], strict=True):
        assert (row["row"], row["tokens"]) == (expected.row, expected.tokens)
        assert row["loss"] == pytest.approx(expected.loss, rel=1e-4)
    said = capsys.readouterr().out
    assert f"step 2 (NOT ITS WEIGHTS: those after step {FIRST - 1}):\nno row stands out" in said


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_numbers_of_documents(packing: Any, tmp_path: Path) -> None:
    """Every token is of the document whose text has it, over files of shards, with some documents held out."""
    texts = [f"{n:03}" * (1 + n * n % 40) for n in range(120)]
    texts[50] *= 60  # longer than a file of shards
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    words = [f"--input={tmp_path}/text.jsonl", f"--output={tmp_path}/out", "--tokenizer=bytes"]
    assert main(["prepare", *words, "--shard-tokens=2000", "--validation-fraction=0.2"]) == 0
    assert len([*(tmp_path / "out").glob("train-*")]) > 2
    kept = [t for t in texts if not in_validation(t, fraction=0.2)]
    source = {"type": "shards", "path": f"{tmp_path}/out"}
    data = {"sources": [source, {**source, "weight": 2}], "packing": packing}
    task = NextToken(job(data=data, tokenizer={"name": "bytes"}))
    samples, numbers = task.dataset("train", rank=0, world=1), np.arange(200)
    found, tokens = samples.documents(numbers), samples.get(numbers)
    sources = samples.sources(numbers)
    assert sources is not None and len(np.unique(found)) > 100
    for row, of_row, source_number in zip(tokens, found, sources, strict=True):
        assert ((of_row < 0) == (row < 0)).all()
        for document in np.unique(of_row[of_row >= 0]):
            assert document >> SOURCE_SHIFT == source_number
            text = task.tokenizer.decode(row[of_row == document].tolist())
            assert text in kept[document % 2**SOURCE_SHIFT]


def test_documents_without_numbers_are_refused(tmp_path: Path) -> None:
    base = with_changes(SMALL, debug={"document_losses": 1}, tokenizer={"name": "bytes"})
    with pytest.raises(DataError, match="the documents have no numbers, as those of streams"):
        run_to_end(Trainer(job(tmp_path / "a", base=base)))
    (tmp_path / "t.txt").write_text("text " * 500)
    training = {"dataset": "text", "dataset_path": f"{tmp_path}/t.txt"}
    text = {"training": training, "data": {"add_bos": False, "add_eos": False}}
    with pytest.raises(
        DataError, match=r"no token marks the documents of .*: set data.add_eos"
    ):
        run_to_end(Trainer(job(tmp_path / "b", base=with_changes(base, **text))))
    trainer = Trainer(
        job(tmp_path / "c", base=with_changes(base, debug={"document_losses": 0}))
    )
    trainer.config = job(base=base)
    trainer.task.loss_can = lambda name: False  # as a task whose loss takes no groups
    with pytest.raises(InputError, match="the loss of NextToken cannot be summed by document"):
        hook(trainer)
    trainer.close()


def gradient(loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    grads = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    return torch.cat([grad.flatten() for grad in grads])


def test_a_document_has_the_loss_of_its_own_labels(tmp_path: Path) -> None:
    """By torch's cross entropy of whole logits, and its gradient; the documents by their lengths."""
    config = config_of(tmp_path, {}, debug={"document_losses": 1})
    trainer = Trainer(config)
    model, found = trainer.train_step.model_parts[0], []
    weight = model.get_parameter("output.weight")
    for batch in trainer.loader.next_step():
        local = trainer.train_step.to_local(batch)
        logits = model(local.input, **local.inputs) @ weight.T
        found.append(F.cross_entropy(logits.movedim(-1, 1), local.targets, reduction="none"))
    trainer.close()
    every = torch.cat(found).flatten()
    losses = every.detach().numpy()
    lengths = [len(text.encode()) + 2 for text in documents()[0]]
    of_labels = np.repeat(np.arange(len(lengths)), lengths)[1 : len(losses) + 1]
    whole = gradient(every.mean(), model)
    trainer = Trainer(config)
    trainer.train_one_step()
    trainer.close()
    rows = measured(tmp_path / "run")
    for row in rows:
        here = of_labels == int(row.row.removeprefix("text:"))
        assert row.tokens == here.sum()
        assert row.loss == pytest.approx(losses[here].mean(), rel=1e-5)
        if row.gradient is not None:
            alone = gradient(every[torch.from_numpy(here)].sum() / len(every), model)
            share = float(alone @ whole / whole.square().sum())
            expected = pytest.approx([float(alone.norm()), share], rel=1e-3, abs=1e-5)
            assert [row.gradient, row.share] == expected
    assert [row.gradient is None for row in rows] == [False] * 10 + [True] * (len(rows) - 10)


def test_a_few_tokens_do_not_outweigh_a_long_document(tmp_path: Path) -> None:
    table = [[n, 100 * (2 + 0.01 * (n % 5)), 100] for n in range(20)]
    first, second, *_ = rank(config_of(tmp_path, {}), [*table, [20, 7.0, 2], [21, 1200, 400]])
    assert (first.row, second.row) == ("text:21", "text:20") and first.score > second.score > 8


def test_losses_that_are_not_finite_come_first(tmp_path: Path) -> None:
    table = [[n, 100 * (2 + 0.01 * (n % 5)), 100] for n in range(20)]
    for bad in (math.nan, math.inf):
        first, second, *_ = rank(config_of(tmp_path, {}), [*table, [20, bad, 9], [21, 900, 99]])
        assert (first.row, second.row) == ("text:20", "text:21")
        assert lines([first])[0] == "1 of 1 rows stand out"
    assert rank(config_of(tmp_path, {}), []) == []  # all of the step was left out
