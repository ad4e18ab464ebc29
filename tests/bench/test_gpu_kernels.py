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


def book_of(script: Any, limit_s: float = 600) -> Any:
    return script.Book(torch.device("cpu"), time.monotonic() + limit_s)


def test_no_time_left(script: Any) -> None:
    [model, _], book = script.TINY, book_of(script, limit_s=-1)
    script.optimizer_rows(model, book)
    assert {row.reason for row in book.rows} == {"TimeoutError: no time left (--limit-s)"}


def test_decisions_by_hand(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """1B has 16 blocks and 16,384 tokens: 8 chunks of 2,048 or 2 of 8,192."""
    [model, _], book = script.MODELS, book_of(script)

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
    book.find(model, "attention fa4 forward").reason = "not installed"
    decisions = {each["what"]: each for each in script.decide(model, book)}
    said = capsys.readouterr().out
    figures = decisions["attention"]["ms_a_step"]
    assert figures["cudnn"] == 16 * 4 and figures["fa3"] == 16 * 1.5
    assert decisions["attention"]["verdict"] == "fa3 PAYS 40.00 ms a step"
    assert "1B, attention: fa3 PAYS 40.00 ms a step. cudnn 64.00 ms, flash 32.00 ms" in said
    assert "fa4 not known (attention fa4 forward: not installed)" in said
    assert decisions["log-sum-exp"]["verdict"] == "online's form PAYS 4.00 ms a step"
    # 16 x ((2 + 1 + 1) + 2 x 3) against 16 x (3 + 1 for the joined weights)
    assert decisions["q, k, v"]["ms_a_step"] == {"three matmuls": 160, "joined": 64}
    # 8 x (logits, dX 2, log-sum-exp, gradient, dW) + zeros; the elementwise rows are of one small chunk
    chunks = {"2048": 8 * 6 + 1, "8192": 2 * (1 + 2 + 1) + 8 * 2 + 1}
    assert decisions["tokens of a chunk"]["ms_a_step"] == chunks
    assert decisions["dW of the first chunk"]["verdict"] == "written PAYS 1.00 ms a step"
    assert decisions["logits"]["verdict"] == "keep fp32, by 0.00 ms a step"
    json.dumps(decisions)


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
    assert len(compiled) == 14 and all(row["ms"] for row in compiled), compiled
    assert (
        len(written["decisions"]) == 16
        and "tiny-blocks, log-sum-exp: " in capsys.readouterr().out
    )


def test_the_compiled_update_is_adamw(script: Any) -> None:
    """Only a kernel that computes the update tells what the update takes."""
    weight, gradient = (torch.randn(300, dtype=torch.float64) for _ in "ab")
    mine = weight.clone()
    state = [torch.zeros(300, dtype=torch.float64) for _ in "ab"]
    low, scale = torch.empty(300, dtype=torch.bfloat16), torch.tensor(0.5)
    theirs = torch.nn.Parameter(weight)
    optimizer = torch.optim.AdamW(
        [theirs], lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in (1, 2, 3):
        corrections = torch.tensor([1 - 0.9**step, 1 - 0.95**step], dtype=torch.float64)
        script.adamw_with_cast(mine, gradient, *state, low, scale, corrections)
        theirs.grad = 0.5 * gradient
        optimizer.step()
    torch.testing.assert_close(mine, theirs.detach())
    torch.testing.assert_close(low, mine.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_of_the_log_sum_exp_are_equal(script: Any, dtype: torch.dtype) -> None:
    logits, columns = 5 * torch.randn(7, 300, dtype=dtype), torch.randint(300, (7,))
    for one, other in zip(
        script.lse_torch(logits, columns), script.lse_online(logits, columns), strict=True
    ):
        torch.testing.assert_close(one, other)
