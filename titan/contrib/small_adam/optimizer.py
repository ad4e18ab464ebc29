"""Adam and AdamW with small states: moments in bf16 or 8 bits, weights in bf16. torchao computes the update.

torch's fused kernel, the default, wants weights, gradients and moments in one precision. Here every update is
computed in fp32, and the stored state is small:

    bf16 moments          4 bytes a parameter rather than 8
    8-bit moments         slightly more than 2 bytes; vectors, and rows that make no blocks, keep fp32
    stochastic rounding   bf16 weights with no fp32 master (titan/optim/rounding.py)

The 8-bit format is dynamic block-wise quantization (arXiv:2110.02861): each block of a row is divided by its largest magnitude
(its scale), and each element becomes the number (its code) of the nearest of 256 levels.

torchao's update runs on this rank's shard. Codes and scales are kept as plain sharded tensors, laid out like the parameter: a
checkpoint needs no special case. There are at least eight blocks to a row, so that a shard of rows or of an eighth of the columns
holds whole blocks. For example, a (4096, 14336) matrix has codes of (4096, 14336) in uint8 and scales of (4096, 56) in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, zeros

from titan.optim.rounding import RoundingSeeds
from titan.optim.states import Allocates, begin_step, local
from titan.parallel.float8 import plain, quiet_torchao

MOMENTS = ("exp_avg", "exp_avg_sq")
LARGEST_BLOCK, SMALLEST_BLOCK = 256, 8
PARTS = 8  # of a row, each of whole blocks: tensor parallel degrees up to 8 cut no block


def block_size(shape: Sequence[int]) -> int:
    """Return the elements in a block of a tensor of this (global) shape. 0: the tensor gets no blocks (vectors, odd rows)."""
    if len(shape) < 2 or shape[-1] % PARTS:
        return 0
    # A power of two, at most 256, that divides an eighth of a row.
    block = math.gcd(LARGEST_BLOCK, shape[-1] // PARTS)
    return block if block >= SMALLEST_BLOCK else 0


class SmallAdam(Allocates, torch.optim.Optimizer):
    """Adam or AdamW with moments in a chosen precision.

    Attributes:
        state_dtype: precision of the moments; uint8 means 8 bits in blocks.
        decoupled: whether weight decay is AdamW's.
        seeds: seeds of stochastic rounding. None: round to the nearest.
        levels: function from a device to the 256 levels of each moment.
        update: function that updates one shard.
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
        seeds: RoundingSeeds | None = None,
        compiled: bool = False,
    ) -> None:
        """Create the optimizer, without state.

        Args:
            parameters: parameters, or groups of them.
            lr: as in torch's Adam.
            betas: as in torch's Adam.
            eps: as in torch's Adam.
            state_dtype: precision of the moments; uint8 means 8 bits in blocks.
            decoupled: decay weights as AdamW does, otherwise as Adam.
            seeds: seeds of stochastic rounding. None: round to the nearest.
            compiled: use one kernel per parameter, by torch.compile (the first step takes seconds), otherwise one per operation.
        """
        quiet_torchao(has_kernels=torch.cuda.is_available())
        # Weight decay is each group's own (titan/optim/optimizers.py).
        super().__init__(
            parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        )
        self.state_dtype, self.decoupled, self.seeds = state_dtype, decoupled, seeds
        self.levels = cache(_levels)
        self.update = _update_shard
        if compiled:
            self.update = torch.compile(_update_shard, fullgraph=True, dynamic=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        for group in self.param_groups:
            for parameter in begin_step(self, group):
                self._update(parameter, group)
        return loss

    def init_state(self, parameter: Tensor) -> None:
        """Fill the state with zeros, laid out like the parameter."""
        state, parameter = self.state[parameter], plain(parameter)
        # On the host, since every step reads it there.
        state["step"] = torch.tensor(0.0)
        is_8_bit = self.state_dtype == torch.uint8
        for name in MOMENTS:
            if is_8_bit and (block := block_size(parameter.shape)):
                state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{name}_scale"] = _zeros_of_blocks(parameter, block)
            else:
                exact = torch.float32 if is_8_bit else self.state_dtype
                state[name] = torch.zeros_like(parameter, dtype=exact)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, shard = self.state[parameter], local(parameter).view(-1)
        if not len(shard):
            return
        step, seeds = state["step"], self.seeds
        with seeds.seeded(parameter, step.item()) if seeds else nullcontext():
            self.update(
                shard,
                local(parameter.grad).contiguous().view(-1),
                {
                    name: local(value).view(-1)
                    for name, value in state.items()
                    if name != "step"
                },
                None if MOMENTS[0] in state else self.levels(shard.device),
                step=step,
                lr=torch.tensor(group["lr"]),  # a number would be compiled in
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                max_exp_avg_sq=None,
                IS_ADAMW=self.decoupled,
                BF16_STOCHASTIC_ROUND=seeds is not None,
            )


def _update_shard(
    shard: Tensor,
    grad: Tensor,
    state: dict[str, Any],
    levels: dict[str, Tensor] | None,
    **options: Any,
) -> None:
    """Update a shard in place, in fp32. All tensors are vectors; `levels` are those of 8-bit moments."""
    from torchao.optim import adam, quant_utils

    if levels is None:
        return adam.single_param_adam(shard, grad, **state, **options)
    parts = {name: (state[f"{name}_codes"], state[f"{name}_scale"]) for name in MOMENTS}
    moments: Any = {
        name: quant_utils.dequant_with_qmap(codes, levels[name], scale)
        for name, (codes, scale) in parts.items()
    }
    adam.single_param_adam(shard, grad, **moments, **options)
    for name, (codes, scale) in parts.items():
        scaled, new_scale = quant_utils.scale_tensor(moments[name], len(codes) // len(scale))
        codes.copy_(quant_utils.quantize_8bit_with_qmap(scaled, levels[name]))
        scale.copy_(new_scale)


def _levels(device: torch.device) -> dict[str, Tensor]:
    """Return the 256 levels of each moment. Those of the first moment have both signs."""
    from torchao.optim.quant_utils import create_dynamic_map

    return {
        name: torch.tensor(create_dynamic_map(name == "exp_avg"), device=device)
        for name in MOMENTS
    }


def _zeros_of_blocks(parameter: Tensor, block: int) -> Tensor:
    """Return fp32 zeros, one for each block of each row, laid out like the parameter."""
    shape = (*parameter.shape[:-1], parameter.shape[-1] // block)
    assert local(parameter).shape[-1] % block == 0, (
        "rules.py refuses tensor parallel degrees that cut a block"
    )
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=parameter.device)
    placed = zeros(shape, device_mesh=parameter.device_mesh, placements=parameter.placements)
    return placed.to(parameter.device)  # offloaded parameters are not on the mesh's device
