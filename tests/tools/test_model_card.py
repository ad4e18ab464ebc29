"""The README.md of an exported model says how it was trained, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.jobs import job
from titan.tools.model_card import model_card, newest_row


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
