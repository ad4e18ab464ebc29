"""The loss of each source of a blend: on every layout that of one process by torch's own cross entropy, and together the loss of the step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support import layouts
from tests.support.jobs import SMALL, degrees_of, job, with_changes
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.base.rows import Row
from titan.cli import main
from titan.config.schema import JobConfig
from titan.losses.loss import IGNORED
from titan.observe.columns import curves

TEMPLATE = """{%- for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% endfor %}"""
NAMES = ("prose", "code")
MTP = {"name": "deepseek_v3", "overrides": {"n_layers": 3, "num_mtp_modules": 2}}
PP = {"pp": 2, "dp_shard": 1}
# Axes, and sections of the job.
LAYOUTS: dict[str, tuple[Mapping[str, int], dict[str, Any]]] = {
    "one process, accumulation": ({}, {}),
    "one process, compiled loss": (
        {},
        {"compile": {"enable": True, "components": ["loss"], "backend": "eager"}},
    ),
    "DDP": ({"dp_replicate": 2}, {}),
    "FSDP2": ({"dp_shard": 2}, {}),
    "FSDP2, chunks of other lengths than sequences": (
        {"dp_shard": 2},
        {"loss": {"chunk_tokens": 21}},
    ),
    "TP+SP": ({"tp": 2}, {}),
    "TP+SP, torch's loss parallel": (
        {"tp": 2},
        {"loss": {"chunk_tokens": 0, "chunk_output": False}},
    ),
    "TP+SP, whole logits": ({"tp": 2}, {"parallelism": {"disable_loss_parallel": True}}),
    "CP all-gather": ({"cp": 2}, {}),
    "CP x TP+SP, chunks": ({"cp": 2, "tp": 2}, {"loss": {"chunk_tokens": 21}}),
    "PP 1F1B, compiled": (PP, {"compile": {"enable": True, "backend": "aot_eager"}}),
    "PP x FSDP2": ({**PP, "dp_shard": 2}, {}),
    "PP x CP": ({**PP, "cp": 2}, {}),
    "PP, multi-token prediction": (PP, {"model": MTP}),
    "CP all-gather, multi-token prediction": ({"cp": 2}, {"model": MTP}),
}


def written(folder: Path) -> list[dict[str, Any]]:
    """Return two sources in files, which differ in their letters and in the lengths of their documents."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "prose": [f"the cat {n} sat on mat {n * n}. " * (1 + n % 3) for n in range(150)],
        "code": [f"x[{n}] = ({n} + {n % 7}) * {{}};" for n in range(300)],
    }
    for name, documents in texts.items():
        lines = (json.dumps({"text": text}) + "\n" for text in documents)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return [
        {"type": "jsonl", "path": f"{folder}/{name}.jsonl", "weight": weight}
        for name, weight in zip(NAMES, (1, 2), strict=True)
    ]


def config_of(folder: Path, name: str, **changes: Any) -> JobConfig:
    axes, sections = LAYOUTS[name]
    base = with_changes(
        SMALL,
        training={"local_batch_size": 2, "global_batch_size": 8},
        tokenizer={"name": "bytes"},
        validation={"enable": True, "freq": 2, "steps": 2},
        data={
            "sources": written(folder / "text"),
            "validation_fraction": 0.3,
            "cache_folder": str(folder / "cache"),
            "document_mask": True,
        },
        **sections,
    )
    base["parallelism"] = degrees_of(axes) | dict(base.get("parallelism", {}))
    return job(folder / "run", base=base | changes)


def train(config: JobConfig) -> None:
    run_to_end(PoolTrainer(config))


def by_hand(config: JobConfig) -> dict[str, float]:
    """Return the columns of step 1, of whole logits in torch's cross entropy, source by source."""
    trainer = Trainer(config)
    try:
        sums = dict.fromkeys(NAMES, (0.0, 0))
        for batch in trainer.loader.next_step():
            local = trainer.train_step.to_local(batch)
            with torch.no_grad():
                output = trainer.train_step.model_parts[0](local.input, **local.inputs)
            logits = output[: len(local.input)] @ weight_of(trainer).T
            numbers = batch.first_sample + torch.arange(len(local.input)).numpy()
            sources = trainer.loader.samples.sources(numbers)
            assert sources is not None
            for row, source in enumerate(sources):
                labels = batch.labels_BS[row]
                loss = F.cross_entropy(
                    logits[row], labels, ignore_index=IGNORED, reduction="sum"
                )
                before = sums[NAMES[source]]
                valid = int((labels != IGNORED).sum())
                sums[NAMES[source]] = (before[0] + loss.item(), before[1] + valid)
    finally:
        trainer.close()
    losses = {f"source_loss/{name}": a / b for name, (a, b) in sums.items()}
    return losses | {f"source_tokens/{name}": b for name, (_, b) in sums.items()}


def weight_of(trainer: Trainer) -> torch.Tensor:
    """Return the weight of the output layer, which the loss applies."""
    return trainer.train_step.model_parts[0].get_parameter("output.weight").detach()


def require_whole(row: Mapping[str, Any], *, prefix: str, loss: str) -> None:
    """Check that the sources of a row give its loss, to rounding in fp32."""
    names = [name for name in NAMES if f"{prefix}_tokens/{name}" in row]
    tokens = sum(row[f"{prefix}_tokens/{name}"] for name in names)
    total = sum(row[f"{prefix}_loss/{name}"] * row[f"{prefix}_tokens/{name}"] for name in names)
    assert total / tokens == pytest.approx(row[loss], rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_torch_on_one_process(name: str, pool: Pool, tmp_path: Path) -> None:
    config = config_of(tmp_path, name)
    pool.run(math.prod(LAYOUTS[name][0].values()), train, config)
    alone = config_of(tmp_path / "alone", name, parallelism={}, loss={}, compile={})
    rows = read_json_lines(tmp_path / "run/metrics.jsonl")
    for key, value in by_hand(alone).items():
        assert rows[0][key] == pytest.approx(value, rel=layouts.BOUND), key
    for row in rows:
        require_whole(row, prefix="source", loss="loss")
    require_whole(rows[-1], prefix="source_validation", loss="validation_loss")
    assert {f"source_validation_loss/{name}" for name in NAMES} <= rows[-1].keys()


def chats(folder: Path) -> dict[str, Any]:
    turns = ([("user", f"{n}?"), ("assistant", f"{n * n}.")] for n in range(200))
    rows = ([{"role": role, "content": text} for role, text in turn] for turn in turns)
    lines = (json.dumps({"messages": row}) + "\n" for row in rows)
    (folder / "chat.jsonl").write_text("".join(lines))
    (folder / "chat.jinja").write_text(TEMPLATE)
    return {"type": "jsonl", "path": f"{folder}/chat.jsonl", "messages_key": "messages"}


def parquet(folder: Path) -> dict[str, Any]:
    tables = pytest.importorskip("pyarrow")
    texts = [f"row {n} of a table, {n % 9}" for n in range(200)]
    pytest.importorskip("pyarrow.parquet").write_table(
        tables.table({"text": texts}), folder / "table.parquet"
    )
    return {"type": "parquet", "path": f"{folder}/table.parquet"}


def shards(folder: Path) -> dict[str, Any]:
    words = [f"--input={folder}/code.jsonl", f"--output={folder}/prepared", "--tokenizer=bytes"]
    assert main(["prepare", *words]) == 0
    return {"type": "shards", "path": f"{folder}/prepared"}


def stream(folder: Path) -> dict[str, Any]:
    pytest.importorskip("datasets")
    (folder / "hub").mkdir()
    (folder / "hub/data.jsonl").write_text((folder / "code.jsonl").read_text())
    return {"type": "huggingface", "path": f"{folder}/hub", "shuffle_buffer": 0}


@pytest.mark.parametrize("source", [chats, parquet, shards, stream])
def test_every_kind_of_source(source: Any, tmp_path: Path) -> None:
    """Beside JSON Lines; twice of one name, which gets a number."""
    prose, _ = written(tmp_path)
    other, cache = source(tmp_path), f"{tmp_path}/cache"
    data = {"sources": [prose, other, other], "document_mask": True, "cache_folder": cache}
    template = {"chat_template": f"{tmp_path}/chat.jinja"} if source is chats else {}
    run_to_end(
        Trainer(
            job(
                tmp_path / "run",
                base=with_changes(SMALL, training={"local_batch_size": 16}),
                data=data,
                tokenizer={"name": "bytes", **template},
            )
        )
    )
    name = Path(other["path"]).stem
    for row in read_json_lines(tmp_path / "run/metrics.jsonl"):
        names = {key.partition("/")[2] for key in row if key.startswith("source_loss/")}
        assert names <= {"prose", name, f"{name}-2"}
        tokens = {key: row[f"source_tokens/{key}"] for key in names}
        total = sum(row[f"source_loss/{key}"] * tokens[key] for key in names)
        assert total / sum(tokens.values()) == pytest.approx(row["loss"], rel=1e-6)
        assert {f"source_loss/{key}" for key in names} <= curves(
            row
        ).keys()  # of TensorBoard and W&B


def columns_of(rows: list[Row]) -> set[str]:
    return {key.partition("/")[0] for row in rows for key in row if key.startswith("source_")}


def test_runs_that_have_no_loss_by_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One source; a validation dataset, which is one; a loss of a package."""
    sources = written(tmp_path / "text")
    for name, sections in {
        "one": {"data": {"sources": sources[:1]}},
        "dataset": {"validation": {"enable": True, "dataset": "synthetic", "steps": 1}},
        "package": {},
    }.items():
        own = partial(F.cross_entropy, reduction="sum") if name == "package" else None
        monkeypatch.setattr("titan.tasks.next_token.loss_function", lambda _, loss=own: loss)
        base = with_changes(SMALL, data={"sources": sources}, tokenizer={"name": "bytes"})
        trainer = Trainer(job(tmp_path / name, base=with_changes(base, **sections)))
        run_to_end(trainer)
        rows = read_json_lines(tmp_path / name / "metrics.jsonl")
        kept = {"source_loss", "source_tokens"} if name == "dataset" else set()
        assert columns_of(rows) == kept, name
