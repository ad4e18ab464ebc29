"""Command `titan evaluate FOLDER --tasks NAME,FILE.jsonl,... [--nproc N]`: scores of tasks with a model.

The model is a checkpoint or a Hugging Face folder. A job of N ranks lays it out, FSDP unless
`--parallelism.KEY=VALUE` changes that, and [[evaluation]] scores it as during a run. Tasks that are
neither shipped nor files belong to an installed package.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titan.checkpoint.model_folders import model_folders
from titan.checkpoint.saved_model import (
    AVERAGE_OPTION,
    LOCATION_OPTION,
    TOKENIZER_OPTION,
    find_checkpoint,
    hf_job,
    is_hf_folder,
    load_text,
    load_weights,
    open_run_tokenizer,
    require_average,
    require_text,
)
from titan.checkpoint.storage import Location
from titan.checks.rules import check_to_run
from titan.config.errors import did_you_mean, foreign
from titan.config.layout import Layout
from titan.config.options import (
    TRUST_OPTION,
    add_options,
    command_parser,
    known_options,
    mistake,
    put_json,
)
from titan.config.plug_ins import door, parts_of
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.config.toml import table_beside
from titan.data import DataError
from titan.ops.launch import launch_command
from titan.sim.report.text import columns

from .examples import ExampleTask, Figure, is_file, read_task, shipped

if TYPE_CHECKING:
    from .scoring import Scorer

# Tokens of a text for a Hugging Face folder: at most, and without max_position_embeddings, as in the harness.
_MAX_LENGTH, _UNKNOWN_LENGTH = 8192, 2048
_ARGUMENTS = "FOLDER --tasks NAME,FILE.jsonl,... [--nproc N] [--section.key=value ...]"


@door("evaluate")
class EvaluateExtension:
    """More tasks of `titan evaluate`.

    A package registers a subclass under the entry point group `titan.extensions` as evaluate.NAME (titan/config/plug_ins.py).
    about: the tasks, for --help.
    """

    about = ""

    def add_options(self, parser: ArgumentParser) -> None:
        """Add options to the command."""

    def check(self, names: Sequence[str], args: Namespace, *, what: str) -> None:
        """Raise DataError for a name that is no task of this package. what: why titan has not the first of them."""

    def evaluate(
        self, scorer: Scorer, names: Sequence[str], args: Namespace
    ) -> dict[str, float]:
        """Return the figures of tasks by name. Every rank calls this."""
        return {}


def extensions() -> list[EvaluateExtension]:
    """Return an instance of each extension that is installed."""
    return [*parts_of(EvaluateExtension)]


def parse(argv: Sequence[str] | None) -> tuple[Namespace, list[str]]:
    """Parse the command line. Return the command's options, and the overrides of the job."""
    parser = command_parser("evaluate", _ARGUMENTS, summary=main.__doc__ or "")
    add = parser.add_argument
    add("folder", metavar="FOLDER", **LOCATION_OPTION)
    names = [*shipped(), ".jsonl files (docs/evaluation.md)", *(e.about for e in extensions())]
    add("--tasks", required=True, metavar="A,B", help=", ".join(names))
    add("--average", **AVERAGE_OPTION)
    add_options(parser, table_beside(__file__, "options.toml")["evaluate"])
    for extension in extensions():
        extension.add_options(parser)
    add("--tokenizer", **TOKENIZER_OPTION)
    add("--trust-remote-code", **TRUST_OPTION)
    parser.add_json()
    args, overrides = parser.parse_known_args(argv)
    for word in overrides:
        if "." not in word.partition("=")[0] or not word.startswith("--"):
            known = known_options(parser)
            hint = foreign(word, known) or did_you_mean(word, known)
            raise mistake(word, f"unknown option{hint}")
    return args, [override.removeprefix("--") for override in overrides]


class Weights(NamedTuple):
    """Location of weights, with the job and the layout of their model.

    Attributes:
        config: job with the model.
        layout: layout of the ranks.
        where: step or Hugging Face folder.
    """

    config: JobConfig
    layout: Layout
    where: Location


def find_weights(
    where: Location,
    overrides: Sequence[str],
    *,
    tokenizer: str,
    world_size: int,
    trust_remote_code: bool = False,
) -> Weights:
    """Find the weights of a folder.

    Args:
        where: as for `find_checkpoint`; or a Hugging Face folder. A step that is both is read
            as a step.
        overrides: overrides of the job's keys, such as "training.seq_len=128".
        tokenizer: as for `find_checkpoint`.
        world_size: number of ranks.
        trust_remote_code: as for `find_checkpoint`.

    Raises:
        InputError: the folder cannot be read.
        ConfigError: the job is wrong.
    """
    if is_hf_folder(step := where):
        run = hf_job(where, tokenizer=tokenizer)
        # As many tokens as the model has positions.
        positions = model_folders().num_positions(Path(str(where)))
        length = _UNKNOWN_LENGTH if positions is None else min(positions, _MAX_LENGTH)
        training = run.training.model_copy(update={"seq_len": length})
        run = run.model_copy(update={"training": training})
    else:
        run, step = find_checkpoint(
            where, tokenizer=tokenizer, trust_remote_code=trust_remote_code
        )
    require_text(run)
    # The model and its text are the run's, but not the training: one process can score a model of many ranks.
    keys = {
        "model": run.model.model_dump(exclude={"converters", "freeze"}),
        "tokenizer": run.tokenizer.model_dump(),
        "data": run.data.model_dump(include={"add_bos"}),
        "training": run.training.model_dump(include={"seq_len"}),
    }
    config = load_text(
        to_toml(JobConfig.model_validate(keys)), name=str(step), overrides=overrides
    )
    open_run_tokenizer(config)  # before the ranks start, which takes longer
    return Weights(config, check_to_run(config, world_size=world_size), step)


def split_tasks(args: Namespace) -> tuple[list[ExampleTask], list[str]]:
    """Split the tasks of the command line.

    Returns:
        Tasks that titan reads, and names of packages' tasks.

    Raises:
        DataError: a task is unknown.
    """
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    ours = [name for name in names if is_file(name) or name in shipped()]
    theirs = [name for name in names if name not in ours]
    tasks = [read_task(name, num_examples=args.num_examples) for name in ours]
    if not names:
        raise DataError("--tasks: names no task")
    if theirs:
        what = f'"{theirs[0]}" is none of {", ".join(shipped())} and no .jsonl file'
        if not extensions():
            raise DataError(f"--tasks: {what}")
        for extension in extensions():
            extension.check(theirs, args, what=what)
    return tasks, theirs


def build_scorer(weights: Weights, *, device: Any, average: bool = False) -> Scorer:
    """Build the scorer of texts for a model. All ranks call it, in a process group.

    Args:
        weights: weights of the model.
        device: this rank's device.
        average: whether to load the average of the weights.
    """
    import torch

    from titan.config.model import family
    from titan.parallel import build_mesh
    from titan.parallel.block_attention import prefer_backend
    from titan.step.resolved import resolve_job
    from titan.step.train_step import build_train_step

    from .scoring import Scorer

    config = weights.config
    prefer_backend(config.model.attention_backend, device.type)
    mesh = build_mesh(device.type, **weights.layout.degrees)
    job = resolve_job(config, weights.layout, device=device.type)
    name = config.model.name
    with torch.device("meta"):
        model = family(name).build_model(job.sizes)
    named: dict[str, Any] = {"name": name, "sizes": job.sizes, "average": average}
    load_weights(weights.where, [model], only_check=True, **named)
    train_step = build_train_step(job, device=device, mesh=mesh)
    load_weights(weights.where, train_step.model_parts, **named)
    tokenizer = job.task.tokenizer
    assert tokenizer is not None, "a task without text"
    return Scorer(train_step, tokenizer)


def score(scorer: Scorer, args: Namespace) -> dict[str, float]:
    """Score all tasks. Every rank calls it.

    Args:
        scorer: scorer of texts.
        args: options of the command.

    Returns:
        Figures by "task/name". Only the first rank of a node gets the figures of packages' tasks.
    """
    tasks, theirs = split_tasks(args)
    figures = {}
    for task in tasks:
        found = task.figures(
            scorer.score([*starmap(scorer.row, task.pairs)], batch=args.batch_size)
        )
        figures |= {f"{task.name}/{name}": value for name, value in found.items()}
    for extension in extensions() if theirs else ():
        figures |= extension.evaluate(scorer, theirs, args)
    return figures


def table(figures: Mapping[str, float]) -> list[str]:
    """Return the lines of a table of figures by "task/name"."""
    rows: list[Sequence[str]] = [("task", "n", "metric", "value", "stderr", "chance")]
    for name, value in figures.items():
        task, _, metric = name.rpartition("/")
        known = value if isinstance(value, Figure) else Figure(value)
        numbers = (value, known.stderr, known.chance)
        shown = ("-" if number is None else f"{number:.4f}" for number in numbers)
        rows.append((task, str(known.n or "-"), metric, *shown))
    return columns(rows, left=range(len(rows[0])))


def main(argv: Sequence[str] | None = None) -> int:
    """Score tasks with a checkpoint or a Hugging Face folder, on one process or several."""
    argv = sys.argv[1:] if argv is None else argv
    args, overrides = parse(argv)
    is_launcher = "RANK" not in os.environ and args.nproc > 1
    world_size = args.nproc if is_launcher else int(os.environ.get("WORLD_SIZE", 1))
    split_tasks(args)  # mistakes are reported before the ranks start
    weights = find_weights(
        args.folder,
        overrides,
        tokenizer=args.tokenizer,
        world_size=world_size,
        trust_remote_code=args.trust_remote_code,
    )
    if args.average:
        require_average(weights.where)
    if is_hf_folder(weights.where) and "RANK" not in os.environ:
        length = weights.config.training.seq_len
        print(f"texts have up to {length:,} tokens (--training.seq_len)", file=sys.stderr)
    if is_launcher:
        return launch_command("evaluate", argv, num_processes=args.nproc)
    from titan.parallel.init_distributed import start_process_group

    config = weights.config
    device = start_process_group(
        init_timeout_s=config.comm.init_timeout_seconds,
        expandable_segments=config.training.expandable_segments,
    )
    scorer = build_scorer(weights, device=device, average=args.average)
    figures = score(scorer, args)
    if os.environ.get("RANK", "0") == "0" and not put_json(figures, args.json):
        print("\n".join(table(figures)))
    return 0
