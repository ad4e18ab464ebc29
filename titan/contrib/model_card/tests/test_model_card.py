"""The README.md of an exported model says how it was trained, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.jobs import job
from titan.config.plug_ins import load_plug_ins
from titan.contrib.model_card.card import model_card, newest_row, write_card


def test_the_card_has_the_training_and_the_newest_figures(tmp_path: Path) -> None:
    rows = [
        {"step": 10, "loss": 5.5, "validation_loss": 5.25, "eval/cloze/acc": 0.25},
        {"step": 20, "loss": 4.5, "validation_loss": None},
        {"step": 30, "loss": 4.0},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    row = newest_row(tmp_path, 20)
    config = job(training={"steps": 30, "seq_len": 64, "dataset": "synthetic"})
    saved = {"step": 20, "tokens": 12_800}
    card = model_card(config, "A model", name="m|y", saved=saved, row=row, is_average=True)
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in (
        *("| steps | 20 of 30 |", "| tokens | 12,800 |", "| data | synthetic |"),
        *("| loss | 4.5000 |", "| validation_loss | 5.2500 |", "| eval/cloze/acc | 0.2500 |"),
        *("## Figures of step 20", "| weights | an exponential moving average over the steps |"),
    ):
        assert line in card.splitlines(), line
    assert newest_row(tmp_path / "none", 20) == {}


def test_a_converted_folder_has_no_training() -> None:
    saved = {"step": 0, "tokens": 0}
    card = model_card(job(), "A model", name="my", saved=saved, row={}, is_average=False)
    assert "## " not in card and "the license" in card


def test_convert_writes_the_card(tmp_path: Path) -> None:
    [write] = load_plug_ins("titan.extensions", of="convert")
    assert write is write_card
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 10, "loss": 5.5}\n{"step": 20, "loss": 4.5}\n'
    )
    (output := tmp_path / "my_model").mkdir()
    saved = {"step": 10, "tokens": 640}
    write(output, job(), tmp_path, what="A model", saved=saved, is_average=False)
    text = (output / "README.md").read_text()
    assert "# my_model" in text and "| loss | 5.5000 |" in text and "A model, written by" in text
