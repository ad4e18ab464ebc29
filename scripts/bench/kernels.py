"""Count the operations of one step on a CPU, views left out: what an accelerator would launch, more or less.

    python scripts/bench/kernels.py                                  # in the checkouts to compare
    torchrun --nproc-per-node 2 scripts/bench/kernels.py             # FSDP2, and its collectives

Each case trains Llama of width 64 with 8 blocks on two sequences of 128 tokens a rank. An operation on a list of tensors
counts once. Optimizers whose moments have another precision than the weights are not compiled here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVE = "collectives"
LOOP = {"implementation": "for-loop"}
CASES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, 4 microbatches": {"training": {"global_batch_size": 8}},
    "document masks": {
        "data": {"document_mask": True, "add_eos": True},
        "training": {"dataset": "stdlib"},
    },
    "loss in chunks": {"loss": {"chunk_tokens": 64}},
    "Muon": {"optimizer": {"name": "Muon"}},
    "AdamW8bit": {"optimizer": {"name": "AdamW8bit", **LOOP}},
    "AdamW, bf16 moments": {"optimizer": {"name": "AdamW", "state_dtype": "bfloat16", **LOOP}},
    "bf16 weights, stochastic rounding": {
        "optimizer": {"name": "AdamW", "stochastic_rounding": True, **LOOP},
        "training": {"dtype": "bfloat16"},
    },
}


class Count(TorchDispatchMode):
    """Count operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Views and allocations launch nothing.
        if func.namespace in ("c10d", "_c10d_functional"):
            self.by_name[COLLECTIVE] += "wait" not in func.__name__
        elif not func.is_view and not func.__name__.startswith(
            ("empty", "new_empty", "detach")
        ):
            self.by_name[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(changes: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the operations of the third step by part: forward, backward, update."""
    from titan.config.schema import JobConfig
    from titan.run.trainer import Trainer

    job: dict[str, dict[str, Any]] = {
        "model": {"name": "llama3", "flavor": "tiny"},
        "training": {"dataset": "synthetic", "local_batch_size": 2, "seq_len": 128, "steps": 9},
        "tokenizer": {"name": "bytes"},
        "checkpoint": {"enable": False},
        "metrics": {"enable_tensorboard": False},
    }
    for section, values in changes.items():
        job[section] = job.get(section, {}) | values
    with tempfile.TemporaryDirectory() as mine:
        # Ranks share a folder, which rank 0 removes.
        folder = Path(mine).with_name(f"kernels-{os.environ.get('MASTER_PORT', os.getpid())}")
        job["job"] = {"dump_folder": str(folder)}
        trainer = Trainer(JobConfig.model_validate(job))
        step, parts, counter = trainer.train_step, {}, Count()

        def mark(name: str) -> None:
            parts[name] = parts.get(name, Counter()) + counter.by_name
            counter.by_name = Counter()

        for number in (1, 2, 3):
            parts.clear()
            counter.by_name.clear()
            step.call_on_event(mark)
            with counter:
                step.train(trainer.loader.next_step(), step=number)
            mark("update")
        trainer.close()
        if not trainer.rank:
            shutil.rmtree(folder)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=";".join(CASES), help="separated by semicolons")
    parser.add_argument("--names", type=int, default=0, help="most frequent operations to list")
    args = parser.parse_args()
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        print("| case | forward | backward | update | in all | collectives of each |")
        print("|---|--:|--:|--:|--:|--:|")
    for case in args.cases.split(";"):
        parts = count(CASES[case])
        of = [parts.get(name, Counter()) for name in ("forward", "backward", "update")]
        calls = [counts.pop(COLLECTIVE, 0) for counts in of]
        sums = [counts.total() for counts in of]
        if not is_first:
            continue
        print(f"| {case} | {' | '.join(map(str, [*sums, sum(sums)]))} | {calls} |", flush=True)
        for name, of_part in parts.items():
            if args.names:
                print(f"    {name}: {of_part.most_common(args.names)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
