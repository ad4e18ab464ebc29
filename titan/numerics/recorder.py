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
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves, tree_map

from titan.parallel.compile import is_compiled
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import axis_rank, axis_size
from titan.parallel.selective import outside_selection

from .digests import Digest, differ, digest_of, indices_of, local_of, whole
from .module_hooks import hook_outputs, is_recomputation
from .recorded import RecordedTensor

Dim = int | str
"""A dimension of a whole tensor: a length, or "B", "S", or "BS" for both in one."""
Dims = Sequence[Dim]
Run = Callable[[nn.Module, int, int], object]
Part = tuple[Tensor, list[Tensor], Dims]
"""Part of a whole tensor that one rank has: its values, its indices in each dimension of the whole tensor, and these dimensions."""
Place = tuple[object, ...]
"""Start and length of a part in each dimension, and its coordinate among addends."""
Key = tuple[str, str, Place]
"""Kind and name of a tensor, see `RecordedTensor`, and the place of a part."""


def whole_shapes(model: nn.Module, run: Run, *, length: int) -> dict[str, tuple[Dim, ...]]:
    """Return the shape of each module's first output, with the dimensions that follow the batch by name.

    Args:
        model: the model on meta, before it is laid out.
        run: calls the model on meta with inputs of a batch and a length.
        length: length of a sequence, to which the model may be called.
    """
    half = max(1, length // 2)
    first, second = (_output_shapes(model, run, *sizes) for sizes in ((5, half), (7, length)))
    named: dict[Any, Any] = {(5, 7): "B", (half, length): "S", (5 * half, 7 * length): "BS"}
    found: dict[str, tuple[Dim, ...]] = {}
    for name, shape in first.items():
        pairs = [*zip(shape, second.get(name, ()), strict=False)]
        dims = tuple(named.get((a, b), a if a == b else None) for a, b in pairs)
        if len(dims) == len(shape) and dims and None not in dims:
            found[canonical_name(name)] = dims
    return found


def _output_shapes(
    model: nn.Module, run: Run, batch: int, length: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each module's first output in a run of the model."""
    shapes: dict[str, tuple[int, ...]] = {}

    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, _: object, out: object) -> None:
        x = _first_float(out)
        if x is not None and module in names:
            shapes.setdefault(names[module], tuple(x.shape))

    with register_module_forward_hook(note):
        run(model, batch, length)
    return shapes


@dataclass(frozen=True, kw_only=True)
class Share:
    """Samples and tokens of a step that one rank has.

    Attributes:
        dp: this rank's number among the data-parallel ranks, and their number.
        tp: the same of tensor parallelism.
        batch: samples of a micro-batch of this rank.
        samples: samples of a step of this rank.
        positions: positions of this rank's tokens in the sequence, before tensor parallelism cuts them, int64.
        length: tokens of a sequence.
    """

    dp: tuple[int, int]
    tp: tuple[int, int]
    batch: int
    samples: int
    positions: Tensor
    length: int

    def indices(self, dim: Dim, length: int, samples: range) -> Tensor | None:
        """Return the indices in the whole dimension of a part of this length, or None if that is not known.

        Args:
            dim: the dimension of the whole tensor.
            length: length of the part.
            samples: samples of this rank that the part has.
        """
        (tp, num_tp), (dp, num_dp) = self.tp, self.dp
        if dim == "B":
            if length != len(samples) or samples.stop > self.samples:
                return None
            # Micro-batches take turns over the data-parallel ranks.
            mine = torch.arange(samples.start, samples.stop)
            return (mine // self.batch * num_dp + dp) * self.batch + mine % self.batch
        if dim == "S":
            cut = len(self.positions)
            if length == cut:
                return self.positions
            if length * num_tp == cut:
                return self.positions.chunk(num_tp)[tp]
            return torch.arange(length) if length == self.length else None
        assert isinstance(dim, int)
        parts, rest = divmod(dim, length) if length else (0, 1)
        if rest or parts > num_tp or num_tp % parts:
            return None
        return tp * parts // num_tp * length + torch.arange(length)

    def part(self, local: Tensor, dims: Dims, samples: range) -> Part | None:
        """Return a rank's part of a whole tensor with its place, or None if the place is not known.

        Args:
            local: the part.
            dims: dimensions of the whole tensor.
            samples: samples of this rank that the part has.
        """
        if local.ndim != len(dims):
            return None
        if "BS" in dims:
            at = dims.index("BS")
            if not samples or local.shape[at] % len(samples):
                return None
            local = local.unflatten(at, (len(samples), -1))
            dims = (*dims[:at], "B", "S", *dims[at + 1 :])
        pairs = zip(dims, local.shape, strict=True)
        indices = [self.indices(dim, length, samples) for dim, length in pairs]
        known = [found for found in indices if found is not None]
        return (local, known, dims) if len(known) == len(indices) else None


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

    Attributes:
        share: what this rank has of the step that is recorded. None: no step is.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        shapes: Mapping[str, Dims],
        *,
        mesh: DeviceMesh | None,
        perturbed: int = 0,
    ) -> None:
        """Hook a model.

        Args:
            parts: the model, or this rank's pipeline stages.
            shapes: as `whole_shapes` returns them.
            mesh: mesh of the layout. None: one process.
            perturbed: seed of a disturbance. Each output of a module without children, and each gradient that passes it, then changes at
                random by one unit in the last place. The spread that follows is what rounding does. 0: none.
        """
        self.parts, self.shapes, self.mesh = parts, shapes, mesh
        self.share: Share | None = None
        self.batch_size = 0
        self.generator = torch.Generator().manual_seed(perturbed) if perturbed else None
        for part in parts:
            part.register_forward_pre_hook(self._note_batch, with_kwargs=True)
            # A selective checkpoint must not keep what a recomputation does not do.
            hook_outputs(part, outside_selection(self._see))

    def _note_batch(self, _: nn.Module, args: object, kwargs: object) -> None:
        leaves = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        self.batch_size = next((len(x) for x in leaves if x.ndim > 1), 0)

    def _see(
        self, name: str, module: nn.Module, args: tuple[object, ...], out: object
    ) -> object:
        """Record an output. Return it, or one that rounding has changed."""
        x = _first_float(out)
        if self.share is None or x is None:
            return out
        is_leaf = not [*module.children()] and not is_compiled(module)
        # A layer that the loss applies returns its argument.
        if self.generator is not None and is_leaf and not any(x is given for given in args):
            moved = self._perturb(x, self.generator)
            out, x = tree_map(lambda leaf: moved if leaf is x else leaf, out), moved
        # A recomputation repeats what has been recorded, and the output of a pipeline stage is not the model's.
        if name in self.shapes and name and not is_recomputation():
            self._note_output(name, x)
        return out

    def begin(self, *, batch: int, samples: int, positions: Tensor, length: int) -> None:
        """Begin the record of a step with the weights before it.

        Args:
            batch: samples of a micro-batch of this rank.
            samples: samples of a step of this rank.
            positions: positions of this rank's tokens in the sequence, before tensor parallelism cuts them, int64.
            length: tokens of a sequence.
        """
        self.share = Share(
            dp=_place(self.mesh, "dp_replicate", "dp_shard"),
            tp=_place(self.mesh, "tp"),
            batch=batch,
            samples=samples,
            positions=positions.cpu(),
            length=length,
        )
        self.seen: dict[Key, Digest] = {}
        self.calls: Counter[str] = Counter()
        self.with_gradient: set[tuple[str, range]] = set()
        self.parameters("weight")

    def inputs(self, first: int, **tensors: Tensor) -> None:
        """Record what this rank reads of a micro-batch, which begins at its sample `first`. Tensors without tokens are left out."""
        for name, x in tensors.items():
            self._note("batch", name, x, range(first, first + len(x)), ("B", "S", *x.shape[2:]))

    # ---- outputs and their gradients ----------------------------------------------------------------

    def _perturb(self, x: Tensor, generator: torch.Generator) -> Tensor:
        # A recomputation must save as many tensors for the backward pass. Its signs may be other ones.
        local = local_of(x)
        signs = torch.randint(-1, 2, local.shape, generator=generator).to(local.device)
        factor = 1 + signs.to(local.dtype) * torch.finfo(local.dtype).eps
        if isinstance(x, DTensor):
            factor = DTensor.from_local(factor, x.device_mesh, x.placements, run_check=False)
        return x * factor

    def _note_output(self, name: str, x: Tensor) -> None:
        first, dims = self.calls[name], self.shapes[name]
        has_batch = not {"B", "BS"}.isdisjoint(dims)
        samples = range(first, first + self.batch_size)
        if (not has_batch and first) or not self._note("output", name, x, samples, dims):
            return  # an output of parameters alone is the same in each micro-batch
        self.calls[name] += self.batch_size if has_batch else 1
        if x.requires_grad and has_batch:
            x.register_hook(partial(self._note_gradient, name, samples))

    def _note_gradient(self, name: str, samples: range, gradient: Tensor | None) -> None:
        # None: no gradient arrives. A backward pass in two halves computes it in both.
        if gradient is not None and (name, samples) not in self.with_gradient:
            self.with_gradient.add((name, samples))
            self._note("output gradient", name, gradient, samples, self.shapes[name])

    @torch.no_grad()
    def _note(self, kind: str, name: str, x: Tensor, samples: range, dims: Dims) -> bool:
        """Note a part with some samples of this rank. Return whether its place is known."""
        assert self.share is not None
        part = self.share.part(local_of(x.detach()), dims, samples)
        if part is not None:
            self._add(kind, name, x, part)
        return part is not None

    @torch.no_grad()
    def parameters(self, kind: str) -> None:
        """Record all parameters' weights, gradients, or updates since `begin`.

        Args:
            kind: "weight", "gradient" or "update".
        """
        for stage in self.parts:
            for name, parameter in [*stage.named_parameters(), *_buffers(stage)]:
                value = parameter.grad if kind == "gradient" else parameter.detach()
                if value is None:
                    continue
                local, indices = local_of(value), indices_of(value)
                if [*local.shape] != [*map(len, indices)]:
                    local, indices = whole(value), [*map(torch.arange, value.shape)]
                if local.numel():
                    part = local, indices, value.shape
                    self._add(kind, canonical_name(name), value, part)

    def _add(self, kind: str, name: str, x: Tensor, part: Part) -> None:
        """Add this rank's part of a tensor to the record."""
        share, (local, indices, dims) = self.share, part
        assert share is not None
        named: dict[Dim, int] = {"B": share.samples * share.dp[1], "S": share.length}
        lengths = [dim if isinstance(dim, int) else named[dim] for dim in dims]
        # As gradients of norms over tensor parallelism are, until they are clipped.
        addend = _partial_coordinate(x)
        # Samples of all micro-batches add up in one part.
        starts = (
            share.dp[0] if dim == "B" else (int(i[0]), len(i))
            for dim, i in zip(dims, indices, strict=True)
            if len(i)
        )
        place = *starts, addend
        digest = digest_of(local, indices, lengths, is_partial=addend is not None)
        if kind == "update":  # projections are linear, so the weights need not be kept
            before = self.seen["weight", name, place].sums
            digest = replace(digest, sums=digest.sums - before, squares=None)
        key = kind, name, place
        self.seen[key] = self.seen[key] + digest if key in self.seen else digest

    # ---- joining ----------------------------------------------------------------------------------------

    def end(self) -> list[RecordedTensor]:
        """End the record of a step, and join the parts of all ranks.

        Returns:
            On rank 0 the tensors, outputs in the order of the forward pass. Elsewhere nothing.
        """
        self.share = None
        everyone: list[Any] = [self.seen]
        if dist.is_initialized():
            everyone *= dist.get_world_size()
            dist.all_gather_object(everyone, self.seen)
            if dist.get_rank():
                return []
        tensors: dict[tuple[str, str], dict[Place, dict[int, Digest]]] = {}
        for rank, seen in enumerate(everyone):
            for (kind, name, place), digest in seen.items():
                tensors.setdefault((kind, name), {}).setdefault(place, {})[rank] = digest
        named = (stage.named_modules() for stage in self.parts)
        modules = {canonical_name(name): module for name, module in chain(*named)}
        return [
            _join(kind, name, parts.values(), source_line(modules, name))
            for (kind, name), parts in tensors.items()
        ]


def _join(
    kind: str, name: str, parts: Iterable[dict[int, Digest]], line: str
) -> RecordedTensor:
    """Join the parts of a tensor. Several ranks may have a copy of a part."""
    digests: list[Digest] = []
    differing: list[list[int]] = []
    for copies in parts:
        (rank, first), *others = copies.items()
        away = [[other, rank] for other, digest in others if differ(first, digest)]
        if away and kind == "output gradient":
            # Each rank has the gradient of its own uses. The backward pass adds them up before this module.
            sums = sum((digest.sums for _, digest in others), first.sums)
            first = replace(first, sums=sums, squares=None)
        else:
            differing += away
        digests.append(first)
    total = sum(digests[1:], digests[0])
    norm = None if total.squares is None else total.squares**0.5
    return RecordedTensor(kind, name, total.dtype, norm, total.sums.tolist(), differing, line)


def _buffers(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point buffers that belong to a checkpoint, such as routing biases."""
    for path, module in part.named_modules():
        for name, buffer in module._buffers.items():
            is_kept = name not in module._non_persistent_buffers_set
            if is_kept and buffer is not None and buffer.is_floating_point():
                yield f"{path}.{name}".lstrip("."), buffer


def _partial_coordinate(value: Tensor) -> tuple[int, ...] | None:
    """Return this rank's place along the axes over which a tensor is yet to be added up, or None if there are none."""
    if not isinstance(value, DTensor):
        return None
    axes = [n for n, placement in enumerate(value.placements) if placement.is_partial()]
    return (*map(value.device_mesh.get_local_rank, axes),) or None


def _first_float(out: Any) -> Tensor | None:
    """Return the first floating tensor of a module's output."""
    tensors = (x for x in tree_leaves(out) if isinstance(x, Tensor))
    return next((x for x in tensors if x.is_floating_point()), None)


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
    code = getattr(inspect.unwrap(type(modules[name]).forward), "__code__", None)
    if code is None:
        return ""
    path = Path(code.co_filename).resolve()
    root = next(p for p in path.parents if not (p / "__init__.py").exists())
    return f"{path.relative_to(root)}:{code.co_firstlineno}"
