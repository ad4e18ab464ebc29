"""Damaged files are found before they are used, and what was saved before is used instead."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import titan
from tests.support.commands import Shell
from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.tables import tabled
from tests.support.trainers import Trainer, run_to_end
from titan.base import untrusted
from titan.checkpoint import identity, manifest, tensor_index
from titan.checkpoint.manager import CheckpointError, CheckpointManager, list_steps, load
from titan.checkpoint.manifest import HashingStream, find_damage, read_manifest, render
from titan.checkpoint.storage import LocalStorage
from titan.checkpoint.tensor_index import Chunk, StoredTensor, TensorIndex
from titan.checkpoint.tensors import read_metadata
from titan.config.schema import CheckpointSection
from titan.tools import verify

FILES = [
    ".metadata",
    "__0_0.distcp",
    "__1_0.distcp",
    "manifest.json",
    "tensors.json",
    "titan.json",
]
STEPS = (10, 20, 30)


def section(**settings: Any) -> CheckpointSection:
    return CheckpointSection.model_validate(settings)


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"model.{i}": torch.randn(40, 50, generator=generator) for i in range(8)}


def to_resume(run_dir: Path, **settings: Any) -> Any:
    """Return the step that a run would resume from."""
    return CheckpointManager(section(**settings), run_dir=run_dir).step_to_resume()


def save_steps(folder: Path) -> None:
    manager = CheckpointManager(section(), run_dir=folder)
    for step in STEPS:
        manager.save(step, state_of(step), metadata={"step": step})


@pytest.fixture(scope="module")
def pristine(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    pool.run(2, save_steps, folder)
    return folder


@pytest.fixture
def run_dir(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def step_dir(run_dir: Path, step: int = 30) -> Path:
    return run_dir / "checkpoint" / f"step-{step}"


def files_found(folder: Path) -> set[str]:
    return {damage.file for damage in find_damage(folder)}


def test_what_was_saved_is_whole(run_dir: Path) -> None:
    assert sorted(p.name for p in step_dir(run_dir).iterdir()) == FILES
    assert not any(find_damage(step_dir(run_dir, step)) for step in STEPS)
    manifest = read_manifest(step_dir(run_dir))
    assert (manifest.titan, manifest.torch) == (titan.__version__, torch.__version__)
    old = render(replace(manifest, titan="", torch=""))  # as titan wrote it before
    assert b"torch" not in old
    (step_dir(run_dir) / "manifest.json").write_bytes(old)
    assert not find_damage(step_dir(run_dir))
    assert sorted(p.name for p in (run_dir / "checkpoint").iterdir()) == [
        f"step-{s}" for s in STEPS
    ]


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_zeroed_pages_truncations_and_a_missing_file(
    name: str, run_dir: Path
) -> None:
    dice, file = random.Random(name), step_dir(run_dir) / name
    good = file.read_bytes()
    for number in range(200):
        place, bad = dice.randrange(len(good)), bytearray(good)
        if number < 170:
            bad[place] ^= 1 << dice.randrange(8)
        elif number < 185:
            page = slice(place // 4096 * 4096, place // 4096 * 4096 + 4096)
            bad[page] = bytes(len(bad[page]))
        else:
            del bad[place:]
        file.write_bytes(bad)
        assert files_found(file.parent) == {name}
    file.unlink()
    assert files_found(file.parent) == {name}


def test_swapped_files_and_files_of_another_step(run_dir: Path) -> None:
    first, second = (step_dir(run_dir) / f"__{i}_0.distcp" for i in (0, 1))
    for name in FILES:
        other = Path(shutil.copytree(step_dir(run_dir), run_dir / "other" / "step-30"))
        shutil.copy(step_dir(run_dir, 20) / name, other / name)
        # Both steps hold the same tensors in the same bytes of their files, so their indices are equal.
        assert files_found(other) == {name} - {"tensors.json"}
        shutil.rmtree(other)
    first.rename(first.with_name("x"))
    second.rename(first)
    first.with_name("x").rename(second)
    assert files_found(step_dir(run_dir)) == {first.name, second.name}
    renamed = step_dir(run_dir, 20).rename(step_dir(run_dir, 50))
    assert [str(d) for d in find_damage(renamed)] == ["manifest.json: belongs to step 20"]


def test_the_byte_range_is_named(tmp_path: Path) -> None:
    manager = CheckpointManager(section(), run_dir=tmp_path)
    manager.save(1, {"model.x": torch.zeros(9 * 2**20)}, metadata={})
    file = step_dir(tmp_path, 1) / "__0_0.distcp"
    with file.open("r+b") as stream:
        stream.seek(20_000_000)
        stream.write(b"x")
    assert [str(d) for d in find_damage(step_dir(tmp_path, 1))] == [
        "__0_0.distcp: bytes 16,777,216 to 33,554,431 are not what was saved"
    ]


# ---- what a run does about it ----------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda step: flip(step / "__1_0.distcp"),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "no titan.json": lambda step: (step / "titan.json").unlink(),
    "no metadata": lambda step: (step / ".metadata").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_step_is_used(
    damage: str, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (20, 30):
        DAMAGES[damage](step_dir(run_dir, step))
    path = to_resume(run_dir)
    assert path is not None and path == step_dir(run_dir, 10)
    assert "STEP 30 IS DAMAGED AND NOT USED" in caplog.text
    assert "RESUMING FROM STEP 10" in caplog.text
    assert list_steps(run_dir / "checkpoint") == [10]
    assert (run_dir / "checkpoint" / "damaged-30").is_dir()
    found = {"model.0": torch.empty(40, 50)}
    load(path, found)
    assert torch.equal(found["model.0"], state_of(10)["model.0"])


def resume(run_dir: Path) -> tuple[Any, list[str]]:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("titan").addHandler(handler)
    return to_resume(run_dir), heard


def test_all_ranks_agree_though_each_looks_at_a_part(run_dir: Path, pool: Pool) -> None:
    flip(step_dir(run_dir) / "__1_0.distcp")
    results = pool.run(3, resume, run_dir)
    assert {path for path, _ in results} == {step_dir(run_dir, 20)}
    assert all("STEP 30 IS DAMAGED" in heard[0] for _, heard in results)


@pytest.mark.parametrize("name", FILES)
def test_unreadable_is_not_damaged(name: str, run_dir: Path, monkeypatch: Any) -> None:
    left, really_open = [0], os.open

    def fail(path: Any, *args: Any) -> int:
        if path == step_dir(run_dir) / name and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return really_open(path, *args)

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(untrusted, "PAUSES_S", (0.0, 0.0))
    manager = CheckpointManager(section(), run_dir=run_dir)
    for act in (manager.step_to_resume, lambda: load(step_dir(run_dir), state_of(30))):
        left[0] = 1
        act()
        left[0] = 1000
        with pytest.raises(CheckpointError, match=r"cannot be read.*Stale") as caught:
            act()
        assert caught.value.kind == "disk_lost"
        assert list_steps(run_dir / "checkpoint") == list(STEPS)
        if name in (".metadata", "titan.json"):  # `load` reads neither
            break


@tabled("name, what")
def test_newer_is_not_damaged(name: str, what: str, run_dir: Path) -> None:
    file = step_dir(run_dir) / name
    body = json.loads(file.read_text())
    if what == "format 2":
        file.write_text('{"format": 2,' + file.read_text()[1:])
    else:  # whole, but not as this titan writes it
        del body["hash"]
        body |= {"more": 1, "titan": [titan.__version__]}
        file.write_bytes(manifest._sealed(body))
    version = rf", titan {titan.__version__}" if "other" not in what else ""
    expected = rf"{name}: was written by a newer titan \({what}{version}\)"
    with pytest.raises(CheckpointError, match=expected) as caught:
        to_resume(run_dir)
    assert caught.value.kind == "checkpoint_newer"
    assert list_steps(run_dir / "checkpoint") == list(STEPS)
    assert verify.main([str(file.parent)]) == 2


@tabled("value", ids=json.dumps)
def test_impossible_values_are_refused(value: dict[str, Any], run_dir: Path) -> None:
    """Whatever their hash says."""
    file = step_dir(run_dir) / "titan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | value))
    with pytest.raises(CheckpointError, match=rf"titan.json: .*{next(iter(value))}"):
        identity.read_metadata(step_dir(run_dir))


@pytest.mark.parametrize("is_done", [False, True])
def test_a_rename_is_tried_again(
    is_done: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server may rename, and report an error nevertheless."""
    replace, errors = Path.replace, []

    def fail(path: Path, target: Path) -> Path:
        if not errors:
            errors.append(replace(path, target) if is_done else path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(untrusted, "PAUSES_S", (0.0, 0.0))
    LocalStorage().rename(step_dir(run_dir), step_dir(run_dir, 40))
    assert errors and list_steps(run_dir / "checkpoint") == [*STEPS[:-1], 40]
    with pytest.raises(FileNotFoundError):  # nobody has renamed it
        LocalStorage().rename(step_dir(run_dir, 50), step_dir(run_dir, 40))


def test_where_none_is_whole_the_run_does_not_start(run_dir: Path) -> None:
    for step in STEPS:
        flip(step_dir(run_dir, step) / "titan.json")
    for _ in range(2):  # nor the second time
        with pytest.raises(
            CheckpointError, match=r"NO CHECKPOINT IS WHOLE .step 10, 20, 30.*titan"
        ):
            to_resume(run_dir)
    assert list_steps(run_dir / "checkpoint") == list(STEPS)


def test_without_a_manifest_nothing_is_loaded_unless_told(run_dir: Path) -> None:
    for step in STEPS:
        (step_dir(run_dir, step) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r'cannot be read.*checkpoint\.verify = "off"'):
        to_resume(run_dir)
    assert to_resume(run_dir, verify="off") == step_dir(run_dir)


def test_a_damaged_step_asked_for_by_number_is_an_error(run_dir: Path) -> None:
    flip(step_dir(run_dir, 20) / ".metadata")
    with pytest.raises(CheckpointError, match=r"step-20 is damaged: \.metadata: bytes 0 to"):
        to_resume(run_dir, load_step=20)


def test_a_fresh_start_says_what_it_found(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert to_resume(run_dir, folder="other") is None
    assert "a fresh start" in caplog.text and f"in {run_dir}/checkpoint" in caplog.text


def test_titan_verify(run_dir: Path, shell: Shell) -> None:
    step = step_dir(run_dir)
    assert f"{step} is whole" in shell(f"verify {step}").out
    flip(step / "__0_0.distcp")
    assert "__0_0.distcp: bytes 0 to" in shell(f"verify {step}", code=1).out
    answer = json.loads(shell(f"verify {step} --json", code=1).out)
    assert not answer["whole"] and answer["damages"][0]["file"] == "__0_0.distcp"
    shell.refuse(f"verify {run_dir}/nothing")
    (step / "manifest.json").unlink()
    shell(f"verify {step}", code=1)


def test_titan_verify_of_a_run_names_its_newest_step(run_dir: Path, shell: Shell) -> None:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "rank-0.log").touch()
    newest = step_dir(run_dir)
    for folder in (run_dir, newest.parent, f"file://{run_dir}"):
        told = f"{folder} is no checkpoint; did you mean {folder}"
        assert shell.refuse(f"verify {folder}").startswith(told)
    assert shell.refuse(f"verify {run_dir}").endswith(f"did you mean {newest}?\n")
    shell.refuse(f"verify {run_dir}/logs")
    shell.refuse("verify nowhere://run")


def test_titan_verify_imports_no_torch(run_dir: Path) -> None:
    code = (
        "import sys; from titan.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "verify", str(step_dir(run_dir))]
    assert subprocess.run(command, capture_output=True).returncode == 0


# ---- what a checkpoint must not do -----------------------------------------------------------------


def test_a_step_without_its_index_is_refused(run_dir: Path) -> None:
    step = step_dir(run_dir)
    (step / "tensors.json").unlink()
    manifest = read_manifest(step)
    files = {name: entry for name, entry in manifest.files.items() if name != "tensors.json"}
    (step / "manifest.json").write_bytes(render(replace(manifest, files=files)))
    [damage] = find_damage(step)
    assert damage.file == "tensors.json"
    with pytest.raises(
        CheckpointError, match=r"not a checkpoint: .*/tensors\.json: No such file"
    ):
        load(step, {"model.0": torch.empty(40, 50)})


Tensors = dict[str, dict[str, Any]]


def change_chunk(number: int, value: Any) -> Callable[[Tensors], None]:
    """Return what sets a part of a chunk: offsets, sizes, file, first byte, number of bytes."""

    def change(tensors: Tensors) -> None:
        tensors["model.3"]["chunks"][0][number] = value

    return change


HOLES: dict[str, Callable[[Tensors], object]] = {
    "no chunks": lambda t: t["model.3"]["chunks"].clear(),
    "a smaller chunk": change_chunk(1, [1, 1]),
    "a chunk too many": lambda t: t["model.3"]["chunks"].append(t["model.3"]["chunks"][0]),
    "other axes": change_chunk(1, [40, 50, 1]),
    "too few bytes": change_chunk(4, 100),
    "bytes past the end": change_chunk(3, 2**40),
    "a file that is not the manifest's": change_chunk(2, "__7_0.distcp"),
    "a path upwards": change_chunk(2, "../step-20/__0_0.distcp"),
    "an absolute path": change_chunk(2, "/etc/passwd"),
    "negative bytes": change_chunk(3, -1),
    "an unknown dtype": lambda t: t["model.3"].update(dtype="Tensor"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_an_index_that_leaves_something_out(hole: str, run_dir: Path) -> None:
    """The manifest agrees with it. `titan verify` and loading notice; a run steps back."""
    step = step_dir(run_dir)
    index = json.loads((step / "tensors.json").read_text())
    HOLES[hole](index["tensors"])
    (step / "tensors.json").write_text(json.dumps(index))
    hash_again(step, "tensors.json")
    assert files_found(step) == {"tensors.json"}
    with pytest.raises(CheckpointError, match=r"tensors\.json.*model\.3"):
        load(step, {"model.3": torch.empty(40, 50)})
    assert to_resume(run_dir) == step_dir(run_dir, 20)


def hash_again(step: Path, name: str) -> None:
    """Make the manifest agree with a file, as whoever can write the folder can."""
    manifest, stream = read_manifest(step), HashingStream(io.BytesIO())
    stream.write((step / name).read_bytes())
    files = manifest.files | {name: stream.entry()}
    (step / "manifest.json").write_bytes(render(replace(manifest, files=files)))


@pytest.mark.parametrize("size", [(), (7,), (6, 5), (4, 3, 5), (0, 3)], ids=str)
def test_which_chunks_cover_a_tensor(size: tuple[int, ...]) -> None:
    """Any cut of a box into boxes covers it, in any order; none does if a part is lost, doubled or moved."""
    dice = random.Random(0)

    def cut(offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> list[Any]:
        axes = [d for d, n in enumerate(sizes) if n > 1]
        if not axes or depth == 0:
            return [(offsets, sizes)]
        d = dice.choice(axes)
        n = dice.randrange(1, sizes[d])
        first = (*sizes[:d], n, *sizes[d + 1 :])
        rest = (*sizes[:d], sizes[d] - n, *sizes[d + 1 :])
        moved = (*offsets[:d], offsets[d] + n, *offsets[d + 1 :])
        return [*cut(offsets, first, depth - 1), *cut(moved, rest, depth - 1)]

    def is_covered(chunks: list[Any]) -> bool:
        stored = [Chunk(*chunk, file="a", first=0, num_bytes=0) for chunk in chunks]
        return tensor_index.is_covered(StoredTensor("float32", size, stored))

    for _ in range(50):
        chunks = cut((0,) * len(size), size, 4)
        dice.shuffle(chunks)
        assert is_covered(chunks)
        if 0 in size:
            continue
        (offsets, sizes), *rest = chunks
        shifted = [(tuple(n + 1 for n in offsets), sizes)] if size else []
        for wrong in (rest, [*chunks, chunks[0]], [*rest, *rest], [*rest, *shifted]):
            assert not is_covered(wrong)


def test_plain_dcp_loads_a_step(run_dir: Path) -> None:
    loaded = {name: torch.empty_like(value) for name, value in state_of(30).items()}
    dcp.load(loaded, checkpoint_id=step_dir(run_dir), no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in state_of(30).items())


def test_a_compressed_tensor_is_refused(tmp_path: Path) -> None:
    """A small archive could become a tensor of any size."""
    step = tmp_path / "step"
    dcp.save({"x": torch.zeros(1000)}, checkpoint_id=step, no_dist=True)
    file = step / "__0_0.distcp"
    size, packed = file.stat().st_size, io.BytesIO()
    with (
        zipfile.ZipFile(file) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        new.writestr("archive/padding", random.Random(0).randbytes(size - packed.tell()))
    file.write_bytes(packed.getvalue())
    place = (file.name, 0, len(packed.getvalue()))
    index = TensorIndex({"x": StoredTensor("float32", (1000,), [Chunk((0,), (1000,), *place)])})
    (step / "tensors.json").write_bytes(tensor_index.render(index))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: holds a compressed tensor"):
        load(step, {"x": torch.empty(1000)})


def test_the_index_reads_back_as_torch_wrote_it(run_dir: Path) -> None:
    theirs = pickle.loads((step_dir(run_dir) / ".metadata").read_bytes())
    ours = read_metadata(step_dir(run_dir))
    for tensor in theirs.state_dict_metadata.values():
        if hasattr(tensor.properties, "strides"):  # written since torch 2.15; read by nothing
            tensor.properties.strides = None
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


# ---- what reads a checkpoint besides a run ---------------------------------------------------------


def train(folder: Path) -> None:
    config = job(folder, model={"overrides": {"n_layers": 1}}, checkpoint={"interval": 1})
    run_to_end(Trainer(config))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both kept."""
    train(folder := tmp_path_factory.mktemp("trained"))
    return folder


def test_generate_uses_what_a_resume_would(
    trained: Path, tmp_path: Path, shell: Shell, caplog
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    flip(step_dir(run, 2) / "__0_0.distcp")
    command = "generate --prompt a --max-new-tokens 2 --checkpoint"
    for where in (run, run / "checkpoint"):
        caplog.clear()
        assert f"[{step_dir(run, 1)}, " in shell(f"{command} {where}").err
        assert "CHECKPOINT STEP 2 IS DAMAGED AND NOT USED: __0_0.distcp" in caplog.text
    assert list_steps(run / "checkpoint") == [1, 2], "a reader renames nothing"
    assert shell.refuse(f"{command} {step_dir(run, 2)}").startswith(
        f"{step_dir(run, 2)} is damaged: __0_0.distcp: bytes"
    )
    flip(step_dir(run, 1) / "titan.json")
    assert "NO CHECKPOINT IS WHOLE" in shell.refuse(f"{command} {run}")
