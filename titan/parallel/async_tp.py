"""Asynchronous tensor parallelism: collectives run in pieces behind the matmuls next to them.

Inductor rewrites an all-gather before matmuls, or a reduce-scatter after one, into an operation that does both in pieces, so
that most of the communication hides behind the computation.

The rewrite is torch's micro_pipeline_tp pass over compiled blocks, on PyTorch's symmetric memory. It silently leaves a graph
unchanged if it does not recognise its pattern. titan therefore counts the rewrites while blocks are compiled, and the trainer
reports the counts after the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .torch_compat import enable_symmetric_memory


@dataclass
class Rewrites:
    """Counts of the collectives that the pass found and fused in the graphs compiled so far.

    Attributes:
        num_graphs: number of compiled graphs with such collectives.
        all_gathers: all-gathers found.
        reduce_scatters: reduce-scatters found.
        fused_all_gathers: all-gathers that were fused with matmuls.
        fused_reduce_scatters: reduce-scatters that were fused with matmuls.
    """

    num_graphs: int = 0
    all_gathers: int = 0
    reduce_scatters: int = 0
    fused_all_gathers: int = 0
    fused_reduce_scatters: int = 0

    @property
    def fired(self) -> bool:
        """Return whether the pass fused anything."""
        return self.fused_all_gathers + self.fused_reduce_scatters > 0

    def __str__(self) -> str:
        if not self.num_graphs:
            return "async TP: no graph was compiled (all came from the compiler's cache), so nothing was counted"
        return (
            f"async TP: {self.fused_all_gathers} of {self.all_gathers} all-gathers and {self.fused_reduce_scatters} of "
            f"{self.reduce_scatters} reduce-scatters fused with matrix products, in {self.num_graphs} compiled graphs"
        )


def enable_async_tp(group: dist.ProcessGroup) -> Rewrites:
    """Turn on the rewrite for collectives of `group`. Call it before blocks are compiled.

    Args:
        group: the tensor-parallel group.

    Returns:
        The counts, which grow as blocks are compiled.
    """
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    config._micro_pipeline_tp = True
    enable_symmetric_memory(group)
    module: Any = post_grad
    rewrites = Rewrites()
    # Inductor looks up the pass in this module, by name, for each graph.
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
        # The name of a fused operation contains the name of the plain one, so namespaces are counted separately.
        rewrites.fused_all_gathers += _count(graph, "all_gather", namespace="symm_mem")
        rewrites.fused_reduce_scatters += _count(graph, "reduce_scatter", namespace="symm_mem")

    return counted


def _count(graph: Any, name: str, *, namespace: str = "_c10d_functional") -> int:
    targets = [
        node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    ]
    return sum(t.namespace == namespace and name in t._opname for t in targets)
