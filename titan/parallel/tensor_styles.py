"""Tensor-parallel styles that torch lacks. The table of all styles is in tensor.py, which applies them.

A style decides how a module's weight is stored, and which collectives run before and after its forward pass. A shape with
a "/tp", such as (B, S/tp, D), is local: a rank's part of the global (B, S, D). An example with B = 1 sequence of S = 8 tokens,
width D = 16, H = 4 query heads and G = 1 key/value head of K = 4, vocabulary V = 32, on tp = 2 ranks:

    style              class              weight on a rank     input on a rank   output on a rank
    sequence           SequenceShard      (16,), replicated    (1, 4, 16)        (1, 4, 16)
    gather_input       GatherSequence     none                 (1, 4, 16)        (1, 8, 16): forward reads all tokens
    kv_colwise         ReplicatedHeads    (4, 16), replicated  (1, 8, 16)        (1, 8, 4): the one head, on both ranks
    whole              Around             replicated           (1, 8, 16)        (1, 8, 16)
    whole_input        Around             split inside         (1, 8, 16)        (1, 8, 16)
    gather_shared      Around             none                 (1, 4, 4)         (1, 8, 4)
    width_norm         Around             (8,) of (16,)        (1, 8, 8)         (1, 8, 8): norm over all 16 channels
    head_vector        Around             (2,) of (4,)         none              (2,): a number for each local query head
    local_tokens       LocalWeights       replicated           (1, 4, 16)        (1, 4, 16): plain tensors inside
    partial            LocalWeights       replicated           (1, 8, 16)        (1, 8, 16): used by this rank's heads
    colwise_part       LocalWeights       (F/2, 16)            (1, 8, 16)        (1, 8, F/2)
    cut_sequence       Around             replicated           (1, 7, 16)        (1, 4, 16): T = 7 tokens, padded to 8
    place              AllGatherFeatures  none                 x (1, 4, 16)      (1, 4, 16): forward reads features (1, 8, 16)
    own_heads          OwnHeads           none                 (1, 4, 8, K) each   (1, 4, 8, K): 2 heads inside
    vocab_output       Around             (16, 16) of (32, 16) (1, 4, 16)        (1, 8, 16): the loss multiplies by the weight

The gradient takes the way back: an all-gather in the forward pass is a reduce-scatter in the backward pass, if each rank
computes a partial sum of the gradient (DTensor's `Partial`), as it does where it uses only its own heads or vocabulary rows.

B batch, S tokens of a sequence, D model, H query heads, G key/value heads, K head dim, F features, V vocabulary, tp ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from inspect import signature
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from .float8 import cast_before_gather
from .module_kinds import ExpertModule, is_kind

SEQUENCE_DIM = 1


class GatherSequence(ParallelStyle):
    """All-gather of one argument of a module over the sequence: (B, S/tp, D) -> (B, S, D).

    The other arguments stay as they are. If all layers that read the argument are tensorwise float8 layers, it is cast to float8
    before the all-gather. The module receives a replicated DTensor, so that the gradients of all its uses are added before
    the one reduce-scatter, which returns (B, S/tp, D).

    Attributes:
        name: name of the module, for messages.
        argument: name of the argument to gather. "" is the first tensor in the order of forward's signature. The caller may
            pass it by position or by name.
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
                    f"argument {self.argument}"
                    if self.argument
                    else "tensor among the arguments"
                )
                raise ValueError(
                    f"{self.name} was called with no {what} that could be gathered"
                )
            x = arguments[place]
            # As a DTensor, the gradients of all layers that read it are added up before one reduce-scatter.
            x = laid_out(x, device_mesh, Shard(SEQUENCE_DIM))
            if cast is not None:
                x = cast(x)
            arguments[place] = x.redistribute(placements=(Replicate(),))
            return tuple(arguments[i] for i in range(len(args))), {
                key: arguments[key] for key in kwargs
            }

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module


def laid_out(
    x: Tensor, mesh: DeviceMesh, placement: Placement, to: Placement | None = None
) -> DTensor:
    """Return a tensor as a DTensor over the ranks of a mesh.

    Args:
        x: the rank's part of the tensor, or a DTensor.
        mesh: mesh with the tp axis only.
        placement: which part the rank has, if x is no DTensor.
        to: placement of the result. None: it stays where it is.
    """
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (placement,), run_check=False)
    return x if to is None else x.redistribute(placements=(to,))


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all ranks have as a DTensor, which adds up the gradients of its uses before one all-reduce."""
    return laid_out(x, mesh, Replicate())


def gathered(x: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return a DTensor gathered from all ranks. The gradient is a partial sum, of the rank's own heads or vocabulary rows."""
    whole = x.redistribute(placements=(Replicate(),))
    return whole.to_local(grad_placements=(Partial(),))


def summed(output: Any, mesh: DeviceMesh) -> Any:
    """Return a module's output as a plain tensor. Partial sums are added up over ranks by an all-reduce."""
    if not isinstance(output, DTensor):
        return output
    return output.redistribute(placements=(Replicate(),)).to_local()


def local(output: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a module's output."""
    return output.to_local()


class Around(ParallelStyle):
    """Weights laid out over the ranks, with a conversion of the first argument and one of the output.

    Attributes:
        weights: placement of the module's own parameters. None: they stay as they are.
        take: maps the first argument, and the mesh, to the argument that the module receives. None: it stays.
        give: the same for the output.
        inside: also lay out the parameters of the modules inside.
    """

    def __init__(
        self,
        weights: Placement | None = None,
        *,
        take: Callable[[Any, DeviceMesh], Any] | None = None,
        give: Callable[[Any, DeviceMesh], Any] | None = None,
        inside: bool = False,
    ) -> None:
        self.weights, self.take, self.give, self.inside = weights, take, give, inside

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        take, give = self.take, self.give
        if self.weights is not None:
            for part in module.modules() if self.inside else [module]:
                lay_out_weights(part, device_mesh, self.weights)
        if take is not None:
            module.register_forward_pre_hook(
                lambda _, args: (take(args[0], device_mesh), *args[1:])
            )
        if give is not None:
            module.register_forward_hook(lambda _, __, output: give(output, device_mesh))
        return module


def lay_out_weights(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> list[str]:
    """Make DTensors of a module's own parameters, and return their names.

    Args:
        module: the module.
        mesh: mesh with the tp axis only.
        placement: placement of each parameter.
    """
    parameters = dict(module.named_parameters(recurse=False))
    for name, parameter in parameters.items():
        # src_data_rank=None: every rank has the whole weight, so nothing is sent.
        part = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))
    return [*parameters]


class SequenceShard(SequenceParallel):
    """A replicated module on each rank's tokens: (B, S/tp, D) -> (B, S/tp, F). No communication.

    Each rank's weight gradient is a partial sum over its own tokens. DTensor adds these up.

    The input of a matrix is declared as sharded over the batch dimension, not over the sequence: a linear layer flattens
    (B, S), which torch 2.11 cannot do for a tensor that is sharded over S. The local values are the same.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if all(parameter.ndim == 1 for parameter in module.parameters()):
            return super()._apply(module, device_mesh)

        def take(x: Tensor, mesh: DeviceMesh) -> DTensor:
            return laid_out(x.to_local() if isinstance(x, DTensor) else x, mesh, Shard(0))

        def give(output: DTensor, mesh: DeviceMesh) -> Tensor:
            part = output.to_local()
            return part if self.use_local_output else laid_out(part, mesh, Shard(SEQUENCE_DIM))

        return Around(Replicate(), take=take, give=give)._apply(module, device_mesh)


class ReplicatedHeads(Around):
    """A replicated key or value projection with fewer heads than ranks: (B, S, D) -> (B, S, K).

    Every rank computes all G heads, (B, S, G * K), and keeps one, head rank * G // tp, which its query heads read. The weight's
    gradient is a partial sum on each rank, since it comes from the rank's own head.

    Args:
        num_heads: number of key/value heads, G.
    """

    def __init__(self, num_heads: int) -> None:
        def keep_head(output: DTensor, mesh: DeviceMesh) -> Tensor:
            # Neighbouring ranks share a head, as their query heads do.
            head = mesh.get_local_rank() * num_heads // mesh.size()
            # Each rank's gradient comes from its own head only, so it is a partial sum.
            part = output.to_local(grad_placements=(Partial(),))
            return part.unflatten(-1, (num_heads, -1))[..., head, :]

        super().__init__(Replicate(), take=replicated, give=keep_head)


def width_shard(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the rank's channels (B, S, F/tp) as a DTensor, whose norm sums the squares over all ranks in an all-reduce."""
    return laid_out(x, mesh, Shard(-1))


class OwnHeads(ParallelStyle):
    """A module without parameters that treats each head alone, of which each rank computes its part: (B, H, S, K) -> (B, H, S, V).

    All arguments have the heads in dimension 1, except None and the last one, which stays as it is. Every rank has all heads before and
    after: the forward pass all-gathers the output, the backward pass the gradients of the arguments. Fewer query heads than ranks are
    repeated for their value heads, the third argument. If the ranks do not divide the value heads, each computes all.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()

        def part(x: Tensor | None, heads: int) -> Tensor | None:
            if x is None:
                return None
            if x.shape[1] % size:
                x = x.repeat_interleave(heads // x.shape[1], dim=1)
            return laid_out(x, device_mesh, Replicate(), to=Shard(1)).to_local()

        def forward(*args: Any) -> Tensor:
            heads = args[2].shape[1]
            if heads % size:
                return compute(*args)
            out = compute(*(part(x, heads) for x in args[:-1]), args[-1])
            return summed(laid_out(out.contiguous(), device_mesh, Shard(1)), device_mesh)

        compute = module.forward
        module.forward = forward
        return module


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward, in order.

    Args:
        module: the module. `*args` and `**kwargs` of its forward are left out.
    """
    parameters = signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


class LocalWeights(ParallelStyle):
    """A module whose forward pass reads plain tensors: no operation in it is DTensor's.

    Of a weight (F, D), a rank reads its part (F/tp, D), or the whole one. With `sums`, a rank's gradient of a whole weight is a partial
    sum, of its own tokens or its own heads, and an all-reduce adds these up. A replicated DTensor as input is read as a plain tensor,
    whose gradient is a partial sum, too. Modules with an attribute `dispatcher`, which are experts, keep their parameters.

    Attributes:
        split: split the weights of an nn.Linear by columns.
        sums: add up the ranks' gradients of whole weights.
        inside: also the modules inside.
    """

    def __init__(self, *, split: bool = False, sums: bool = True, inside: bool = True) -> None:
        self.inside = inside
        self.placement = Shard(0) if split else Replicate()
        self.grad_placement = Partial() if sums and not split else self.placement
        self.sums = sums

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take_local(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(map(plain, args)), {name: plain(x) for name, x in kwargs.items()}

        def plain(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            is_partial = self.sums and x.placements[0].is_replicate()
            return x.to_local(grad_placements=(Partial(),) if is_partial else None)

        parts = module.modules() if self.inside else [module]
        for part in [m for m in parts if not is_kind(m, ExpertModule)]:
            if names := lay_out_weights(part, device_mesh, self.placement):
                read_as(part, names, _as_local(self.placement, self.grad_placement))
        if self.inside:
            module.register_forward_pre_hook(take_local, with_kwargs=True)
        return module


@cache
def _as_local(placement: Placement, grad_placement: Placement) -> Callable[[Tensor], Tensor]:
    def read(weight: Tensor) -> Tensor:
        if not isinstance(weight, DTensor):
            return weight
        # Without a redistribution, the gradient would stay a partial sum.
        whole = weight.redistribute(placements=(placement,))
        return whole.to_local(grad_placements=(grad_placement,))

    return read


def read_as(module: nn.Module, names: Iterable[str], convert: Callable[[Any], Any]) -> None:
    """Convert parameters or buffers of a module whenever its forward pass reads them. The stored ones do not change.

    Args:
        module: the module. It gets a class of its own, with properties, as in torch's parametrizations.
        names: names of parameters or buffers.
        convert: maps the stored tensor to what the forward pass reads.
    """
    module.__class__ = _reading(type(module), tuple(names), convert)


@cache
def _reading(kind: Any, names: tuple[str, ...], convert: Callable[[Any], Any]) -> type:
    """Return the class of modules of a kind that convert what they read, one for all that are alike.

    torch.compile has programs for each class, and compiles only 8 versions of a function's code. So the classes' functions do not share theirs.
    """

    def reader(name: str) -> Any:
        def read(self: Any) -> Any:
            stored = (self._parameters if name in self._parameters else self._buffers)[name]
            # FSDP reads the stored ones, by the same names.
            return convert(stored) if self.is_in_forward else stored

        return property(read)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_in_forward = True
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            self.is_in_forward = False

    own = FunctionType(
        forward.__code__.replace(), globals(), "forward", None, forward.__closure__
    )
    added = {**{name: reader(name) for name in names}, "forward": own, "is_in_forward": False}
    return type(kind.__name__, (kind,), added)


def cut_sequence(output: DTensor, mesh: DeviceMesh) -> Tensor:
    """Return the rank's part of an output that every rank has: (N, T, ...) -> (N, T'/tp, D).

    T' is T rounded up to a multiple of tp, and positions after T are zeros.
    """
    x = output.to_local()
    sides = [0, 0] * (x.ndim - SEQUENCE_DIM - 1)  # no padding of later dimensions
    x = F.pad(x, [*sides, 0, -x.shape[SEQUENCE_DIM] % mesh.size()])
    return laid_out(x, mesh, Replicate(), to=Shard(SEQUENCE_DIM)).to_local()


class AllGatherFeatures(ParallelStyle):
    """All-gather of features around a module without parameters, which works on a shard of the sequence.

    The arguments of forward are x (B, S/tp, D), features (N, T/tp, D) and index (B, S), in this order. The module receives x as
    it is, all features (N, T, D), and the rank's part of the index, (B, S/tp). Each rank's gradient of the features comes from
    its own tokens, so it is a partial sum, which the backward pass reduce-scatters.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, features, index = args
            whole = gathered(laid_out(features, device_mesh, Shard(SEQUENCE_DIM)), device_mesh)
            parts = index.chunk(device_mesh.size(), dim=SEQUENCE_DIM)
            return x, whole, parts[device_mesh.get_local_rank()]

        module.register_forward_pre_hook(prepare)
        return module
