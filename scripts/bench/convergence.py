"""Train the same steps in titan and in TorchTitan 0.2.2 and draw both losses: docs/pictures/torchtitan_loss.png.

    python scripts/bench/convergence.py --steps 1000
    python scripts/bench/convergence.py --steps 1000 --layouts

Both start from titan's initial weights and read the batches of titan's loader (the Python library's text as bytes). Model,
loss, clipping, optimizer and schedule are those of each. It runs where TorchTitan is installed: on a GPU, or in fp32 on a
CPU, as overhead.py does.

With --layouts, titan trains a smaller model in several layouts on gloo ranks, one after the other, and draws their losses and how far they are from
one process: docs/pictures/layouts_loss.png. TorchTitan takes part where it is installed. A run that is complete is kept, so
a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PICTURES = HERE.parents[1] / "docs" / "pictures"
JOB = """
[job]
dump_folder = "{folder}"
[model]
name = "llama3"
flavor = "{flavor}"
[optimizer]
lr = 1e-3
implementation = "fused"
[lr_scheduler]
warmup_steps = 100
[training]
dataset = "{dataset}"
local_batch_size = {batch}
seq_len = {seq_len}
steps = {steps}
mixed_precision_param = "{dtype}"
[activation_checkpoint]
mode = "none"
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = false
"""
# What titan does otherwise by default, and what TorchTitan does not know.
TITAN = ["--tokenizer.name=bytes", "--optimizer.decay_norms=true"]

# What --layouts adds to titan's job: a model of 2 blocks, so that 1,000 steps of four ranks take minutes.
SMALL = """
[model.overrides]
n_layers = 2
vocab_size = 264
"""
DEGREE, FLOAT8 = "parallelism.{}_degree", "quantize.linear.float8"
ONE, SHARDED, PIPELINE = "one process", "FSDP 2 x TP 2", "PP 2"
RESUMED = f"{SHARDED}, then {PIPELINE}"
# Ranks, and what differs from the job of one process. The sequences of a step are the same in all.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    SHARDED: (
        4,
        {DEGREE.format("data_parallel_shard"): 2, DEGREE.format("tensor_parallel"): 2},
    ),
    "CP 2": (2, {DEGREE.format("context_parallel"): 2}),
    PIPELINE: (2, {DEGREE.format("pipeline_parallel"): 2}),
    RESUMED: (2, {DEGREE.format("pipeline_parallel"): 2}),
    "float8, emulated": (1, {"model.converters": f'["{FLOAT8}"]', f"{FLOAT8}.emulate": "true"}),
}


def load_job() -> Any:
    """Return titan's config of job.toml."""
    from titan.config.load import load_config

    return load_config("job.toml", overrides=[setting.removeprefix("--") for setting in TITAN])


def titan() -> None:
    import torch

    from titan.run.standard_hooks import standard_hooks
    from titan.run.trainer import Trainer

    trainer = Trainer(load_job(), hooks=standard_hooks)
    (model,) = trainer.train_step.model_parts
    torch.save(dict(model.named_parameters()), "weights.pt")
    assert trainer.run() == 0
    trainer.close()


def torchtitan() -> None:
    """Run TorchTitan's trainer on titan's weights and batches."""
    import overhead
    import torch

    if not torch.cuda.is_available():
        overhead.answer_as_an_accelerator()  # before TorchTitan asks
    import torchtitan_spec
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.train import Trainer

    from titan.tasks import task_of

    class Batches(BaseDataLoader):
        def __iter__(self) -> Any:
            config = load_job()
            loader = task_of(config).loader(rank=0, world=1)
            while True:
                for batch in loader.next_step():
                    yield {"input": batch.tokens_BS}, batch.labels_BS

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    torchtitan_spec.OneBatch = lambda *sizes: Batches()
    sizes = load_job().model.sizes  # with what the job overrides
    spec = get_train_spec("llama3")
    spec.model_args[load_job().model.flavor] = torchtitan_spec.arguments(sizes)
    trainer = Trainer(ConfigManager().parse_args(["--job.config_file=torchtitan.toml"]))
    weights = torch.load("weights.pt", map_location="cpu")
    halves = sizes.head_dim // 2
    for name in weights:
        # titan turns channel i against i + K/2, as Hugging Face does; TorchTitan 2i against 2i + 1, as Meta does.
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            by_half = weights[name].unflatten(0, (-1, 2, halves))
            weights[name] = by_half.transpose(1, 2).flatten(0, 2)
    missing, unexpected = trainer.model_parts[0].load_state_dict(weights, strict=False)
    assert not unexpected and all("freqs_cis" in name for name in missing), (
        missing,
        unexpected,
    )
    trainer.train()
    trainer.close()


def losses(file: Path) -> list[float]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Return how far each step's losses are apart, over the second one."""
    return [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]


def can_draw() -> bool:
    """Return whether matplotlib is installed, and say so if it is not."""
    found = find_spec("matplotlib") is not None
    if not found:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    return found


def draw(runs: dict[str, list[float]], picture: str) -> None:
    """Draw the mean loss of all runs, and the largest difference to the first one, in each 20 steps."""
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    window, floor = 20, 1e-8  # equal losses have no logarithm
    first = next(iter(runs))
    steps = range(0, len(runs[first]), window)
    for number, (name, values) in enumerate(runs.items()):
        color = "black" if name == first else f"C{number - 1}"
        means = [statistics.fmean(values[step : step + window]) for step in steps]
        # Thick lines first, so that each shows a rim where all are on one another.
        width = 0.8 + 1.2 * (len(runs) - 1 - number)
        left.plot([*steps], means, color=color, linewidth=width, label=name)
        if name != first:
            apart = differences(values, runs[first])
            most = [max(floor, *apart[step : step + window]) for step in steps]
            right.semilogy([*steps], most, color=color, linewidth=1.2, label=name)
    left.set(xlabel="step", ylabel=f"loss, nats a token, mean of {window} steps")
    right.set(
        xlabel="step", ylabel=f"largest difference to {first}\nin {window} steps, over its loss"
    )
    left.legend()
    right.legend(loc="center right", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(PICTURES / picture, dpi=110)


# ---- running -----------------------------------------------------------------------------------


def write_jobs(args: argparse.Namespace) -> None:
    """Write titan's job.toml and torchtitan.toml."""
    sizes = {"flavor": args.flavor, "batch": args.batch, "seq_len": args.seq_len}
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, file in {"titan": "job.toml", "torchtitan": "torchtitan.toml"}.items():
        # Each knows only its data; TorchTitan's comes from titan's loader.
        dataset = "stdlib" if name == "titan" else "c4"
        text = JOB.format(
            folder=name, steps=args.steps, dtype=args.dtype, dataset=dataset, **sizes
        )
        text += SMALL if args.layouts and name == "titan" else ""
        (args.folder / file).write_text(text)


def run(args: argparse.Namespace, name: str, command: list[str]) -> list[float]:
    """Run a command that writes its rows to the folder `name`, and return the losses."""
    from steps import free_port

    rows = args.folder / name / "metrics.jsonl"
    if (
        args.layouts
        and rows.exists()
        and len(losses(rows)) >= args.steps // (1 + (name == RESUMED))
    ):
        return losses(rows)  # of an earlier call
    rows.parent.mkdir(exist_ok=True)
    rows.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    if "--contestant" in command:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (args.folder / f"{name}.log").open("w") as log:
        subprocess.run(
            command, cwd=args.folder, env=environment, check=True, stdout=log, stderr=log
        )
    return losses(rows)


def contestant(args: argparse.Namespace, name: str) -> list[float]:
    return run(args, name, [sys.executable, str(HERE / "convergence.py"), "--contestant", name])


def run_layout(args: argparse.Namespace, name: str) -> list[float]:
    """Train in a layout with `titan train`, and return the losses."""
    ranks, settings = LAYOUTS[name]
    half = args.steps // 2
    ranks_of_data = settings.get(DEGREE.format("data_parallel_shard"), 1)
    settings = {
        "job.dump_folder": name,
        "training.local_batch_size": args.batch // ranks_of_data,
        **settings,
    }
    if name in (SHARDED, RESUMED):
        settings |= {"checkpoint.enable": "true", "checkpoint.interval": half}
    if name == RESUMED:
        saved = Path(SHARDED) / "checkpoint" / f"step-{half}"
        settings |= {"checkpoint.initial_load_path": saved}
        settings |= {"checkpoint.initial_load_model_only": "false"}
    command = [sys.executable, "-m", "titan.cli", "train", "job.toml", "--nproc", str(ranks)]
    command += TITAN + [f"--{key}={value}" for key, value in settings.items()]
    return run(args, name, command)


def compare_layouts(args: argparse.Namespace) -> None:
    """Train in all layouts, print their figures, and draw them."""
    write_jobs(args)
    runs = {ONE: contestant(args, "titan")}
    for name in LAYOUTS:
        print(f"training: {name}", file=sys.stderr, flush=True)
        runs[name] = run_layout(args, name)
    runs[RESUMED] = runs[SHARDED][: args.steps // 2] + runs[RESUMED]
    if find_spec("torchtitan"):
        runs["TorchTitan 0.2.2"] = contestant(args, "torchtitan")
    at = sorted({min(100, args.steps), args.steps // 2, args.steps})
    head = [*(f"loss at step {step:,}" for step in at), "largest difference"]
    print(f"| | {' | '.join(head)} |\n|---" + "|--:" * len(head) + "|")
    for name, values in runs.items():
        most = max(differences(values, runs[ONE]))
        cells = [*(f"{values[step - 1]:.5f}" for step in at), f"{most:.1e}" if most else "-"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if can_draw():
        draw(runs, "layouts_loss.png")


def compare(args: argparse.Namespace) -> None:
    """Train in titan and in TorchTitan, print their figures, and draw both."""
    write_jobs(args)
    ours, theirs = (contestant(args, name) for name in ("titan", "torchtitan"))
    apart = differences(ours, theirs)
    print("| step | titan | TorchTitan | apart |\n|--:|--:|--:|--:|")
    for step in sorted({1, 10, 100, args.steps // 2, args.steps}):
        if step > args.steps:
            break
        print(
            f"| {step} | {ours[step - 1]:.5f} | {theirs[step - 1]:.5f} | {apart[step - 1]:.1e} |"
        )
    means = [statistics.fmean(of_run[-100:]) for of_run in (ours, theirs)]
    print(f"mean of the last 100: {means[0]:.5f} and {means[1]:.5f}", flush=True)
    if can_draw():
        runs = {"TorchTitan 0.2.2": theirs, "titan": ours}
        draw(runs, "torchtitan_loss.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layouts", action="store_true", help="titan's layouts instead")
    parser.add_argument("--flavor", default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--folder", type=Path, help="default: in outputs/")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        return globals()[args.contestant]()
    args.folder = args.folder or Path("outputs", "layouts" if args.layouts else "convergence")
    (compare_layouts if args.layouts else compare)(args)


if __name__ == "__main__":
    main()
