"""Count what a step launches on a CPU: operations of ATen that compute, and collectives, in the update and in the whole step.

    python scripts/bench/launches.py                                  # one process
    torchrun --nproc-per-node 2 scripts/bench/launches.py             # FSDP2 on two ranks

The debug model (6 blocks, 57 parameters), eager, the third step. On a GPU each operation is a kernel or more. Optimizers with
moments in a precision other than the weights' are not compiled here (implementation = "for-loop").
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan.config.schema import JobConfig
from titan.data.packing import Batch
from titan.parallel import build_mesh
from titan.train_step import TrainStep, build_train_step

LOOP = {"implementation": "for-loop"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"name": "AdamW"},
    "AdamW, bf16 moments": {"name": "AdamW", "state_dtype": "bfloat16", **LOOP},
    "AdamW8bit": {"name": "AdamW8bit", **LOOP},
    "bf16, stochastic rounding": {"name": "AdamW", "stochastic_rounding": True, **LOOP},
    "Muon": {"name": "Muon"},
}


class Launches(TorchDispatchMode):
    """Count by kind: "compute" or "collective"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, list | tuple) and result else result
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts["collective"] += "wait" not in str(func)
        elif not func.is_view and "detach" not in str(func) and "empty" not in str(func):
            # Scalars of the update are on the host. What works on lists in place returns nothing.
            is_host = isinstance(first, Tensor) and first.ndim == 0
            self.counts["compute"] += not is_host and (first is None or isinstance(first, Tensor))
        return result


def build(optimizer: dict[str, Any], world: int) -> TrainStep:
    rounds = optimizer.get("stochastic_rounding", False)
    dtypes = {"dtype": "bfloat16"} if rounds else {}
    config = JobConfig.model_validate(
        {
            "model": {"flavor": "debugmodel"},
            "training": {"mixed_precision_param": "bfloat16", **dtypes},
            "optimizer": optimizer,
        }
    )
    mesh = build_mesh("cpu", dp_shard=world)
    return build_train_step(config, device=torch.device("cpu"), mesh=mesh)


def main() -> None:
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else LONE))
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, optimizer in OPTIMIZERS.items():
        step = build(optimizer, world)
        update = step.optimizer.step
        in_update = Launches()

        def counted(*_: Any, update: Any = update, mode: Launches = in_update) -> None:
            with mode:
                update()

        rows = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(rank))
        batch = Batch(tokens_BS=rows[:, :-1], labels_BS=rows[:, 1:])
        for number in (1, 2):
            step.train([batch], step=number)
        step.optimizer.step = counted  # pyright: ignore[reportAttributeAccessIssue]
        with Launches() as all_of_it:
            step.train([batch], step=3)
        if not rank:
            ours, rest = in_update.counts, all_of_it.counts
            print(
                f"{name:<26} update {ours['compute']:>5} operations {ours['collective']:>3} collectives; "
                f"whole step {rest['compute']:>5} {rest['collective']:>3}",
                flush=True,
            )
    dist.destroy_process_group()


LONE: dict[str, Any] = {"rank": 0, "world_size": 1, "store": dist.HashStore()}

if __name__ == "__main__":
    main()
