"""torch's private names that the simulator depends on, in one place. Tried on torch 2.11 to 2.15.

`find` reports a missing name when the recording starts, with the version of torch. Replacements
last for the life of the process, which only makes recordings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Fake tensors: shapes and devices without memory. `fake_device` is read rather than `device`, which is dispatched.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

__all__ = ["FakeTensor", "FakeTensorMode", "MissingName", "unset_fake_temporarily"]


class MissingName(ImportError):
    """Absence of a private name that the simulator needs in this torch. The message names both."""


def find(module: str, name: str) -> Any:
    """Return a name of a module of torch.

    Args:
        module: the module.
        name: the name, which may be dotted.

    Returns:
        The object.

    Raises:
        MissingName: This torch has no such name.
    """
    try:
        value = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise MissingName(
            f"torch {torch.__version__} has no {module}.{name}, which the simulator needs; it is known to work on 2.13"
        ) from error
    return value


def replace(module: str, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a name of a module.

    Args:
        module: the module.
        name: the name, which may be dotted.
        wrap: returns the new object from the old one.

    Raises:
        MissingName: This torch has no such name.
    """
    path, _, last = name.rpartition(".")
    owner = find(module, path) if path else import_module(module)
    # From __dict__, since getattr would unwrap a static or class method.
    old = owner.__dict__.get(last) or find(module, name)
    function = old.__func__ if isinstance(old, staticmethod | classmethod) else old
    # Static and class methods stay what they were.
    new = wrap(function)
    setattr(owner, last, type(old)(new) if isinstance(old, staticmethod | classmethod) else new)


def register_backend(name: str, module: Any) -> None:
    """Register a device in Python under a name. `module` becomes torch.<name>."""
    find("torch.utils.backend_registration", "_setup_privateuseone_for_python_backend")(
        name, backend_module=module
    )
    # torch's fake process group takes it for a device it knows.
    find("torch.testing._internal.distributed.fake_pg", "FakeStore")
    capability = dist.Backend.backend_capability["fake"]
    if name not in capability:
        capability.append(name)


def init_fake_process_group(device_type: str, *, rank: int, world_size: int) -> None:
    """Start the default process group of torch's fake backend, as one rank of a world."""
    store = find("torch.testing._internal.distributed.fake_pg", "FakeStore")()
    # As NCCL's: sends and receives that are issued together are one launch, in which none waits for another.
    find("torch._C._distributed_c10d", "FakeProcessGroup").supports_coalescing = property(
        lambda _: True
    )
    dist.init_process_group(
        f"{device_type}:fake,cpu:fake", store=store, rank=rank, world_size=world_size
    )


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every tensor inside a fake tensor. torch.tensor(..., device=...) makes its data on the host first, as always."""
    _repair_addmm()
    replace(
        "torch._subclasses.fake_tensor", "FakeTensorMode._prep_args_for_hash", _hash_quickly
    )
    # A model that is copied (a pipeline stage) stays in the same world of fake tensors.
    FakeTensorMode.__deepcopy__ = lambda mode, _: mode
    # It makes the data of torch.tensor on the host, and moves the fake of it: a move of a number would need memory on the device.
    FakeTensorMode.avoid_device_init = True  # pyrefly: ignore[bad-assignment]
    with FakeTensorMode() as mode:
        yield mode


def _repair_addmm() -> None:
    """Repair the shape of `addmm(..., out_dtype=...)` on fake tensors. torch 2.11 takes its dtype for `beta` (pytorch issue 163880)."""
    table = find("torch._decomp", "decomposition_table")
    for name in ("dtype", "dtype_out"):
        op = getattr(torch.ops.aten.addmm, name)
        if op in table and "out_dtype" not in inspect.signature(table[op]).parameters:
            del table[op]
            _META.impl(f"addmm.{name}", _shape_of_addmm, allow_override=True)


def _hash_quickly(prepare: Callable[..., None]) -> Callable[..., None]:
    """Return a quicker function that makes a key of arguments, for the cache of calls on fake tensors.

    torch's own reads the 17 fields of a dataclass for each tensor, a fifth of a recording. Strides and sizes imply some of
    them, and tensors of the usual kind have the usual values of others. The old function serves other tensors and arguments.
    """

    def quick(mode: Any, result: list[Any], arguments: Any, *rest: Any) -> None:
        kind = type(arguments)
        if kind is not tuple and kind is not list:
            return prepare(mode, result, arguments, *rest)
        result += (kind, len(arguments))
        for value in arguments:
            kind = type(value)
            if kind in _PLAIN_ARGUMENTS:
                result += (kind, value)
            elif kind is FakeTensor and value.fake_mode is mode and (fields := _fields(value)):
                result.append(fields)
            elif kind is list or kind is tuple:
                quick(mode, result, value, *rest)
            else:
                prepare(mode, result, (value,), *rest)

    return quick


_PLAIN_ARGUMENTS = {
    int,
    float,
    bool,
    type(None),
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
}


def _fields(tensor: Any) -> tuple[Any, ...] | None:
    """Return the key that distinguishes a fake tensor. None: it is not dense, has a value, or sizes that are not known."""
    if tensor.layout is not torch.strided or tensor.constant is not None or tensor.is_quantized:
        return None
    num_bytes = tensor.untyped_storage().nbytes()
    # A view of known sizes may have a storage of unknown size: an element, in a program of any shapes.
    if tensor._has_symbolic_sizes_strides or type(num_bytes) is not int:
        return None
    flags = (tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg())
    place = (tensor.fake_device, tensor.storage_offset(), num_bytes)
    return (tensor.dtype, tensor.shape, tensor.stride(), *place, *flags)


_META = torch.library.Library("aten", "IMPL", "Meta")


def _shape_of_addmm(
    addend: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return an empty result of addmm."""
    return left.new_empty((len(left), right.shape[1]), dtype=out_dtype) if out is None else out


@contextmanager
def uncached_calls(tensor: Any) -> Iterator[None]:
    """Turn off the cache of calls on a tensor's fake mode, which would keep the storages of arguments alive."""
    mode = tensor.fake_mode
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def compute_meshes_unfaked(paused: Callable[..., Any]) -> None:
    """Make DeviceMesh compute with real tensors, since it reads their values.

    `paused` is a decorator.
    """

    def for_real(function: Callable[..., Any]) -> Callable[..., Any]:
        return paused(unset_fake_temporarily()(function))

    module = "torch.distributed.device_mesh"
    for name in ("__init__", "_flatten", "_unflatten", "_concatenate"):
        mesh = find(module, "DeviceMesh")
        # Which of these exist depends on the version.
        if name in mesh.__dict__:
            replace(module, f"DeviceMesh.{name}", for_real)
    # It numbers the ranks before it makes the mesh.
    for user in ("titan.parallel.mesh", "torch.distributed", module):
        replace(user, "init_device_mesh", for_real)
    # In newer versions a mesh computes its tensor of ranks when asked.
    rank_map = find(module, "DeviceMesh.mesh")
    if isinstance(rank_map, property):
        assert rank_map.fget is not None
        find(module, "DeviceMesh").mesh = property(for_real(rank_map.fget))


def allow_swapping_fake_tensors() -> None:
    """Allow `module.to(device)` to swap tensors that their fake mode has weak references to. torch refuses it for any weak reference."""
    find("torch.utils", "swap_tensors").__globals__["weakref"] = SimpleNamespace(
        getweakrefs=lambda _: []
    )


def watch_meshes(note: Callable[[Any], None]) -> None:
    """Call `note` with each mesh that is built from now on."""

    def wrap(build: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(build)
        def noted(mesh: Any, *args: Any, **kwargs: Any) -> None:
            build(mesh, *args, **kwargs)
            note(mesh)

        return noted

    replace("torch.distributed.device_mesh", "DeviceMesh.__init__", wrap)


def cache_mesh_slices() -> None:
    """Make a mesh's slices once.

    Compiled code compares them by identity, and would be compiled again.
    """

    def wrap(take: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        slices: dict[tuple[int, Any], Any] = {}

        def kept(mesh: Any, names: Any) -> Any:
            key = (id(mesh), names)
            if key not in slices:
                slices[key] = (
                    take(mesh, names),
                    mesh,
                )  # which must live as long as its id is used
            return slices[key][0]

        return kept

    replace("torch.distributed.device_mesh", "DeviceMesh.__getitem__", wrap)


def make_shards_lazily() -> None:
    """Cut only the shards that FSDP reads, the first and its own, in place of one shard for each rank."""

    def wrap(old: Callable[..., Any]) -> Callable[..., Any]:
        def chunk(tensor: Tensor, num_chunks: int, dim: int) -> Any:
            if tensor.size(dim):
                return _Shards(tensor, num_chunks, dim)
            return old(tensor, num_chunks, dim)

        return chunk

    replace("torch.distributed.fsdp._fully_shard._fsdp_param", "_chunk_with_empty", wrap)


class _Shards:
    """Shards of a tensor as torch.chunk cuts them: equal shards rounded up, then a shorter shard, then empty shards."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, number: int) -> Tensor:
        """Return a shard."""
        start, end = number * self.size, self.tensor.size(self.dim)
        if start < end:
            return self.tensor.narrow(self.dim, start, min(self.size, end - start))
        return self.tensor.new_empty(0)


def pause_in_sharding_propagation(paused: Callable[..., Any]) -> None:
    """Pause the recording while DTensor runs an operation on fake tensors of the global shape, to learn its output shape.

    `paused` is a decorator.
    """
    propagator = "ShardingPropagator._propagate_tensor_meta_non_cached"
    replace("torch.distributed.tensor._sharding_prop", propagator, paused)


def defer_waits() -> None:
    """Make DTensor wait for a collective only when its result is needed.

    It does so on real tensors. On fake tensors it believes that a compiler traces it, and waits at
    once. The replaced check says that no compiler does.
    """

    def wrap(old: Callable[[], bool]) -> Callable[[], bool]:
        proxy_mode = find("torch.fx.experimental.proxy_tensor", "get_proxy_mode")

        def tracing() -> bool:
            return (torch.compiler.is_compiling() or proxy_mode() is not None) and old()

        return tracing

    for name in (
        "_functional_collectives",
        "tensor._collective_utils",
        "tensor._decompositions",
        "tensor._dispatch",
        "tensor._redistribute",
        "tensor._sharding_prop",
    ):
        module = import_module(f"torch.distributed.{name}")
        if hasattr(module, "_are_we_tracing"):
            replace(module.__name__, "_are_we_tracing", wrap)


def fix_pipeline_shapes() -> None:
    """Use the given shapes in a pipeline's stages, since the other stages are not here to agree.

    Compile stages as they run.
    """
    find("titan.parallel.pipeline", "Pipeline").compiles_first = False
    if not hasattr(find("torch.distributed.pipelining.stage", "PipelineStage"), "_recv_meta"):
        return  # 2.11, which asks nobody
    known = find("torch.distributed.pipelining._utils", "InferenceMode").STATIC

    def vote(self: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = known

    schedules = "torch.distributed.pipelining.schedules"
    names = ("_warmup_p2p", "_initialize_pipeline_distributed_state")  # until 2.14, and since
    name = next(
        (n for n in names if hasattr(find(schedules, "_PipelineSchedule"), n)), names[-1]
    )
    replace(schedules, f"_PipelineSchedule.{name}", lambda _: vote)


_A_TENSOR = torch.empty(0)


def release_sent_outputs() -> None:
    """Release the outputs that a pipeline's stage has sent. torch does so since 2.15 for plain tensors, but not for fake tensors."""
    module, stage = "torch.distributed.pipelining.stage", "_PipelineStageBase"
    method = "_output_slot_is_releasable"
    if not hasattr(find(module, stage), method):
        return

    def wrap(is_releasable: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, output: is_releasable(
            self, _A_TENSOR if type(output) is FakeTensor else output
        )

    replace(module, f"{stage}.{method}", wrap)


def report_unpack_errors(tell: Callable[[Exception], None]) -> None:
    """Call `tell` with errors in the unpacking of a saved tensor, which may be a recomputation, before they pass into C++."""

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def telling(
            hooks: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]
        ) -> None:
            def unpack(packed: Any) -> Any:
                try:
                    return unpack_hook(packed)
                except Exception as error:
                    tell(error)
                    raise

            init(hooks, pack_hook, unpack)

        return telling

    replace("torch.autograd.graph", "saved_tensors_hooks.__init__", wrap)


def pause_in_compilation(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call `begin` before and `end` after every compilation, during which a compiler runs operations on fake tensors."""
    find("torch._dynamo.callback", "on_compile_start")(lambda *_: begin())
    find("torch._dynamo.callback", "on_compile_end")(lambda *_: end())


def sequence_number() -> int:
    """Return the number of the next autograd node of this thread."""
    return torch._C._autograd._get_sequence_nr()


def running_node() -> Any:
    """Return the autograd node whose backward runs, or None."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def work_classes() -> tuple[Any, Any, Any]:
    """Return the classes of a collective's handle, of the fake group's handle, and of a group."""
    module = "torch._C._distributed_c10d"
    return find(module, "Work"), find(module, "FakeWork"), find(module, "ProcessGroup")


def group_ranks(group: dist.ProcessGroup) -> dict[int, int]:
    """Return torch's own table of a group, from global rank to the rank within it."""
    return find("torch.distributed.distributed_c10d", "_world").pg_group_ranks[group]


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name, as functional collectives name it."""
    return find("torch._C._distributed_c10d", "_resolve_process_group")(name)
