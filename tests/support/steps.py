"""Training steps of jobs, on a mesh that exists."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan.checks.layout_rules import resolve_layout
from titan.config.schema import JobConfig
from titan.step.resolved import ResolvedJob, resolve_job
from titan.step.train_step import TrainStep, build_train_step

CPU = torch.device("cpu")


def resolved(config: JobConfig, mesh: DeviceMesh, *, task: Any = None) -> ResolvedJob:
    """Return the job, resolved for the ranks of a mesh."""
    return resolve_job(
        config, resolve_layout(config, mesh.size()), device=mesh.device_type, task=task
    )


def build_step(
    config: JobConfig, mesh: DeviceMesh, *, device: torch.device = CPU, task: Any = None
) -> TrainStep:
    """Return the training step of a job."""
    return build_train_step(resolved(config, mesh, task=task), device=device, mesh=mesh)
