"""Families of other packages: what titan reads of them is checked when they are loaded, a line for each mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.tables import tabled
from titan.checks.layout_rules import check_layout
from titan.checks.rules import check
from titan.config import model, plug_ins
from titan.config.schema import JobConfig, ModelSection

ROOT = Path(__file__).parents[2]
OPT = ROOT / "examples" / "opt_family"
PACKAGE = """
import titan_opt
from titan_opt import FLAVORS, TENSOR_PLAN

def build_model(config):
    import torch
    from titan_opt.model import OPT
    class Mine(OPT):
        {body}
    mine = Mine(config)
    {after}
    return mine
"""
FORWARD = "def forward(self, ids, positions=None, documents=None): return super().forward(ids, positions, documents)"
SAID = "Mine of the family mine"
# Stages cannot share embeddings.
MINE = {"name": "mine", "flavor": "tiny", "overrides": {"tied_embeddings": False}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    metadata = tmp_path / "mine-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[titan.models]\nmine = mine_family")
    for path in (OPT, tmp_path):
        monkeypatch.syspath_prepend(path)
    caches = (model.families, model.family, plug_ins.installed_entry_points, model.check_module)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    sys.modules.pop("mine_family", None)
    for cached in caches:
        cached.cache_clear()


@tabled("source, message")
def test_what_a_family_lacks_is_one_line(folder: Path, source: str, message: str) -> None:
    (folder / "mine_family.py").write_text(source)
    config, findings = ModelSection(name="mine", flavor="tiny").resolved
    if message:
        [(_, said)] = findings
        assert said.startswith(message) and "docs/architecture.md" in said and "\n" not in said
    else:
        assert config is not None and findings == []


def test_a_module_in_no_stage_or_without_a_style_is_one_line(folder: Path) -> None:
    """Instead of a traceback of each rank."""
    source = PACKAGE.format(body="pass", after="mine.extra = torch.nn.Linear(4, 4)")
    (folder / "mine_family.py").write_text(source)
    said = {
        "pipeline": "module 'extra' is in no stage; put it into one; mine is another",
        "tensor": "the plan of tensor parallelism has no style for extra.weight, extra.bias: name",
    }
    for axis, message in said.items():
        key = f"{axis}_parallel_degree"
        sections = {"model": MINE, "parallelism": {key: 2}}
        config = JobConfig.model_validate(sections)
        [problem] = check_layout(config, world_size=2)
        assert problem.key == f"parallelism.{key}" and problem.message.startswith(message)
    plain = {"model": MINE}
    assert check_layout(JobConfig.model_validate(plain), world_size=2) == []


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_forward_with_other_names_is_a_line_of_the_job(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine_family.py").write_text(PACKAGE.format(body=FORWARD, after="pass"))
    (folder / "job.toml").write_text(
        '[model]\nname = "mine"\nflavor = "tiny"\n[training]\nsteps = 1\n'
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, OPT, ROOT))))
    argv = [sys.executable, "-m", "titan.cli", command, str(folder / "job.toml")]
    result = finished(argv, cwd=folder, code=None)
    lines = result.stderr.splitlines()
    assert (result.returncode, lines[1:]) == (2, [])
    assert lines[0].startswith(f"{folder}/job.toml:2: model.name: {SAID} is called as forward(")


def test_folders_of_hugging_face_need_a_form(folder: Path) -> None:
    (folder / "mine_family.py").write_text(PACKAGE.format(body="pass", after="pass"))
    saved = {"enable": True, "last_save_in_hf": True}
    config = JobConfig.model_validate({"model": MINE, "checkpoint": saved})
    [problem] = check(config)
    assert problem.key == "checkpoint.last_save_in_hf"
    assert problem.message.startswith(
        'the package of model family "mine" has no huggingface.py'
    )
