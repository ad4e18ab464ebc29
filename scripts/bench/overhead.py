"""A step of titan's loop against a bare PyTorch loop, on the same model: `python scripts/bench/overhead.py`.

Both train Llama "10M" on one process in fp32 with AdamW and clipping. Titan's side is the whole loop (loader, counts,
finiteness, metrics, console); the bare side is forward, F.cross_entropy, backward, clip_grad_norm_ and step on
tensors that are already there. Blocks alternate (A B A B ...) in this one process, so that a noisy machine slows both;
the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from titan.config.model import family, model_config
from titan.config.schema import JobConfig
from titan.hooks import standard_hooks
from titan.optim.optimizers import parameter_groups
from titan.trainer import Trainer


def bare_step(
    model: torch.nn.Module, *, vocabulary: int, shape: tuple[int, int]
) -> Callable[[], None]:
    """One step of the bare loop, as a function without arguments."""
    groups = parameter_groups(model.parameters(), weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=8e-4, betas=(0.9, 0.95), fused=True)
    rows = torch.randint(vocabulary, (shape[0], shape[1] + 1))

    def step() -> None:
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() > 0

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps-per-block", type=int, default=3)
    args = parser.parse_args()
    shape = (4, 256)
    with tempfile.TemporaryDirectory() as folder:
        config = JobConfig.model_validate(
            {
                "job": {"dump_folder": folder},
                "model": {"flavor": "10M"},
                "training": {
                    "dataset": "synthetic",
                    "local_batch_size": shape[0],
                    "seq_len": shape[1],
                    "mixed_precision_param": "float32",
                },
                "checkpoint": {"enable": False},
            }
        )
        trainer = Trainer(config, hooks=standard_hooks)
        trainer.start()
        sizes = model_config(config.model)
        model = family(config.model.name).build_model(sizes)
        bare = bare_step(model, vocabulary=sizes.vocab_size, shape=shape)
        times: dict[str, list[float]] = {"titan": [], "bare": []}
        for round_number in range(args.rounds + 1):
            for name, step in (("titan", trainer.train_one_step), ("bare", bare)):
                for _ in range(args.steps_per_block):
                    begin = time.perf_counter()
                    step()
                    if round_number:  # the first round warms up
                        times[name].append(time.perf_counter() - begin)
        trainer.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        json.dumps(
            {
                "parameters": sum(
                    p.numel() for p in trainer.train_step.model_parts[0].parameters()
                ),
                "threads": torch.get_num_threads(),
                "steps_each": len(times["bare"]),
                "titan_ms": round(medians["titan"] * 1e3, 2),
                "bare_ms": round(medians["bare"] * 1e3, 2),
                "titan_over_bare": round(medians["titan"] / medians["bare"], 4),
            }
        )
    )


if __name__ == "__main__":
    main()
