"""Hook for the load of experts: columns of the metrics, and experts.json, a table of the newest loads.

All figures come from the loads of the step, summed over all ranks (titan/optim/expert_bias.py), so each
layout gives the figures of one process. At logged steps one all-reduce collects the layers of other
pipeline stages. Other steps do nothing.

L layers with experts, E experts, C ranks of an expert-parallel group
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan.base.async_scalars import AsyncScalars
from titan.base.run_writer import run_files
from titan.observe.clock import Window
from titan.run.hook import Hook, StepResult
from titan.run.metrics import Metrics
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport


class ExpertLoads(Hook):
    """Loads and biases of experts, copied to the host at logged steps, and their figures.

    Attributes:
        num_experts: experts of a layer; 0 for a dense model.
        layers: layers with experts.
        measured: loads and biases of the last step, if it was logged.
    """

    priority = 100

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, sizes = trainer, trainer.sizes
        self.num_experts: int = sizes.num_experts
        blocks = range(sizes.num_blocks)
        self.layers = [n for n in blocks if self.num_experts and sizes.is_moe_layer(n)]
        self.measured: AsyncScalars | None = None

    def start(self) -> None:
        if self.trainer.rank == 0 and self.trainer.step == 0:
            # Left by the run that was in this folder before.
            run_files(self.trainer.run_dir).remove("experts.json")

    def updated(self, report: StepReport) -> None:
        trainer = self.trainer
        balance, stages = trainer.train_step.balance, trainer.train_step.groups.stages
        self.measured = None
        if not (self.layers and trainer.logs_this_step):
            return
        # A stage fills the rows of its layers, and the sum combines all stages. float64 holds every count exactly.
        shape = (len(self.layers), 2, self.num_experts)
        both = torch.zeros(shape, dtype=torch.float64, device=trainer.device)
        for n, (name, moe) in enumerate(balance.moes.items()):
            row = self.layers.index(int(name.split(".")[1]))
            assert balance.loads is not None, "a step has ended"
            both[row, 0], both[row, 1] = balance.loads[n], getattr(moe, "bias", 0)
        if stages is not None:
            dist.all_reduce(both, group=stages)
        self.measured = AsyncScalars([both])

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        if self.measured is None:  # a row of a validation between logged steps
            return {}
        numbers = torch.tensor(self.measured.values(), dtype=torch.float64)
        loads_LE, bias_LE = numbers.view(len(self.layers), 2, self.num_experts).unbind(1)
        ep = self.trainer.config.parallelism.expert_parallel_degree
        figures = load_figures(loads_LE, bias_LE, ep=ep)
        if (metrics := self.trainer.hook(Metrics)) is not None and metrics.log is not None:
            metrics.log.write_loads(self.trainer.step, self.layers, loads_LE.long().tolist())
        # With one rank, the busiest expert takes the place of the busiest rank.
        worst = figures["ep_imbalance"] if ep > 1 else figures["maxvio"] + 1
        of_layers = {name: [round(v, 5) for v in t.tolist()] for name, t in figures.items()}
        return {
            "expert_imbalance": round(float(worst.max()), 5),
            "experts": {"layer": self.layers, **of_layers},
        }


def load_figures(loads_LE: Tensor, bias_LE: Tensor, *, ep: int) -> dict[str, Tensor]:
    """Compute the figures that docs/evaluation.md defines.

    Args:
        loads_LE: tokens of each expert in a step, over all ranks, float64.
        bias_LE: routing bias of each expert, float64.
        ep: ranks over which the experts are split, in order.

    Returns:
        A tensor (L,) by the name of the figure.
    """
    num_experts = loads_LE.shape[1]
    total_L1 = loads_LE.sum(1, keepdim=True).clamp(min=1)
    # Ranks with the same index in all expert-parallel groups hold the same experts, and count as one rank.
    rows_LC = loads_LE.unflatten(1, (ep, -1)).sum(-1)
    return {
        "maxvio": (loads_LE / total_L1).amax(1) * num_experts - 1,
        "entropy": torch.special.entr(loads_LE / total_L1).sum(1)
        / math.log(max(num_experts, 2)),
        "dead": (loads_LE == 0).sum(1),
        "bias_range": bias_LE.amax(1) - bias_LE.amin(1),
        "ep_imbalance": (rows_LC / total_L1).amax(1) * ep,
    }
