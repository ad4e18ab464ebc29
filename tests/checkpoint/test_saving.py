"""When and where a run saves, what it keeps, and that a resumed run is the uninterrupted one, to the bit."""

from __future__ import annotations

import json
import random
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.commands import Shell
from tests.support.jobs import SMALL, with_changes
from tests.support.jobs import job as any_job
from tests.support.metrics import read_json_lines
from tests.support.runs import logged_rows, numbers, saved_tensors
from tests.support.tables import table, tabled
from tests.support.trainers import Trainer
from titan.base.signals import StopRequest
from titan.checkpoint import staging as staging_module
from titan.checkpoint.commit import remove_step
from titan.checkpoint.manager import (
    CheckpointError,
    CheckpointManager,
    SaveFailed,
    list_steps,
    load,
    load_rng_state,
    read_metadata,
    rng_state,
)
from titan.checkpoint.saved_model import find_checkpoint
from titan.checkpoint.staging import Staging
from titan.checkpoint.storage import storage_of
from titan.checks.rules import check
from titan.config.load import load_config
from titan.config.schema import CheckpointSection, JobConfig
from titan.observe.metrics import MetricsLog
from titan.optim.averaged import averaged
from titan.tools import verify

CPU = torch.device("cpu")


BASE = with_changes(
    SMALL,
    model={"overrides": {"n_layers": 1}},
    training={"seq_len": 16, "steps": 6},
    lr_scheduler={"warmup_steps": 2, "total_steps": 6},
    checkpoint={"interval": 2},
)
job = partial(any_job, base=BASE)


def run(config: JobConfig) -> int | None:
    trainer = Trainer(config)
    try:
        return trainer.run()
    finally:
        trainer.close()


# ---- resumed = uninterrupted -----------------------------------------------------------------------

WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = table(__file__, "ways")


@pytest.mark.parametrize("way", WAYS)
def test_resumed_equals_uninterrupted_bit_for_bit(way: str, tmp_path: Path) -> None:
    mode, optimizer, training = WAYS[way]
    training = job(tmp_path).training.model_dump(include={"dataset", "seq_len"}) | training
    common = {"local_batch_size": 2, "mixed_precision_param": "float32"}

    def finish(name: str, mode: str, steps: int) -> None:
        of = common | training | {"steps": steps}
        saves = {"interval": 1, "async_mode": mode}
        run(job(tmp_path / name, training=of, optimizer=optimizer, checkpoint=saves))

    finish("whole", "disabled", 6)
    finish("parts", mode, 3)
    # What was written while training went on is the state of its own step, and not of the next one.
    finish("parts", mode, 6)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    for step in (2, 6):
        whole, parts = (
            saved_tensors(tmp_path / name / "checkpoint" / f"step-{step}", rng=True)
            for name in ("whole", "parts")
        )
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("log_freq", [1, 2])
def test_the_row_of_a_step_survives_a_kill_after_its_save(
    log_freq: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing import event_accumulator as reader

    changes: dict[str, Any] = {
        "metrics": {"log_freq": log_freq, "enable_tensorboard": True},
        "validation": {"enable": True, "freq": 2, "steps": 1},
        "data": {"validation_fraction": 0.5},
    }
    run(job(tmp_path / "whole", **changes))

    class Killed(BaseException):
        pass

    def write(log: MetricsLog, row: dict[str, Any], of: Any = MetricsLog.write) -> None:
        if row["step"] == 4:
            raise Killed
        of(log, row)

    monkeypatch.setattr(MetricsLog, "write", write)
    trainer = Trainer(job(tmp_path / "parts", **changes))
    with pytest.raises(Killed):
        trainer.run()
    trainer.close()
    assert 4 not in [step for step, *_ in numbers(tmp_path / "parts")]
    monkeypatch.undo()
    run(job(tmp_path / "parts", **changes))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    whole, parts = (
        next(
            row
            for row in read_json_lines(tmp_path / name / "metrics.jsonl")
            if row["step"] == 4
        )
        for name in ("whole", "parts")
    )
    assert parts.keys() == whole.keys() and parts["validation_loss"] == whole["validation_loss"]
    events = reader.EventAccumulator(str(tmp_path / "parts/tensorboard"))
    assert 4 in [event.step for event in events.Reload().Scalars("loss/train")]


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    manager = CheckpointManager(CheckpointSection(), run_dir=tmp_path)

    def draw() -> list[float]:
        return [random.gauss(0, 1), np.random.normal(), torch.randn(()).item()]

    draw()  # gauss and normal have now half a pair in store
    path = manager.save(1, rng_state(0, CPU), metadata={})
    expected = [draw() for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    load_rng_state(path, 0, CPU)
    assert [draw() for _ in range(3)] == expected
    before = draw()
    load_rng_state(path, 7, CPU)  # the saving run had no such rank
    assert draw() != before and draw() not in expected


def test_what_is_beside_the_tensors(tmp_path: Path) -> None:
    run(job(tmp_path))
    metadata = read_metadata(tmp_path / "checkpoint" / "step-4")
    assert (metadata["step"], metadata["tokens"]) == (4, 4 * 2 * 16)
    (tmp_path / "again.toml").write_text(metadata["config"])
    assert load_config(tmp_path / "again.toml") == job(tmp_path)


# ---- when, and what is kept ------------------------------------------------------------------------


def test_some_steps_are_kept_for_ever(tmp_path: Path) -> None:
    section = CheckpointSection(keep_latest_k=2, keep_every_n_steps=30)
    manager = CheckpointManager(section, run_dir=tmp_path)
    for step in range(10, 110, 10):
        manager.save(step, {"model.x": torch.ones(2)}, metadata={})
    assert manager.steps() == [30, 60, 90, 100]


def test_a_run_saves_by_the_clock(tmp_path: Path) -> None:
    trainer = Trainer(job(tmp_path, checkpoint={"interval": 100, "interval_minutes": 60}))
    for passed_s in (0, 2400, 1200, 0):
        trainer.checkpoints.saved_at -= passed_s
        trainer.train_one_step()
    trainer.close()
    assert list_steps(tmp_path / "checkpoint") == [3]


def test_blocking_time_is_in_the_metrics_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(job(tmp_path))
    rows = logged_rows(tmp_path)
    assert [row["checkpoint_s"] > 0 for row in rows] == [False, True] * 3
    assert capsys.readouterr().out.count(f"saved {tmp_path}/checkpoint/step-") == 3
    run(job(tmp_path / "async", checkpoint={"interval": 2, "async_mode": "async"}))
    said = re.findall(
        r"saved .* in ([\d.]+) s, of which .* for ([\d.]+) s", capsys.readouterr().out
    )
    assert len(said) == 2 and all(0 <= float(blocked) < 10 for _, blocked in said)


def test_the_seed_checkpoint(tmp_path: Path) -> None:
    run(job(tmp_path / "seed", checkpoint={"create_seed_checkpoint": True}))
    assert list_steps(tmp_path / "seed" / "checkpoint") == [0]
    run(job(tmp_path / "seed"))
    run(job(tmp_path / "plain"))
    assert numbers(tmp_path / "seed") == numbers(tmp_path / "plain")


def test_a_save_of_weights_only_ends_a_run(tmp_path: Path) -> None:
    only = {"last_save_model_only": True, "interval": 4}
    run(job(tmp_path, checkpoint=only))
    assert run(job(tmp_path, checkpoint=only)) == 0  # a finished run: nothing to do
    with pytest.raises(CheckpointError, match=r"step-6 holds weights only, so .* to step 8"):
        Trainer(job(tmp_path, training={"dataset": "synthetic", "seq_len": 16, "steps": 8}))
    torch.distributed.destroy_process_group()


@tabled("settings, message")
def test_settings_that_contradict(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    problems = check(job(tmp_path, checkpoint=settings))
    assert len(problems) == 1 and re.search(message, str(problems[0]))


# ---- saves that fail, in a run ---------------------------------------------------------------------

MODES = pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])


def break_save(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    from titan.checkpoint import commit

    write = commit.write_step

    def fail(*args: Any, step: int, **settings: Any) -> Any:
        if step in steps:
            raise SaveFailed(f"step {step} could not be saved: rank 0: no room")
        return write(*args, step=step, **settings)

    monkeypatch.setattr(commit, "write_step", fail)


@MODES
def test_training_goes_on_when_a_save_fails(
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(job(tmp_path / "plain"))
    break_save(monkeypatch, 4)
    assert run(job(tmp_path / "run", checkpoint={"interval": 2, "async_mode": mode})) == 0
    assert list_steps(tmp_path / "run" / "checkpoint") == [2, 6]
    assert numbers(tmp_path / "run") == numbers(tmp_path / "plain")
    assert capsys.readouterr().out.count("step 4 could not be saved: rank 0: no room") == 1


@MODES
@pytest.mark.parametrize(
    ("step", "on_failure", "left"), [(2, "stop", []), (6, "continue", [2, 4])]
)
def test_a_save_that_has_to_succeed_ends_the_run(
    mode: str,
    step: int,
    on_failure: str,
    left: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_save(monkeypatch, step)
    settings = {"interval": 2, "async_mode": mode, "on_failure": on_failure}
    with pytest.raises(SaveFailed, match="no room" if step == 6 else ""):
        run(job(tmp_path, checkpoint=settings))
    assert list_steps(tmp_path / "checkpoint") == left


@MODES
def test_a_stop_request_waits_for_its_save(mode: str, tmp_path: Path) -> None:
    stop = StopRequest()
    trainer = Trainer(job(tmp_path, checkpoint={"interval": 3, "async_mode": mode}), stop=stop)
    for _ in range(2):
        trainer.train_one_step()
    stop.signal_name = "SIGTERM"
    assert trainer.run() == 75
    assert list_steps(tmp_path / "checkpoint") == [3]
    trainer.close()


# ---- copies ----------------------------------------------------------------------------------------


def test_buffers_are_kept_and_the_copy_is_of_its_own_step() -> None:
    staging = Staging(overlap=True)
    weight = torch.zeros(1000)
    addresses = set()
    for step in range(3):
        weight.fill_(step)
        finish = staging.begin({"x": weight})
        copies = finish()  # the writer's thread
        staging.before_update()
        weight.fill_(-1)
        assert copies["x"].eq(step).all()
        addresses.add(copies["x"].data_ptr())
    assert len(addresses) == 1
    fresh = Staging(overlap=False).begin({"x": weight})
    weight.fill_(7)
    assert fresh()["x"].eq(-1).all()


def test_a_shard_moves_to_the_shared_allocation(one_rank: None) -> None:
    weight = distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    memory = torch.empty(512, dtype=torch.uint8)
    local = staging_module._local(weight)
    staging_module.share_memory([local], lambda _: memory)
    with torch.no_grad():
        weight.fill_(5)
    assert memory.view(torch.float32)[:32].eq(5).all()


def test_pinned_buffers_share_a_few_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place six tensors in three allocations, and find none of them overwritten."""
    monkeypatch.setattr(staging_module, "_ALLOCATION", 4096)
    asked: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    shapes = [(257,), (3, 5), (2000,), (), (0,), (7, 64)]
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.int64,
        torch.float32,
        torch.int8,
    ]
    tensors = [torch.empty(shape, dtype=d) for shape, d in zip(shapes, dtypes, strict=True)]
    staging_module.share_memory(tensors, allocate)
    # The third tensor is larger than an allocation. The last allocation has only the bytes that are still needed.
    assert asked == [4096, 8192, 1024]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert tensor.shape == shapes[number] and tensor.eq(number).all()


def test_a_validation_with_the_average_waits_for_a_copy_under_way(tmp_path: Path) -> None:
    """It sets the weights that are being copied, also after a step without an update, which waits for nothing."""
    config = job(
        tmp_path,
        checkpoint={"interval": 1, "async_mode": "async_with_pinned_mem"},
        average={"enable": True},
        validation={"enable": True, "freq": 100, "steps": 1},
    )
    trainer = Trainer(config)
    trainer.train_one_step()
    weight = next(trainer.train_step.model_parts[0].parameters()).detach()
    finish = trainer.checkpoints.staging.begin({"x": weight})
    expected, copied = weight.clone(), []
    # The writer's thread comes late.
    writer = Timer(0.3, lambda: copied.append(finish()["x"].clone()))
    writer.start()
    with averaged(trainer.train_step):
        writer.join()
        assert not torch.equal(weight, expected)
    trainer.close()
    torch.testing.assert_close(copied[0], expected, rtol=0, atol=0)


class LateDevice(TorchDispatchMode):
    """A device whose `non_blocking` copies arrive when an event is awaited, and its module of streams."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and True in args[2:]:
            self.under_way.append(partial(func, *args[:2]))
            return args[0]
        return func(*args, **(kwargs or {}))

    def synchronize(self) -> None:
        for copy in self.under_way:
            copy()

    # This one object stands for the module, its streams and its events.
    def stream(self, *_: Any) -> Any:
        return nullcontext(self)

    Stream = current_stream = record_event = lambda self, *_: self
    wait_stream = wait_event = lambda *_: None


@pytest.mark.parametrize("overlap", [False, True])
def test_the_writer_gets_copies_that_have_arrived(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA from 12 on may return from a `non_blocking` copy to any memory before its end."""
    weight, device = torch.arange(1000.0), LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    staging = Staging(overlap=overlap)
    with device:
        if overlap:
            copies = {"x": torch.zeros(1000)}
            finish = staging.copy_on_stream({"x": weight}, copies, weight.device)
            assert copies["x"].eq(0).all()
        else:
            finish = staging.begin({"x": weight})
        assert torch.equal(finish()["x"], weight)


def test_an_update_waits_until_the_copy_is_made() -> None:
    staging, weight = Staging(overlap=True), torch.zeros(10)
    finish = staging.begin({"x": weight})

    def update() -> None:
        staging.before_update()
        weight.fill_(1)

    training = Thread(target=update)
    training.start()
    training.join(timeout=0.2)
    assert training.is_alive() and weight.eq(0).all()
    copies = finish()
    training.join(timeout=10)
    assert copies["x"].eq(0).all() and weight.eq(1).all()


# ---- remote folders --------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"memory://{tmp_path}/run" if request.param == "memory" else f"file://{tmp_path}/remote"
    )


def test_a_remote_step_is_committed_by_its_manifest(url: str, tmp_path: Path) -> None:
    section = CheckpointSection(folder=url, keep_latest_k=2)
    manager = CheckpointManager(section, run_dir=tmp_path)
    for step in (1, 2, 3):
        manager.save(step, {"model.x": torch.full((5,), float(step))}, metadata={"step": step})
    assert manager.steps() == [2, 3]
    path = manager.step_to_resume()
    assert path is not None and path == f"{url}/step-3" and read_metadata(path) == {"step": 3}
    found = {"model.x": torch.empty(5)}
    load(path, found)
    assert found["model.x"].eq(3).all()
    assert verify.main([str(path)]) == 0
    files = storage_of(path)
    files.remove(f"{path}/manifest.json")  # as a save that was killed leaves it
    assert manager.steps() == [2]
    manager.save(3, {"model.x": torch.full((5,), 4.0)}, metadata={"step": 3})
    assert manager.steps() == [2, 3]
    remove_step(f"{url}/step-2")
    assert manager.steps() == [3] and "step-2" not in files.listdir(url)


def test_an_old_step_that_is_a_link_to_another_disk_loses_its_link(tmp_path: Path) -> None:
    manager = CheckpointManager(CheckpointSection(keep_latest_k=2), run_dir=tmp_path / "run")
    manager.save(1, {"model.x": torch.ones(5)}, metadata={})
    folder, elsewhere = tmp_path / "run/checkpoint", tmp_path / "disk"
    elsewhere.mkdir()
    (folder / "step-1").rename(elsewhere / "step-1")
    (folder / "step-1").symlink_to(elsewhere / "step-1")
    for step in (2, 3):
        manager.save(step, {"model.x": torch.ones(5)}, metadata={})
    assert manager.steps() == [2, 3] and [p.name for p in folder.glob(".*")] == []
    assert (elsewhere / "step-1/manifest.json").is_file()


def test_a_damaged_remote_step_is_set_aside(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(CheckpointSection(folder=url), run_dir=tmp_path)
    for step in (1, 2):
        manager.save(step, {"model.x": torch.ones(5)}, metadata={})
    with storage_of(url).open(f"{url}/step-2/titan.json", "wb") as stream:
        stream.write(b"{ }")
    assert manager.step_to_resume() == f"{url}/step-1"
    assert "CHECKPOINT STEP 2 IS DAMAGED" in caplog.text and manager.steps() == [1]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_with_a_remote_folder_resumes(url: str, mode: str, tmp_path: Path) -> None:
    settings = {"interval": 3, "folder": url, "async_mode": mode}
    stop = StopRequest()
    trainer = Trainer(job(tmp_path / "parts", checkpoint=settings), stop=stop)
    for _ in range(3):
        trainer.train_one_step()
    trainer.close()
    run(job(tmp_path / "parts", checkpoint=settings))
    run(job(tmp_path / "whole"))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert list_steps(url) == [3, 6]
    for where in (url, f"{url}/step-6"):
        assert find_checkpoint(where)[1] == f"{url}/step-6"
    with pytest.raises(CheckpointError, match="naming a step, or its URL"):
        find_checkpoint(tmp_path / "parts")


def test_a_moved_run_is_used_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    """With its own tokenizer, even where the job's relative path means another file."""
    pytest.importorskip("tokenizers")
    at_home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    at_home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(at_home)
    for folder, words in ((at_home / "mine", "a b c d"), (elsewhere / "mine", "w x y z")):
        folder.mkdir()
        vocabulary = {word: number for number, word in enumerate(words.split())}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}
        split = {"type": "WhitespaceSplit"}
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": model, "pre_tokenizer": split})
        )
    settings = {"tokenizer": {"path": "mine"}, "model": {"overrides": {"vocab_size": 4}}}
    run(job("run", **settings, training={"steps": 2}))
    run(job("run", **settings, training={"steps": 3}))  # a resume keeps the copy
    at_home.joinpath("run").rename(elsewhere / "moved")
    monkeypatch.chdir(elsewhere)

    def generated(*options: str) -> set[str]:
        argv = ["--checkpoint", "moved", "--max-new-tokens", "30", *options]
        printed = shell("generate", *argv)
        return {*printed.out} - {" ", "\n"}

    assert generated("--prompt", "a") == {*"abcd"}
    assert generated("--prompt", "w", "--tokenizer", "mine") == {*"wxyz"}
    copy = elsewhere / "moved" / "tokenizer" / "tokenizer.json"
    for out, options, expected in (
        ("out", [], copy),
        ("other", ["--tokenizer", "mine"], elsewhere / "mine" / "tokenizer.json"),
    ):
        shell(f"convert to-hf moved {out}", *options)
        assert (elsewhere / out / "tokenizer.json").read_bytes() == expected.read_bytes()
    assert "the tokenizer has 258 tokens, but llama3 tiny has" in shell.refuse(
        "generate --checkpoint moved --tokenizer bytes"
    )
    # Without a copy, as of a run of an older titan, the message names the option.
    copy.unlink()
    copy.parent.rmdir()
    (elsewhere / "mine").rename(elsewhere / "gone")
    said = shell.refuse("convert to-hf moved none")
    assert "--tokenizer PATH gives the permission" in said


def test_generate_finds_the_checkpoints_of_a_run(tmp_path: Path, shell: Shell) -> None:
    run(job(tmp_path, checkpoint={"interval": 3, "folder": "elsewhere"}))
    step = tmp_path / "elsewhere" / "step-6"
    for where in (tmp_path, step.parent, step, f"file://{step}"):
        argv = f"--checkpoint {where} --prompt a --max-new-tokens 2"
        assert f"{step}, temperature" in shell(f"generate {argv}").err
    for where in (tmp_path / "logs", tmp_path / "elsewhere" / "step-7", tmp_path / "no"):
        assert shell.refuse(f"generate --checkpoint {where}").startswith(
            f"{where} holds no checkpoint; name a run"
        )


class StrictZipFile(zipfile.ZipFile):
    """It refuses an archive whose positions are not those of its file, as zipfile does since CPython's fix of CVE-2025-8291.

    Python 3.10.19, 3.11.14, 3.12.12, 3.13.8, 3.14.0 and the system's Python of Debian and Ubuntu have the fix.
    """

    def __init__(self, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> None:
        length = file.seek(0, 2)
        file.seek(length - 42)  # locator, 20 bytes, and the end's record, 22 bytes
        signature, _, place, _ = struct.unpack("<4sIQI", file.read(20))
        assert signature == b"PK\x06\x07"
        file.seek(place)
        if file.read(4) != b"PK\x06\x06":
            raise zipfile.BadZipFile("Corrupt zip64 end of central directory locator")
        super().__init__(file, mode, *args, **kwargs)


def test_archives_are_read_at_their_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Some tensors are read at once, and of larger ones only the end."""
    manager = CheckpointManager(CheckpointSection(), run_dir=tmp_path)
    state = {f"model.{size}": torch.randn(size) for size in (1, 1000, 20_000, 400_000)}
    path = manager.save(1, state, metadata={}, wait=True)
    monkeypatch.setattr(zipfile, "ZipFile", StrictZipFile)
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    load(path, found)
    assert all(found[name].equal(value) for name, value in state.items())
