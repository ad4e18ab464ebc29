"""Record of a training step that does not depend on the layout: digests of whole tensors, by name.

For each module it covers the output and the gradient of the output, and for each parameter weight, gradient and update. A digest is a
few projections of the tensor on fixed vectors of signs, and its norm. A sign belongs to an index of the whole tensor, and projections
are linear. So each rank projects its own part, and the sums over ranks are the projections of the whole: nothing is gathered.

How parts join follows from shapes. `whole_shapes` runs the model on meta before it is laid out. A rank's part of a dimension is then known
by its length: samples by data parallelism, tokens by context and tensor parallelism, features by tensor parallelism. Outputs with other
lengths, such as the rows that experts receive, are left out.

B batch, S sequence, D any other dimension
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from titan.numerics.module_hooks import hook_outputs, is_recomputation
from titan.parallel.compile import is_compiled
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import axis_rank, axis_size
from titan.parallel.selective import outside_selection

from .digests import Digest, differ, digest_of, indices_of

Dim = int | str
"""A dimension of a whole tensor: a length, or "B", "S", or "BS" for both in one."""


@dataclass
class JoinedTensor:
    """A tensor of a recorded step.

    Attributes:
        kind: "batch", "weight" before the step, "output", "output gradient", "gradient" or "update".
        name: module or parameter, by its name in the plain model.
        digest: of the whole tensor.
        copies: ranks whose copy of a part differs from the first rank's, each with that rank.
        full: the whole tensor, if asked for.
    """

    kind: str
    name: str
    digest: Digest
    copies: list[tuple[int, int]] = field(default_factory=list)
    full: Tensor | None = None


def whole_shapes(
    model: nn.Module, run: Callable[[nn.Module, int, int], Any], *, length: int
) -> dict[str, tuple[Dim, ...]]:
    """Return the shape of each module's first output, with the dimensions that follow the batch by name.

    Args:
        model: the model on meta, before it is laid out.
        run: calls the model on meta with inputs of a batch and a length.
        length: length of a sequence, to which the model may be called.
    """
    sizes = (5, max(1, length // 2)), (7, length)
    seen: list[dict[str, tuple[int, ...]]] = []
    for batch, tokens in sizes:
        shapes: dict[str, tuple[int, ...]] = {}

        def note(name: str, _: nn.Module, __: Any, out: Any, shapes: Any = shapes) -> None:
            if (x := _first_float(out)) is not None:
                shapes.setdefault(name, tuple(x.shape))

        hooks = [m.register_forward_hook(partial(note, n)) for n, m in model.named_modules()]
        try:
            run(model, batch, tokens)
        finally:
            for hook in hooks:
                hook.remove()
        seen.append(shapes)
    named: Any = {
        tuple(pair): name for name, pair in zip("BS", zip(*sizes, strict=True), strict=True)
    }
    named[tuple(batch * tokens for batch, tokens in sizes)] = "BS"
    found: dict[str, tuple[Dim, ...]] = {}
    for name, first in seen[0].items():
        pairs = [*zip(first, seen[1].get(name, ()), strict=False)]
        dims = [named.get(pair, pair[0] if pair[0] == pair[1] else None) for pair in pairs]
        if len(pairs) == len(first) and dims and None not in dims:
            found[canonical_name(name)] = tuple(dims)
    return found


class Recorder:
    """Recorder of steps on one rank. Between `begin` and `end`, it records what modules compute.

    Example of a trainer's own:

        recorder = Recorder([model], shapes, mesh=mesh)
        recorder.begin(batch=4, samples=4, positions=torch.arange(2048), length=2048)
        loss(model(tokens)).backward()
        recorder.parameters("gradient")
        optimizer.step()
        recorder.parameters("update")
        tensors = recorder.end()      # on rank 0; [] elsewhere
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        shapes: Mapping[str, tuple[Dim, ...]],
        *,
        mesh: DeviceMesh | None,
        full: bool = False,
        perturbed: int = 0,
    ) -> None:
        """Hook a model.

        Args:
            parts: the model, or this rank's pipeline stages.
            shapes: as `whole_shapes` returns them.
            mesh: mesh of the layout. None: one process.
            full: keep whole tensors, too, for small models.
            perturbed: seed of a disturbance. Each output of a module without children, and each gradient that passes it, then changes at
                random by one unit in the last place. The spread that follows is what rounding does. 0: none.
        """
        self.parts, self.shapes, self.mesh, self.full = parts, dict(shapes), mesh, full
        self.dp = _place(mesh, "dp_replicate", "dp_shard")
        self.tp, self.cp = _place(mesh, "tp"), _place(mesh, "cp")
        self.active, self.now = False, 0
        self.parts_seen: dict[tuple[str, str], dict[tuple[Any, ...], Digest]] = {}
        self.kept: dict[tuple[str, str], list[tuple[list[Tensor], list[int], Tensor]]] = {}
        self.calls: Counter[str] = Counter()
        self.with_gradient: set[tuple[str, int]] = set()
        self.generator = torch.Generator().manual_seed(perturbed) if perturbed else None
        for part in parts:
            part.register_forward_pre_hook(self._note_batch, with_kwargs=True)
            # A selective checkpoint must not keep what a recomputation does not do.
            hook_outputs(part, outside_selection(self._see))

    def _note_batch(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [
            x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.ndim > 1
        ]
        self.now = len(leaves[0]) if leaves else 0

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Record an output. Return it, or one that rounding has changed."""
        if self.generator is not None and not [*module.children()] and not is_compiled(module):
            out = self._perturb(args, out)
        if name:  # a pipeline stage ends elsewhere than the model
            self._note_output(name, out)
        return out

    def begin(self, *, batch: int, samples: int, positions: Tensor, length: int) -> None:
        """Begin the record of a step with the weights before it.

        Args:
            batch: samples of a micro-batch of this rank.
            samples: samples of a step of this rank.
            positions: positions of this rank's tokens in the sequence, before tensor parallelism cuts them, int64.
            length: tokens of a sequence.
        """
        self.batch, self.samples, self.length = batch, samples, length
        self.positions = positions.cpu()
        self.active = True
        self.parts_seen, self.kept, self.calls = {}, {}, Counter()
        self.with_gradient = set()
        self.parameters("weight")

    def inputs(self, first: int, **tensors: Tensor) -> None:
        """Record what this rank reads of a micro-batch, which begins at its sample `first`. Tensors without tokens are left out."""
        for name, x in tensors.items():
            self.now = len(x)
            self._note("batch", name, x, first, ("B", "S", *x.shape[2:]))

    # ---- outputs and their gradients ----------------------------------------------------------------

    def _perturb(self, args: Any, out: Any) -> Any:
        # A recomputation must save as many tensors for the backward pass. Its signs may be other ones.
        if (
            not self.active
            or (x := _first_float(out)) is None
            or any(x is given for given in args)  # a layer that the loss applies
        ):
            return out
        leaves, spec = tree_flatten(out)
        local = x.to_local() if isinstance(x, DTensor) else x
        signs = torch.randint(-1, 2, local.shape, generator=self.generator).to(local.device)
        factor = 1 + signs.to(local.dtype) * torch.finfo(local.dtype).eps
        if isinstance(x, DTensor):
            factor = DTensor.from_local(factor, x.device_mesh, x.placements, run_check=False)
        leaves = [x * factor if leaf is x else leaf for leaf in leaves]
        return tree_unflatten(leaves, spec)

    def _note_output(self, name: str, out: Any) -> None:
        # A recomputation for the backward pass repeats what has been recorded.
        if not self.active or is_recomputation():
            return
        x = _first_float(out)
        if x is None or name not in self.shapes:
            return
        first, has_batch = self.calls[name], not {"B", "BS"}.isdisjoint(self.shapes[name])
        if (not has_batch and first) or not self._note("output", name, x, first):
            return  # an output of parameters alone is the same in each micro-batch
        self.calls[name] += self.now if has_batch else 1
        if x.requires_grad and has_batch:
            x.register_hook(partial(self._note_gradient, name, self.now, first))

    def _note_gradient(self, name: str, now: int, first: int, gradient: Tensor | None) -> None:
        if gradient is None:  # none comes from behind
            return
        # A backward pass in two halves computes it in both.
        if (name, first) not in self.with_gradient:
            self.with_gradient.add((name, first))
            before, self.now = self.now, now
            self._note("output gradient", name, gradient, first)
            self.now = before

    @torch.no_grad()
    def _note(
        self, kind: str, name: str, x: Tensor, first: int, dims: tuple[Dim, ...] = ()
    ) -> bool:
        """Note a part that begins at a sample of this rank. Return whether it is known how the parts join."""
        addend = _partial_coordinate(x)
        local = x.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        dims = dims or self.shapes[name]
        if "BS" in dims:
            at = dims.index("BS")
            if not self.now or local.ndim != len(dims) or local.shape[at] % self.now:
                return False
            local = local.unflatten(at, (self.now, -1))
            dims = (*dims[:at], "B", "S", *dims[at + 1 :])
        if local.ndim != len(dims):
            return False
        lengths: list[int] = []
        indices: list[Tensor] = []
        for dim, length in zip(dims, local.shape, strict=True):
            found = self._indices(dim, length, first)
            if found is None:
                return False
            indices.append(found)
            whole = self.samples * self.dp[1] if dim == "B" else self.length
            lengths.append(dim if isinstance(dim, int) else whole)
        # Samples of all micro-batches add up in one part.
        place = [
            self.dp[0] if dim == "B" else (int(i[0]), len(i))
            for dim, i in zip(dims, indices, strict=True)
            if len(i)
        ]
        self._put((kind, name), (*place, addend), local, indices, lengths, addend is not None)
        return True

    def _indices(self, dim: Dim, length: int, first: int) -> Tensor | None:
        """Return the indices in the whole dimension of a part of this length, or None if that is not known."""
        (tp, tps), (dp, dps) = self.tp, self.dp
        if dim == "B":
            mine = torch.arange(first, first + length)
            if length != self.now or first + length > self.samples:
                return None
            # Micro-batches take turns over the data-parallel ranks.
            return (mine // self.batch * dps + dp) * self.batch + mine % self.batch
        if dim == "S":
            cut = len(self.positions)
            if length == cut:
                return self.positions
            if length * tps == cut:
                return self.positions.chunk(tps)[tp]
            return torch.arange(length) if length == self.length else None
        assert isinstance(dim, int)
        parts, rest = divmod(dim, length) if length else (0, 1)
        if rest or parts > tps or tps % parts:
            return None
        return tp * parts // tps * length + torch.arange(length)

    # ---- parameters -----------------------------------------------------------------------------------

    @torch.no_grad()
    def parameters(self, kind: str) -> None:
        """Record all parameters' weights, gradients, or updates since `begin`.

        Args:
            kind: "weight", "gradient" or "update".
        """
        for part in self.parts:
            for name, parameter in [*part.named_parameters(), *_buffers(part)]:
                value = parameter.grad if kind == "gradient" else parameter.detach()
                if value is None:
                    continue
                indices = indices_of(value)
                local = value.to_local() if isinstance(value, DTensor) else value
                if tuple(local.shape) != tuple(len(i) for i in indices):
                    assert isinstance(value, DTensor), "a plain tensor is whole"
                    local, indices = value.full_tensor(), [torch.arange(n) for n in value.shape]
                # As gradients of norms over tensor parallelism are, until they are clipped.
                addend = _partial_coordinate(value)
                place = (*((int(i[0]), len(i)) for i in indices if len(i)), addend)
                if local.numel():
                    key = kind, canonical_name(name)
                    self._put(key, place, local, indices, [*value.shape], addend is not None)

    def _put(
        self,
        key: tuple[str, str],
        place: tuple[Any, ...],
        local: Tensor,
        indices: list[Tensor],
        lengths: list[int],
        is_partial: bool,
    ) -> None:
        digest = digest_of(local, indices, lengths, is_partial=is_partial)
        if key[0] == "update":  # projections are linear, so the weights need not be kept
            before = self.parts_seen["weight", key[1]][place].sums
            digest.sums = [
                [a - b for a, b in zip(*rows, strict=True)]
                for rows in zip(digest.sums, before, strict=True)
            ]
            digest.squares = None
        parts = self.parts_seen.setdefault(key, {})
        if place in parts:
            parts[place].add(digest)
        else:
            parts[place] = digest
        if self.full and key[0] != "update":
            self.kept.setdefault(key, []).append((indices, lengths, local.clone().cpu()))

    # ---- joining ----------------------------------------------------------------------------------------

    def end(self) -> list[JoinedTensor]:
        """End the record of a step, and join the parts of all ranks.

        Returns:
            On rank 0 the tensors, outputs in the order of the forward pass. Elsewhere nothing.
        """
        self.active = False
        mine = (self.parts_seen, self.kept)
        everyone: list[Any] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            if dist.get_rank():
                return []
        parts: dict[tuple[str, str], dict[tuple[Any, ...], list[tuple[int, Digest]]]] = {}
        for rank, (seen, _) in enumerate(everyone):
            for key, places in seen.items():
                for place, digest in places.items():
                    parts.setdefault(key, {}).setdefault(place, []).append((rank, digest))
        joined = {key: _join(key, places) for key, places in parts.items()}
        for _, kept in everyone:
            for key, pieces in kept.items():
                for indices, lengths, local in pieces:
                    if (full := joined[key].full) is None:
                        full = joined[key].full = torch.zeros(lengths, dtype=local.dtype)
                    full[torch.meshgrid(*indices, indexing="ij")] = local
        return [*joined.values()]


def _join(
    key: tuple[str, str], places: dict[tuple[Any, ...], list[tuple[int, Digest]]]
) -> JoinedTensor:
    """Join the parts of a tensor, of which several ranks may have copies."""
    whole: Digest | None = None
    differing: list[tuple[int, int]] = []
    for (rank, first), *others in places.values():
        away = [(other, rank) for other, digest in others if differ(first, digest)]
        total = Digest([[*row] for row in first.sums], first.squares, first.count, first.dtype)
        if away and key[0] == "output gradient":
            # Each rank has the gradient of its own uses. The backward pass adds them up before this module.
            for _, digest in others:
                total.add(digest)
            total.squares, total.count = None, first.count
        else:
            differing += away
        if whole is None:
            whole = total
        else:
            whole.add(total)
    assert whole is not None
    return JoinedTensor(*key, whole, differing)


def _buffers(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point buffers that belong to a checkpoint, such as routing biases."""
    for path, module in part.named_modules():
        for name, buffer in module._buffers.items():
            is_kept = name not in module._non_persistent_buffers_set
            if is_kept and buffer is not None and buffer.is_floating_point():
                yield f"{path}.{name}".lstrip("."), buffer


def _partial_coordinate(value: Tensor) -> tuple[int, ...] | None:
    """Return this rank's place along the axes over which a tensor is yet to be added up, or None if there are none."""
    if not isinstance(value, DTensor) or not any(p.is_partial() for p in value.placements):
        return None
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    return tuple(c for c, p in zip(coordinate, value.placements, strict=True) if p.is_partial())


def _first_float(out: Any) -> Tensor | None:
    """Return the first floating tensor of a module's output."""
    leaves: Iterable[Any] = tree_flatten(out)[0]
    return next((x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()), None)


def _place(mesh: DeviceMesh | None, *axes: str) -> tuple[int, int]:
    """Return this rank's number along axes, and their size."""
    return (0, 1) if mesh is None else (axis_rank(mesh, *axes), axis_size(mesh, *axes))


def source_line(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return file and line of the forward pass that computes with a module or parameter, in the model's code and not torch's.

    Args:
        modules: modules by name.
        name: of the module or parameter.
    """
    while name and (name not in modules or type(modules[name]).__module__.startswith("torch.")):
        name = name.rpartition(".")[0]
    if name not in modules:
        return ""
    # FSDP puts a class of its own around that of the model.
    kind = next(c for c in type(modules[name]).__mro__ if "forward" in vars(c))
    function = inspect.unwrap(kind.forward)
    try:
        file, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
    except (OSError, TypeError):
        return ""
    path = Path(file or "").resolve()
    root = next((p for p in path.parents if not (p / "__init__.py").exists()), path.parent)
    return f"{path.relative_to(root)}:{line}"
