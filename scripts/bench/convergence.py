"""Train the same steps in titan and in TorchTitan 0.2.2 and draw both losses: docs/pictures/torchtitan_loss.png.

    python scripts/bench/convergence.py --steps 1000
    python scripts/bench/convergence.py --steps 1000 --layouts

Both start from titan's initial weights and read the batches of titan's loader (the Python library's text as bytes). Model,
loss, clipping, optimizer and schedule are those of each. It runs where TorchTitan is installed: on a GPU, or in fp32 on a
CPU, as overhead.py does.

With --layouts, titan trains a smaller model in several layouts on gloo ranks, one after the other, and draws their losses and how far they are from
one process: docs/pictures/layouts_loss.png. TorchTitan takes part where it is installed.

    python scripts/bench/convergence.py --steps 500 --precisions

With --precisions, titan trains the debug model in fp32, in bf16, and in bf16 with its linear layers in each float8 recipe, emulated, which
rounds as hardware does: docs/float8_convergence.png. All see the same samples from the same weights, but one more bf16 run, which shows
the difference that means nothing. Eleven minutes of CPU time.

A run of layouts or precisions that is complete is kept, so a second call goes on where the first one stopped. The jobs are in
convergence.toml.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steps import rank_environment

from titan.base.rows import read_rows
from titan.config.toml import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TITAN, LAYOUTS = TABLES["titan"], TABLES["layouts"]
ONE = "one process"


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
    return [row["loss"] for row in read_rows(file) if "loss" in row]


def differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Return how far each step's losses are apart, over the second one."""
    return [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]


def can_draw() -> bool:
    """Return whether matplotlib is installed, and say so if it is not."""
    found = find_spec("matplotlib") is not None
    if not found:
        print("no picture: matplotlib is not installed", file=sys.stderr)
    return found


def draw(runs: dict[str, list[float]], picture: str, first: str) -> None:
    """Draw the mean loss of all runs, and the largest difference to one of them, in each 20 steps."""
    from matplotlib.figure import Figure  # not pyplot: it would look for a display

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    window, floor = 20, 1e-8  # equal losses have no logarithm
    steps = range(0, len(runs[first]), window)
    for number, (name, values) in enumerate(runs.items()):
        color = "black" if name == first else f"C{number}"
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
    figure.savefig(ROOT / "docs" / picture, dpi=110)


# ---- running -----------------------------------------------------------------------------------


def write_jobs(args: argparse.Namespace) -> None:
    """Write titan's job.toml and torchtitan.toml."""
    sizes = {key: value for key, value in vars(args).items() if key != "folder"}
    for name, file in {"titan": "job.toml", "torchtitan": "torchtitan.toml"}.items():
        # Each knows only its data; TorchTitan's comes from titan's loader.
        dataset = "stdlib" if name == "titan" else "c4"
        text = TABLES["job"].format(folder=f"{name}-run", dataset=dataset, **sizes)
        text += TABLES["small"] if args.layouts and name == "titan" else ""
        (args.folder / file).write_text(text)


def run(
    args: argparse.Namespace, name: str, command: list[str], *, steps: int | None = None
) -> list[float]:
    """Run a command that writes its rows to the folder `name`, and return the losses.

    steps: number of rows of a complete run, which is kept; None: it is repeated.
    """
    rows = args.folder / name / "metrics.jsonl"
    if steps and rows.exists() and len(losses(rows)) >= steps:
        return losses(rows)  # of an earlier call
    print(f"training: {name}", file=sys.stderr, flush=True)
    rows.parent.mkdir(exist_ok=True)
    rows.unlink(missing_ok=True)
    with (args.folder / f"{name}.log").open("w") as log:
        # `titan train` starts ranks itself.
        environment = rank_environment() if "--contestant" in command else {**os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(
            [sys.executable, *command],
            cwd=args.folder,
            env=environment,
            check=True,
            stdout=log,
            stderr=log,
        )
    return losses(rows)


def contestant(args: argparse.Namespace, name: str) -> list[float]:
    steps = args.steps if args.layouts else None
    # A folder called titan would be taken for the package.
    return run(args, f"{name}-run", [__file__, "--contestant", name], steps=steps)


def train(
    args: argparse.Namespace,
    name: str,
    settings: list[str],
    *,
    steps: int,
    job: str = "job.toml",
    ranks: int = 1,
) -> list[float]:
    """Train with `titan train`, and return the losses of so many steps."""
    command = ["-m", "titan.cli", "train", job, "--nproc", str(ranks)]
    command += [f"--job.dump_folder={name}", *settings]
    return run(args, name, command, steps=steps)


def run_layout(args: argparse.Namespace, name: str) -> list[float]:
    """Train in a layout, and return the losses."""
    row, half = LAYOUTS[name], args.steps // 2
    batch = args.batch // row.get("data_ranks", 1)
    settings = [*TITAN, f"--training.local_batch_size={batch}", *row["settings"]]
    before = row.get("from")
    if before or row.get("saves"):
        settings += ["--checkpoint.enable=true", f"--checkpoint.interval={half}"]
    if before:
        settings += [f"--checkpoint.initial_load_path={before}/checkpoint/step-{half}"]
        settings += ["--checkpoint.initial_load_model_only=false"]
    steps = args.steps - half if before else args.steps
    return train(args, name, settings, steps=steps, ranks=row["ranks"])


def compare_layouts(args: argparse.Namespace) -> None:
    """Train in all layouts, print their figures, and draw them."""
    write_jobs(args)
    runs = {ONE: contestant(args, "titan")}
    for name, row in LAYOUTS.items():
        runs[name] = run_layout(args, name)
        if "from" in row:
            runs[name] = runs[row["from"]][: args.steps // 2] + runs[name]
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
        draw(runs, "pictures/layouts_loss.png", ONE)


def compare_precisions(args: argparse.Namespace) -> None:
    """Train in all precisions, print their figures, and draw them."""
    table, job = TABLES["precisions"], str(ROOT / "train_configs/debug_model.toml")
    common = [*table["common"], f"--training.steps={args.steps}"]
    common += [f"--validation.freq={args.steps}"]
    print("| precision | training loss, mean of the last 100 steps | validation loss |")
    print("|---|---|---|")
    runs = {}
    for name, settings in table["runs"].items():
        runs[name] = train(args, name, [*common, *settings], steps=args.steps, job=job)
        last = read_rows(args.folder / name / "metrics.jsonl")[-1]["validation_loss"]
        print(f"| {name} | {statistics.fmean(runs[name][-100:]):.4f} | {last:.4f} |")
    if can_draw():
        draw(runs, "float8_convergence.png", "bf16")


def compare(args: argparse.Namespace) -> None:
    """Train in titan and in TorchTitan, print their figures, and draw both."""
    write_jobs(args)
    ours, theirs = (contestant(args, name) for name in ("titan", "torchtitan"))
    apart = differences(ours, theirs)
    print("| step | titan | TorchTitan | apart |\n|--:|--:|--:|--:|")
    for step in sorted({1, 10, 100, args.steps // 2, args.steps}):
        if step <= args.steps:
            cells = f"{ours[step - 1]:.5f} | {theirs[step - 1]:.5f} | {apart[step - 1]:.1e}"
            print(f"| {step} | {cells} |")
    means = [statistics.fmean(of_run[-100:]) for of_run in (ours, theirs)]
    print(f"mean of the last 100: {means[0]:.5f} and {means[1]:.5f}", flush=True)
    if can_draw():
        runs = {"TorchTitan 0.2.2": theirs, "titan": ours}
        draw(runs, "pictures/torchtitan_loss.png", "TorchTitan 0.2.2")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layouts", action="store_true", help="titan's layouts instead")
    parser.add_argument("--precisions", action="store_true", help="titan's precisions instead")
    parser.add_argument("--flavor", default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--folder", type=Path, help="default: in outputs/")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        return globals()[args.contestant]()
    kinds = {"layouts": compare_layouts, "precisions": compare_precisions}
    kind = next((name for name in kinds if getattr(args, name)), "convergence")
    args.folder = args.folder or Path("outputs", kind)
    args.folder.mkdir(parents=True, exist_ok=True)
    kinds.get(kind, compare)(args)


if __name__ == "__main__":
    main()
