"""The loss of examples/z_loss: found by its entry point, the same numbers on every layout; and losses that are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import job
from tests.support.layouts import BOUND, Layout, cp, differences, each, fsdp, pp, tp, train
from tests.support.metadata import write_metadata
from tests.support.ranks import Pool
from tests.support.tables import table
from titan.checks.rules import check
from titan.config import plug_ins

FOLDER = Path(__file__).parents[2] / "examples" / "z_loss"
# As large as this, the second term is half of the loss.
LOSS = (("name", "z_loss"), ("options", {"weight": 0.1}))
WHOLE = (("disable_loss_parallel", True),)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what pip would leave of the package's metadata, on the path of this process and of the pool's ranks."""
    write_metadata(FOLDER, tmp_path, **{name: f"wrong_losses:{name}" for name in WRONG})
    (tmp_path / "wrong_losses.py").write_text(
        "import torch\nfrom torch.nn.functional import cross_entropy\n"
        + "\n".join(
            f"def {name}(x, y):\n    return {body}" for name, (body, _) in WRONG.items()
        )
    )
    for folder in (tmp_path, FOLDER):
        monkeypatch.syspath_prepend(folder)
    plug_ins.installed_entry_points.cache_clear()
    yield tmp_path
    sys.modules.pop("wrong_losses", None)
    plug_ins.installed_entry_points.cache_clear()


def train_it(layout: Layout) -> dict[str, Any]:
    plug_ins.installed_entry_points.cache_clear()  # read before this process's path had the package
    return train(layout)


@cache
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(1, train_it, Layout("one process", loss=LOSS))[0]


LAYOUTS = [
    Layout("FSDP2", fsdp(2), accumulation=2, loss=LOSS),
    Layout("TP+SP", tp(2), loss=LOSS),
    Layout("PP", pp(2), loss=LOSS),
    Layout("CP", cp(2), loss=LOSS),
    Layout("one chunk", loss=(*LOSS, ("chunk_tokens", 0))),
    Layout("TP+SP, logits", tp(2), loss=(*LOSS, ("chunk_output", False)), repeats=True),
    Layout("TP+SP, whole logits", tp(2), settings=WHOLE, loss=LOSS, repeats=True),
    Layout("FSDP2 x TP+SP x PP", (*fsdp(2), *tp(2), *pp(2)), loss=LOSS, repeats=True),
    Layout("FSDP2, compiled", fsdp(2), compiled="aot_eager", loss=LOSS, repeats=True),
]


@each(LAYOUTS, "{0.name}")
def test_equals_one_process(layout: Layout, pool: Pool, installed: Path) -> None:
    reference = alone(pool)
    found = differences(pool.run(layout.ranks, train_it, layout), reference)
    assert max(found.values()) < BOUND, found
    # Cross entropy and log Z begin at 8: 8 + 0.1 * 8^2.
    assert 13 < reference["losses"][0] < 16


# What the functions of the package `wrong_losses` return, and what the check says.
WRONG = table(__file__, "wrong")


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_would_train_on_other_numbers_is_refused(
    name: str, installed: Path
) -> None:
    [problem] = check(job(loss={"name": name}))
    assert problem.key == "loss.name" and problem.message.startswith(f"{name} ")
    assert WRONG[name][1] in problem.message
    assert problem.message.endswith(
        'docs/optimizers.md, "A custom loss", says what titan expects'
    )


def test_names_and_options_are_checked(installed: Path) -> None:
    assert not check(job(loss={"name": "z_loss", "options": {"weight": 1e-3}}))
    before = torch.random.get_rng_state()
    for section, key, message in (
        ({"name": "z_los"}, "loss.name", "unknown loss \"z_los\"; did you mean 'z_loss'?"),
        (
            {"name": "z_loss", "options": {"wait": 1}},
            "loss.options.wait",
            "unknown option of z_",
        ),
        ({"name": "mean", "options": {"weight": 1}}, "loss.options.weight", "it has none"),
        ({"options": {"weight": 1}}, "loss.options", "cross_entropy has none"),
    ):
        [problem] = check(job(loss=section))
        assert problem.key == key and message in problem.message
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_loss_of_the_docs() -> None:
    page = (
        (FOLDER.parents[1] / "docs" / "optimizers.md").read_text().split("## A custom loss")[1]
    )
    scopes: list[dict[str, Any]] = [{}, {}]
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], scopes[0])
    exec((FOLDER / "titan_z_loss.py").read_text(), scopes[1])
    logits, labels = torch.randn(5, 9), torch.tensor([1, -100, 3, 4, 0])
    on_page, in_package = (scope["z_loss"](logits, labels, weight=0.1) for scope in scopes)
    assert on_page == in_package > 8
