"""What the rules know of torch without importing it is what torch says."""

from __future__ import annotations

import torch
import torch._dynamo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan.config.machine import BACKENDS, operations
from titan.parallel.kept_operations import GROUPS


def test_every_backend_of_torch_is_known() -> None:
    assert {*torch._dynamo.list_backends(exclude_tags=())} <= {*BACKENDS}


def test_operations_are_those_of_torch() -> None:
    """Those of the groups, and whatever a step calls; and no name that torch lacks is passed."""
    known = operations()
    called = {name for names in GROUPS.values() for name in names}

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
            called.add(str(func).rsplit(".", 1)[0])
            return func(*args, **(kwargs or {}))

    with Listen():
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1)
        layer(torch.randn(3, 2, 16)).sum().backward()
    called = {name for name in called if name.startswith("aten.")}
    assert len(called) > 20 and called <= known
    assert "aten.mmm" not in known
    assert sum(hasattr(torch.ops.aten, name.removeprefix("aten.")) for name in known) > 0.99 * len(
        known
    )
