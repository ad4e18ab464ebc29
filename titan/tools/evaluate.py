"""Score tasks with a checkpoint or a Hugging Face folder: `titan evaluate FOLDER --tasks NAME,FILE.jsonl,... [--nproc N]`.

The model is laid out as a job of N ranks lays it out, FSDP unless `--parallelism.KEY=VALUE` says otherwise, and scored as
[[evaluation]] scores it during a run. Tasks that are neither shipped nor files are lm-evaluation-harness's (extra `evaluate`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan.checkpoint import huggingface
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.hf_model import HFModel
from titan.checkpoint.manager import load, model_state
from titan.checkpoint.storage import Location, as_location
from titan.checks.rules import check_to_run
from titan.config.layout import Layout
from titan.config.model import model_config
from titan.config.options import command_parser, positive, whole
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.data import DataError, require
from titan.data.examples import ExampleTask, is_file, read_task, shipped
from titan.data.scoring import Scorer
from titan.tools.generate import TOKENIZER_OPTION, find_checkpoint, load_text, open_run_tokenizer

_ARGUMENTS = "FOLDER --tasks NAME,FILE.jsonl,... [--nproc N] [--section.key=value ...]"
Figures = dict[str, dict[str, Any]]


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the command's options, and the overrides of the job."""
    parser = command_parser("evaluate", _ARGUMENTS, summary=main.__doc__ or "")
    add = parser.add_argument
    where = "a run folder (its newest step), a step-N folder or its URL, or a Hugging Face folder"
    add("folder", type=as_location, metavar="FOLDER", help=where)
    names = f"{', '.join(shipped())}, .jsonl files (docs/evaluation.md), or names of lm-eval"
    add("--tasks", required=True, metavar="A,B", help=names)
    add("--nproc", type=positive, default=1, metavar="N", help="processes; default: 1")
    add("--num-examples", type=whole, default=0, metavar="N", help="of each task; default: all")
    add("--num-fewshot", type=whole, metavar="N", help="of lm-eval's tasks; default: the task's")
    add("--include-path", metavar="FOLDER", help="more tasks of lm-eval, as YAML")
    add("--batch-size", type=positive, default=8, metavar="B", help="rows of a rank; default: 8")
    add("--tokenizer", **TOKENIZER_OPTION)
    add("--json", type=Path, metavar="FILE", help="also write the figures there")
    return parser.parse_known_args(argv)


def open_model(
    where: Location, overrides: Sequence[str], *, tokenizer: str, world_size: int
) -> tuple[JobConfig, Layout, Location, bool]:
    """Return a job that has the model, its layout, where the weights are, and whether that is a Hugging Face folder.

    Raises InputError or ConfigError.
    """
    is_hf = isinstance(where, Path) and (where / huggingface.CONFIG).is_file()
    if is_hf:
        name, sizes = huggingface.read_sizes(folder := huggingface.open_folder(where))
        huggingface.require_weights_for(sizes, folder)
        step = where
        run = JobConfig.model_validate(
            {
                "model": huggingface.model_keys(name, sizes) | {"hf_assets_path": str(where)},
                "tokenizer": {"name": tokenizer or "auto"}
                if tokenizer in ("", "bytes")
                else {"path": tokenizer},
            }
        )
    else:
        run, step = find_checkpoint(where, tokenizer=tokenizer)
    # What concerns the model and its text is the run's. How it was trained is not: one process can score what many trained.
    job = JobConfig(
        model=run.model.model_copy(update={"converters": [], "freeze": []}),
        tokenizer=run.tokenizer,
        data=JobConfig().data.model_copy(update={"add_bos": run.data.add_bos}),
        training=JobConfig().training.model_copy(update={"seq_len": run.training.seq_len}),
    )
    config = load_text(to_toml(job), name=str(step), overrides=[o.removeprefix("--") for o in overrides])  # fmt: skip
    open_run_tokenizer(config)  # before the ranks start, which takes longer
    return config, check_to_run(config, world_size=world_size), step, is_hf


def split_tasks(args: argparse.Namespace) -> tuple[list[ExampleTask], list[str]]:
    """Return the tasks that titan reads, and the names of lm-eval's. Raises DataError for one that nobody knows."""
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    ours = [name for name in names if is_file(name) or name in shipped()]
    theirs = [name for name in names if name not in ours]
    tasks = [read_task(name, num_examples=args.num_examples) for name in ours]
    if not names:
        raise DataError("--tasks: names no task")
    if theirs:
        purpose = f'"{theirs[0]}" is none of {", ".join(shipped())} and no .jsonl file, and a task of lm-evaluation-harness'
        require("lm_eval", purpose=purpose, extra="evaluate")
        from titan.tools.lm_eval_model import check_names

        check_names(theirs, include_path=args.include_path)
    return tasks, theirs


def build_scorer(
    config: JobConfig, layout: Layout, step: Location, *, device: Any, is_hf: bool
) -> Scorer:
    """Return what scores texts with the weights of a step, or of a Hugging Face folder. All ranks call it, in a process group."""
    from titan.parallel import build_mesh
    from titan.task import task_of
    from titan.train_step import build_train_step

    axes = asdict(layout)
    del axes["accumulation"]  # the only field of a layout that is no axis of the mesh
    mesh = build_mesh(device.type, **axes)
    train_step = build_train_step(config.on_device(device.type), device=device, mesh=mesh)
    state = model_state(train_step.model_parts)
    if is_hf:
        assert isinstance(step, Path)
        model = HFModel.of(config.model.name, model_config(config.model))
        huggingface.load(step, state, model=model, group=CheckpointGroup())
    else:
        load(step, state)
    tokenizer = task_of(config).tokenizer
    assert tokenizer is not None, "a task without text"
    return Scorer(train_step, tokenizer)


def score(scorer: Scorer, args: argparse.Namespace) -> Figures:
    """Return the figures of all tasks. Every rank calls this; ranks other than a node's first get none of lm-eval's."""
    tasks, theirs = split_tasks(args)
    figures: Figures = {}
    for task in tasks:
        rows = [scorer.row(*pair) for pair in task.pairs]
        figures[task.name] = task.figures(scorer.score(rows, batch=args.batch_size))
    if theirs:
        from titan.tools.lm_eval_model import evaluate

        figures |= evaluate(
            scorer,
            theirs,
            batch=args.batch_size,
            limit=args.num_examples or None,
            num_fewshot=args.num_fewshot,
            include_path=args.include_path,
        )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Score tasks with a checkpoint or a Hugging Face folder, on one process or several."""
    argv = sys.argv[1:] if argv is None else argv
    args, overrides = parse(argv)
    is_launcher = "RANK" not in os.environ and args.nproc > 1
    world_size = args.nproc if is_launcher else int(os.environ.get("WORLD_SIZE", 1))
    split_tasks(args)  # mistakes are reported before the ranks start
    model = open_model(args.folder, overrides, tokenizer=args.tokenizer, world_size=world_size)
    if is_launcher:
        from titan.health.launch import environment

        command = [sys.executable, "-m", "titan.health.launch", "--standalone", "--max-restarts=0"]
        # torchrun would take --nproc for an option of its own.
        launcher = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        launcher.add_argument("--nproc")
        rest = launcher.parse_known_args(argv)[1]
        command += [f"--nproc-per-node={args.nproc}", "-m", "titan.tools.evaluate", *rest]
        return subprocess.call(command, env=environment(args.nproc))
    from titan.parallel.init_distributed import start_process_group

    config, layout, step, is_hf = model
    device = start_process_group(
        init_timeout_s=config.comm.init_timeout_seconds,
        expandable_segments=config.training.expandable_segments,
        numa_binding=config.comm.numa_binding,
    )
    figures = score(build_scorer(config, layout, step, device=device, is_hf=is_hf), args)
    if os.environ.get("RANK", "0") == "0":
        width = max(len(f"{task} {name}") for task, found in figures.items() for name in found)
        for task, found in figures.items():
            for name, value in found.items():
                shown = f"{value:.6f}" if isinstance(value, float) else value
                print(f"{f'{task} {name}':<{width}}  {shown}")
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    from titan import cli

    code = cli.main(["evaluate", *sys.argv[1:]])
    sys.stdout.flush()
    # As in titan/train.py: gloo's threads may be at work while the interpreter is torn down.
    os._exit(code)
