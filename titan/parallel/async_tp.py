"""Make tensor parallelism asynchronous: inductor rewrites an all-gather before matrix products, or
a reduce-scatter after one, into an operation that does both in pieces, so that most of the
communication hides behind the computation.

The rewrite (torch's micro_pipeline_tp pass over compiled blocks; PyTorch's symmetric memory underneath) leaves a graph
that it does not recognise as it was, without a word. So titan counts what it did while blocks are
compiled, and the trainer reports the counts after the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .torch_compat import enable_symmetric_memory, micro_pipeline_module


@dataclass
class Rewrites:
    """Count what the pass found in the graphs compiled so far, and what it fused."""

    num_graphs: int = 0
    all_gathers: int = 0
    reduce_scatters: int = 0
    fused_all_gathers: int = 0
    fused_reduce_scatters: int = 0

    @property
    def fired(self) -> bool:
        """Return whether anything was fused."""
        return self.fused_all_gathers + self.fused_reduce_scatters > 0

    def __str__(self) -> str:
        if not self.num_graphs:
            return "async TP: no graph was compiled (all came from the compiler's cache), so nothing was counted"
        return (
            f"async TP: {self.fused_all_gathers} of {self.all_gathers} all-gathers and {self.fused_reduce_scatters} of "
            f"{self.reduce_scatters} reduce-scatters fused with matrix products, in {self.num_graphs} compiled graphs"
        )


def enable_async_tp(group: dist.ProcessGroup) -> Rewrites:
    """Turn the rewrite on for collectives of `group`, before blocks are compiled; the counts fill as they are."""
    from torch._inductor import config

    config._micro_pipeline_tp = True
    enable_symmetric_memory(group)
    module = micro_pipeline_module()
    rewrites = Rewrites()
    module.micro_pipeline_tp_pass = _counted(module.micro_pipeline_tp_pass, rewrites)
    return rewrites


def _counted(rewrite: Callable[[Any], None], rewrites: Rewrites) -> Callable[[Any], None]:
    def counted(graph: Any) -> None:
        gathers, scatters = _count(graph, "all_gather"), _count(graph, "reduce_scatter")
        rewrite(graph)
        if gathers + scatters:
            rewrites.num_graphs += 1
        rewrites.all_gathers += gathers
        rewrites.reduce_scatters += scatters
        # The name of a fused operation has that of the plain one in it: count namespaces apart.
        rewrites.fused_all_gathers += _count(graph, "all_gather", namespace="symm_mem")
        rewrites.fused_reduce_scatters += _count(graph, "reduce_scatter", namespace="symm_mem")

    return counted


def _count(graph: Any, name: str, *, namespace: str = "_c10d_functional") -> int:
    targets = [
        node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    ]
    return sum(t.namespace == namespace and name in t._opname for t in targets)
