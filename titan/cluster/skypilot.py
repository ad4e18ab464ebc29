"""`titan skypilot JOB.toml --nodes N --gpu H100`: a task for SkyPilot, for `sky jobs launch`, which starts it again after a
preemption, or after an exit with 75.

SkyPilot copies this folder to every machine, less what git ignores, and the job is run there as it is given here. So every
relative path that the job reads must be in this folder.
"""

from __future__ import annotations

import glob
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from titan.config.errors import ConfigError

from .facts import Facts, gather, parser, require, volumes
from .kubernetes import deliver
from .yaml import to_yaml

SUMMARY = "Write a task for SkyPilot, for sky jobs launch. docs/cluster.md"
RUN = """\
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
exec python -m titan.cluster.node --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node={ranks} \\
  --rdzv-backend=titan --rdzv-id="$SKYPILOT_TASK_ID" --rdzv-endpoint="$head:29500" \\
  --rdzv-conf="rank=$SKYPILOT_NODE_RANK" \\
  -m titan.train {job}
"""


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for the user's mistakes, of which titan.cli tells a `ConfigError`."""
    usage = "[--gpu NAME] [--image I] [--volume BUCKET:/PATH] [--setup COMMAND] [--output FILE]"
    made = parser("skypilot", summary=SUMMARY, options=usage)
    add = made.add_argument
    add("--gpu", default="H100", metavar="NAME", help="as SkyPilot names them; default: H100")
    add("--image", metavar="I", help="a container image to run in")
    add("--volume", action="append", default=[], metavar="BUCKET:/PATH", help="to mount")
    help_ = "default: pip install '.[EXTRAS]', with those that the job needs"
    add("--setup", metavar="COMMAND", help=help_)
    options, job = made.parse_known_args(sys.argv[1:] if argv is None else argv)
    require("gpu", options.gpu, pattern=r"[\w.-]+", example="H100")
    facts = gather(options, job)
    _check_inputs(facts)
    extras = f"[{','.join(facts.extras)}]" if facts.extras else ""
    task = manifest(
        facts,
        gpu=options.gpu,
        image=options.image,
        setup=options.setup or f"pip install {shlex.quote(f'.{extras}')}",
        mounts=volumes(options.volume),
    )
    return deliver(to_yaml(task), options.output)


def _check_inputs(facts: Facts) -> None:
    """Raise ConfigError for every relative path that the job reads and SkyPilot would not copy."""
    problems = []
    for key, path in facts.relative_inputs().items():
        if not Path(path).resolve().is_relative_to(Path.cwd()):
            reason = "is outside this folder, which is what SkyPilot copies"
        elif not glob.glob(path):  # noqa: PTH207
            reason = "is not in this folder, which is what SkyPilot copies"
        elif _is_ignored(path):
            reason = "is ignored by git, so SkyPilot does not copy it (a .skyignore file would say otherwise)"
        else:
            continue
        message = f"'{path}' {reason}; give a path on a --volume, or put it into this folder"
        problems.append(facts.config.source_map.problem(key, message))
    if problems:
        raise ConfigError(problems)


def _is_ignored(path: str) -> bool:
    if Path(".skyignore").exists() or shutil.which("git") is None:
        return False
    command = ["git", "check-ignore", "--quiet", "--", path]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def manifest(
    facts: Facts, *, gpu: str, image: str | None, setup: str, mounts: list[tuple[str, str]]
) -> dict[str, Any]:
    """The task."""
    recovery = {"max_restarts_on_errors": facts.max_restarts, "recover_on_exit_codes": [75]}
    resources: dict[str, Any] = {"job_recovery": recovery}
    if facts.gpus_per_node:
        resources["accelerators"] = f"{gpu}:{facts.gpus_per_node}"
    if image:
        resources["image_id"] = f"docker:{image}"
    task: dict[str, Any] = {
        "name": facts.name,
        "workdir": ".",
        "num_nodes": facts.nodes,
        "resources": resources,
    }
    if mounts:
        task["file_mounts"] = {path: {"source": bucket, "mode": "MOUNT"} for bucket, path in mounts}
    run = RUN.format(ranks=facts.ranks_per_node, job=shlex.join(facts.words))
    return task | {"setup": setup, "run": run}
