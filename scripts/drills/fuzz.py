"""Damage the files of a run folder at random, and read each by the commands that read it, in this process.

    python scripts/drill.py fuzz --count 2000 --seed 0     prints each finding, and exits with 1 if there is one

A command must end with an exit code, without an exception, and print nothing that could steer a terminal. tests/test_untrusted.py
does some hundreds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from .shared import TABLE as ALL
from .shared import TITAN

TABLE = ALL["fuzz"]
ESCAPE = "\x1b]52;c;aGFoYQ==\x07\x9b31m\u202e\n"
ODD: list[Any] = [
    *(None, True, -1, 10**30, 2**63, 1e999, float("nan"), "", "x", ESCAPE, "../../x"),
    *("/dev/zero", "s3://host/x", [], {}, [[]], {ESCAPE: ESCAPE}, [ESCAPE], "9" * 5000),
]


def write_run(folder: Path) -> None:
    """Train a tiny model for three steps, and leave a lock as a killed run does."""
    job = folder.with_suffix(".toml")
    job.write_text(TABLE["job"])
    command = [*TITAN, "train", str(job), f"--job.dump_folder={folder}"]
    subprocess.run(command, check=True, capture_output=True)
    lock = {"host": "a", "pid": 1, "started": "1", "machine": "m", "job": "", "attempt": ""}
    (folder / "lock.json").write_text(json.dumps(lock))


def damages(dice: random.Random) -> list[Callable[[Path], None]]:
    """Return the kinds of damage, each a function of the file."""

    def bits(file: Path) -> None:
        data = bytearray(file.read_bytes())
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)

    def cut(file: Path) -> None:
        data = file.read_bytes()
        begin, end = sorted(dice.randrange(len(data) + 1) for _ in range(2))
        file.write_bytes(data[:begin] + dice.choice([b"", data[end:]]))

    def insert(file: Path) -> None:
        data, at = file.read_bytes(), dice.randrange(file.stat().st_size + 1)
        piece = dice.choice(
            [ESCAPE.encode(), b"\x00", b"[" * 1000, b"\xff", b"{}\n", data[:at]]
        )
        file.write_bytes(data[:at] + piece + data[at:])

    def setting(text: str) -> str:
        lines = text.splitlines()
        at = dice.choice([n for n, line in enumerate(lines) if " = " in line])
        odd = dice.choice(ODD)
        new = "nan" if odd != odd else json.dumps(odd).replace("null", '"x"')
        lines[at] = f"{lines[at].partition(' = ')[0]} = {new}"
        return "\n".join(lines)

    def value(file: Path) -> None:
        text = file.read_text()
        if file.suffix == ".toml":
            file.write_text(setting(text))
            return
        parts = text.splitlines() if file.suffix == ".jsonl" else [text]
        at = dice.randrange(len(parts))
        content = json.loads(parts[at])
        if "config" in content and dice.random() < 0.7:
            content["config"] = setting(content["config"])
        else:
            holder, key = dice.choice([*_leaves(content)])
            holder[key] = dice.choice(ODD)
        parts[at] = json.dumps(content, ensure_ascii=False)
        file.write_text("\n".join(parts) + "\n")

    def other(file: Path) -> None:
        file.unlink()
        target = dice.choice(["", "/", "/dev/zero", "/etc/hostname", file.name])
        if not target:
            os.mkfifo(file)
        elif target == "/":
            file.mkdir()
        else:
            file.symlink_to(target)

    return [bits, cut, insert, value, value, value, other]


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _leaves(inner)


def read(argv: list[str]) -> tuple[str, str]:
    """Run a command of titan here. Return what it said, and what is wrong."""
    from titan import cli

    said = io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = cli.main(argv)
    except BaseException:
        return said.getvalue(), traceback.format_exc(limit=-4)
    wrong = [f"exit code {code}"] if code not in (0, 1, 2) else []
    return said.getvalue(), "".join(wrong)


def check(said: str) -> str:
    """Return what is wrong with the output of a command."""
    from titan.base.untrusted import printable

    dirty = [line for line in said.split("\n") if line != printable(line)]
    return f"unprintable: {dirty[0]!r}" if dirty else "Traceback" * ("Traceback (" in said)


def seal(step: Path, *, number: int = 3) -> None:
    """Write the manifest that its files need, as the author of a hostile step does."""
    from titan.checkpoint.manifest import HashingStream, write_manifest

    entries = {}
    for file in sorted(step.iterdir()):
        small = file.is_file() and not file.is_symlink() and file.stat().st_size < 2**24
        if file.name != "manifest.json" and small:
            stream = HashingStream(io.BytesIO())
            stream.write(file.read_bytes())
            entries[file.name] = stream.entry()
    if (step / "manifest.json").is_file():
        write_manifest(step, entries, step=number)


def fuzz(place: Path, *, count: int, seed: int = 0) -> list[str]:
    """Return the findings of `count` damages of a run's files.

    Args:
        place: empty folder.
        count: number of damages.
        seed: seed of the damages.
    """
    dice, whole, found = random.Random(seed), place / "whole", list[str]()
    run, out = place / "run", place / "out"
    write_run(whole)
    files = [f for f in sorted(whole.rglob("*")) if f.is_file() and f.stat().st_size]
    for number in range(count):
        for folder in (run, out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, run)
        out.mkdir()
        file = run / dice.choice(files).relative_to(whole)
        damage = dice.choice(damages(dice))
        try:
            damage(file)
        except (ValueError, IndexError):  # a value of a file that has none
            continue
        step = run / "checkpoint" / "step-3"
        # A file of a step: on its own, as one that was sent.
        if (file.parent / "titan.json").is_file():
            step = file.parent.rename(out / "step-3")
            if dice.random() < 0.8:
                seal(step)
        readers = next(c for end, c in TABLE["readers"].items() if file.name.endswith(end))
        for command in readers:
            argv = command.format(run=run, step=step, out=out).split()
            said, wrong = read(argv)
            if wrong := wrong or check(said):
                where = f"{number}: {damage.__name__} of {file.relative_to(run)}"
                found.append(f"{where}, titan {command}: {wrong}")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the piece's options."""
    parser.add_argument("--count", type=int, default=2000, help="default: 2000")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
    """Damage and read. Return 1 if something is wrong."""
    with tempfile.TemporaryDirectory() as place:
        found = fuzz(Path(place), count=options.count, seed=options.seed)
    print(*found, f"{options.count} damages, {len(found)} findings", sep="\n")
    return int(bool(found))
