"""A process whose host memory is not enough ends with one line."""

from __future__ import annotations

import errno
import sys

import pytest

from tests.support.commands import Shell, finished
from tests.support.jobs import ROOT
from titan.base.errors import kind_of
from titan.ops.memory_limit import out_of_memory

ERRORS = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
    ),
    RuntimeError("std::bad_alloc\nframe #0"),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
def test_a_shortage_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    found = out_of_memory(error)
    assert found is not None and kind_of(found) == "out_of_host_memory"

    def fail(_: object) -> int:
        raise ValueError("another") from error

    monkeypatch.setattr("titan.cli.load_command", lambda _: fail)
    line = shell("check", code=1).err
    assert line.startswith("out of memory: ") and line.count("\n") == 1
    assert out_of_memory(ValueError("another")) is None


def test_torch_is_not_imported_where_it_does_not_fit() -> None:
    """C++ would end the process while its libraries are loaded."""
    train = f"{sys.executable} -m titan.cli train train_configs/debug_model.toml"
    command = ["bash", "-c", f"ulimit -v 600000; exec {train} --job.dump_folder=/nowhere"]
    done = finished(command, cwd=ROOT, code=None)
    assert done.returncode == 2 and done.stderr.startswith("out of memory: torch needs 1 GiB")
    assert "0.57 GiB" in done.stderr and done.stderr.count("\n") == 1
