"""titan.train with a fault in its third step, in the way that FAULT says, on rank 1 (or FAULTY_RANK); for torchrun and titan.ops.launch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

FAULT, STEP = os.environ["FAULT"], 3
STRIKES = os.environ.get("RANK") == os.environ.get("FAULTY_RANK", "1")


def hang() -> None:
    time.sleep(1000)


def lock() -> None:
    ctypes.PyDLL(None).sleep(1000)  # PyDLL does not let go of the interpreter's lock


def eat() -> None:
    taken = []
    while True:
        taken.append(b"x" * 2**24)


def in_model(step: int) -> None:
    """Within the forward pass, in step 3 or in every one."""
    import torch

    if FAULT == "slow":
        time.sleep(0.4)
    elif step >= STEP:
        if FAULT == "device_oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        hang()


def collective(ours: bool) -> None:
    """One that all ranks call, but not alike."""
    import torch
    import torch.distributed as dist

    x = torch.ones(4000, dtype=torch.float64 if ours and FAULT == "dtype" else torch.float32)
    if ours and FAULT == "operation":
        dist.all_gather([x, x.clone()], x)
    else:
        dist.all_reduce(x[:3000] if ours and FAULT == "shape" else x)


def before_step(step: int) -> None:
    if step != STEP:
        return
    if FAULT in ("shape", "dtype", "operation"):
        return collective(STRIKES)
    faults = {
        "missing": lambda: os._exit(0),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "locked": lock,
        "host_oom": eat,
        "segfault": lambda: ctypes.string_at(0),
    }
    if STRIKES and FAULT in faults:
        faults[FAULT]()


def of_data(call: Any) -> Any:
    calls = 0

    def get(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if STRIKES and calls >= STEP:
            if FAULT == "dead_loader":
                raise ConnectionError("file server data1 does not answer")
            hang()
        return call(*args)

    return get


def install() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch.distributed as dist

    import titan.run.standard_hooks
    from tests.support.fault_injection import hooks_with_faults
    from titan.data.loader import Loader
    from titan.models.llama3.model import Block
    from titan.run.trainer import Trainer

    one_step, make = Trainer.train_one_step, Loader.__init__
    trainer: list[Trainer] = []

    def faulty_step(self: Trainer) -> None:
        trainer[:] = [self]
        before_step(self.step + 1)
        one_step(self)

    def faulty_loader(self: Loader, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.samples.get = of_data(self.samples.get)

    Trainer.train_one_step = faulty_step
    # As NCCL's waits for collectives that other ranks never join.
    if FAULT not in ("none", "slow"):
        dist.destroy_process_group = lambda group=None: hang()
    titan.run.standard_hooks.standard_hooks = hooks_with_faults  # TITAN_FAULT
    if FAULT in ("dead_loader", "stuck_loader"):
        Loader.__init__ = faulty_loader
    if STRIKES and FAULT in ("hang", "slow", "device_oom"):
        forward = Block.forward

        def faulty_forward(self: Block, *args: Any, **kwargs: Any) -> Any:
            if self.training and trainer:
                in_model(trainer[0].step)
            return forward(self, *args, **kwargs)

        Block.forward = faulty_forward


if __name__ == "__main__":
    import faulthandler

    from titan.base.signals import die_with_parent
    from titan.run import train

    faulthandler.enable()
    die_with_parent()
    install()
    code = train.main(sys.argv[1:])
    os._exit(code)
