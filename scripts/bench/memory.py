"""Activation memory of each checkpointing mode, by the CPU's allocator, beside the formula: `python scripts/bench/memory.py`.

Forward and backward pass of a Llama in fp32 on one process, after one that sets everything up. torch's profiler records every
allocation; what is there when the loss begins, less what was there before the step, is what the forward pass keeps.
The peak is that of the whole step above its beginning (the parameters' gradients exist before).

The formula is that of the start-up page (titan/sim/estimate.py), which is about an accelerator's kernels. torch's on a CPU keep
more where a layer keeps all: RMSNorm is not one kernel there (2 D more for a layer's two norms), and attention's output is laid
out anew for the projection after it (D); the log-sum-exp of each head and token is counted too. Writes a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from titan.checks.layout_rules import resolve_layout
from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.config.toml import read_toml
from titan.data.packing import Batch
from titan.parallel import build_mesh
from titan.sim.estimate import activation_elements
from titan.step.resolved import resolve_job
from titan.step.train_step import TrainStep, build_train_step

TABLES = read_toml(Path(__file__).with_suffix(".toml"))[0]
BATCH, SEQUENCE = (TABLES["sections"]["training"][n] for n in ("local_batch_size", "seq_len"))


def job(settings: dict[str, Any]) -> JobConfig:
    """The job of a mode."""
    section = dict(settings)
    compiled = {"enable": section.pop("compile", False), "components": ["model"]}
    own = {"activation_checkpoint": section, "compile": compiled}
    return JobConfig.model_validate(TABLES["sections"] | own)


def measure(config: JobConfig) -> tuple[float, float]:
    """Bytes kept when the loss begins, and at the step's peak, both above those at its beginning."""
    mesh = build_mesh("cpu", dp_shard=1)
    job = resolve_job(config, resolve_layout(config, mesh.size()), device="cpu")
    train_step = build_train_step(job, device=torch.device("cpu"), mesh=mesh)
    rows = torch.randint(config.model.sizes.vocab_size, (BATCH, SEQUENCE + 1))
    batch = Batch(tokens_BS=rows[:, :-1].contiguous(), labels_BS=rows[:, 1:].contiguous())
    _train(train_step, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        _train(train_step, batch)
    torch.compiler.reset()  # a mode's blocks must not run what was compiled for another's
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    begin = next(e["ts"] for e in events if e["name"] == "the step")
    loss = next(e["ts"] for e in events if e["name"] == "the loss")
    end = next(e["ts"] + e["dur"] for e in events if e["name"] == "the step")
    changes = sorted(
        (e["ts"], e["args"]["Bytes"])
        for e in events
        if e["name"] == "[memory]" and begin <= e["ts"] <= end
    )
    live = peak = kept = 0
    for time, num_bytes in changes:
        live += num_bytes
        peak = max(peak, live)
        kept = live if time < loss else kept
    return kept, peak


def _train(train_step: TrainStep, batch: Batch) -> None:
    """Forward and backward of one micro-batch; gradients stay allocated."""
    (model,) = train_step.model_parts
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with record_function("the step"):
        output = model(batch.tokens_BS)
        with record_function("the loss"):
            loss = train_step.loss_sum(output, batch.labels_BS)
        del output
        loss.backward()
        del loss


def by_formula(config: JobConfig) -> tuple[float, float]:
    """Bytes kept by the start-up page's formula, and with what a CPU's kernels keep besides."""
    layout = Layout(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, accumulation=1)
    sizes = config.model.sizes
    kept, _ = activation_elements(config, sizes, layout, layers=sizes.n_layers)
    unit = 4 * BATCH * SEQUENCE
    return unit * kept, unit * (kept + _more_on_a_cpu(config, sizes))


def _more_on_a_cpu(config: JobConfig, sizes: Any) -> float:
    """Elements per token that torch's kernels for CPUs keep besides; not known for compiled blocks."""
    section = config.activation_checkpoint
    if config.compile.enable:
        return 0
    if section.mode == "selective" and section.selective_ac_option == "op":
        return sizes.dim + sizes.n_layers * sizes.n_heads * ("attention" in section.op_keep)
    every = int(section.selective_ac_option) if section.mode == "selective" else 1
    whole_layers = {"none": sizes.n_layers, "full": 0}.get(
        section.mode, sizes.n_layers * (every - 1) // every
    )
    return sizes.dim + whole_layers * (2 * sizes.dim + sizes.n_heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default="", help="only modes that contain this")
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| mode | kept, MiB | formula | formula on a CPU | peak of the step |")
    print("|---|---|---|---|---|")
    for name, settings in TABLES["modes"].items():
        if args.modes not in name:
            continue
        config = job(settings)
        kept, peak = measure(config)
        formula, on_cpu = by_formula(config)
        mib = " | ".join(f"{x / 2**20:.1f}" for x in (kept, formula, on_cpu, peak))
        print(f"| {name} | {mib} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
