"""`titan skypilot JOB.toml --nodes N --gpu H100`: a task for SkyPilot, for `sky jobs launch`, which starts it again after a
preemption, or after an exit with 75.

SkyPilot copies this folder to every machine, and the job is run there as it is given here.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

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
    add("--setup", default="pip install .", metavar="COMMAND", help="default: pip install .")
    options, job = made.parse_known_args(sys.argv[1:] if argv is None else argv)
    require("gpu", options.gpu, pattern=r"[\w.-]+", example="H100")
    facts = gather(options, job)
    task = manifest(
        facts,
        gpu=options.gpu,
        image=options.image,
        setup=options.setup,
        mounts=volumes(options.volume),
    )
    return deliver(to_yaml(task), options.output)


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
