"""`titan slurm JOB.toml --nodes N`: train.sbatch for one job, checked, with every choice written out; shown, and submitted if asked.

What a user gives may hold anything, `$(...)` and line breaks too, and never becomes a command or an option: shell words are
quoted, and options to Slurm are of known characters, or refused.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from titan.config.errors import ConfigError

from .facts import Facts, gather, option_problem, parser, require

SUMMARY = "Write a job's script for sbatch: train.sbatch, checked and resolved. docs/cluster.md"
TEMPLATE = Path(__file__).with_name("train.sbatch")


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for the user's mistakes, of which titan.cli tells a `ConfigError`."""
    usage = "[--time T] [--partition P] [--account A] [--container IMAGE] [--submit]"
    made = parser("slurm", summary=SUMMARY, options=usage)
    add = made.add_argument
    add("--time", metavar="T", help="limit, as Slurm writes it, such as 24:00:00")
    add("--partition", metavar="P")
    add("--account", metavar="A")
    add("--container", metavar="IMAGE", help="run in it, through pyxis")
    add("--mounts", metavar="FROM:TO,...", help="what the container sees besides this folder")
    add("--submit", action="store_true", help="hand it to sbatch")
    options, job = made.parse_known_args(sys.argv[1:] if argv is None else argv)
    facts = gather(options, job)
    text = script(facts, options)
    path: Path = options.output or facts.run_folder / "job.sbatch"
    try:
        for folder in (path.parent, facts.run_folder):  # Slurm opens its log there, and makes none
            folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"titan slurm: {error}", file=sys.stderr)
        return 2
    print(text, end="", flush=True)
    command = ["sbatch", str(path)]
    if not options.submit:
        print(f"\nwritten. To submit it: {shlex.join(command)}", file=sys.stderr)
        return 0
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        problem = option_problem("submit", "there is no sbatch on this machine")
        raise ConfigError([problem]) from None


def script(facts: Facts, options: argparse.Namespace) -> str:
    """The text of the script; raises ConfigError for what Slurm's options cannot hold."""
    name = r"[\w.,+-]+"
    require(
        "time", options.time, pattern=r"(\d+-)?\d+(:\d+){0,2}", example="24:00:00 or 2-12:00:00"
    )
    require("partition", options.partition, pattern=name, example="gpu")
    require("account", options.account, pattern=name, example="my-project")
    folder = str(facts.run_folder)
    if not folder.isprintable() or "%" in folder:
        message = f"Slurm cannot write its log there: {folder!r} has a %, or characters that are not printable"
        raise ConfigError([facts.config.source_map.problem("job.dump_folder", message)])
    directives = {
        "job-name": facts.name,
        "nodes": facts.nodes,
        "gpus-per-node": facts.gpus_per_node or None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": _quoted(f"{folder}/slurm-%j.out"),
        "signal": f"B:USR1@{facts.notice_s}",
    }
    settings = {
        "PYTHON": "python" if options.container else sys.executable,
        "NPROC": facts.ranks_per_node,
        "MAX_RESTARTS": facts.max_restarts,
        "CONTAINER": options.container or "",
        "CONTAINER_MOUNTS": ",".join(filter(None, [f"{Path.cwd()}:{Path.cwd()}", options.mounts])),
    }
    before, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("\n\n")
    kept = [
        line
        for line in before.splitlines()
        if line.removeprefix("#SBATCH --").partition("=")[0] not in directives
    ]
    return "\n".join(
        [
            *kept,
            *(f"#SBATCH --{key}={value}" for key, value in directives.items() if value is not None),
            "",
            "# Written by `titan slurm`.",
            f"cd -- {shlex.quote(str(Path.cwd()))} || exit 2",
            *(f"{key}={shlex.quote(str(value))}" for key, value in settings.items()),
            f"set -- {shlex.join(facts.words)}",
            "",
            rest[rest.index("set -uo pipefail") :],
        ]
    )


def _quoted(path: str) -> str:
    """A path for #SBATCH, in double quotes."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
