"""Entry point of flow matching. Imports no torch before the task is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.config.schema import JobConfig

from .flow_options import FlowOptions as TaskOptions

if TYPE_CHECKING:
    from .flow_matching import FlowMatching

__all__ = ["TaskOptions", "build_task"]


def build_task(config: JobConfig, options: TaskOptions) -> FlowMatching:
    """Return the task of a job."""
    from .flow_matching import FlowMatching

    return FlowMatching(config, options)
