"""Runs of megatron-core for tests: each variant of megatron_run.py is trained once, by the first test that asks."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

SCRIPT = Path(__file__).with_name("megatron_run.py")
LIMIT_S = 240


@dataclass(frozen=True)
class MegatronRun:
    """A run of Megatron.

    Attributes:
        folder: its run folder, with latest_checkpointed_iteration.txt.
        iteration: the checkpoint of step 2.
        reference: what megatron_run.py says: "variant", "tokens" and "steps" by step, "state" by step, "groups".
    """

    folder: Path
    iteration: Path
    reference: dict[str, Any]


def train_megatron(out: Path, variant: str, *changes: str) -> MegatronRun:
    """Train a variant in new processes.

    Args:
        out: an empty folder.
        variant: a row of megatron_run.VARIANTS.
        changes: changes of its fields, such as "tp=2".
    """
    with (out / "log.txt").open("w+") as log:
        # Megatron's writers are processes of their own, which a kill of the first would leave.
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(out), variant, *changes],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        log.seek(0)
        assert code == 0, log.read()[-4000:]
    [iteration] = (out / "run").glob("iter_*")
    reference = torch.load(out / "reference.pt", weights_only=True)
    return MegatronRun(out / "run", iteration, reference)


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MegatronRun]:
    """Return a function that trains a variant, or returns the run that it made before."""
    for package in ("megatron.core", "psutil"):
        pytest.importorskip(package)
    runs: dict[tuple[str, ...], MegatronRun] = {}

    def run(*variant: str) -> MegatronRun:
        if variant not in runs:
            runs[variant] = train_megatron(tmp_path_factory.mktemp("megatron"), *variant)
        return runs[variant]

    return run


def write_model_space(iteration: Path, out: Path) -> None:
    """Write a checkpoint's moments in the form fully_sharded_model_space, which megatron-core wrote until 0.13.

    There, a moment is a table of flat shards: (shards along each dimension of the weight ..., elements of a shard).
    megatron-core 0.12.3 writes (4, 2, 1, 6144) for fc1 of (4, 192, 64), whose shards are gate and up of a layer.

    Args:
        iteration: a checkpoint whose moments have the shapes of the weights.
        out: a new folder.
    """
    reader = dcp.FileSystemReader(iteration)
    state: dict[str, Any] = {}
    shards: dict[str, list[int]] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, dcp.TensorStorageMetadata):
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            size = entry.chunks[0].sizes
            shards[key] = [whole // part for whole, part in zip(entry.size, size, strict=True)]
    dcp.load(state, checkpoint_id=iteration, no_dist=True)
    extra: dict[str, dict[str, Any]] = {}
    for key, tensor in [*state.items()]:
        extra[key] = {}
        if key.startswith("optimizer.state."):
            weight = key.split(".", 3)[3]
            split = [
                size
                for whole, count in zip(tensor.shape, shards[weight], strict=True)
                for size in (count, whole // count)
            ]
            counts = range(0, 2 * tensor.ndim, 2)
            inner = range(1, 2 * tensor.ndim, 2)
            table = tensor.view(split).permute(*counts, *inner)
            # fully_reshardable calls the master weights "param".
            del state[key], extra[key]
            key = key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
            state[key] = table.reshape(*shards[weight], -1)
            extra[key] = {"nd_reformulated_orig_global_shape": tuple(tensor.shape)}
    dcp.save(state, checkpoint_id=out, no_dist=True)
    # Megatron keeps the shapes of the weights in the attribute mcore_data.
    file = out / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.mcore_data = extra
    file.write_bytes(pickle.dumps(metadata))
    for name in ("common.pt", "metadata.json"):
        shutil.copyfile(iteration / name, out / name)
