"""Compare the simulator's host with this machine's: `python scripts/bench/host.py [--rounds N] [--rows TEXT]`.

Jobs of many blocks run a real step on CPU tensors under torch's fake process group, and their CPU time is taken without any
instrument. Beside it is what the simulator says of the same job: the pace of a tiny model of few blocks, spread over the events of
the job's trace, times the tiny operation that was timed beside the real step. For this comparison the pace keeps the CPU's kernels,
since they are in the real step, too. The last columns are without them: the host's own work of a tiny job, which the simulator uses.

The two are timed in turn, in processes of their own, and medians are compared, because machines are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median
from typing import Any

LLAMA: dict[str, Any] = {
    "name": "llama3",
    "flavor": "8B",
    "overrides": {"dim": 64, "n_layers": 32, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 256},
}
# The feed-forward layers of the three rows above it stay 14,336 wide, so that most of a CPU's time goes into copies of their weights.
NARROW = {**LLAMA, "overrides": {**LLAMA["overrides"], "ffn_dim": 64}}
DEEPSEEK = {
    "name": "deepseek_v3",
    "flavor": "16B",
    "overrides": {
        **{"dim": 64, "n_layers": 27, "n_heads": 4, "vocab_size": 256, "ffn_dim": 64},
        **{
            "expert_dim": 32,
            "num_experts": 8,
            "top_k": 2,
            "kv_lora_rank": 32,
            "rope_factor": 0.0,
        },
    },
}
OPERATORS = {"mode": "selective", "selective_ac_option": "op"}
EVEN = {"debug": {"moe_force_load_balance": True}}
ROWS: dict[str, dict[str, Any]] = {
    "Llama, FSDP 8, no AC": {"model": LLAMA},
    "Llama, FSDP 8, full AC": {"model": LLAMA, "activation_checkpoint": {"mode": "full"}},
    "Llama, FSDP 4 x TP 2, no AC": {
        "model": LLAMA,
        "parallelism": {"tensor_parallel_degree": 2},
    },
    "narrow Llama, FSDP 8, no AC": {"model": NARROW},
    "narrow Llama, FSDP 4 x TP 2, no AC": {
        "model": NARROW,
        "parallelism": {"tensor_parallel_degree": 2},
    },
    "DeepSeek, FSDP 8, op AC": {"model": DEEPSEEK, "activation_checkpoint": OPERATORS},
    "DeepSeek, EP 2, op AC": {
        "model": DEEPSEEK,
        "activation_checkpoint": OPERATORS,
        "parallelism": {"expert_parallel_degree": 2},
        **EVEN,
    },
    "DeepSeek, TP 2 x EP 2, op AC": {
        "model": DEEPSEEK,
        "activation_checkpoint": OPERATORS,
        "parallelism": {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
        **EVEN,
    },
}
TRAINING: dict[str, Any] = {
    "local_batch_size": 1,
    "seq_len": 16,
    "mixed_precision_param": "bfloat16",
}


def config_of(row: str) -> Any:
    """Return the config of a row."""
    from titan.config.schema import JobConfig

    sections: Any = {"training": TRAINING, **ROWS[row]}
    return JobConfig(**sections)


def real_step(row: str) -> dict[str, float]:
    """Return the CPU milliseconds of a real step, and the microseconds of a tiny operation."""
    import gc

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from titan.config.layout import resolve_layout
    from titan.parallel import build_mesh
    from titan.sim.record.host_meter import valid_counts
    from titan.sim.record.program import job_program

    torch.set_num_threads(1)
    config = config_of(row).on_device("cpu")
    layout = resolve_layout(config, 8)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    mesh = build_mesh("cpu", **{n: getattr(layout, n) for n in ("pp", "dp_replicate", "dp_shard", "cp", "tp")})  # fmt: skip
    program = job_program(config, layout, torch.device("cpu"), mesh)
    gc.collect()
    gc.disable()
    steps, tiny = [], []
    a, b = torch.ones(16, 64), torch.ones(16, 64)
    with valid_counts():
        for step in range(6):
            start = time.process_time()
            program.train(step + 1)
            steps.append(time.process_time() - start)
            start = time.process_time()
            for _ in range(1000):
                torch.add(a, b)
            tiny.append((time.process_time() - start) / 1000)
    return {"ms": median(steps[1:]) * 1e3, "tiny_us": median(tiny) * 1e6}


def tiny_pace(row: str) -> dict[str, dict[str, float]]:
    """Return the paces of a row's tiny job, with CPU kernels and without."""
    from titan.config.layout import resolve_layout
    from titan.sim.record.host_meter import measure_job
    from titan.sim.record.host_time import tiny

    config = config_of(row).on_device("cpu")
    small, layout = tiny(config, resolve_layout(config, 8))
    # As wide and as long as the row itself, whose CPU kernels are to be compared. Only the depth is small.
    depth = {
        n: v for n, v in small.model.overrides.items() if n in ("n_layers", "n_dense_layers")
    }
    overrides = {**config.model.overrides, **depth}
    model = config.model.model_copy(update={"overrides": overrides})
    wide = small.model_copy(update={"model": model, "training": config.training})
    return {
        "with": measure_job(wide, layout, keep_kernels=True),
        "without": measure_job(small, layout),
    }


def host_ms(trace: Any, pace: dict[str, float], tiny_us: float) -> float:
    """Return the milliseconds that the simulator's host takes to issue a trace, without launches."""
    from titan.sim.price.cost import Cost
    from titan.sim.price.profiles import load_profile
    from titan.sim.record.trace import Launch, Transfer
    from titan.sim.replay.host import Issue

    free = {"launch_us": 0.0, "launch_compiled_us": 0.0, "launch_transfer_us": 0.0}
    profile = load_profile("cpu").model_copy(update={**free, "host_tiny_us": tiny_us})
    issue = Issue(replace(trace, host=pace), Cost(profile))
    total = 0.0
    for event in trace.step:
        if isinstance(event, Launch):
            total += issue.kernel_s(event)
        elif isinstance(event, Transfer):
            total += issue.transfer_s(event)
    return total * 1e3


def trace_of(row: str) -> Any:
    """Return the trace of rank 0."""
    from titan.config.layout import resolve_layout
    from titan.sim.record.trace_cache import TraceRequest, get_traces

    config = config_of(row).on_device("cuda")
    found: list[Any] = []
    request = TraceRequest(config, resolve_layout(config, 8))
    get_traces([request], done=lambda _, traces: found.append(traces))
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0][0]


def ask(what: str, row: str) -> Any:
    """Return the result of one function, run in a separate process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", what, "--rows", row]
    output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows whose name has this text")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return print(json.dumps(globals()[options.child](options.rows)))
    print("row | real ms | simulated ms | ratio | without kernels | tiny us")
    for row in ROWS:
        if options.rows not in row:
            continue
        trace = trace_of(row)
        real, simulated, alone, tiny = [], [], [], []
        for _ in range(options.rounds):
            step = ask("real_step", row)
            paces = ask("tiny_pace", row)
            real.append(step["ms"])
            tiny.append(step["tiny_us"])
            simulated.append(host_ms(trace, paces["with"], step["tiny_us"]))
            alone.append(host_ms(trace, paces["without"], step["tiny_us"]))
        ratio = median(simulated) / median(real)
        print(f"{row} | {median(real):.0f} | {median(simulated):.0f} | {ratio:.2f} | {median(alone):.0f} | {median(tiny):.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
