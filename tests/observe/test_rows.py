"""Rows of any length: thinned while they are read, read on, and cut off after a step, in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titan.base import rows as module
from titan.base.rows import cut_after, read_rows
from titan.base.run_folder import RunFolder
from titan.tools import row_files
from titan.tools.row_files import RowFile, Tail


def write(path: Path, steps: range, mode: str = "w", **values: object) -> Path:
    with path.open(mode) as file:
        file.writelines(
            json.dumps({"step": n, "loss": 1 + 1 / n, **values}) + "\n" for n in steps
        )
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows]


def test_thinning_keeps_the_course(path: Path) -> None:
    write(path, range(1, 5000))
    write(path, range(5000, 5001), "a", loss=99.0)
    write(path, range(5001, 5002), "a", loss=-99.0)
    write(path, range(5002, 5003), "a", validation_loss=1.0)
    write(path, range(5003, 5004), "a", loss=None)
    write(path, range(5004, 20_001), "a")
    rows = RowFile(path, limit=400)
    rows.update()
    kept = steps(rows.thin.rows())
    assert rows.thin.count == 20_000 and 100 < len(kept) <= 400
    assert kept == sorted(set(kept)) and {1, 5000, 5001, 5002, 20_000} <= set(kept)


@pytest.mark.parametrize("count", [1, 2, 99, 2000])
def test_few_rows_are_all_kept(path: Path, count: int) -> None:
    rows = RowFile(write(path, range(1, count + 1)))
    rows.update()
    assert steps(rows.thin.rows()) == list(range(1, count + 1))


def test_reading_on_notices_a_cut_in_place(path: Path) -> None:
    rows = RowFile(write(path, range(1, 11)))
    rows.update()
    cut_after(path, step=4)
    write(path, range(5, 31), "a", again=True)  # more bytes than before
    rows.update()
    assert steps(rows.thin.rows()) == list(range(1, 31))
    assert rows.generation == 2
    assert rows.since(28) is not None and steps(rows.since(28) or []) == [29, 30]
    assert rows.since(0) is None and rows.since(31) is None


def test_long_lines_are_left_out_in_bounded_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in (module, row_files):
        monkeypatch.setattr(reader, "BLOCK_BYTES", 100)
        monkeypatch.setattr(reader, "MAX_LINE_BYTES", 1000)
    path.write_bytes(b'{"step": 1}\n' + b"x" * 5000 + b'\n{"step": 2}\n' + b"y" * 3000)
    tail = Tail(path)
    assert [line for lines in tail.read() for line in lines] == [b'{"step": 1}', b'{"step": 2}']
    assert tail.num_long == 2
    with path.open("ab") as file:
        file.write(b'\n{"step": 3}\n')
    assert [line for lines in tail.read() for line in lines] == [b'{"step": 3}']
    assert cut_after(path, step=2) == {"step": 2}
    assert path.read_bytes().endswith(b'{"step": 2}\n')


@pytest.mark.parametrize("block", [7, 64, 2**18])
@pytest.mark.parametrize("step", [0, 1, 57, 99, 100])
def test_cutting(path: Path, block: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", block)
    write(path, range(1, 51))
    with path.open("ab") as file:
        file.write(b"\xff\x00 no row\n{\n[]\n")
    write(path, range(51, 101), "a")
    with path.open("ab") as file:
        file.write(b'{"step": 101, "lo')
    row = cut_after(path, step=step)
    if step == 0:
        assert row is None and not path.exists()
        assert len(read_rows(path.with_name("metrics.previous.jsonl"))) == 100
    else:
        assert row is not None and row["step"] == step
        assert steps(read_rows(path)) == list(range(1, step + 1))
        assert path.read_bytes().endswith(b"\n")


def test_many_rows_take_little_memory(path: Path) -> None:
    """300,000 rows: kept at once they took 900 MB."""
    filler = {"filler": "x" * 300}
    path.write_text(
        "".join(json.dumps({"step": n, "loss": 1 / n} | filler) + "\n" for n in range(1, 1001))
    )
    block = path.read_bytes()
    with path.open("ab") as file:
        for _ in range(299):
            file.write(block)
    code = (
        "import json, sys; from pathlib import Path; from titan.base.rows import *; from titan.tools.row_files import *\n"
        "used = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024\n"
        "path, before = Path(sys.argv[1]), used()\n"
        "rows = RowFile(path); rows.update(); rows.thin.rows(); cut_after(path, step=999)\n"
        "print(json.dumps([rows.thin.count, used() - before]))\n"
    )
    count, more_mb = json.loads(
        subprocess.check_output([sys.executable, "-c", code, str(path)], text=True)
    )
    assert count == 300_000 and more_mb < 60
    assert read_rows(path)[-1]["step"] == 999


def test_what_is_no_regular_file(path: Path) -> None:
    os.mkfifo(path)
    rows = RowFile(path)
    rows.update()
    assert "not a regular file" in rows.problem and rows.thin.rows() == []
    with pytest.raises(OSError, match="not a regular file"):
        cut_after(path, step=3)


def test_runs_and_groups_take_the_place_of_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b", "c/group-10", "c/group-9", "b/inner"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "status.json").touch()
    for folder, runs in (("", "a b"), ("b", "b"), ("c", "c/group-9 c/group-10"), ("x", "x")):
        assert RunFolder.find([tmp_path / folder]) == [tmp_path / run for run in runs.split()]


def test_runs_near_a_folder_have_what_is_asked_for(tmp_path: Path) -> None:
    for file in ("a/config.toml", "b/metrics.jsonl", "c/status.json"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    near = RunFolder.near(tmp_path / "a", "metrics.jsonl")
    assert near == f"; runs near it: {tmp_path / 'b'}"
    assert RunFolder.near(tmp_path / "x").count(str(tmp_path)) == 3
