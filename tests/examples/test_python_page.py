"""The programs of docs/api.md run as they stand there, and compute what plain torch computes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.jobs import ROOT
from tests.support.metrics import read_json_lines

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.S)
# What two ranks and one process have to agree on: the loss, and sums over the updated weights.
SAID = """
import os
from pathlib import Path
from torch.distributed.tensor import DTensor

full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
# A file for each rank, since their lines may mix.
said = [loss.item(), *(p.double().sum().item() for p in full)]
Path(f"rank-{os.environ['RANK']}.txt").write_text(" ".join(map(str, said)))
"""


def run(program: str, folder: Path, ranks: int = 1) -> str:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "program.py"]
    command = command if "init_process_group" in program else [sys.executable, "program.py"]
    done = finished(command, cwd=folder)
    return done.stdout


def test_a_run_without_toml(tmp_path: Path) -> None:
    run(PROGRAMS[0] + "assert exit_code == 0 and trainer.step == 4\n", tmp_path)
    rows = read_json_lines(tmp_path / "outputs" / "from_python" / "metrics.jsonl")
    assert [row["step"] for row in rows][-1] == 4


def test_a_model_of_transformers_on_two_ranks_equals_plain_torch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    # AdamW takes the rounding of gradients that are zero, those of keys' biases, for a step.
    program = PROGRAMS[1].replace("optim.AdamW", "optim.SGD")
    plain = re.sub(r"(?ms)^apply_fsdp\(.*?^\)\n|^apply_ac\(.*?\)\n", "", program)
    assert plain.count("apply_") == 2  # the import alone
    results = []
    for name, text, ranks in (("plain", plain, 1), ("split", program, 2)):
        (folder := tmp_path / name).mkdir()
        run(text + SAID, folder, ranks)
        files = [folder / f"rank-{rank}.txt" for rank in range(ranks)]
        results.append([[*map(float, file.read_text().split())] for file in files])
    [expected], found = results
    for values in found:
        assert values == pytest.approx(expected, rel=1e-5, abs=1e-5)
