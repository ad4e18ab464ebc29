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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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

from titan.optim.states import local as local_of
from titan.parallel.compile import is_compiled
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import axis_rank, axis_size
from titan.parallel.selective import outside_selection

from .digests import Digest, digest_of, indices_of, whole
from .module_hooks import hook_outputs, is_recomputation
from .recorded import RecordedTensor

Run = Callable[[nn.Module, int, int], object]
Dim = int | str
"""A dimension of a whole tensor: a length, or "B", "S", or "BS" for both in one."""


Key = tuple[str, str]
"""Kind and name of a tensor, see `RecordedTensor`."""
Place = tuple[Any, ...]
"""Start and length of a part in each dimension, and its coordinate among addends."""


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
        self.parts, self.shapes = parts, shapes
        self.dp = _place(mesh, "dp_replicate", "dp_shard")
        self.tp = _place(mesh, "tp")
        self.active = False
        self.generator = torch.Generator().manual_seed(perturbed) if perturbed else None
        for part in parts:
            part.register_forward_pre_hook(self._note_batch, with_kwargs=True)
            # A selective checkpoint must not keep what a recomputation does not do.
            hook_outputs(part, outside_selection(self._see))

    def _note_batch(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        self.batch_size = next((len(x) for x in leaves if x.ndim > 1), 0)

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        """Record an output. Return it, or one that rounding has changed."""
        if self.generator is not None and not [*module.children()] and not is_compiled(module):
            out = self._perturb(args, out)
        if name:  # a pipeline stage ends elsewhere than the model
            self._note_output(name, module, out)
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
        self.seen: dict[Key, dict[Place, Digest]] = {}
        self.calls = Counter[str]()
        self.with_gradient = set[tuple[str, range]]()
        self.parameters("weight")

    def inputs(self, first: int, **tensors: Tensor) -> None:
        """Record what this rank reads of a micro-batch, which begins at its sample `first`. Tensors without tokens are left out."""
        for name, x in tensors.items():
            self._note("batch", name, x, range(first, first + len(x)), ("B", "S", *x.shape[2:]))

    # ---- outputs and their gradients ----------------------------------------------------------------

    def _perturb(self, args: Any, out: Any) -> Any:
        # A recomputation must save as many tensors for the backward pass. Its signs may be other ones.
        if (
            not self.active
            or (x := _first_float(out)) is None
            or any(x is given for given in args)  # a layer that the loss applies
        ):
            return out
        local = local_of(x)
        signs = torch.randint(-1, 2, local.shape, generator=self.generator).to(local.device)
        factor = 1 + signs.to(local.dtype) * torch.finfo(local.dtype).eps
        if isinstance(x, DTensor):
            factor = DTensor.from_local(factor, x.device_mesh, x.placements, run_check=False)
        return tree_map(lambda leaf: x * factor if leaf is x else leaf, out)

    def _note_output(self, name: str, module: Any, out: Any) -> None:
        # A recomputation for the backward pass repeats what has been recorded.
        if not self.active or is_recomputation():
            return
        first = self.calls[name]
        samples = range(first, first + self.batch_size)
        if "record_choice" in vars(module):
            # The output is numbers of keys, which do not tell how far two choices are apart.
            for kind, x in module.record_choice(out).items():
                self._note(kind, name, x, samples, ("B", "S", *x.shape[2:]))
            self.calls[name] = samples.stop
            return
        x = _first_float(out)
        if x is None or name not in self.shapes:
            return
        has_batch = not {"B", "BS"}.isdisjoint(self.shapes[name])
        if (not has_batch and first) or not self._note("output", name, x, samples):
            return  # an output of parameters alone is the same in each micro-batch
        self.calls[name] += self.batch_size if has_batch else 1
        if x.requires_grad and has_batch:
            x.register_hook(partial(self._note_gradient, name, samples))

    def _note_gradient(self, name: str, samples: range, gradient: Tensor | None) -> None:
        # None: no gradient arrives. A backward pass in two halves computes it in both.
        if gradient is not None and (name, samples) not in self.with_gradient:
            self.with_gradient.add((name, samples))
            self._note("output gradient", name, gradient, samples)

    @torch.no_grad()
    def _note(
        self, kind: str, name: str, x: Tensor, samples: range, dims: tuple[Dim, ...] = ()
    ) -> bool:
        """Note a part with some samples of this rank. Return whether it is known how the parts join."""
        local, dims = local_of(x.detach()), dims or self.shapes[name]
        if local.ndim != len(dims):
            return False
        if "BS" in dims:
            at = dims.index("BS")
            if not samples or local.shape[at] % len(samples):
                return False
            local = local.unflatten(at, (len(samples), -1))
            dims = (*dims[:at], "B", "S", *dims[at + 1 :])
        indices = []
        for dim, length in zip(dims, local.shape, strict=True):
            indices.append(found := self._indices(dim, length, samples))
            if found is None:
                return False
        self._put(kind, name, x, local, indices, dims)
        return True

    def _indices(self, dim: Dim, length: int, samples: range) -> Tensor | None:
        """Return the indices in the whole dimension of a part of this length, or None if that is not known."""
        (tp, tps), (dp, dps) = self.tp, self.dp
        if dim == "B":
            if length != len(samples) or samples.stop > self.samples:
                return None
            # Micro-batches take turns over the data-parallel ranks.
            mine = torch.arange(samples.start, samples.stop)
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
                indices, local = indices_of(value), local_of(value)
                if [*local.shape] != [*map(len, indices)]:
                    local, indices = whole(value), [*map(torch.arange, value.shape)]
                if local.numel():
                    self._put(kind, canonical_name(name), value, local, indices, value.shape)

    def _put(
        self,
        kind: str,
        name: str,
        x: Tensor,
        local: Tensor,
        indices: list[Tensor],
        dims: Sequence[Dim],
    ) -> None:
        """Add this rank's part of a tensor, with its indices in each dimension, to the record."""
        named: dict[Dim, int] = {"B": self.samples * self.dp[1], "S": self.length}
        lengths = [dim if isinstance(dim, int) else named[dim] for dim in dims]
        # As gradients of norms over tensor parallelism are, until they are clipped.
        addend = _partial_coordinate(x)
        # Samples of all micro-batches add up in one part.
        starts = (
            self.dp[0] if dim == "B" else (int(i[0]), len(i))
            for dim, i in zip(dims, indices, strict=True)
            if len(i)
        )
        place = *starts, addend
        digest = digest_of(local, indices, lengths, is_partial=addend is not None)
        if kind == "update":  # projections are linear, so the weights need not be kept
            digest.sums = digest.sums - self.seen["weight", name][place].sums
            digest.squares = None
        parts = self.seen.setdefault((kind, name), {})
        parts[place] = parts[place] + digest if place in parts else digest

    # ---- joining ----------------------------------------------------------------------------------------

    def end(self) -> list[RecordedTensor]:
        """End the record of a step, and join the parts of all ranks.

        Returns:
            On rank 0 the tensors, outputs in the order of the forward pass. Elsewhere nothing.
        """
        self.active = False
        everyone: list[Any] = [self.seen]
        if dist.is_initialized():
            everyone *= dist.get_world_size()
            dist.all_gather_object(everyone, self.seen)
            if dist.get_rank():
                return []
        parts: dict[Key, dict[Place, list[tuple[int, Digest]]]] = {}
        for rank, seen in enumerate(everyone):
            for key, places in seen.items():
                for place, digest in places.items():
                    parts.setdefault(key, {}).setdefault(place, []).append((rank, digest))
        named = (part.named_modules() for part in self.parts)
        modules = {canonical_name(name): module for name, module in chain(*named)}
        return [
            _join(*key, [*places.values()], source_line(modules, key[1]))
            for key, places in parts.items()
        ]


def _join(
    kind: str, name: str, parts: list[list[tuple[int, Digest]]], line: str
) -> RecordedTensor:
    """Join the parts of a tensor, of which several ranks may have copies."""
    digests: list[Digest] = []
    differing: list[list[int]] = []
    for (rank, first), *others in parts:
        away = [
            [other, rank]
            for other, digest in others
            if (first.sums - digest.sums).norm() > 1e-3 * first.sums.norm()
        ]
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
    return tuple(map(value.device_mesh.get_local_rank, axes)) or None


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
