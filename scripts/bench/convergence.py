"""Train the same steps in titan and in TorchTitan 0.2.2 and draw both losses: docs/pictures/torchtitan_loss.png.

    python scripts/bench/convergence.py --steps 1000

Both start from titan's initial weights and read the batches of titan's loader (the Python library's text as bytes). Model,
loss, clipping, optimizer and schedule are those of each. It runs where TorchTitan is installed: on a GPU, or in fp32 on a
CPU, as overhead.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parents[1] / "docs" / "pictures" / "torchtitan_loss.png"
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


def load_job() -> Any:
    """Return titan's config of job.toml."""
    from titan.config.load import load_config

    return load_config("job.toml", overrides=[setting.removeprefix("--") for setting in TITAN])


def titan() -> None:
    import torch

    from titan.hooks import standard_hooks
    from titan.trainer import Trainer

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
    from torchtitan.train import Trainer

    from titan.config.machine import open_tokenizer
    from titan.config.model import model_config
    from titan.data.loader import build_loader

    class Batches(BaseDataLoader):
        def __iter__(self) -> Any:
            config = load_job()
            loader = build_loader(
                config.training,
                data=config.data,
                seed=config.debug.seed,
                accumulation=1,
                tokenizer=open_tokenizer(config),
                rank=0,
                world=1,
            )
            while True:
                for batch in loader.next_step():
                    yield {"input": batch.tokens_BS}, batch.labels_BS

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    torchtitan_spec.OneBatch = lambda *sizes: Batches()  # pyright: ignore
    trainer = Trainer(ConfigManager().parse_args(["--job.config_file=torchtitan.toml"]))
    weights = torch.load("weights.pt", map_location="cpu")
    halves = model_config(load_job().model).head_dim // 2
    for name in weights:
        # titan turns channel i against i + K/2, as Hugging Face does; TorchTitan 2i against 2i + 1, as Meta does.
        if name.endswith(("attention.wq.weight", "attention.wk.weight")):
            by_half = weights[name].unflatten(0, (-1, 2, halves))
            weights[name] = by_half.transpose(1, 2).flatten(0, 2)
    missing, unexpected = trainer.model_parts[0].load_state_dict(weights, strict=False)
    assert not unexpected and all("freqs_cis" in name for name in missing), (missing, unexpected)
    trainer.train()
    trainer.close()


def losses(file: Path) -> list[float]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def draw(ours: list[float], theirs: list[float], picture: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    left.plot(theirs, color="tab:orange", linewidth=2.4, label="TorchTitan 0.2.2")
    left.plot(ours, color="tab:blue", linewidth=0.8, label="titan")
    left.set(xlabel="step", ylabel="loss, nats a token")
    left.legend()
    right.semilogy([abs(a - b) / b for a, b in zip(ours, theirs, strict=True)], linewidth=0.8)
    right.set(xlabel="step", ylabel="difference over TorchTitan's loss")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--flavor", default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--folder", type=Path, default=Path("outputs/convergence"))
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        return globals()[args.contestant]()
    args.folder.mkdir(parents=True, exist_ok=True)
    sizes = {"flavor": args.flavor, "batch": args.batch, "seq_len": args.seq_len}
    files = {"titan": "job.toml", "torchtitan": "torchtitan.toml"}
    for name, file in files.items():
        # Each knows only its data; TorchTitan's comes from titan's loader.
        dataset = "stdlib" if name == "titan" else "c4"
        text = JOB.format(folder=name, steps=args.steps, dtype=args.dtype, dataset=dataset, **sizes)
        (args.folder / file).write_text(text)
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    }
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    from steps import free_port

    for name in files:
        (args.folder / name).mkdir(exist_ok=True)
        (args.folder / name / "metrics.jsonl").unlink(missing_ok=True)
        environment["MASTER_PORT"] = str(free_port())
        command = [sys.executable, str(HERE / "convergence.py"), "--contestant", name]
        with (args.folder / f"{name}.log").open("w") as log:
            subprocess.run(
                command, cwd=args.folder, env=environment, check=True, stdout=log, stderr=log
            )
    ours, theirs = (losses(args.folder / name / "metrics.jsonl") for name in files)
    draw(ours, theirs, args.picture)
    apart = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    print("| step | titan | TorchTitan | apart |\n|--:|--:|--:|--:|")
    for step in sorted({1, 10, 100, args.steps // 2, args.steps}):
        if step > args.steps:
            break
        print(f"| {step} | {ours[step - 1]:.5f} | {theirs[step - 1]:.5f} | {apart[step - 1]:.1e} |")
    means = [statistics.fmean(of_run[-100:]) for of_run in (ours, theirs)]
    print(f"mean of the last 100: {means[0]:.5f} and {means[1]:.5f}")


if __name__ == "__main__":
    main()
