"""`titan kubernetes JOB.toml --nodes N --image I`: a TrainJob for Kubeflow Trainer (v2, trainer.kubeflow.org/v1alpha1).

The resolved job is part of it, so that the image needs titan and nothing of the job. Kubernetes signals only the first process of a
pod: titan.cluster.node, which passes it on.
"""

from __future__ import annotations

import sys
from typing import Any

from titan.config.errors import ConfigError
from titan.config.render import to_toml

from .facts import Facts, gather, parser, require, volumes
from .yaml import to_yaml

SUMMARY = "Write a TrainJob for Kubeflow Trainer v2, for kubectl apply. docs/cluster.md"
NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
RUN = 'printf %s "$TITAN_JOB" >/tmp/job.toml && exec python -m titan.cluster.node -m titan.train /tmp/job.toml'


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for the user's mistakes, of which titan.cli tells a `ConfigError`."""
    made = parser(
        "kubernetes", summary=SUMMARY, options="--image I [--volume CLAIM:/PATH] [--output FILE]"
    )
    add = made.add_argument
    add("--image", required=True, metavar="I", help="a container image that has titan")
    add("--volume", action="append", default=[], metavar="CLAIM:/PATH", help="a claim to mount")
    add("--runtime", default="torch-distributed", metavar="NAME", help="of Kubeflow Trainer")
    options, job = made.parse_known_args(sys.argv[1:] if argv is None else argv)
    mounts = volumes(options.volume)
    require("runtime", options.runtime, pattern=NAME, example="torch-distributed")
    for claim, _ in mounts:
        require("volume", claim, pattern=NAME, example="checkpoints:/checkpoints")
    facts = gather(options, job)
    problems = [
        facts.config.source_map.problem(
            key,
            f"'{path}' is relative to this folder, and the image has another; give the path in the image or on a --volume",
        )
        for key, path in facts.relative_inputs().items()
    ]
    if problems:
        raise ConfigError(problems)
    made_of = manifest(facts, image=options.image, runtime=options.runtime, mounts=mounts)
    return deliver(to_yaml(made_of), options.output)


def deliver(text: str, output: Any) -> int:
    """To the file, or to standard output."""
    if output is None:
        print(text)
        return 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"titan: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}", file=sys.stderr)
    return 0


def manifest(
    facts: Facts, *, image: str, runtime: str, mounts: list[tuple[str, str]]
) -> dict[str, Any]:
    """The TrainJob."""
    trainer: dict[str, Any] = {
        "image": image,
        "numNodes": facts.nodes,
        "numProcPerNode": facts.ranks_per_node,
        "command": ["bash", "-c"],
        "args": [_literal(RUN)],
        "env": [{"name": "TITAN_JOB", "value": _literal(to_toml(facts.config))}],
    }
    if facts.gpus_per_node:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": facts.gpus_per_node}}
    names = [f"volume-{i}" for i in range(len(mounts))]
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": facts.notice_s}
    if mounts:
        pod["volumes"] = [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for name, (claim, _) in zip(names, mounts, strict=True)
        ]
        paths = [
            {"name": name, "mountPath": path} for name, (_, path) in zip(names, mounts, strict=True)
        ]
        pod["containers"] = [{"name": "node", "volumeMounts": paths}]
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [job]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": facts.name},
        "spec": {
            "runtimeRef": {"name": runtime},
            "trainer": trainer,
            "runtimePatches": [{"manager": "titan.cli/manifest", "trainingRuntimeSpec": patch}],
        },
    }


def _literal(text: str) -> str:
    """Kubernetes puts variables for $(NAME) in what containers are given; a dollar twice is a dollar."""
    return text.replace("$", "$$")
