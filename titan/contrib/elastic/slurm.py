"""Options --elastic and --groups of `titan slurm`: an array of jobs, and the job of their lighthouse."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from titan.config.options import add_options
from titan.config.schema import JobConfig
from titan.config.toml import table_beside
from titan.ops.cluster.slurm import SlurmExtension, directive_lines


class GroupScripts(SlurmExtension):
    """Slurm array with a replica group in each element, and a job for the lighthouse."""

    usage = "[--elastic --groups G]"

    def add_options(self, parser: ArgumentParser) -> None:
        add_options(parser, table_beside(__file__, "tables.toml")["slurm"])

    def array(self, options: Namespace) -> str | None:
        return f"0-{_count(options) - 1}" if _count(options) else None

    def lines(self, options: Namespace, config: JobConfig, folder: str) -> list[str]:
        groups = _count(options)
        if not groups:
            return []
        file, checkpoints = f"{folder}/lighthouse", config.checkpoint.folder
        saved = checkpoints if "://" in checkpoints else str(Path(folder) / checkpoints)
        settings = [
            "--fault_tolerance.enable=true",
            f"--fault_tolerance.replica_groups={groups}",
        ]
        return [
            f'set -- "$@" {shlex.join([*settings, f"--checkpoint.folder={saved}"])} \\',
            '  --fault_tolerance.replica_id="$SLURM_ARRAY_TASK_ID" \\',
            f"  {shlex.quote(f'--fault_tolerance.lighthouse={file}')} \\",  # lighthouse.sbatch writes it
            f'  --job.dump_folder={shlex.quote(folder)}/group-"$SLURM_ARRAY_TASK_ID"',
        ]

    def write(
        self, options: Namespace, job: Sequence[str], folder: Path, path: Path
    ) -> list[list[str]]:
        if not _count(options):
            return []
        beside = path.with_name("lighthouse.sbatch")
        beside.write_text(_lighthouse_script(options, job, folder), encoding="utf-8")
        (folder / "lighthouse").unlink(missing_ok=True)  # the address of an earlier submission
        return [["sbatch", str(beside)]]


def _count(options: Namespace) -> int:
    return options.groups or (2 if options.elastic else 0)


def _lighthouse_script(options: Namespace, job: Sequence[str], folder: Path) -> str:
    """Return the script of the groups' lighthouse, a process that needs one core.

    Slurm requeues it while groups run or wait, also at its time limit. The groups read its new address in the file.
    """
    directives = {
        "job-name": f"{options.name}-lighthouse",
        "ntasks": 1,
        "open-mode": "append",
        "signal": "B:USR1@60",
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": f'"{folder}/lighthouse-%j.out"',
    }
    python = "python" if options.container else sys.executable
    command = ["-m", "titan.contrib.elastic.launch_groups", f"{folder}/lighthouse", *job]
    return "\n".join(
        [
            "#!/bin/bash",
            *directive_lines(directives, ["--requeue", *options.sbatch]),
            "",
            f"cd -- {shlex.quote(str(Path.cwd()))} || exit 2",
            "trap 'kill $(jobs -p)' USR1  # a minute before the time limit",
            f"{shlex.join([python, *command])} &",
            'wait "$!"; code=$?',
            "((code == 2)) && exit 2  # a mistake, which it would make again",
            f'groups=$(squeue --noheader --user="$(id -un)" --name={shlex.quote(options.name)})',
            '[[ $groups ]] && scontrol requeue "$SLURM_JOB_ID"',
            'exit "$code"',
            "",
        ]
    )
