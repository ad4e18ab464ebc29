"""Files that others wrote, of every kind, with every damage: one line that names the file, little memory and time, nothing run.

Each reader runs in one child, and each damage in a fork of it, whose memory and processor time are measured. (Data files: tests/data/; the watcher's
and the plotter's: tests/observe/.)
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.support.bombs import Bomb
from tests.support.commands import finished
from tests.support.tables import table
from titan.base.untrusted import (
    InputError,
    PrintableStream,
    is_plain_name,
    printable,
    read_json,
    tail_lines,
)

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from drills import fuzz

MAX_BYTES, MAX_CPU_S = 200 * 2**20, 10  # over an idle process
ESCAPE = fuzz.ESCAPE.strip()  # into the clipboard, in colour, backwards


# ---- damages ---------------------------------------------------------------------------------------


# What a file may hold instead. It is made when a file needs it: some are large.
CONTENTS: dict[str, Callable[[], bytes]] = {
    "junk": lambda: random.Random(0).randbytes(100_000),
    "deep": lambda: b"[" * 10_000_000,
    "deep_tables": lambda: b'{"a":' * 2_000_000,
    "wide": lambda: b"[" + b"[]," * 15_000_000 + b"[]]",
    "endless_number": lambda: b'{"step": ' + b"9" * 5_000_000 + b"}",
    "list_for_table": lambda: b"[1, null]",
    "escape_keys": lambda: json.dumps({ESCAPE: ESCAPE, f"x\n{ESCAPE}": {ESCAPE: 1}}).encode(),
    "long_header": lambda: (2**40).to_bytes(8, "little") + b"{}" + bytes(20_000),
    "wide_header": lambda: with_length(b"{" + b'"a":[],' * 2_000_000 + b'"b":[]}'),
    "deep_header": lambda: with_length(b"[" * 5_000_000),
    "long_key": lambda: b'"a".' * 200_000 + b"b = 1\n",
    "escaped_toml": lambda: (
        b'[job]\n"x\\u001b]52;c;\\u0007" = "\\u001b[31m"\n[training]\nsteps = "\\u009b"\n'
    ),
}
# What becomes of every leaf of a JSON file.
LEAVES: dict[str, Callable[[Any], Any]] = {
    "huge_numbers": lambda value: 10**30 if isinstance(value, int) else value,
    "not_numbers": lambda value: float("nan") if isinstance(value, int | float) else value,
    "negative": lambda value: -value - 1 if isinstance(value, int | float) else value,
    "other_types": lambda value: [str(value)],
    "escapes": lambda value: f"{value}{ESCAPE}" if isinstance(value, str) else value,
}
SIZES = {
    "billion_layers": {"num_hidden_layers": 10**9},
    "no_heads": {"num_attention_heads": 0},
}


def with_length(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def damage_file(file: Path, damage: str) -> None:
    if damage in CONTENTS:
        file.write_bytes(CONTENTS[damage]())
    elif damage in LEAVES:
        change(file, LEAVES[damage])
    elif damage in SIZES:
        file.write_text(json.dumps(json.loads(file.read_text()) | SIZES[damage]))
    else:
        FUNCTIONS[damage](file)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file: Path) -> None:
    dice, data = random.Random(0), bytearray(file.read_bytes())
    for _ in range(max(len(data) // 50, 3)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file.write_bytes(data)


def sparse(file: Path) -> None:
    os.truncate(file, 2**36)


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def link_out(file: Path) -> None:
    outside = file.parents[2] / "secret"
    outside.write_bytes(file.read_bytes() if file.is_file() else b"{}")
    file.unlink()
    file.symlink_to(outside)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def change(file: Path, what: Callable[[Any], Any]) -> None:
    """Every leaf of a JSON file, or of the lines of one."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(item) for key, item in value.items()}
        return [changed(item) for item in value] if isinstance(value, list) else what(value)

    texts = [file.read_text()] if file.suffix == ".json" else file.read_text().splitlines()
    file.write_text("\n".join(json.dumps(changed(json.loads(text))) for text in texts) + "\n")


ANY = (
    "truncated",
    "flipped",
    "junk",
    "deep",
    "wide",
    "sparse",
    "fifo",
    "device",
    "link_out",
    "folder",
)
JSON = (*ANY, "deep_tables", "endless_number", *LEAVES, "list_for_table", "escape_keys")


def bomb(file: Path) -> None:
    file.write_bytes(pickle.dumps(Bomb(file.parents[2] / "executed")))


def nan_weights(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name: t * float("nan") for name, t in load_file(file).items()}, file)


def escaped_names(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file(
        load_file(file) | {f"x\n{ESCAPE}": next(iter(load_file(file).values())).clone()}, file
    )


WEIGHTS = (*ANY, "long_header", "wide_header", "deep_header", "nan_weights", "escaped_names")


TOML = (
    "truncated",
    "flipped",
    "junk",
    "deep",
    "deep_tables",
    "sparse",
    "fifo",
    "device",
    "folder",
    "long_key",
)
TOML = (*TOML, "escaped_toml", "endless_number")


# ---- kinds of files --------------------------------------------------------------------------------

STATUS = {
    "state": "failed",
    "exit_code": 1,
    "step": 7,
    "reason": "rank 0 failed",
    "unix_s": 1.7e9,
}
DUMP = table(__file__, "dump")
TIMES = {"step": 5, "step_s": 1.0, "own_s": 1.0, "data_wait_s": 0.1, "unix_s": 1.7e9}


def write_run(run: Path) -> None:
    (run / "logs").mkdir(parents=True)
    (run / "flight_recorder").mkdir()
    launch = {"ranks": {"1": {"pid": 1, "exit_code": -9, "unix_s": 1.7e9}}, "oom_kills": 0}
    owner = {"host": "a", "pid": 1, "started": "1", "machine": "m", "job": "", "attempt": ""}
    for name, content in {
        "status.json": STATUS,
        "environment.json": {"written_unix_s": 1.6e9, "world_size": 2},
        "flight_recorder/rank-0.json": DUMP,
        "logs/launch-a.json": launch,
        "lock.json": owner,
    }.items():
        (run / name).write_text(json.dumps(content))
    for name, row in {"metrics.jsonl": TIMES, "logs/rank-0.times.jsonl": TIMES}.items():
        (run / name).write_text(f"{json.dumps(row)}\n" * 5)
    stack = (
        'Current thread 0x1 (most recent call first):\n  File "/x/titan/a.py", line 90 in f\n'
    )
    (run / "logs" / "rank-0.stacks.txt").write_text(stack * 5)


def write_running(run: Path) -> None:
    write_run(run)
    (run / "status.json").write_text(json.dumps(STATUS | {"state": "running"}))


def write_crashed(run: Path) -> None:
    write_run(run)
    launch = {"ranks": {"0": {"pid": 1, "exit_code": -11, "unix_s": 1.7e9}}, "oom_kills": 0}
    (run / "logs" / "launch-a.json").write_text(json.dumps(launch))


def write_step(step: Path) -> None:
    import torch

    from titan.checkpoint.manager import CheckpointManager
    from titan.config.schema import CheckpointSection

    manager = CheckpointManager(CheckpointSection(), run_dir=step.parents[1])
    state = {f"model.{i}": torch.randn(40, 50) for i in range(4)}
    manager.save(7, state, metadata={"step": 7, "tokens": 1, "data": {}, "config": "[job]\n"})


def write_model(model: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from titan.huggingface.load import HFModel
    from titan.models.llama3.config import LlamaConfig
    from titan.models.llama3.huggingface import hf_config

    model.mkdir(parents=True)
    sizes = LlamaConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=32, vocab_size=64)
    described = HFModel.of("llama3", sizes)
    weights = {described.names[k]: torch.randn(shape) for k, shape in described.shapes.items()}
    save_file(weights, model / "part.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "part.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "config.json").write_text(json.dumps(hf_config(sizes)))
    vocab = {"a": 0, "b": 1, "<s>": 2}
    kind = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    parts = (
        "truncation",
        "padding",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
    )
    tokenizer = {"version": "1.0", "added_tokens": [], **dict.fromkeys(parts), "model": kind}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))


def write_single(model: Path) -> None:
    write_model(model)
    (model / "model.safetensors.index.json").unlink()
    (model / "part.safetensors").rename(model / "model.safetensors")


def doctor(run: Path) -> int:
    from titan import cli

    return cli.main(["doctor", str(run)])


def verify_and_load(step: Path) -> int:
    """`titan verify`; then the same again with a manifest that agrees with the damaged file."""
    import torch

    from titan import cli
    from titan.checkpoint.manager import load, read_metadata

    code = cli.main(["verify", str(step)])
    if (step / "manifest.json").is_file() and not (step / "manifest.json").is_symlink():
        fuzz.seal(step, number=7)
    try:
        load(step, {f"model.{i}": torch.empty(40, 50) for i in range(4)})
        read_metadata(step, "step", "tokens", "data")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return code


def convert(model: Path) -> int:
    from titan import cli

    return cli.main(["convert", "from-hf", str(model), str(model.parent / "out")])


def check(job: Path) -> int:
    from titan import cli

    return cli.main(["config", str(job / "job.toml")])


def write_job(job: Path) -> None:
    job.mkdir(parents=True)
    (job / "job.toml").write_text('[job]\ndescription = "a job"\n[training]\nsteps = 5\n' * 1)


RUN: tuple[Any, ...] = (write_run, doctor)
STEP: tuple[Any, ...] = (write_step, verify_and_load)
MODEL: tuple[Any, ...] = (write_model, convert)
TEXT = ("junk", "deep", "sparse", "fifo", "device", "link_out", "folder")
FUNCTIONS = {
    function.__name__: function
    for function in (truncated, flipped, sparse, fifo, device, link_out, folder, bomb)
}
FUNCTIONS |= {"nan_weights": nan_weights, "escaped_names": escaped_names}
KINDS: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "run/status.json": (RUN, JSON),
    "run/environment.json": (RUN, JSON),
    "run/lock.json": ((write_running, doctor), JSON),
    "run/flight_recorder/rank-0.json": (RUN, JSON),
    "run/logs/launch-a.json": (RUN, JSON),
    "run/metrics.jsonl": (RUN, JSON),
    "run/logs/rank-0.times.jsonl": (RUN, JSON),
    "run/logs/rank-0.stacks.txt": ((write_crashed, doctor), TEXT),
    "run/checkpoint/step-7/manifest.json": (STEP, JSON),
    "run/checkpoint/step-7/titan.json": (STEP, JSON),
    "run/checkpoint/step-7/tensors.json": (STEP, JSON),
    "run/checkpoint/step-7/__0_0.distcp": (STEP, (*ANY, "bomb")),
    "run/checkpoint/step-7/.metadata": (STEP, ("bomb",)),
    "model/config.json": (MODEL, (*JSON, "billion_layers", "no_heads")),
    "model/model.safetensors.index.json": (MODEL, JSON),
    "model/model.safetensors": ((write_single, convert), WEIGHTS),
    "model/tokenizer.json": (MODEL, JSON),
    "model/tokenizer_config.json": (MODEL, JSON),
    "job/job.toml": ((write_job, check), TOML),
}
# What is not refused, since it is shown harmlessly, not used, or what a killed run leaves (a torn last line).
HARMLESS: dict[str, set[str]] = {
    "*": {"escapes", "flipped"},
    "run/environment.json": {"negative", "escape_keys"},
    "run/status.json": {"escape_keys"},
    "run/lock.json": {"negative", "huge_numbers"},
    "run/metrics.jsonl": {"truncated"},
    "run/logs/rank-0.times.jsonl": {"truncated"},
    "run/logs/rank-0.stacks.txt": {"junk", "deep", "sparse"},
    "model/model.safetensors.index.json": {
        "negative",
        "huge_numbers",
        "not_numbers",
    },  # has none
    "model/tokenizer_config.json": {"negative", "huge_numbers", "not_numbers", "escape_keys"},
}
READERS = {read.__name__: read for (_, read), _ in KINDS.values()}


def feed(kind: str, damage: str, home: Path) -> dict[str, Any]:
    """One damage, in this process: what was said, and what it took."""
    (write, read), _ = KINDS[kind]
    top = home / kind.split("/")[0]
    root = (home / kind).parent if write is write_step else top
    write(root)
    damage_file(home / kind, damage)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    idle, started = _peak(), _cpu_s()
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = read(root)
    return {
        "code": code,
        "said": said.getvalue(),
        "bytes": _peak() - idle,
        "cpu_s": _cpu_s() - started,
        "executed": any(home.rglob("executed")),
    }


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(reader: str, home: Path) -> None:
    """Each damage of a reader's files in a fork of this process, which has everything imported and warm."""
    for number, (kind, ((write, read), damages)) in enumerate(KINDS.items()):
        if read.__name__ != reader:
            continue
        warm = home / f"warm-{number}"
        write((warm / kind).parent if write is write_step else warm / kind.split("/")[0])
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            read((warm / kind).parent if write is write_step else warm / kind.split("/")[0])
        for damage in damages:
            place = home / f"{number}-{damage}"
            place.mkdir()
            child = os.fork()
            if child == 0:
                resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
                answer = feed(kind, damage, place)
                (place / "answer.json").write_text(json.dumps(answer))
                os._exit(0)
            os.waitpid(child, 0)


@pytest.mark.parametrize("reader", READERS)
def test_damaged_files(reader: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.test_untrusted", reader, str(tmp_path)]
    done = finished(command)
    wrong = []
    for number, (kind, ((_, read), damages)) in enumerate(KINDS.items()):
        for name in damages if read.__name__ == reader else ():
            answer = tmp_path / f"{number}-{name}" / "answer.json"
            if not answer.exists():
                wrong.append(f"{kind}, {name}: ended by an exception or a signal")
                continue
            found = json.loads(answer.read_text())
            said, file = found["said"], kind.rsplit("/", 1)[1]
            is_harmless = name in HARMLESS["*"] | HARMLESS.get(kind, set())
            refused = found["code"] and any(file in line for line in said.splitlines())
            is_clean = all(printable(line) == line for line in said.splitlines())
            is_small = found["bytes"] <= MAX_BYTES and found["cpu_s"] <= MAX_CPU_S
            is_well = (
                is_clean and is_small and "Traceback" not in said and not found["executed"]
            )
            if not is_well or not (refused or is_harmless):
                wrong.append(f"{kind}, {name}: {found}")
    assert not wrong, "\n".join([*wrong, done.stderr[-3000:]])


def test_files_of_a_run_damaged_at_random(tmp_path: Path) -> None:
    assert fuzz.fuzz(tmp_path, count=200) == []


# ---- the reader itself -----------------------------------------------------------------------------


def test_what_reaches_a_terminal() -> None:
    assert printable(f"a{ESCAPE}\n") == "a\\u001b]52;c;aGFoYQ==\\u0007\\u009b31m\\u202e\\u000a"
    assert printable("straße, 東京, 🙂") == "straße, 東京, 🙂"
    assert printable("x" * 50, 10) == "xxxxxx ..."
    assert str(InputError(f"a\n{ESCAPE}")).count("\n") == 1
    PrintableStream(shown := io.StringIO()).write(f"a\u200db\n{ESCAPE}")
    assert shown.getvalue() == "a\u200db\n" + printable(ESCAPE)


def test_names_in_a_folder() -> None:
    assert is_plain_name("__0_0.distcp")
    for name in (
        "",
        ".",
        "..",
        "a/b",
        "a\\b",
        "/a",
        "a\x00",
        "a\n",
        ESCAPE,
        "x" * 300,
        3,
        None,
    ):
        assert not is_plain_name(name)


def test_links_within_a_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "1").mkdir(parents=True)
    (tmp_path / "blobs" / "a").write_text('{"a": 1}')
    link = tmp_path / "snapshots" / "1" / "a.json"
    link.symlink_to("../../blobs/a")
    assert read_json(link, dict[str, int]) == {"a": 1}
    assert read_json(link, dict[str, int], within=tmp_path) == {"a": 1}
    with pytest.raises(
        InputError, match=r"a\.json: cannot be read: it is a link that leads out"
    ):
        read_json(link, dict[str, int], within=link.parent)


def test_the_tail_of_a_long_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100 + b"\nsecond\n\xffthird\n")
    assert tail_lines(tmp_path / "a", limit=20) == ["second", "�third", ""]


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
