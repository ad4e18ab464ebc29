"""What TorchTitan 0.2.2 is given to run steps.py's jobs; it imports this file (`--experimental.custom_import=torchtitan_spec`).

Its trainer, model, parallelism, loss, optimizer, schedule and step are its own, untouched. Through its public registry of
train specs four things are put in:

    sizes         those of steps.py, in its TransformerModelArgs; TorchTitan ships no 1B and no 3B
    tokenizer     none: nothing is to be downloaded
    data          one batch of random tokens in pinned memory, the same at each step; its loader would read C4
    metrics       its own figures, written to metrics.jsonl besides its log

On one GPU TorchTitan wraps nothing in FSDP: it computes in bf16 through autocast. That is what its users get there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from steps import MODELS, NUM_TOKENS
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import BaseLogger, MetricsProcessor, build_metrics_processor
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan_sizes import arguments


class OneBatch(BaseDataLoader):
    """The same random batch over and over."""

    def __init__(self, batch: int, seq_len: int) -> None:
        rows = torch.randint(NUM_TOKENS, (batch, seq_len + 1))
        pinned = [part.contiguous() for part in (rows[:, :-1], rows[:, 1:])]
        if torch.cuda.is_available():
            pinned = [part.pin_memory() for part in pinned]
        self.tokens, self.labels = pinned

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield {"input": self.tokens}, self.labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Rows(BaseLogger):
    """TorchTitan's figures under the names that titan's metrics.jsonl has."""

    def __init__(self, folder: str) -> None:
        self.file = (Path(folder) / "metrics.jsonl").open("w", buffering=1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        names = {
            "loss": "loss_metrics/global_avg_loss",
            "tokens_per_s": "throughput(tps)",
            "memory_gib": "memory/max_reserved(GiB)",
            "memory_active_gib": "memory/max_active(GiB)",
        }
        row = {"step": step} | {ours: float(metrics[theirs]) for ours, theirs in names.items()}
        self.file.write(json.dumps(row) + "\n")


def build_dataloader(*, job_config: Any, **unused: Any) -> OneBatch:
    return OneBatch(job_config.training.local_batch_size, job_config.training.seq_len)


def build_metrics(job_config: Any, *rest: Any, **named: Any) -> MetricsProcessor:
    processor = build_metrics_processor(job_config, *rest, **named)
    processor.logger = Rows(job_config.job.dump_folder)
    return processor


register_train_spec(
    "llama3",
    replace(
        get_train_spec(),
        # Other families are titan's alone; the sizes of some need a transformers that is newer than TorchTitan's.
        model_args={
            name: arguments(model.sizes)
            for name, model in MODELS.items()
            if model.family == "llama3"
        },
        build_tokenizer_fn=None,
        build_dataloader_fn=build_dataloader,
        build_metrics_processor_fn=build_metrics,
    ),
)
