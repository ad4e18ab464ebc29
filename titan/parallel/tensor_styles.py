"""Define the styles of tensor parallelism that torch lacks. titan/parallel/tensor.py has the table of all, and applies them."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from .float8 import cast_before_gather

SEQUENCE_DIM = 1


class GatherSequence(ParallelStyle):
    """Gather one argument of the module over the sequence, in float8 where the layers that read it
    cast it anyway.

    The module gets a DTensor, so that the gradients of its uses add up before the one reduce-scatter.

    argument: its name; "": the first tensor, in the order of forward's signature. The caller may give it by position or by name.
    """

    def __init__(self, name: str, argument: str = "") -> None:
        self.name = name
        self.argument = argument

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cast = cast_before_gather(module, device_mesh)
        names = argument_names(module)
        if self.argument and self.argument not in names:
            raise ValueError(
                f"{self.name} has no argument {self.argument} to gather; its forward takes {', '.join(names)}"
            )

        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Arguments by position and by name, in one table.
            arguments: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
            if self.argument:
                order = (self.argument, names.index(self.argument))
            else:
                order = (*range(len(args)), *names, *kwargs)
            place = next((key for key in order if isinstance(arguments.get(key), Tensor)), None)
            if place is None:
                what = (
                    f"argument {self.argument}" if self.argument else "tensor among the arguments"
                )
                raise ValueError(f"{self.name} was called with no {what} that could be gathered")
            x = arguments[place]
            # A DTensor: the gradients of all layers that read it add up before one reduce-scatter.
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, (Shard(SEQUENCE_DIM),), run_check=False)
            if cast is not None:
                x = cast(x)
            arguments[place] = x.redistribute(placements=(Replicate(),))
            return tuple(arguments[i] for i in range(len(args))), {
                key: arguments[key] for key in kwargs
            }

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


class SequenceShard(SequenceParallel):
    """Run a module with whole weights on each rank's part of the sequence.

    A matrix sees that part as cut over its first dimension, since a rank's tokens are tokens: its product flattens (B, S),
    which torch 2.11 does for no tensor that is cut over S.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if any(parameter.ndim > 1 for parameter in module.parameters()):

            def cut_first(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                x = args[0].to_local() if isinstance(args[0], DTensor) else args[0]
                return DTensor.from_local(x, device_mesh, (Shard(0),), run_check=False), *args[1:]

            def cut_sequence(_: nn.Module, __: Any, output: DTensor) -> Tensor:
                local = output.to_local()
                if self.use_local_output:
                    return local
                return DTensor.from_local(
                    local, device_mesh, (Shard(SEQUENCE_DIM),), run_check=False
                )

            self._replicate_module_fn("", module, device_mesh)
            module.register_forward_pre_hook(cut_first)
            module.register_forward_hook(cut_sequence)
            return module
        return super()._apply(module, device_mesh)


class ReplicatedHeads(ParallelStyle):
    """Keep a key or value projection with fewer heads than ranks whole on each rank, which uses one
    head of its output."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Neighbouring ranks share a head, as their query heads do.
        head = device_mesh.get_local_rank() * self.num_heads // device_mesh.size()

        def keep_head(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            # Each rank's gradient reaches its own head only: what all ranks have is an unfinished sum.
            local = output.to_local(grad_placements=(Partial(),))
            return local.unflatten(-1, (self.num_heads, -1))[..., head, :]

        return distribute_module(module, device_mesh, _replicate, _accept_replicated, keep_head)  # pyright: ignore


class ReplicatedInput(ParallelStyle):
    """Let each rank have all of what goes in and out, where the module or its layers want DTensors.

    What ranks compute alike has equal gradients on all of them. Where a layer gives each rank a part of the gradient, or of the
    output, the parts are added up.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def add_up(_: nn.Module, __: Any, output: Any) -> Any:
            if not isinstance(output, DTensor):
                return output
            return output.redistribute(placements=(Replicate(),)).to_local()

        module.register_forward_pre_hook(partial(_accept_replicated, mesh=device_mesh))
        module.register_forward_hook(add_up)
        return module


class ReplicatedModule(ReplicatedInput):
    """Keep a module's parameters whole on each rank, as what goes in and out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replicate("", module, device_mesh)
        return super()._apply(module, device_mesh)


class AllGatherSequence(ParallelStyle):
    """What the module returns, gathered over the sequence. Each rank uses it for its heads, so gradients are parts of a sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...], output: DTensor) -> Tensor:
            whole: DTensor = output.redistribute(placements=(Replicate(),))
            return whole.to_local(grad_placements=(Partial(),))

        module.register_forward_hook(gather)
        return module


class NormOfAllRanks(ParallelStyle):
    """A norm in plain operations over channels that are split: DTensor adds up what ranks have of a token's sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(args[0], mesh, (Shard(-1),), run_check=False)

        def give(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, _split_weight, take, give)  # pyright: ignore


class HeadVector(ParallelStyle):
    """Split a weight over heads. Each rank gets the values of its own."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _split_weight("", module, device_mesh)
        module.register_forward_hook(lambda _, __, output: output.to_local())
        return module


class GatherForLoss(ParallelStyle):
    """Split the output layer where the loss applies its weight: V/tp rows of it for each rank, and
    what goes in comes out gathered.

    Each rank's gradient belongs to its part of the vocabulary, so it is a part of a sum. The way
    back reduces and scatters it.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x: DTensor = args[0].redistribute(placements=(Replicate(),))
            return (x.to_local(grad_placements=(Partial(),)), *args[1:])

        _split_weight("", module, device_mesh)
        module.register_forward_pre_hook(gather)
        return module


def _split_weight(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    # src_data_rank=None: every rank has the whole weight, so nothing is sent.
    weight = distribute_tensor(module.get_parameter("weight"), mesh, [Shard(0)], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(weight))


def argument_names(module: nn.Module) -> list[str]:
    """Return the names that a module's forward gives to its arguments, in order."""
    parameters = signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _accept_replicated(_: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    x, *rest = args
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    return (x, *rest)


def _replicate(_: str, child: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(child.named_parameters(recurse=False)):
        # src_data_rank=None: every rank has the whole weight, so nothing is sent.
        whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        child.register_parameter(name, nn.Parameter(whole))


class CutSequence(SequenceParallel):
    """Run a module with whole weights on whole inputs on each rank, and keep the rank's part of the output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(args[0], device_mesh, (Replicate(),), run_check=False)
            return x, *args[1:]

        def cut(_: nn.Module, __: Any, output: DTensor) -> Tensor:
            x = output.to_local()
            sides = [0, 0] * (x.ndim - SEQUENCE_DIM - 1)  # of the dimensions after it: none
            x = F.pad(x, [*sides, 0, -x.shape[SEQUENCE_DIM] % device_mesh.size()])
            x = DTensor.from_local(x, device_mesh, (Replicate(),), run_check=False)
            return x.redistribute(placements=(Shard(SEQUENCE_DIM),)).to_local()

        for part in module.modules():
            self._replicate_module_fn("", part, device_mesh)
        module.register_forward_pre_hook(whole)
        module.register_forward_hook(cut)
        return module


class AllGatherFeatures(ParallelStyle):
    """Let a module without weights read features of all ranks for the rank's part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, features, index = args
            cut = DTensor.from_local(features, device_mesh, (Shard(SEQUENCE_DIM),), run_check=False)
            whole = cut.redistribute(placements=(Replicate(),))
            part = index.chunk(device_mesh.size(), dim=SEQUENCE_DIM)[device_mesh.get_local_rank()]
            # Each rank's gradient is that of its own positions.
            return x, whole.to_local(grad_placements=(Partial(),)), part

        module.register_forward_pre_hook(prepare)
        return module
