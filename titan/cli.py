"""Command `titan`. Each subcommand imports its modules when it runs, so that help and mistakes cost no time.

Exit codes: docs/cluster.md has the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from titan.commands import (
    ALIASES,
    GONE,
    command_groups,
    command_names,
    load_command,
    missing_part,
    prepare_process,
    summary_of,
)
from titan.config.options import JOB, add_new_layout, add_quiet, command_parser, positive, whole
from titan.config.plug_ins import parts_of, require_part

# Commands that draw on the terminal. They read the files of a job that was named.
_DRAWS = ("train", "sim", "plan", "preflight")

if TYPE_CHECKING:
    from titan.config.schema import JobConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    if problem := prepare_process():
        print(problem, file=sys.stderr)
        return 2
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    name, *rest = (*ALIASES.get(name, (name,)), *rest)
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    names = command_names()
    is_help = name in ("-h", "--help", "help")
    if name not in names and not is_help and name != "--version":
        from titan.base.untrusted import printable
        from titan.config.errors import did_you_mean

        aliases = [alias for alias, words in ALIASES.items() if words[0] in names]
        hint = did_you_mean(name, [*names, *aliases]) or f"; there are {', '.join(names)}"
        text = GONE.get(name, f"unknown command{hint}")
        if part := missing_part(name):
            text = f"this titan was installed without {part}, which has this command"
        print(f"command line: {printable(name)}: {text}", file=sys.stderr)
        return 2
    # pydantic looks for plug-ins in every installed package, which takes 0.1 s. titan has none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        if is_help:
            print(_overview(), flush=True)
            return 0
        if name == "--version":
            from titan import __version__

            print(f"titan {__version__}")
            return 0
        with nullcontext() if name in _DRAWS else _printable_output(name):
            return load_command(name)(rest)
    except SystemExit as request:  # by argparse, after --help or a wrong option
        return request.code if isinstance(request.code, int) else 1
    # As of `titan config ... | head`; Python would complain again when it flushes.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        if argv is None:  # the whole process, without its seconds of cleaning up
            os._exit(130)
        return 130
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("titan."):
            part = "/".join(str(error.name).split(".")[:2])
            print(f"titan {name}: this titan was installed without {part}", file=sys.stderr)
            return 2
        # Imported here, so that --help imports neither pydantic nor other large modules.
        from titan.run.supervisor import explain

        failure = explain(error)
        if failure is None:
            raise
        print(failure, file=sys.stderr)
        return failure.exit_code


@contextmanager
def _printable_output(name: str) -> Iterator[None]:
    """Escape characters that could control the terminal. The files that these commands print may come from anybody."""
    from titan.base.untrusted import PrintableStream

    plain = sys.stdout, sys.stderr
    # What a model says stays as it is in a file or a pipe.
    if name != "generate" or sys.stdout.isatty():
        sys.stdout = PrintableStream(sys.stdout)
    # Progress bars of libraries return to the beginning of the line.
    sys.stderr = PrintableStream(sys.stderr, allowed="\r")
    try:
        yield
    finally:
        sys.stdout, sys.stderr = plain


def _overview() -> str:
    width = max(map(len, command_names()))
    lines = ["usage: titan COMMAND ..."]
    for title, names in command_groups().items():
        rows = [f"  {name:{width}}  {summary_of(name)}" for name in names]
        lines += ["", title, *rows] if rows else []
    words = (f"{alias} ({' '.join(words)})" for alias, words in ALIASES.items())
    return "\n".join(
        [
            *lines,
            "",
            f"also: {', '.join(words)}",
            "`titan COMMAND --help` says more. The keys of a job file: `titan config JOB.toml --comments`, docs/config.md",
        ]
    )


def train(argv: list[str]) -> int:
    """Run `titan train`: this process alone, or as the launcher of several."""
    from titan.run.launch_extension import LaunchExtension, LayoutChoice, launcher

    extensions = [*parts_of(LaunchExtension)]
    more = "".join(f" {extension.usage}" for extension in extensions)
    parser = command_parser(
        "train",
        f"{JOB} [--nproc N] [--max-restarts R] [--new-layout]{more} [--quiet]",
        summary=summary_of("train"),
    )
    parser.add_argument(
        "--nproc",
        type=positive,
        metavar="N",
        help="processes on this machine; default: one per accelerator, else one",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole,
        metavar="R",
        help="times to go on from the newest checkpoint after a process has failed; default: 0",
    )
    add_new_layout(parser)
    for extension in extensions:
        extension.add_options(parser)
    add_quiet(parser)
    options, job = parser.parse_known_args(argv)
    # torchrun sets RANK. Then this process is a rank already, and starts no others.
    if "RANK" not in os.environ:
        from titan.base.hardware import count_accelerators
        from titan.config.load import leaves_layout_open

        known = [f"--{name.replace('_', '-')}" for name in vars(options)]
        num_processes = options.nproc or max(1, count_accelerators())
        choice = None
        is_open = leaves_layout_open(job)
        if options.new_layout and not is_open:
            print('--new-layout: not used, since the layout is not "auto"', file=sys.stderr)
        if is_open:  # other jobs import no simulator
            missing = (
                '"auto" needs titan/sim, which is not installed; use "fixed" and the degrees'
            )
            choose = require_part(LayoutChoice, key="parallelism.layout", missing=missing)
            job, choice = choose(job, world_size=num_processes, keep=not options.new_layout)

        def load(num_processes: int) -> JobConfig:
            from titan.checks.rules import load_to_run

            # Rank 0 warns.
            return load_to_run(
                job, world_size=num_processes, options=known, here=True, warn=False
            )[0]

        for extension in extensions:
            if (code := extension.launch(options, job, load)) is not None:
                return code
        config = load(num_processes)
        if num_processes > 1 or options.max_restarts or choice:
            from titan.run import train as rank

            code = rank.before_start(config)
            if code is not None:
                return code
        if choice:
            choice.write(config)
        # One process without restarts needs no launcher.
        if num_processes > 1 or options.max_restarts:
            return launcher("titan.train JOB.toml", num_processes).launch(
                job,
                num_processes=num_processes,
                dump_folder=config.job.dump_folder,
                max_restarts=options.max_restarts or 0,
            )
    from titan.run import train as rank

    return rank.main(job)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # As in titan/run/train.py: gloo's threads may be at work while the interpreter is torn down.
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)
