"""Command `titan slurm JOB.toml --nodes N`: a checked job's script train.sbatch, submitted on request.

The user's text may hold anything, even `$(...)` and line breaks, and must never become a command or
an option. So words for the shell are quoted, and values of #SBATCH lines, which cannot be quoted,
may have known characters only.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan.base.untrusted import read_bytes
from titan.checks.rules import load_to_run
from titan.config.errors import ConfigError
from titan.config.load import parse_args
from titan.config.options import JOB, add_new_layout, command_parser, mistake, positive, whole
from titan.config.plug_ins import door, parts_of
from titan.config.schema import JobConfig
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.search import auto

SUMMARY = "Check a job, write its script for sbatch, and submit it on request. docs/cluster.md"
TEMPLATE = Path(__file__).with_name("train.sbatch")
_NAME = r"[\w.,+-]+"
# Another option: its value cannot end the line, or begin a comment, a quote or another option. The script needs the options of _OURS.
_OURS = "nodes|gpus-per-node|ntasks|ntasks-per-node|array|output|error|signal|requeue|no-requeue|open-mode|wrap"
_SBATCH_OPTION = rf"--(?!({_OURS})(=|$))[a-z][a-z-]*(=[\w.,+:;/@%&|*!=\[\]()-]+)?"
# Options of Slurm: the form of a value, and an example for the error.
_PATTERNS = {
    "time": (r"(\d+-)?\d+(:\d+){0,2}", "24:00:00 or 2-12:00:00"),
    "partition": (_NAME, "gpu"),
    "account": (_NAME, "my-project"),
}


@door("slurm")
class SlurmExtension:
    """More of a script for sbatch, and scripts beside it.

    A package registers a subclass under the entry point group `titan.extensions` as slurm.NAME (titan/config/plug_ins.py).
    usage: its options in the usage line.
    """

    usage = ""

    def add_options(self, parser: ArgumentParser) -> None:
        """Add options to the command."""

    def array(self, options: Namespace) -> str | None:
        """Return the numbers of an array of jobs, such as "0-3"; None: it is one job."""

    def lines(self, options: Namespace, config: JobConfig, folder: str) -> list[str]:
        """Return lines that come before the launch, when "$@" is the job. folder: the run's."""
        return []

    def write(
        self, options: Namespace, job: Sequence[str], folder: Path, path: Path
    ) -> list[list[str]]:
        """Write other scripts than that at `path`. Return the commands that submit them, which run first."""
        return []


def _parse(
    words: Sequence[str], extensions: Sequence[SlurmExtension]
) -> tuple[Namespace, list[str]]:
    """Parse the command line. Return the command's options, and the files and overrides of the job."""
    more = "".join(f" {extension.usage}" for extension in extensions)
    usage = f"[--time T] [--partition P] [--account A] [--container IMAGE] [--setup FILE] [--preflight]{more} [--submit] [-- --qos=Q ...]"
    parser = command_parser(
        "slurm", f"{JOB} --nodes N [--gpus-per-node G] {usage}", summary=SUMMARY
    )
    add = parser.add_argument
    add("--nodes", type=positive, metavar="N", help="machines")
    add("--world-size", type=positive, metavar="W", help="ranks in all, in place of --nodes")
    add(
        "--gpus-per-node", type=whole, default=8, metavar="G", help="default: 8; 0: run on CPUs"
    )
    add(
        "--ranks-per-node",
        type=positive,
        metavar="R",
        help="default: one per GPU, or one on CPUs",
    )
    add(
        "--max-restarts",
        type=whole,
        metavar="R",
        help="restarts after a crash; default: 3 on several nodes, 0 on one",
    )
    add("--hardware", metavar="H", help='of the cluster, for parallelism.layout = "auto"')
    add_new_layout(parser)
    add(
        "--preflight",
        action="store_true",
        help="run it first, and leave out nodes that it names",
    )
    add(
        "--spare-nodes",
        type=whole,
        default=0,
        metavar="S",
        help="for those left out; default: 0",
    )
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="for sbatch, such as --sbatch=--qos=high; also all words after --",
    )
    add("--output", type=Path, metavar="FILE", help="default: job.sbatch in the run folder")
    add("--time", metavar="T", help="time limit in Slurm's notation, such as 24:00:00")
    add("--partition", metavar="P")
    add("--account", metavar="A")
    add("--container", metavar="IMAGE", help="run in this image, through pyxis")
    add("--mounts", metavar="FROM:TO,...", help="folders of the container beside this one")
    add(
        "--setup",
        type=Path,
        metavar="FILE",
        help="the site's lines of bash, such as module load and NCCL_*, to begin the script with",
    )
    for extension in extensions:
        extension.add_options(parser)
    add("--submit", action="store_true", help="pass the script to sbatch")
    end = words.index("--") if "--" in words else len(words)
    options, job = parser.parse_known_args(words[:end])
    options.sbatch += words[end + 1 :]
    if options.spare_nodes and not options.preflight:
        raise mistake(
            "--spare-nodes", "is for --preflight, which names the nodes to leave out; add that"
        )
    if bool(options.nodes) == bool(options.world_size):
        raise mistake("--nodes", "give either --nodes or --world-size")
    # Without GPUs one rank uses the cores of a node.
    ranks = options.ranks_per_node = options.ranks_per_node or options.gpus_per_node or 1
    if options.world_size:
        options.nodes, left = divmod(options.world_size, ranks)
        if left:
            raise mistake(
                "--world-size",
                f"{options.world_size} is no multiple of {ranks} ranks a node; see --gpus-per-node",
            )
    if options.max_restarts is None:
        options.max_restarts = 3 if options.nodes > 1 else 0
    return options, job


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the job or an option is wrong. titan.cli reports it.
    """
    extensions = [*parts_of(SlurmExtension)]
    options, job = _parse(list(sys.argv[1:] if argv is None else argv), extensions)
    known = [f"--{name.replace('_', '-')}" for name in vars(options)]
    device = "cuda" if options.gpus_per_node else "cpu"
    # Check everything that `titan check` checks. In a container the files may have other places.
    here = not options.container
    ranks: int = options.ranks_per_node
    size = options.nodes * ranks

    def profile(config: JobConfig) -> Profile:
        name = "cpu" if device == "cpu" else options.hardware or config.hardware.name
        if name == "auto":
            raise mistake(
                "--hardware",
                'parallelism.layout = "auto" needs the hardware of the cluster, such as h100-sxm',
            )
        return auto.on_nodes(load_profile(name), ranks)

    if options.hardware:
        load_profile(options.hardware)  # also where the job does not need it
    job, choice = auto.resolve(
        job, world_size=size, profile=profile, keep=not options.new_layout
    )
    config, _ = load_to_run(job, world_size=size, options=known, here=here, device=device)
    # Nothing is written before everything is checked.
    folder = run_folder(config)
    options.name = _job_name(job)
    job, copies = _snapshot(job, folder / "submitted")
    text = script(config, options, job, extensions)
    path: Path = options.output or folder / "job.sbatch"
    try:
        # Slurm opens its log in the folder, but does not create it.
        for parent in (path.parent, folder / "submitted"):
            parent.mkdir(parents=True, exist_ok=True)
        for copy, content in copies.items():
            copy.write_bytes(content)
        path.write_text(text, encoding="utf-8")
        if choice:
            choice.write(config)
    except OSError as error:
        raise mistake("--output", str(error)) from None
    if options.output is None and not options.submit:
        print(text, end="", flush=True)
    commands = [["sbatch", str(path)]]
    for extension in extensions:
        commands = [*extension.write(options, job, folder, path), *commands]
    if not options.submit:
        text = " && ".join(map(shlex.join, commands))
        print(f"\nwritten. To submit it: {text}", file=sys.stderr)
        return 0
    try:
        return max(subprocess.run(command).returncode for command in commands)
    except FileNotFoundError:
        raise mistake("--submit", "there is no sbatch on this machine") from None


def _require_valid(options: Namespace) -> None:
    """Raise ConfigError for a value that cannot be in a line of #SBATCH."""
    for name, (pattern, example) in _PATTERNS.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise mistake(f"--{name}", f"expected such as {example}, got {value!r}")
    for word in options.sbatch:
        if not re.fullmatch(_SBATCH_OPTION, word):
            rule = "expected such as --qos=high, and no option that titan slurm sets"
            raise mistake("--sbatch", f"{word!r}: {rule}")


def script(
    config: JobConfig,
    options: Namespace,
    job: Sequence[str],
    extensions: Sequence[SlurmExtension],
) -> str:
    """Return the text of the script.

    Args:
        config: the job.
        options: options of the command.
        job: files and overrides of the command line.
        extensions: packages' parts of the script.

    Raises:
        ConfigError: a value cannot be in a line of #SBATCH.
        InputError: the file of --setup cannot be read.
    """
    _require_valid(options)
    folder = str(run_folder(config))
    # Slurm replaces %j and the like in the name of its log, and has no way to escape a line break.
    if not folder.isprintable() or "%" in folder:
        message = f"Slurm cannot write its log there: {folder!r} has a %, or characters that are not printable"
        raise ConfigError([config.source_map.problem("job.dump_folder", message)])
    log = f"{folder}/slurm-%j.out".replace("\\", "\\\\").replace('"', '\\"')
    directives = {
        "job-name": options.name,
        "array": next(filter(None, (e.array(options) for e in extensions)), None),
        "nodes": options.nodes + options.spare_nodes,
        "gpus-per-node": options.gpus_per_node or None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": f'"{log}"',
        # A job needs the time that a save may take, and a minute to spare.
        "signal": f"B:USR1@{config.fault_tolerance.grace_seconds + 60}",
    }
    settings = {
        # In a container this Python does not exist.
        "PYTHON": "python" if options.container else sys.executable,
        "NPROC": options.ranks_per_node,
        **({"JOB_NODES": options.nodes} if options.spare_nodes else {}),
        "PREFLIGHT": "1" if options.preflight else "",
        "MAX_RESTARTS": options.max_restarts,
        "CONTAINER": options.container or "",
        "CONTAINER_MOUNTS": ",".join(
            filter(None, [f"{Path.cwd()}:{Path.cwd()}", options.mounts])
        ),
    }
    # Directives come first in the file: Slurm stops reading them at the first command.
    before, _, rest = TEMPLATE.read_text(encoding="utf-8").partition("\n\n")
    # The template's own directives, unless this job sets them.
    kept = [
        line
        for line in before.splitlines()
        if line.removeprefix("#SBATCH --").partition("=")[0] not in directives
    ]
    return "\n".join(
        [
            *kept,
            *directive_lines(directives, options.sbatch),
            "",
            "# Written by `titan slurm`.",
            f"cd -- {shlex.quote(str(Path.cwd()))} || exit 2",
            # Behind a command, so that Slurm reads no #SBATCH in them; before settings, which win.
            read_bytes(options.setup).decode() if options.setup else "",
            *(f"{key}={shlex.quote(str(value))}" for key, value in settings.items()),
            f"set -- {shlex.join(job)}",
            *(line for e in extensions for line in e.lines(options, config, folder)),
            "",
            rest[rest.index("set -uo pipefail") :],
        ]
    )


def directive_lines(directives: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    """Return the lines for sbatch: directives with a value, and more options as they are."""
    lines = [f"--{key}={value}" for key, value in directives.items() if value is not None]
    return [f"#SBATCH {line}" for line in [*lines, *more]]


def _snapshot(job: Sequence[str], folder: Path) -> tuple[list[str], dict[Path, bytes]]:
    """Replace the files of a job's words by copies in `folder`. Return the words, and the copies' content.

    A later edit of a file then does not change a job that waits, or is requeued. A copy's name has
    a hash, so it never belongs to another job.
    """
    arguments = parse_args(job)
    copies: dict[str, Path] = {}
    for file in (arguments.job, *arguments.overlays):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
        copies[str(file)] = folder / f"{file.stem}-{digest}.toml"
    words = [str(copies.get(str(Path(w)), w)) if w[:1] != "-" else w for w in job]
    return words, {copy: Path(file).read_bytes() for file, copy in copies.items()}


def run_folder(config: JobConfig) -> Path:
    """Return the whole path of a job's run folder."""
    return Path(config.job.dump_folder).absolute()


def _job_name(job: Sequence[str]) -> str:
    """Return the name of the job file in letters, digits and dashes, a letter first."""
    stem = Path(parse_args(job).job).stem.lower()
    name = re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:40].rstrip("-")
    return name if name[:1].isalpha() else f"titan-{name}".rstrip("-")
