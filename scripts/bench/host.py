"""Fit the weights of the host's work (titan/sim/record/host_meter.py): `python scripts/bench/host.py [--rows TEXT]`, on an idle machine.

Each job's tiny step runs in a separate process, with a clock at the borders of the parts: CPU time of this thread, the least of
twelve steps, without what CPU kernels take beyond a tiny operation. Beside it is what the counts of the same parts say. At the end
are the weights that the least squares of all parts give, each part weighed by its size.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from time import thread_time_ns
from typing import Any

from titan.config.toml import tomllib

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROWS: dict[str, dict[str, Any]] = TABLES["rows"]


class Clock:
    """Nanoseconds of a meter's parts."""

    def __init__(self, meter: Any) -> None:
        self.meter, self.enter = meter, meter.enter
        self.spent: Counter[str] = Counter()
        self.since = thread_time_ns()
        meter.enter = self.charge

    def charge(self, part: str) -> None:
        """Charge the time until now to the part that ran."""
        now = thread_time_ns()
        self.spent[self.meter.part] += now - self.since
        self.enter(part)
        self.since = now


def timed(row: str) -> list[dict[str, Any]]:
    """Return time and counts of each part of a row's tiny job, in tiny operations."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from titan.checks.layout_rules import resolve_layout
    from titan.config.schema import JobConfig
    from titan.parallel import build_mesh
    from titan.sim.record.host_meter import Census, HostMeter, valid_counts
    from titan.sim.record.host_time import tiny
    from titan.sim.record.operators import tensors_in
    from titan.sim.record.program import job_program

    torch.set_num_threads(1)
    config = JobConfig(**(TABLES["common"] | ROWS[row])).on_device("cpu")
    config, layout = tiny(config, resolve_layout(config, 8))
    dist.init_process_group("fake", rank=0, world_size=layout.world_size, store=FakeStore())
    mesh = build_mesh("cpu", **layout.degrees)
    meter = HostMeter()
    a, b = torch.ones(16, 64), torch.ones(16, 64)
    took: dict[Any, int] = {}
    seen: Counter[Any] = Counter()

    class Kernels(TorchDispatchMode):
        """The least time of each distinct call, and how often each part makes it."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
                return NotImplemented
            start = thread_time_ns()
            result = func(*args, **(kwargs or {}))
            spent = thread_time_ns() - start
            call = func, tuple((t.shape, t.dtype) for t in tensors_in(args))
            took[call] = min(spent, took.get(call, spent))
            seen[meter.part, call] += 1
            return result

    def burst() -> float:
        start = thread_time_ns()
        for _ in range(1000):
            torch.add(a, b)
        return (thread_time_ns() - start) / 1000

    with ExitStack() as stack:
        stack.enter_context(meter.watch_hooks())
        program = job_program(config, layout, torch.device("cpu"), mesh)
        stack.enter_context(valid_counts())
        stack.enter_context(meter.watch(program))
        gc.collect()
        gc.disable()
        program.train(1)
        sys.setprofile(meter.profile)
        program.train(2)
        sys.setprofile(None)
        census = Census(meter)
        with census:
            program.train(3)
        for step in (4, 5):
            seen.clear()
            with Kernels():
                program.train(step)
        with Kernels():
            for _ in range(100):
                torch.add(a, b)
        clock, steps, bursts = Clock(meter), [], []
        for step in range(6, 18):
            bursts.append(burst())
            meter.enter("forward")
            clock.spent.clear()
            program.train(step)
            meter.enter("forward")
            steps.append(Counter(clock.spent))
    small = took[torch.ops.aten.add.Tensor, ((a.shape, a.dtype), (b.shape, b.dtype))]
    kernels: Counter[str] = Counter()
    for (part, call), number in seen.items():
        kernels[part] += number * max(0, took[call] - small)
    least = {part: min(step[part] for step in steps) for part in steps[0]}
    return [
        {
            "row": row,
            "part": part,
            "time": (least[part] - kernels[part]) / min(bursts),
            "calls": meter.python[part],
            "operations": census.operations[part],
        }
        for part in least
    ]


def ask(row: str) -> list[dict[str, Any]]:
    """Return the parts of a row, from a separate process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", "--rows", row]
    output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def fit(parts: list[dict[str, Any]], features: list[str]) -> list[float]:
    """Return the weights of features that predict the parts' times best, as shares of them."""
    import numpy as np

    times = np.array([part["time"] for part in parts])
    counts = np.array([[part[name] for name in features] for part in parts])
    return [*np.linalg.lstsq(counts / times[:, None], times / times, rcond=None)[0]]


def main() -> None:
    """Print the table and the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name has this text")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return print(json.dumps(timed(options.rows)))
    from titan.sim.record.host_meter import CALL, OPERATION, UPDATE_CALL

    updates, others = [], []
    print("row | part | tiny operations | counted | ratio")
    for row in ROWS:
        if options.rows not in row:
            continue
        for part in ask(row):
            is_update = part["part"] in ("clip", "optimizer")
            (updates if is_update else others).append(part)
            counted = CALL * part["calls"] + OPERATION * part["operations"]
            if is_update:
                counted = UPDATE_CALL * part["calls"]
            part["ratio"] = counted / part["time"]
            print(
                f"{row} | {part['part']} | {part['time']:.0f} | {counted:.0f} | {part['ratio']:.2f}",
                flush=True,
            )
    call, operation = fit(others, ["calls", "operations"])
    [update] = fit(updates, ["calls"])
    print(f"fit: CALL {call:.2f}, OPERATION {operation:.2f}, UPDATE_CALL {update:.2f}")
    for name, group in (("forward and backward", others), ("clip and optimizer", updates)):
        print(
            f"{name}: off by {fmean(abs(part['ratio'] - 1) for part in group):.0%} in the mean of {len(group)} parts"
        )


if __name__ == "__main__":
    main()
