"""Keep less between the steps of Adam and AdamW: moments in bf16 or 8 bits, weights in bf16.

torch's fused kernel, the default, wants weights, gradients and moments in one precision. Here every update is
computed in fp32, and what is kept is small:

    bf16 moments          4 bytes a parameter rather than 8
    8-bit moments         2 and a little (eightbit.py); vectors, and rows that make no blocks, keep fp32
    stochastic rounding   bf16 weights with no fp32 master (rounding.py)

Small parameters are joined in one vector and large ones cut into slices, so that the number of kernels depends on bytes rather than on
how many parameters there are, and so does the memory of what is computed in between.

Everything is done element by element on this rank's shard, and depends on the element's place in the whole
parameter, not on the layout: one process and any mesh compute the same bits from the same gradients. That is why this is not
torchao.optim, whose blocks run over a rank's shard and whose random numbers are the rank's own: replicas that
hold different shards of something else would drift apart. tests/optim/test_small_states.py holds the two
against each other where they should agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.parallel.float8 import plain

from .eightbit import Levels, block_size, dequantize, levels, quantize
from .rounding import Dice, RoundingNoise, StepNoise, rounded

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements. A shard below the first limit is joined with others: copying it twice costs less than launching kernels for it. Hosts
# launch sooner and copy later. At most as many as the last are updated at once: 32 MiB in fp32.
SMALL, SMALL_ON_HOST, LARGEST = 2**20, 2**14, 2**23


@dataclass(frozen=True)
class Piece:
    """Name elements of this rank's shard of a parameter, in the order of memory."""

    parameter: Tensor
    begin: int
    length: int

    def of(self, tensor: Tensor | None, block: int, *, width: int = 0) -> Tensor:
        """Return the piece, as a view, of a contiguous tensor laid out like the parameter: a vector or, of a tensor in blocks, a row
        for each of them. width: numbers for a block, if not the block's."""
        flat = local(tensor).view(-1)
        if not block:
            return flat[self.begin : self.begin + self.length]
        rows = flat.view(-1, width or block)
        return rows[self.begin // block : (self.begin + self.length) // block]


class CompactAdam(torch.optim.Optimizer):
    """Update parameters by Adam or AdamW, with moments in a precision of choice.

    Args:
        lr, betas, eps: as in torch's Adam.
        state_dtype: of the moments; uint8 means 8 bits in blocks.
        decoupled: decay weights as AdamW does, else as Adam.
        noise: for each parameter that is rounded stochastically.
        compiled: one kernel per vector, by torch.compile (its length changes nothing; the first step takes seconds); otherwise one
            kernel per operation.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype,
        decoupled: bool = True,
        noise: Mapping[Tensor, RoundingNoise] | None = None,
        compiled: bool = False,
    ) -> None:
        # Weight decay is each group's own (optimizers.py).
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.levels = cache(levels)  # by device
        self.state_dtype, self.decoupled, self.dice = state_dtype, decoupled, Dice(noise)
        self.compute = torch.compile(_compute, dynamic=True) if compiled else _compute

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for chunk in self._chunks(begin_step(self, group)):
                self._update(chunk, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_as_saved(self, state_dict)

    def init_state(self, parameter: Tensor) -> None:
        """Fill the state with zeros, laid out like the parameter. They are plain tensors, so
        checkpoints need no special case."""
        state, parameter = self.state[parameter], plain(parameter)
        # On the host: it is read in every step.
        state["step"] = torch.tensor(0.0)
        for name in MOMENTS:
            if block := self._block(parameter):
                state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{name}_scale"] = _zeros_of_blocks(parameter, block)
            else:
                exact = torch.float32 if self.state_dtype == torch.uint8 else self.state_dtype
                state[name] = torch.zeros_like(parameter, dtype=exact)

    def _chunks(self, parameters: Iterable[Tensor]) -> Iterator[tuple[Piece, ...]]:
        """Yield pieces that are updated at once: a slice of a large shard, or small shards of one kind."""
        joined: dict[Any, list[Piece]] = defaultdict(list)
        for parameter in parameters:
            size, state = local(parameter).numel(), self.state[parameter]
            if size >= (SMALL_ON_HOST if parameter.device.type == "cpu" else SMALL):
                for begin in range(0, size, LARGEST):
                    yield (Piece(parameter, begin, min(LARGEST, size - begin)),)
            elif size:
                dims = len(self.dice.sources[parameter].dims) if self.dice.sources else 0
                step = state["step"].item()  # a host tensor: nothing waits
                kind = step, parameter.device, parameter.dtype, self._block(parameter), dims
                joined[kind].append(Piece(parameter, 0, size))
                if sum(piece.length for piece in joined[kind]) >= LARGEST:
                    yield tuple(joined.pop(kind))
        yield from map(tuple, joined.values())

    def _update(self, chunk: tuple[Piece, ...], group: dict[str, Any]) -> None:
        first = chunk[0].parameter
        step, block = self.state[first]["step"].item(), self._block(first)
        # What is updated: the parameters under "", and each of their states.
        tensors = {"": [piece.of(piece.parameter, block) for piece in chunk]}
        for name in self.state[first]:
            if name != "step":
                width = int(name.endswith("_scale"))
                states = ((piece, self.state[piece.parameter][name]) for piece in chunk)
                tensors[name] = [piece.of(state, block, width=width) for piece, state in states]
        grads = [piece.of(local(piece.parameter.grad).contiguous(), block) for piece in chunk]
        single = len(chunk) == 1
        vectors = {name: v[0] if single else torch.cat(v) for name, v in tensors.items()}
        # With 8 bits, what keeps fp32 is small, and would be compiled again.
        compute = self.compute if block or self.state_dtype != torch.uint8 else _compute
        compute(
            vectors[""],
            grads[0] if single else torch.cat(grads),
            {name: vector for name, vector in vectors.items() if name},
            self._numbers(step, group),
            decoupled=self.decoupled,
            step_noise=self.dice.at_step(step, [(p.parameter, p.begin, p.length) for p in chunk]),
            maps=self.levels(first.device) if self.state_dtype == torch.uint8 else None,
        )
        if not single:
            for name, pieces in tensors.items():
                torch._foreach_copy_(pieces, vectors[name].split([len(x) for x in pieces]))

    def _numbers(self, step: float, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the factors of an update as tensors on the host, for numbers would be compiled in."""
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        # Both bias corrections are folded into numbers, so that the kernel has fewer operations.
        numbers = {
            "lr": group["lr"] / (1 - beta1**step),
            "correction": (1 - beta2**step) ** 0.5,
            "eps": group["eps"],
            "decay": group["lr"] * decay if self.decoupled else decay,
            "exp_avg": 1 - beta1,
            "exp_avg_sq": 1 - beta2,
        }
        return {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}

    def _block(self, parameter: Tensor) -> int:
        return block_size(parameter.shape) if self.state_dtype == torch.uint8 else 0


def _compute(
    parameter: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    numbers: dict[str, Tensor],
    *,
    decoupled: bool,
    step_noise: StepNoise | None,
    maps: tuple[Levels, Levels] | None,
) -> None:
    """Compute one update in fp32, in place: of vectors, or of blocks as rows, which a compiler sees as one loop."""
    x, grad = parameter.float(), grad.float()
    if decoupled:
        x = x - numbers["decay"] * x
    else:
        grad = grad + numbers["decay"] * x
    targets = (grad, grad.square())
    moments = []
    # Both moments move towards their target by 1 - beta.
    for i, name in enumerate(MOMENTS):
        before = _read(state, name, maps[i] if maps else None)
        after = before + numbers[name] * (targets[i] - before)
        _write(state, name, after, maps[i] if maps else None)
        moments.append(after)
    denominator = moments[1].sqrt() / numbers["correction"] + numbers["eps"]
    parameter.copy_(rounded(x - numbers["lr"] * (moments[0] / denominator), step_noise))


def _read(state: dict[str, Tensor], name: str, levels: Levels | None) -> Tensor:
    if name in state:
        return state[name].float()
    assert levels is not None
    return dequantize(state[f"{name}_codes"], state[f"{name}_scale"], levels)


def _write(state: dict[str, Tensor], name: str, value: Tensor, levels: Levels | None) -> None:
    if name in state:
        state[name].copy_(value)
        return
    assert levels is not None
    codes, scale = quantize(value, levels)
    state[f"{name}_codes"].copy_(codes)
    state[f"{name}_scale"].copy_(scale)


def begin_step(optimizer: Any, group: dict[str, Any]) -> list[Tensor]:
    """Return a group's parameters that have gradients. They have a state from now on, and their steps are counted."""
    parameters = [p for p in group["params"] if p.grad is not None]
    for parameter in parameters:
        if not optimizer.state[parameter]:
            optimizer.init_state(parameter)
    if parameters:
        torch._foreach_add_([optimizer.state[p]["step"] for p in parameters], 1)
    return parameters


def load_as_saved(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load as torch's load_state_dict does, without its cast of every state to the weights' precision."""
    torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    saved = (i for group in state_dict["param_groups"] for i in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for i, parameter in zip(saved, parameters, strict=True):
        for name, value in state_dict["state"].get(i, {}).items():
            # "step" stays on the host.
            if name != "step":
                optimizer.state[parameter][name] = value.to(parameter.device)


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's shard, sharing its memory (under no_grad)."""
    assert tensor is not None
    tensor = plain(tensor)
    # Not a Parameter, whose shape torch.compile would take for a constant.
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _zeros_of_blocks(parameter: Tensor, block: int) -> Tensor:
    """Return fp32 zeros with a number for each block of each row, laid out like the parameter."""
    shape = (*parameter.shape[:-1], parameter.shape[-1] // block)
    mine = local(parameter)
    assert mine.shape[-1] % block == 0, "rules.py refuses tensor parallel degrees that cut a block"
    zeros = torch.zeros(*mine.shape[:-1], mine.shape[-1] // block, device=mine.device)
    if not isinstance(parameter, DTensor):
        return zeros
    # Strides of the whole: from_local would guess them from this rank's shard.
    strides = torch.empty(shape, device="meta").stride()
    placed = DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )
    return placed.to(parameter.device)  # of offloaded parameters, from_local takes it to the mesh's
