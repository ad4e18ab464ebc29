"""A hook that makes each step slower in a way that the variable SLOW names, and one that is quick in the same way."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan.run.hook import Hook


def hand_written_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize in a kernel for each operation, as F.layer_norm does in one."""
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5))


def in_fp32(linear: nn.Linear, x: Tensor) -> Tensor:
    """Multiply in fp32, whatever the dtype of the job."""
    return F.linear(x.float(), linear.weight.float()).to(x.dtype)


class Slow(Hook):
    """A slowness by its name: methods named after it begin it and act in each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.name, _, self.quick = os.environ.get("SLOW", "").partition("-")
        # CPU seconds of each step since the last row: on a shared machine, the wall's vary.
        self.cpu_s: list[float] = []
        self.last_s = time.process_time()
        self.seconds = float(os.environ.get("SLOW_S", "0.02"))

    def _modules(self, suffix: str) -> list[nn.Module]:
        parts = self.trainer.train_step.model_parts
        return [
            m for part in parts for name, m in part.named_modules() if name.endswith(suffix)
        ]

    def start(self) -> None:
        if self.name == "norm":
            for norm in self._modules("norm"):
                self._replace_norm(norm)
        elif self.quick:
            return
        elif self.name == "fp32":
            for block in self._modules("feed_forward"):
                for linear in (m for m in block.modules() if isinstance(m, nn.Linear)):
                    linear.forward = partial(in_fp32, linear)
        elif self.name == "math":
            self.kept = sdpa_kernel(SDPBackend.MATH)
            self.kept.__enter__()
        elif self.name == "loader":
            self.trainer.loader.samples.get = self._slowly(self.trainer.loader.samples.get)
        elif self.name == "rank" and self.trainer.rank == 1:
            for block in self._modules("feed_forward"):
                block.forward = self._slowly(block.forward)

    def _slowly(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.seconds)
            return call(*args, **kwargs)

        return slow

    def _replace_norm(self, norm: Any) -> None:
        shape = norm.weight.shape
        quick: Callable[[Tensor], Tensor] = lambda x: F.layer_norm(x, shape, norm.weight)  # noqa: E731
        norm.forward = quick if self.quick else lambda x: hand_written_norm(x, norm.weight)

    def columns(self, *_: Any) -> dict[str, Any]:
        cpu_s, self.cpu_s = self.cpu_s, []
        return {"slow/cpu_s": min(cpu_s)} if cpu_s else {}

    def before_step(self) -> None:
        now_s = time.process_time()
        self.cpu_s.append(now_s - self.last_s)
        self.last_s = now_s

    def step_begin(self) -> None:
        if self.name == "compile" and not self.quick:
            torch._dynamo.reset()

    def before_forward(self, batches: Sequence[Any]) -> None:
        if self.quick:
            return
        if self.name == "item":
            tokens = [token for batch in batches for token in batch.tokens_BS.flatten()]
            self.counts = [sum(token.item() > n for token in tokens) for n in range(40)]
        elif self.name == "gc":
            gc.collect()
