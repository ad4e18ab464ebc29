"""`titan reproduce`: the published runs, one of them simulated, its Slurm job, and a run of it beside both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from titan.cli import main
from titan.config.load import load_config
from titan.config.render import to_toml
from titan.config.toml import read_toml
from titan.contrib.reproduce.cli import published

R1 = ROOT / "train_configs" / "published" / "R1.toml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of R1 with steps of 2.5 s, after slower ones."""
    folder = tmp_path / "run"
    folder.mkdir()
    job = load_config(R1, overrides=["training.steps=20", "training.dataset=synthetic"])
    (folder / "config.toml").write_text(to_toml(job))
    rows = [
        {
            "step": n,
            "step_s": 9.0 if n < 3 else 2.5,
            "memory_gib": 80.5,
            "memory_active_gib": 70.0,
            "memory_kind": "device",
        }
        for n in range(1, 7)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {"world_size": 8, "titan": "0.1.0", "torch": "2.13.0", "device_names": ["H100"] * 8}
    (folder / "environment.json").write_text(json.dumps(facts))
    return folder


def test_each_published_run_has_its_job(capsys: pytest.CaptureFixture[str]) -> None:
    rows = published()
    assert len(rows) == 105 and main(["reproduce"]) == 0
    listed = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == [*rows]
    assert "  5,762  82.4  published in TorchTitan's performance page of December 2024" in listed[0]
    for row in rows.values():
        layout = load_config(row.job).parallelism
        assert layout.context_parallel_degree == row.run["cp"] and row.about
        assert row.profile.gpus_per_node and load_config(row.job).training.seq_len == row.run["seq_len"]  # fmt: skip


def test_the_context_parallel_rows_of_the_reply() -> None:
    rows = [row.run for name, row in published().items() if name.startswith("N592")]
    keys = ("gpus", "cp", "seq_len", "tokens_per_s_per_gpu", "mfu")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        (8, 1, 32_768, 4_497, 0.431),
        (16, 2, 81_920, 1_970, 0.346),
        (32, 4, 147_456, 1_205, 0.337),
        (64, 8, 294_912, 638, 0.341),
    ]


def test_a_measured_run_beside_both(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "R1.toml"
    assert main(["reproduce", "R1", "--measured", str(run), "--record", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    speed, memory = (next(x.split() for x in lines if x.startswith(n)) for n in ("tok", "reserved"))
    # 2 sequences of 8,192 tokens in 2.5 s.
    assert speed[1] == "5,762" and speed[4:6] == ["6,554", "+13.7%"]
    assert memory[2] == "82.4" and memory[5:7] == ["80.5", "-2.3%"]
    row = read_toml(record)[0]
    simulated = float(speed[2].replace(",", ""))
    # Today's attention loop and norms are faster than those of 2024, which was 5,762.
    assert 6_000 < simulated < 6_500
    assert speed[6] == f"{6553.6 / simulated - 1:+.1%}"
    assert row["tokens_per_s_per_gpu"] == 6553.6 and row["memory_gib"] == 80.5
    assert (row["id"], row["gpus"], row["devices"]) == ("R1", 8, ["H100"])
    assert row["hardware"] == "h100-96g-500w" and row["who"] == ""


def test_the_ledger(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's own record, somebody's JSON, and the same person again, whose figures replace the first."""
    monkeypatch.chdir(tmp_path)
    record = tmp_path / "R1.toml"
    assert main(["reproduce", "R1", "--measured", str(run), "--record", str(record)]) == 0
    # Nobody has put a name into it yet.
    assert main(["reproduce", "R1", "--record", str(record)]) == 2
    assert re.search(r"R1.toml:\d+: who: ", capsys.readouterr().err)
    assert not (tmp_path / "ledger.toml").exists()
    record.write_text(record.read_text().replace('who = ""', 'who = "A. Person | lab"'))
    assert main(["reproduce", "R1", "--record", str(record)]) == 0
    assert "added R1 on h100-96g-500w by A. Person" in capsys.readouterr().out
    other = {"tokens_per_s_per_gpu": 5000, "hardware": "h100-96g-500w", "who": "B", "date": "2026-11-26", "torch": "2.13"}  # fmt: skip
    for speed in (5000, 4000):
        (tmp_path / "b.json").write_text(json.dumps(other | {"tokens_per_s_per_gpu": speed}))
        assert main(["reproduce", "R1", "--record", "b.json"]) == 0
    assert "replaced R1 on h100-96g-500w by B" in capsys.readouterr().out
    first, second = read_toml(tmp_path / "ledger.toml")[0]["measurement"]
    assert (first["tokens_per_s_per_gpu"], second["tokens_per_s_per_gpu"]) == (6553.6, 4000)
    assert "memory_gib" not in second and first["predicted_low"] < first["predicted_high"]
    page = (tmp_path / "ledger.md").read_text()
    predicted = first["predicted_tokens_per_s_per_gpu"]
    interval = f"{first['predicted_low']:,.0f} to {first['predicted_high']:,.0f}"
    cells = f"| 6,554 | {predicted:,.0f} | {interval} | {predicted / 6553.6 - 1:+.1%} | 80.5 |"
    assert "| R1 | h100-96g-500w | A. Person / lab |" in page and cells in page
    assert f"| B | 2026-11-26 | 2.13 | 4,000 | {predicted:,.0f} |" in page
    assert "1 of 2 measured speeds are in the interval" in page and page.count("| R1 |") == 2


def test_the_job_for_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "R5", "--submit"]) == 0
    printed = capsys.readouterr()
    script = tmp_path / "outputs" / "published_R5" / "job.sbatch"
    assert "#SBATCH --nodes=16\n#SBATCH --gpus-per-node=8\n" in script.read_text()
    # The job runs a copy of its file.
    assert re.search(r"R5\S*\.toml --training\.dataset=synthetic", script.read_text())
    assert f"sbatch {script}" in printed.err
    assert "titan reproduce R5 --measured ./outputs/published_R5 --record R5.toml" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["R11"], "there is no published run 'R11'; did you mean 'R1'?"),
        (["N592"], "did you mean 'N592-CP1'?"),
        (["R1", "--measured", "nowhere"], "nowhere has no metrics.jsonl"),
        (["R4", "--measured", "RUN"], "RUN is no run of R4: ranks: 8 here, 128 in R4; parallelism.data_parallel_shard_degree: 8 here, 128 in R4"),
        (["R1", "--record", "none.toml"], "none.toml"),
        (["R1", "--record", "RUN/environment.json"], "unknown key"),
        (["R1", "--ledger", "RUN"], "--ledger: goes with --record FILE"),
        (["R1", "--record", "x.toml", "--ledger", "none"], "--ledger: there is no folder none"),
        (["R1", "--record", "RUN/other.json"], "gpus: is 16, not 8"),
        (["R1", "--record", "RUN/good.json", "--ledger", "RUN/broken"], "ledger.toml:1: measurement[0].hardware: is missing"),
        (["R1", "--record", "RUN/good.json", "--ledger", "RUN/number"], "has tables [[measurement]] only"),
        (["R1", "--record", "RUN/good.json", "--ledger", "/proc"], "--ledger: cannot write /proc/ledger.toml"),
        (["R1", "--measured", "RUN", "--record", "RUN"], "--record: cannot write"),
        (["R1", "--submit", "--measured", "RUN"], "--submit: goes with an ID alone"),
        (["R1", "--measured", "RUN", "--record", "none/file"], "there is no folder none"),
    ],
)  # fmt: skip
def test_mistakes(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {
        "tokens_per_s_per_gpu": 5000,
        "hardware": "h100-sxm",
        "who": "B",
        "date": "2026-11-26",
        "torch": "2.13",
    }
    for name, gpus in {"good": 8, "other": 16}.items():
        (run / f"{name}.json").write_text(json.dumps(other | {"gpus": gpus}))
    for name, text in {
        "broken": '[[measurement]]\nid = "R1"\n',
        "number": "measurement = 5\n",
    }.items():
        (run / name).mkdir(exist_ok=True)
        (run / name / "ledger.toml").write_text(text)
    given = [argument.replace("RUN", str(run)) for argument in arguments]
    assert main(["reproduce", *given]) == 2
    assert message.replace("RUN is", f"{run} is") in capsys.readouterr().err
