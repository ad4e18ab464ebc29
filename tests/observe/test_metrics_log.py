"""metrics.jsonl over resumes, crashes and full disks; what TensorBoard and Weights & Biases get."""

import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import titan.observe.sinks
from tests.support.commands import finished
from tests.support.metrics import read_json_lines, step_row
from titan.config.schema import JobConfig, MetricsSection
from titan.observe.columns import COLUMNS
from titan.observe.flops import flops_by_dtype, model_tflops, utilization
from titan.observe.metrics import MetricsLog
from titan.observe.sinks import MissingExtra
from titan.parallel.float8 import Conversion


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return read_json_lines(run_dir / name)


def log_steps(run_dir: Path, steps: range, **options: Any) -> None:
    log = MetricsLog(run_dir, section=MetricsSection(), **options)
    for step in steps:
        log.write(step_row(step))
    log.close()


def test_a_row_has_the_promised_keys(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, section=MetricsSection())
    log.write(step_row(1))
    log.write(
        step_row(2, loss=math.nan, grad_norm=-math.inf, mfu=0.43, validation_loss=1.25),
    )
    log.close()
    first, second = rows(tmp_path)
    assert {
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "tokens_per_s",
        "time_s",
    } <= first.keys()
    assert (first["step"], first["loss"], first["tokens"], first["mfu"]) == (1, 10.0, 100, None)
    assert 0 <= first["time_s"] <= second["time_s"] < 60
    assert "validation_loss" not in first
    assert (second["loss"], second["grad_norm"], second["validation_loss"]) == (
        None,
        None,
        1.25,
    )
    assert second["mfu"] == 0.43


def test_each_column_is_documented_and_shares_no_curve() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")
    missing = [name for name in COLUMNS if f"`{name}`" not in page]
    assert not missing
    named = [column.curve for column in COLUMNS.values() if column.curve]
    assert len({*named}) == len(named)
    page = (Path(__file__).parents[2] / "docs/operate.md").read_text(encoding="utf-8")
    assert [curve for curve in named if f"`{curve}`" not in page] == []


def test_resume_cuts_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 8))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    log_steps(tmp_path, range(6, 9), resume_step=5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))  # only the line's end is torn off
    log_steps(tmp_path, range(9, 10), resume_step=8)
    assert [row["step"] for row in rows(tmp_path)] == [*range(1, 10)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_time_goes_on_counting_from_the_first_start(tmp_path: Path) -> None:
    first_start = time.time() - 1000
    row = {"step": 4, "time_s": 300.0, "unix_s": first_start + 300.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    log_steps(tmp_path, range(5, 6), resume_step=4)
    assert rows(tmp_path)[-1]["time_s"] == pytest.approx(1000, abs=30)


def test_ranks(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 3), rank=1)
    assert list(tmp_path.iterdir()) == []
    log = MetricsLog(tmp_path, section=MetricsSection(save_for_all_ranks=True), rank=1)
    log.write(step_row(1))
    log.close()
    assert rows(tmp_path, "metrics.rank-1.jsonl")[0]["step"] == 1
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_values_and_resume(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    section = MetricsSection(enable_tensorboard=True)
    for start, resume_step in ((1, 0), (3, 2)):
        log = MetricsLog(tmp_path, section=section, resume_step=resume_step)
        for step in range(start, start + 3):
            loss = step + 0.5 * (resume_step > 0)
            of_hooks = {"mine/ratio": 1.5, "mine/text": "slow", "ungrouped": 2.0}
            log.write(step_row(step, loss=loss, validation_loss=7.0) | of_hooks)
        log.write_texts(4, {"Once": " upon"})
        log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    training = [(e.step, e.value) for e in events.Scalars("loss/train")]
    assert training == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5)]
    assert events.Scalars("loss/validation")[0].value == 7.0
    tags = set(events.Tags()["scalars"])
    assert "throughput/mfu" not in tags  # unknown, so not drawn
    [text] = events.Tensors("samples/prompt_0/text_summary")[0].tensor_proto.string_val
    assert text == b"    Once upon\n"
    assert {tag for tag in tags if "mine" in tag or "un" in tag} == {"mine/ratio"}


def test_wandb_offline_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    section = MetricsSection(enable_wandb=True, wandb_project="p", wandb_run_name="r")
    for resume_step in (0, 1):
        log = MetricsLog(tmp_path, section=section, resume_step=resume_step)
        log.write(step_row(resume_step + 1))
        log.close()
    assert caplog.messages == []
    run_id = (tmp_path / "wandb" / "run-id.txt").read_text()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{run_id}.wandb"}
    deadline = time.monotonic() + 30  # W&B's own process writes them
    while not all(b"loss/train" in file.read_bytes() for file in files):
        assert time.monotonic() < deadline, [file.stat().st_size for file in files]
        time.sleep(0.1)


@pytest.mark.parametrize("server", ["", "http://127.0.0.1:9"])
def test_wandb_finds_the_login_that_wandb_wrote(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    server: str,
) -> None:
    """The key is stored for the server that W&B uses: its own, or one of the user's."""
    program = """
import sys, wandb
from pathlib import Path
from titan.config.schema import MetricsSection
from titan.observe.sinks import WandbSink

wandb.init = lambda **options: print("mode", options["mode"]) or type("Run", (), {"define_metric": lambda *_, **__: None})
for login in (False, True):
    if login:
        from wandb.sdk.lib.wbauth import write_netrc_auth

        write_netrc_auth(host=wandb.setup().settings.base_url, api_key="a" * 40)
    WandbSink(Path(sys.argv[1]), section=MetricsSection(), resume_step=0, job_config=None)
"""
    pytest.importorskip("wandb")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    environment = (
        kept | {"HOME": str(tmp_path)} | ({"WANDB_BASE_URL": server} if server else {})
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = finished(command, env=environment)
    assert re.findall("mode (.*)", done.stdout) == ["offline", "online"]
    assert "found no login (wandb login): it logs offline, below" in done.stderr


def test_a_sink_that_cannot_open_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ConnectionError("server is down")

    monkeypatch.setattr("titan.observe.metrics.WandbSink", broken)
    section = MetricsSection(enable_wandb=True)
    log = MetricsLog(tmp_path, section=section)
    log.write(step_row(1))
    log.close()
    [message] = caplog.messages
    assert "Weights & Biases" in message and "server is down" in message
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_missing_extra_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    monkeypatch.setattr(titan.observe.sinks, "find_spec", lambda name: None)
    section = MetricsSection.model_validate({f"enable_{extra}": True})
    with pytest.raises(MissingExtra, match=rf"pip install 'titan-pretrain\[{extra}\]'"):
        MetricsLog(tmp_path, section=section, rank=3)  # on every rank alike


def test_model_tflops() -> None:
    assert model_tflops(tokens_per_s=8000, flops_per_token=5e10, num_ranks=2) == pytest.approx(
        200
    )


def test_utilization_adds_up_precisions() -> None:
    """An 8B model whose blocks multiply in float8 and whose output layer multiplies in bf16, by hand."""
    model = {"name": "llama3", "flavor": "8B", "converters": ["quantize.linear.float8"]}
    config = JobConfig.model_validate({"model": model, "training": {"seq_len": 8192}})
    sizes = config.model.sizes
    matrices = {"wq": (4096, 4096), "wk": (1024, 4096), "wv": (1024, 4096), "wo": (4096, 4096)}
    matrices |= {"w1": (14336, 4096), "w2": (4096, 14336), "w3": (14336, 4096)}
    layers = [
        Conversion(f"layers.{n}.{m}", shape) for n in range(32) for m, shape in matrices.items()
    ]
    layers.append(Conversion("output", (128256, 4096), "the output layer"))
    blocks = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    attention = 12 * 32 * 4096 * 8192
    flops = flops_by_dtype(config, sizes, layers)
    assert flops == {"float8": 6 * blocks, "bfloat16": 6 * 128256 * 4096 + attention}
    peaks = {"float8": 1979e12, "bfloat16": 989e12}
    found = utilization(flops, peaks, tokens_per_s=80_000, num_ranks=8)
    by_hand = 10_000 * (6 * blocks / 1979e12 + (6 * 128256 * 4096 + attention) / 989e12)
    assert found == pytest.approx(by_hand, rel=1e-12)
    assert utilization(flops, {"bfloat16": 989e12}, tokens_per_s=1.0, num_ranks=1) is None
    # Gradients of weights stay in bf16, and so do layers without a converter.
    recipe = {"linear": {"float8": {"recipe_name": "rowwise_with_gw_hp"}}}
    job = JobConfig.model_validate(config.model_dump() | {"quantize": recipe})
    assert flops_by_dtype(job, sizes, layers)["float8"] == 4 * blocks
    plain = flops_by_dtype(JobConfig.model_validate({"model": {"flavor": "8B"}}), sizes, ())
    assert plain.keys() == {"bfloat16"}


def test_utilization_of_experts_in_float8() -> None:
    model = {
        "name": "qwen3",
        "flavor": "tiny_moe",
        "converters": ["quantize.grouped_mm.float8"],
    }
    config = JobConfig.model_validate({"model": model})
    sizes = config.model.sizes
    flops = flops_by_dtype(config, sizes, ())
    assert (
        flops["float8"] == 6 * sizes.n_layers * sizes.top_k * 3 * sizes.dim * sizes.expert_dim
    )
    total = sizes.flops_per_token(config.training.seq_len)
    assert sum(flops.values()) == total


def test_a_row_that_a_crash_lost_is_written_from_its_checkpoint(tmp_path: Path) -> None:
    lost = step_row(4) | {"unix_s": time.time() - 100}
    log_steps(tmp_path, range(1, 4))
    log_steps(tmp_path, range(5, 7), resume_step=4, resume_row=lost)
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert found[3]["unix_s"] == lost["unix_s"]
    # A row that is there, another step's row, and another run's folder.
    log_steps(tmp_path, range(7, 8), resume_step=6, resume_row=step_row(6, loss=0.0))
    log_steps(tmp_path, range(9, 10), resume_step=8, resume_row=step_row(7))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert rows(tmp_path)[5]["loss"] != 0.0
    log_steps(tmp_path / "new", range(5, 6), resume_step=4, resume_row=lost)
    assert [row["step"] for row in rows(tmp_path / "new")] == [5]
