"""Contents of a checkpoint: a flat dictionary of tensors, whose names do not depend on the layout.

    model.<parameter>                 weights
    optimizer.<parameter>.<state>     moments and step counts
    average.<parameter>               the average of the weights, if the job keeps one
    rng.rank-<r>.<generator>          random states, of each rank

DCP stores the shards and joins them again for any other layout. It gets only tensors, because it would write any other value
as a pickle. Values that are not tensors go into titan.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from titan.checkpoint import CheckpointError
from titan.checkpoint.storage import Location
from titan.checkpoint.tensors import StateDict, load, some, stored_shapes
from titan.optim.averaged import Average
from titan.optim.optimizers import allocate_state
from titan.parallel.float8 import plain
from titan.parallel.init_weights import canonical_name


def model_state(parts: Sequence[nn.Module], *, average: bool = False) -> StateDict:
    """Return the weights of a model, or of its pipeline stages on this rank, under their canonical names.

    A shared parameter (tied embeddings) appears once.

    Args:
        parts: the model, or its stages on this rank.
        average: use the names of `average_state` for parameters, to load the average into them.
    """
    state: StateDict = {}
    seen: set[int] = set()
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            # keep_vars returns the parameter itself, so tied ones have the same id.
            if id(tensor) not in seen:
                seen.add(id(tensor))
                group = "average" if average and isinstance(tensor, nn.Parameter) else "model"
                state[f"{group}.{canonical_name(name)}"] = plain(tensor.detach())
    return state


def load_model(
    path: Location,
    parts: Sequence[nn.Module],
    *,
    gather: Callable[[set[str]], list[set[str]]] | None = None,
    is_strict: bool = True,
) -> list[str]:
    """Load the weights of a step.

    Args:
        path: folder of the step.
        parts: the model, or its stages on this rank.
        gather: returns the names that each rank has, from this rank's names. None means that all ranks have the same names.
        is_strict: require equal names. False loads the weights that both step and model have.

    Returns:
        Messages about weights that were not loaded.

    Raises:
        CheckpointError: only the step or only the model has some weights.
    """
    state, stored = model_state(parts), stored_shapes(path)
    mine = set().union(*gather({*state})) if gather else {*state}
    # Buffers `last_loads` belong to a loss over steps, and are no part of the model.
    theirs = {k for k in stored if k.startswith("model.") and not k.endswith(".last_loads")}
    surplus, messages = sorted(theirs - mine), []
    if surplus and is_strict:
        text = f"{path} holds {some(surplus)}, which this model has no place for: saved from another model?"
        raise CheckpointError(text, kind="checkpoint_differs")
    if not is_strict:
        new = [k for k, v in state.items() if k not in stored or stored[k][0] != v.shape]
        state = {name: tensor for name, tensor in state.items() if name not in new}
        absent = "not in the step with this shape, so as at a fresh start"
        whats = ((surplus, "not in the model, so not loaded"), (new, absent))
        messages = [f"{what}: {some(names)}" for names, what in whats if names]
    load(path, state)
    return messages


def _named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    return {canonical_name(name): p for part in parts for name, p in part.named_parameters()}


def optimizer_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> StateDict:
    """Return the optimizer's tensors, named by their parameters."""
    allocate_state(optimizer)
    state: StateDict = {}
    for name, parameter in _named_parameters(parts).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            # Optimizers may also keep plain numbers, which are not saved.
            if isinstance(value, Tensor):
                state[f"optimizer.{name}.{key}"] = value
    return state


def empty_optimizer_state(
    path: Location, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> StateDict:
    """Allocate the optimizer's state, laid out like the parameters, and return it to be loaded into.

    titan's optimizers allocate their own state. For any other optimizer, allocate the state that the checkpoint contains.
    """
    if allocate_state(optimizer):
        return optimizer_state(parts, optimizer)
    stored = stored_shapes(path)
    parameters = _named_parameters(parts)
    for full_key, (shape, dtype) in stored.items():
        if not full_key.startswith("optimizer."):
            continue
        # As in "optimizer.layers.0.attention.wq.weight.exp_avg": only parameters' names have dots.
        name, key = full_key.removeprefix("optimizer.").rsplit(".", 1)
        parameter = parameters.get(name)
        if parameter is None:  # it is on another pipeline stage
            continue
        if shape == parameter.shape:
            value = torch.empty_like(plain(parameter), dtype=dtype, requires_grad=False)
        else:  # a step count, which is the same on every rank
            group = optimizer.param_groups[0]
            # Fused and capturable optimizers read it on the device.
            on_device = group.get("fused") or group.get("capturable")
            device = parameter.device if on_device else "cpu"
            value = torch.empty(shape, dtype=dtype, device=device)
        optimizer.state[parameter][key] = value
    return optimizer_state(parts, optimizer)


def average_state(average: Average | None) -> StateDict:
    """Return the average of the weights, or {} for None."""
    return {f"average.{name}": x for name, x in (average.tensors if average else {}).items()}


def rng_state(rank: int, device: torch.device) -> StateDict:
    """Return the random states of this rank: torch's (on host and device), Python's and numpy's."""
    kind, numbers, *_, pos, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "cpu": torch.get_rng_state(),
        "python": _to_bytes(random.getstate()),
        # pyrefly: ignore[missing-attribute]
        "numpy": _to_bytes([kind, numbers.tolist(), pos, has_gauss, cached]),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return {f"rng.rank-{rank}.{name}": value for name, value in states.items()}


def load_rng_state(path: Location, rank: int, device: torch.device) -> None:
    """Restore the random states of this rank. All ranks call this together.

    A rank that the saving run did not have keeps its seed.
    """
    stored = stored_shapes(path)
    # Load the states that this rank would save now, if the checkpoint has them. It may come from more or fewer ranks, or from
    # another kind of device.
    names = [name for name in rng_state(rank, device) if name in stored]
    state = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in names}
    load(path, state)
    for name, value in state.items():
        generator = name.rsplit(".", 1)[1]
        if generator == "python":
            version, numbers, gauss = json.loads(bytes(value.tolist()))
            random.setstate((version, tuple(numbers), gauss))
        elif generator == "numpy":
            kind, numbers, *rest = json.loads(bytes(value.tolist()))
            np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))
        else:
            module = torch if generator == "cpu" else torch.get_device_module(generator)
            module.set_rng_state(value)


def _to_bytes(value: object) -> Tensor:
    """Return a value as JSON in a tensor, which runs nothing when it is loaded."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
