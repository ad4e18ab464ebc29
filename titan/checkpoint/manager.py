"""Saving and resuming with PyTorch's distributed checkpoint (DCP).

    checkpoint/step-N/    complete: appears under this name by one rename, after every rank has written its part
    checkpoint/.saving-N/ being written; left by a crash, and removed by the next save

A checkpoint is a flat dictionary of tensors, whose names do not depend on the layout; DCP stores the shards and
puts them together again under any other layout:

    model.<parameter>                 weights
    optimizer.<parameter>.<state>     moments and step counts
    rng.rank-<r>.<device>             random states, of each rank

Only tensors are given to DCP, since it would write anything else as a pickle. What is not a tensor (step, tokens
seen, position in the data) is in titan.json beside them.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from titan.config.sections import CheckpointSection
from titan.parallel.weights import canonical_name

logger = logging.getLogger("titan")
State = dict[str, Tensor]


class CheckpointError(ValueError):
    """A checkpoint that was asked for is not there or does not fit; the message is for the user."""


class CheckpointManager:
    """Saves and loads the steps of one run folder."""

    def __init__(self, section: CheckpointSection, *, run_dir: Path) -> None:
        self.section = section
        self.folder = run_dir / section.folder

    def steps(self) -> list[int]:
        """The complete checkpoints, oldest first."""
        return list_steps(self.folder)

    @property
    def can_save(self) -> bool:
        return self.section.enable and not self.section.load_only

    def should_save(self, step: int, *, last_step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        first = step == 1 and self.section.enable_first_step_checkpoint
        return self.can_save and (first or step == last_step or step % self.section.interval == 0)

    def save(
        self, step: int, state: State, *, metadata: dict[str, Any], model_only: bool = False
    ) -> Path:
        """Write step-N; all ranks call this together. `metadata` is kept beside it as JSON."""
        final, temporary = self.folder / f"step-{step}", self.folder / f".saving-{step}"
        if _is_main():
            for stale in self.folder.glob(".saving-*"):
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
        _barrier()
        if model_only:
            dtype = getattr(torch, self.section.export_dtype)
            state = {k: v.to(dtype) for k, v in state.items() if k.startswith("model.")}
        dcp.save(state, checkpoint_id=str(temporary))
        if _is_main():
            (temporary / "titan.json").write_text(json.dumps(metadata, indent=2) + "\n")
            if final.exists():  # the run was taken back to an earlier step and got here again
                shutil.rmtree(final)
            temporary.rename(final)
            self._remove_old()
        _barrier()
        return final

    def step_to_resume(self) -> Path | None:
        """The folder to resume from, or None for a fresh start. Raises CheckpointError for a missing load_step."""
        if not self.section.enable:
            return None
        steps = self.steps()
        wanted = self.section.load_step
        if wanted == -1:
            return self.folder / f"step-{steps[-1]}" if steps else None
        if wanted not in steps:
            raise CheckpointError(
                f"checkpoint.load_step: there is no step {wanted} in {self.folder}; there is "
                + (", ".join(map(str, steps)) if steps else "none at all")
            )
        return self.folder / f"step-{wanted}"

    def _remove_old(self) -> None:
        keep = self.section.keep_latest_k
        for step in self.steps()[:-keep] if keep else []:
            doomed = self.folder / f".removing-{step}"
            (self.folder / f"step-{step}").rename(
                doomed
            )  # half a checkpoint never has a step's name
            shutil.rmtree(doomed)


def read_metadata(path: Path) -> dict[str, Any]:
    """What `save` was given as metadata."""
    try:
        return json.loads((path / "titan.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of titan: {error}") from error


def list_steps(folder: Path) -> list[int]:
    """Steps with a complete checkpoint in a folder, oldest first."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(m[1]) for m in found if m and (folder / m[0] / ".metadata").exists())


def stored_shapes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a checkpoint."""
    try:
        metadata = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except OSError as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error
    return {k: (m.size, m.properties.dtype) for k, m in metadata.items() if hasattr(m, "size")}  # pyright: ignore


def load(path: Path, state: State) -> None:
    """Fill the tensors of `state`, whatever their layout, from a checkpoint; all ranks call this together.

    Raises CheckpointError naming the tensors that are missing or have another shape.
    """
    stored = stored_shapes(path)
    missing = [name for name in state if name not in stored]
    if missing:
        raise CheckpointError(f"{path} lacks {_some(missing)}: saved from another model?")
    other = [
        f"{k} {tuple(stored[k][0])} (wanted {tuple(v.shape)})"
        for k, v in state.items()
        if stored[k][0] != v.shape
    ]
    if other:
        raise CheckpointError(
            f"{path} holds other shapes: {_some(other)}: saved from another model?"
        )
    with warnings.catch_warnings():  # that a single process loads alone is no news
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=str(path), no_dist=not dist.is_initialized())


def model_state(parts: Sequence[nn.Module]) -> State:
    """Weights of a model, or of its pipeline stages on this rank, under their plain names; a shared parameter (tied
    embeddings) appears once."""
    state: State = {}
    seen: set[int] = set()
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                state[f"model.{canonical_name(name)}"] = tensor.detach()
    return state


def _named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {canonical_name(name): p for part in parts for name, p in part.named_parameters()}


def optimizer_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> State:
    """The optimizer's tensors, named by the parameter they belong to."""
    state: State = {}
    for name, parameter in _named_parameters(parts).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer.{name}.{key}"] = value
    return state


def empty_optimizer_state(
    path: Path, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> State:
    """Allocate the optimizer state that a checkpoint holds, laid out like the parameters, to be loaded into."""
    stored = stored_shapes(path)
    parameters = _named_parameters(parts)
    for full_key, (shape, dtype) in stored.items():
        if not full_key.startswith("optimizer."):
            continue
        name, key = full_key.removeprefix("optimizer.").rsplit(".", 1)
        parameter = parameters.get(name)
        if parameter is None:  # of another pipeline stage
            continue
        if shape == parameter.shape:
            value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        else:  # a step count, the same on every rank
            value = torch.empty(shape, dtype=dtype, device=_step_device(parameter, optimizer))
        optimizer.state[parameter][key] = value
    return optimizer_state(parts, optimizer)


def _step_device(parameter: Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """Where torch's optimizers keep scalars: with the parameter if fused or capturable, else on the host."""
    group = optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return parameter.device if on_device else torch.device("cpu")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
