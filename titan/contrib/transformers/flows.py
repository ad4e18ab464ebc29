"""Flow of the outputs of linear layers through a forward pass on meta: what reads them, and where their channels are cut.

The outputs of a linear layer are ordered. Tensor-parallel ranks hold consecutive parts of them, so the code after the layer must keep that
order: it may give the channels to heads, but not cut the row of all channels into pieces, as it does for a fused matrix.

An example: `qkv` returns (B, S, 12). Code that views it as (B, S, 3, 4) and cuts the last dimension leaves the order of three heads. Code
that splits it into (B, S, 4) for queries and keys and values, or cuts dimension 2 of that view, does not.

B batch, S sequence
"""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_VIEWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_reshape_alias"}
_CUTS = {"split", "split_with_sizes", "slice", "narrow", "select", "unbind", "index_select"}
_MATMULS = {"mm", "bmm", "addmm", "matmul", "baddbmm", "linear"}


class Flows:
    """Linear layers whose outputs a tensor holds, with the dimension in which their channels are ordered.

    Attributes:
        cut: names of layers whose row of channels is cut into pieces.
    """

    def __init__(self) -> None:
        self.cut: set[str] = set()
        # The tensors are kept, so that their identities stay theirs.
        self._of: dict[int, tuple[Tensor, dict[str, int]]] = {}

    def begin(self, name: str, output: Tensor, dim: int) -> None:
        """Begin to follow an output, whose channels are ordered in `dim`."""
        self._of[id(output)] = output, {name: dim % output.ndim}

    def of(self, tensor: Any) -> dict[str, int]:
        """Return the dimension of the channels in a tensor for each layer whose outputs it holds."""
        return self._of.get(id(tensor), (None, {}))[1]

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Follow the arguments of an operation to its result."""
        operation = func.overloadpacket._qualified_op_name.partition("::")[2]
        if operation in _MATMULS:
            return
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for x in tree_leaves((args, kwargs)):
            for name, dim in self.of(x).items() if isinstance(x, Tensor) else ():
                for out in outputs:
                    after = self._after(operation, args, x, dim, out, name)
                    if after is not None and out is not x:
                        self._of.setdefault(id(out), (out, {}))[1][name] = after

    def _after(
        self, operation: str, args: Any, x: Tensor, dim: int, out: Tensor, name: str
    ) -> int | None:
        """Return the dimension of the channels of `name` in a result, or None if it has lost their order."""
        if operation in _VIEWS:
            return _dim_after_view(x.shape, dim, out.shape)
        if operation in ("transpose", "permute", "t"):
            dims = [*range(x.ndim)]
            if operation == "permute":
                dims = [d % x.ndim for d in args[1]]
            else:
                a, b = (d % x.ndim for d in (args[1:3] if operation == "transpose" else (0, 1)))
                dims[a], dims[b] = b, a
            return dims.index(dim)
        if operation in _CUTS:
            place = {"split": 2, "split_with_sizes": 2}.get(operation, 1)
            cut = (args[place] if len(args) > place else 0) % x.ndim
            is_removed = operation in ("select", "unbind")
            if cut == dim:
                if x.shape[dim] > 1 and (is_removed or out.shape[dim] < x.shape[dim]):
                    self.cut.add(name)
                return None if is_removed else dim
            return dim - (is_removed and cut < dim)
        keeps = out.ndim == x.ndim and out.shape[dim] == x.shape[dim]
        return dim if keeps else None


def _dim_after_view(before: Any, dim: int, after: Any) -> int | None:
    """Return the dimension of a view that the channels of `dim` are ordered by first."""
    if tuple(after[:dim]) == tuple(before[:dim]) and len(after) > dim:
        return dim
    size = prod(before[:dim])
    found = (n for n in range(1, len(after)) if prod(after[:n]) == size)
    return next(found, None)
