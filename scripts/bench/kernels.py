"""Count the operations of one step on a CPU, views left out: what an accelerator would launch, more or less.

    python scripts/bench/kernels.py            # in the checkouts to compare

Each case trains Llama of width 64 with 8 blocks, two sequences of 128 tokens, in one process.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CASES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, 4 microbatches": {"training": {"global_batch_size": 8}},
    "document masks": {
        "data": {"document_mask": True, "add_eos": True},
        "training": {"dataset": "stdlib"},
    },
    "loss in chunks": {"loss": {"chunk_tokens": 64}},
    "Muon": {"optimizer": {"name": "Muon"}},
    "AdamW8bit": {"optimizer": {"name": "AdamW8bit"}},
    "AdamW, bf16 moments": {"optimizer": {"name": "AdamW", "state_dtype": "bfloat16"}},
}


class Count(TorchDispatchMode):
    """Count operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views and allocations launch nothing.
        if not func.is_view and not func.__name__.startswith(("empty", "detach")):
            self.by_name[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(changes: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the operations of the third step by part: forward, backward, update."""
    from titan.config.schema import JobConfig
    from titan.trainer import Trainer

    job: dict[str, dict[str, Any]] = {
        "model": {"name": "llama3", "flavor": "tiny"},
        "training": {"dataset": "synthetic", "local_batch_size": 2, "seq_len": 128, "steps": 9},
        "tokenizer": {"name": "bytes"},
        "checkpoint": {"enable": False},
        "metrics": {"enable_tensorboard": False},
    }
    for section, values in changes.items():
        job[section] = job.get(section, {}) | values
    with tempfile.TemporaryDirectory() as folder:
        job["job"] = {"dump_folder": folder}
        trainer = Trainer(JobConfig.model_validate(job))
        step, parts, counter = trainer.train_step, {}, Count()

        def mark(name: str) -> None:
            parts[name] = parts.get(name, Counter()) + counter.by_name
            counter.by_name = Counter()

        for number in (1, 2, 3):
            parts.clear()
            counter.by_name.clear()
            step.mark = mark
            with counter:
                step.train(trainer.loader.next_step(), step=number)
            mark("update")
        trainer.close()
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=";".join(CASES), help="separated by semicolons")
    parser.add_argument("--names", type=int, default=0, help="most frequent operations to list")
    args = parser.parse_args()
    print("| case | forward | backward | update | in all |\n|---|--:|--:|--:|--:|")
    for case in args.cases.split(";"):
        try:
            parts = count(CASES[case])
        except Exception as error:
            print(f"| {case} | {type(error).__name__}: {str(error).splitlines()[0]} |")
            continue
        sums = [parts.get(name, Counter()).total() for name in ("forward", "backward", "update")]
        print(f"| {case} | {' | '.join(map(str, sums))} | {sum(sums)} |", flush=True)
        for name, of_part in parts.items():
            if args.names:
                print(f"    {name}: {of_part.most_common(args.names)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
