"""scripts/bench/gpu_kernels.py on a CPU: rows with a figure or a reason, and decisions by hand."""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import pytest
import torch

from tests.support.jobs import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    yield importlib.import_module("gpu_kernels")
    for name in ("gpu_kernels", "steps"):
        sys.modules.pop(name)


def test_decisions_by_hand(script: Any) -> None:
    """1B has 16 blocks and 16,384 tokens: 8 chunks of 2,048 or 2 of 8,192."""
    model, _ = script.MODELS
    book = script.Book(torch.device("cpu"), time.monotonic() + 600)

    def prices(**ms: float) -> None:
        """Set the figure of the rows whose name begins with a key, in which underscores stand for spaces."""
        for key, figure in ms.items():
            names = {
                name
                for _, terms in script.choices(model)
                for t in terms.values()
                for name, _ in t
            }
            for name in names:
                if name.startswith(key.replace("_", " ")):
                    book.rows.insert(0, script.Row("1B", name, {}, ms=figure))

    prices(
        attention=1,
        q=1,
        k=1,
        logsumexp=1,
        gradient=1,
        output=1,
        AdamW=1,
        clip=1,
        fp32=1,
        bf16=1,
    )
    prices(
        attention_fa3=0.75, attention_cudnn=2, logsumexp_online=0.5, q_forward=2, output_dX=2
    )
    book.find(model, "attention fa4 forward").ms = None
    decisions = {each["what"]: each for each in script.decide(model, book)}
    figures = decisions["attention"]["ms_a_step"]
    assert figures["cudnn"] == 16 * 4 and figures["fa3"] == 16 * 1.5
    assert decisions["attention"]["verdict"] == "fa3 PAYS 40.00 ms a step"
    assert decisions["log-sum-exp"]["verdict"] == "online's form PAYS 4.00 ms a step"
    # 16 x ((2 + 1 + 1) + 2 x 3) against 16 x (3 + 1 for the joined weights)
    assert decisions["q, k, v"]["ms_a_step"] == {"three matmuls": 160, "joined": 64}
    # 8 x (logits, dX 2, log-sum-exp, gradient, dW) + zeros; the elementwise rows are of one small chunk
    chunks = {"2048": 8 * 6 + 1, "8192": 2 * (1 + 2 + 1) + 8 * 2 + 1}
    assert decisions["tokens of a chunk"]["ms_a_step"] == chunks
    assert decisions["dW of the first chunk"]["verdict"] == "written PAYS 1.00 ms a step"
    assert decisions["logits"]["verdict"] == "keep fp32, by 0.00 ms a step"


def test_the_whole_script(
    script: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(
        sys, "argv", f"gpu_kernels.py --tiny --json {out} --limit-s 500".split()
    )
    script.main()
    written = json.loads(out.read_text())
    assert written["machine"]["device"] and len(written["rows"]) > 100
    for row in written["rows"]:
        assert (row["ms"] is None) == bool(row["reason"]), row
        assert "dtype_out" in row["reason"] or row["flops"] + row["bytes"] > 0
    compiled = [
        row for row in written["rows"] if row["name"].startswith(("AdamW", "logsumexp"))
    ]
    assert len(compiled) == 12 and all(row["ms"] for row in compiled), compiled
    assert (
        len(written["decisions"]) == 16
        and "tiny-blocks, log-sum-exp: " in capsys.readouterr().out
    )
