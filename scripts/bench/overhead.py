"""Compare titan's small steps and its start-up with a bare loop, TorchTitan 0.2.2, HF Trainer, FSDP1 and DeepSpeed on a CPU.

    python scripts/bench/overhead.py --sizes dim64,dim256 --ranks 1,2 --rounds 5

Each contestant trains Llama's shapes in fp32 with AdamW and clipping, as separate processes that take turns. Each turn runs
one step, and then many. The first is the time from a command to its first step and out again; the difference, divided
by the steps, is the time of a step. Both are measured from outside: wall time, and CPU time of all processes. The
table gives medians, and their ratio to the bare loop's.

On two ranks, titan, TorchTitan and the bare loop use FSDP2 over gloo, with each block a unit. HF Trainer uses DDP, since
it shards on accelerators only. TorchTitan needs triton, and gets a CPU's names for the CUDA calls that it makes.

FSDP1 and DeepSpeed train titan's model in the bare loop's step. FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel) wraps each block.
DeepSpeed runs ZeRO-2 with torch's AdamW: its own Adam for CPUs would be compiled at the start. Its ZeRO-3 runs with `--against deepspeed3`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from steps import free_port, rank_environment

HERE = Path(__file__).resolve().parent
# Flavor of Llama, sequences a step on each rank, their length, and the steps of a long run.
SIZES = {"dim64": ("tiny", 2, 128, 300), "dim256": ("debugmodel", 4, 256, 60)}
CONTESTANTS = ("bare", "titan", "torchtitan", "hf", "fsdp1", "deepspeed", "deepspeed3")
PACKAGES = {"torchtitan": "torchtitan", "hf": "accelerate", "deepspeed": "deepspeed"}
PACKAGES["deepspeed3"] = "deepspeed"
LOG_FREQ = 10


def job_toml(size: str, *, steps: int, rank_count: int) -> str:
    """Return the job that titan and TorchTitan read."""
    flavor, batch, seq_len, _ = SIZES[size]
    return f"""
[job]
dump_folder = "."
[model]
name = "llama3"
flavor = "{flavor}"
[optimizer]
lr = 3e-4
implementation = "fused"
[lr_scheduler]
warmup_steps = 1
[training]
dataset = "synthetic"
local_batch_size = {batch}
seq_len = {seq_len}
steps = {steps}
mixed_precision_param = "float32"
[parallelism]
data_parallel_shard_degree = {rank_count}
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = {LOG_FREQ}
enable_tensorboard = false
[checkpoint]
enable = false
"""


# ---- the contestants ---------------------------------------------------------------------------


def model_and_rows(size: str) -> tuple[Any, Any]:
    """Return titan's model and a batch of random tokens, with labels one further."""
    import torch

    from titan.models.llama3 import FLAVORS, build_model

    flavor, batch, seq_len, _ = SIZES[size]
    torch.manual_seed(0)
    return build_model(FLAVORS[flavor]), torch.randint(256, (batch, seq_len + 1))


def loop(model: Any, rows: Any, steps: int, *, backward: Any, update: Any) -> None:
    """Run the steps; `backward` gets the loss, and `update` clips and steps."""
    import torch.distributed as dist
    import torch.nn.functional as F

    for step in range(1, steps + 1):
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        backward(loss)
        update()
        if step % LOG_FREQ == 0:
            print(step, loss.item())
    if dist.is_initialized():
        dist.destroy_process_group()


def plain_loop(model: Any, rows: Any, steps: int, clip: Any) -> None:
    """Run the steps with torch's AdamW, fused."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)

    def update() -> None:
        clip()
        optimizer.step()
        optimizer.zero_grad()

    loop(model, rows, steps, backward=lambda loss: loss.backward(), update=update)


def bare(size: str, steps: int) -> None:
    """Train titan's model in a loop of plain PyTorch."""
    import torch
    import torch.distributed as dist

    model, rows = model_and_rows(size)
    if int(os.environ["WORLD_SIZE"]) > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        for block in model.layers.values():
            fully_shard(block)
        fully_shard(model)
    clip = torch.nn.utils.clip_grad_norm_
    plain_loop(model, rows, steps, lambda: clip(model.parameters(), 1.0))


def fsdp1(size: str, steps: int) -> None:
    """Train titan's model under FullyShardedDataParallel, each block a unit."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("gloo")
    model, rows = model_and_rows(size)
    blocks = ModuleWrapPolicy({type(block) for block in model.layers.values()})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=blocks, use_orig_params=True, device_id=torch.device("cpu")
    )
    plain_loop(model, rows, steps, lambda: model.clip_grad_norm_(1.0))


def deepspeed(size: str, steps: int, stage: int = 2) -> None:
    """Train titan's model under DeepSpeed's engine, which clips and steps."""
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    model, rows = model_and_rows(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    settings = {
        "train_micro_batch_size_per_gpu": len(rows),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    loop(engine, rows, steps, backward=engine.backward, update=engine.step)


def deepspeed3(size: str, steps: int) -> None:
    deepspeed(size, steps, stage=3)


def titan(size: str, steps: int) -> None:
    from titan.run.train import main

    assert main(["job.toml", "--tokenizer.name=bytes"]) == 0


def answer_as_an_accelerator() -> None:
    """Let a CPU answer to what TorchTitan asks of an accelerator."""
    from types import SimpleNamespace

    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    answers: dict[str, Any] = {
        "get_device_name": "CPU",
        "get_device_properties": SimpleNamespace(total_memory=2**34),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "memory_stats": {},
        "current_device": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)


def torchtitan(size: str, steps: int) -> None:
    """Run TorchTitan's own main, on a CPU that answers to what it asks of an accelerator."""
    from torch.distributed.fsdp import FSDPModule

    answer_as_an_accelerator()
    import torchtitan.train as program
    from torchtitan.config import ConfigManager

    arguments = ["--job.config_file=job.toml", "--experimental.custom_import=torchtitan_spec"]
    trainer = program.Trainer(ConfigManager().parse_args(arguments))
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):  # gloo cannot scale within a sum
                module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    trainer.close()


def hf(size: str, steps: int) -> None:
    """Train transformers' Llama with its Trainer."""
    import torch
    import transformers

    from titan.models.llama3 import FLAVORS

    flavor, batch, seq_len, _ = SIZES[size]
    sizes = FLAVORS[flavor]
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        num_key_value_heads=sizes.n_kv_heads,
        use_cache=False,
    )
    tokens = torch.randint(256, (seq_len,))
    arguments = transformers.TrainingArguments(
        output_dir=".",
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=3e-4,
        adam_beta2=0.95,
        optim="adamw_torch_fused",
        logging_steps=LOG_FREQ,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    rows: Any = [{"input_ids": tokens, "labels": tokens}] * (batch * steps * 2)
    model = transformers.LlamaForCausalLM(config)
    transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # gloo's threads would abort the process as it ends


# ---- measuring ---------------------------------------------------------------------------------


def measure(args: argparse.Namespace, contestant: str, size: str, *, ranks: int, steps: int):
    """Run a contestant; return its seconds of wall and of CPU time, start and end included."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(job_toml(size, steps=steps, rank_count=ranks))
        environment = rank_environment()
        environment |= {"OMP_NUM_THREADS": str(args.threads), "GLOO_SOCKET_IFNAME": "lo"}
        launch = [sys.executable]
        if ranks > 1:
            launch += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
            launch += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command = [*launch, __file__, "--contestant", contestant]
        command += ["--sizes", size, "--steps", str(steps)]
        with (Path(folder) / "log.txt").open("w+") as log:
            begin = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - begin
            if status:
                log.seek(0)
                sys.exit(f"{contestant}, {size}, {ranks} ranks failed:\n{log.read()[-3000:]}")
    return wall_s, usage.ru_utime + usage.ru_stime


def compare(args: argparse.Namespace, size: str, ranks: int) -> None:
    """Print a table for one size and number of ranks."""
    most = args.steps or SIZES[size][3]
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in args.against}
    for _ in range(args.rounds):
        for name in args.against:
            first = measure(args, name, size, ranks=ranks, steps=1)
            last = measure(args, name, size, ranks=ranks, steps=most)
            step = [(b - a) / (most - 1) * 1e3 for a, b in zip(first, last, strict=True)]
            figures[name].append((*step, *first))
    rows = {
        name: [statistics.median(column) for column in zip(*turns, strict=True)]
        for name, turns in figures.items()
    }
    print(f"\n{size}, {ranks} rank(s), medians of {args.rounds}\n")
    print(
        "| | step, ms | CPU of a step, ms | first step, s | CPU to it, s |\n|---|--:|--:|--:|--:|"
    )
    for name, row in rows.items():
        base = rows.get("bare", row)
        cells = [f"{x:.2f} ({x / b:.2f})" for x, b in zip(row, base, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps({"size": size, "ranks": ranks, "turns": figures}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", default="dim64,dim256")
    add("--ranks", default="1,2")
    add("--rounds", type=int, default=5)
    add("--against", default="bare,titan,torchtitan,hf,fsdp1,deepspeed")
    add("--threads", type=int, default=1, help="threads of each rank")
    add("--json", type=Path, help="add every turn's figures to this file")
    add("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    add("--steps", type=int, help="steps of a long turn; default: 300 at dim64, 60 at dim256")
    args = parser.parse_args()
    if args.contestant:
        return globals()[args.contestant](args.sizes, args.steps)
    args.against = args.against.split(",")
    for name, package in PACKAGES.items():
        if name in args.against and find_spec(package) is None:
            print(f"{package} is not installed: without {name}")
            args.against.remove(name)
    for size, ranks in product(args.sizes.split(","), args.ranks.split(",")):
        compare(args, size, int(ranks))


if __name__ == "__main__":
    main()
