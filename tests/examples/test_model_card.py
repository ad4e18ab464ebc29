"""examples/model_card: the card says how a model was trained, and its newest figures."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from tests.support.jobs import ROOT, job

write_card = runpy.run_path(str(ROOT / "examples/model_card/titan_model_card.py"))["write_card"]


def test_the_card_has_the_training_and_the_newest_figures(tmp_path: Path) -> None:
    rows = [
        {"step": 10, "loss": 5.5, "validation_loss": 5.25, "eval/cloze/acc": 0.25},
        {"step": 20, "loss": 4.5, "validation_loss": None},
        {"step": 30, "loss": 4.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = job(training={"steps": 30, "seq_len": 64, "dataset": "synthetic"})
    saved = {"step": 20, "tokens": 12_800}
    write_card(tmp_path, config, tmp_path, what="A model", saved=saved, is_average=True)
    card = (tmp_path / "README.md").read_text().splitlines()
    for line in (
        "| steps | 20 of 30 |",
        "| tokens | 12,800 |",
        "| data | synthetic |",
        "| loss | 4.5000 |",
        "| validation_loss | 5.2500 |",
        "| eval/cloze/acc | 0.2500 |",
        "A model, written by titan.",
        "| weights | an exponential moving average over the steps |",
    ):
        assert line in card, line
