"""Private and changing names of torch 2.11 to 2.15, all in this one place.

Each name has a description, with the versions in which torch differs. If torch lacks a name, this import fails, and not the
middle of a run.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from operator import getitem
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

# DDP on FSDP2's machinery. Not the older function of the same name in torch.distributed._composable, which
# wraps DistributedDataParallel and loses its parameters under tensor parallelism.
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate

# A collective's result that may still be under way.
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor as AsyncCollectiveTensor,
)

# Leaves state_dict's names alone; parameters' names get a part, see weights.canonical_name.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper as checkpoint_wrapper,
)
from torch.distributed.distributed_c10d import _set_pg_timeout

# The place of a shard in the whole tensor. DCP's own planner asks it, too.
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)
from torch.utils import checkpoint, flop_counter

GPU_TYPES = {"cuda"}
"""Types of devices that run kernels of GPUs. The simulator adds its own."""


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Announce a group, since torch up to 2.13 rewrites only for announced groups."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def compute_capability(device_type: str) -> tuple[int, int]:
    """Return a device's compute capability, such as (9, 0), or (0, 0) for devices without one, such as CPUs."""
    module = getattr(torch, device_type, None)  # torch.cuda; there is none for "meta"
    return getattr(module, "get_device_capability", lambda: (0, 0))()


def allow_programs(kinds: int) -> None:
    """Raise torch.compile's limit so that each of `kinds` kinds of blocks gets a program, as do other shapes.

    All blocks run the same code. By default torch compiles 8 versions of it, and runs all others uncompiled.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 7 + kinds)


def start_compile_workers() -> None:
    """Start the processes that compile for inductor, if it has any, deaf to the signals that stop a run.

    Slurm sends these signals to every process of a step. A rank then finishes its step and saves, for which it may need a
    compilation, and the workers must not die before that. They end with their rank. Programs inherit blocked signals, but no
    handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    try:
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def keep_random_state_in_graphs(keep: bool) -> None:
    """Set whether graphs compiled from now on restore the state of random generators for recomputed operations.

    Attention counts as drawing random numbers, even without dropout. Up to 2.13, torch puts that state behind the DeviceMesh that
    a graph with DTensor weights keeps for its backward pass, and then finds neither.
    """
    from torch._functorch import partitioners

    with_random_state = _with_random_state()
    # pyrefly: ignore[bad-assignment]
    partitioners.functionalize_rng_ops = with_random_state if keep else _without_random_state


@cache
def _with_random_state() -> Any:
    # Only compiled jobs come here: this import takes longer than FSDP's and DTensor's together.
    from torch._functorch.partitioners import functionalize_rng_ops

    return functionalize_rng_ops


def _without_random_state(
    joint: Any, forward: Any, backward: Any, *rest: Any
) -> tuple[Any, Any]:
    if any(map(_node_draws, joint.graph.nodes)):  # a call of F.dropout, which no module shows
        return _with_random_state()(joint, forward, backward, *rest)
    return forward, backward


def set_allocator(settings: str) -> None:
    """Set the accelerator's allocator, as in PYTORCH_ALLOC_CONF. Call it before the first allocation."""
    torch._C._accelerator_setAllocatorSettings(settings)


def set_memory_budget(share: float) -> None:
    """Set the share of the activations, 0 to 1, that graphs compiled from now on may keep for their backward pass.

    torch 2.13 asks for the size of everything that a graph takes. Under tensor parallelism that includes the DeviceMesh of its
    DTensors, whose size it refuses to guess. A mesh holds no activations, so its size is zero.
    """
    from torch._functorch import config

    config.activation_memory_budget = share
    # Not every torch has the setting.
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = share < 1
    if share < 1:
        _keep_random_numbers()
        _count_grouped_heads("sdpa_flop_count", 1)
        _count_grouped_heads("sdpa_backward_flop_count", 2)


@cache
def _keep_random_numbers() -> None:
    """Make graphs with a memory budget keep the random numbers that they draw, such as the mask of dropout.

    torch recomputes them without the state of the generator, so that the backward pass has others (pytorch#190758, #190717).
    """
    from torch._functorch import partitioners

    choose = partitioners.choose_saved_values_set

    def choose_with_random_numbers(
        joint: Any, info: Any, memory_budget: float = 1
    ) -> list[Any]:
        saved = choose(joint, info, memory_budget=memory_budget)
        if memory_budget == 1:
            return saved
        drawing = filter(_node_draws, info.required_fw_nodes)
        drawn = [value for node in drawing for value in _tensors_of(node)]
        return [*dict.fromkeys([*saved, *drawn])]

    # pyrefly: ignore[bad-assignment]
    partitioners.choose_saved_values_set = choose_with_random_numbers


def _node_draws(node: Any) -> bool:
    return node.op == "call_function" and draws(node.target, node.args, node.kwargs)


def _tensors_of(node: Any) -> list[Any]:
    """Return the values of a node of a graph that are tensors: itself, or the entries of a tuple that are in use."""
    is_tuple = isinstance(node.meta.get("val"), tuple | list)
    return [user for user in node.users if user.target is getitem] if is_tuple else [node]


def draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operation draws random numbers. Attention without dropout does not, though torch marks it."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(kwargs.get("dropout_p", args[place] if place < len(args) else 0.0))


@cache
def _count_grouped_heads(name: str, keys: int) -> None:
    """Make torch 2.11 count the operations of attention with grouped heads, to choose the results to keep.

    name: name of the function that counts by shapes. keys: place of the key among its arguments, which the value follows.
    """
    original = getattr(flop_counter, name)

    def count(*shapes: Any) -> int:
        heads = shapes[keys - 1][1]
        key, value = ((batch, heads, *rest) for batch, _, *rest in shapes[keys : keys + 2])
        return original(*shapes[:keys], key, value)

    setattr(flop_counter, name, count)


@dataclass(frozen=True)
class CompileEvent:
    """One compilation.

    Attributes:
        name: function, file and line. "" for a backward pass.
        file: the function's file.
        seconds: time of the whole compilation.
    """

    name: str
    file: Path
    seconds: float
    is_forward: bool
    from_cache: bool
    recompile_reason: str
    graph_breaks: tuple[str, ...]
    failure: str


def compile_events() -> list[tuple[Any, CompileEvent]]:
    """Return the newest 64 compilations of torch._dynamo in this process, with a unique key each."""
    from torch._dynamo import utils

    events = []
    # The name has no folder, which says nothing to a reader.
    for m in utils.get_compilation_metrics():
        path = Path(m.co_filename or "")
        where = f"{m.co_name} ({path.name}:{m.co_firstlineno})" if m.co_name else ""
        event = CompileEvent(
            name=where,
            file=path,
            seconds=(m.duration_us or 0) / 1e6,
            is_forward=bool(m.is_forward),
            from_cache=bool(m.aotautograd_local_cache_hit_count),
            recompile_reason=m.recompile_reason or "",
            # An analysis that begins again without a reason breaks no graph. Its reason is its class, such as
            # TensorifyScalarRestartAnalysis for a learning rate that becomes an input.
            graph_breaks=tuple(
                r for r in m.restart_reasons or () if not r.startswith("<class ")
            ),
            failure=m.fail_reason or "",
        )
        events.append(((m.compile_id, m.is_forward, m.start_time_us), event))
    return events


def keep_saved_tensors() -> None:
    """Keep the tensors that forward passes saved: no graph compiled from now on reuses their memory, which W reads."""
    from torch._functorch import config

    config.donated_buffer = False


def find_backend(name: str, mode: str | None) -> Callable[..., Any]:
    """Return torch.compile's backend of this name, which takes a graph and its inputs."""
    from torch._dynamo import lookup_backend

    backend: Any = lookup_backend(name)
    if mode is None:
        return backend
    from torch._inductor import list_mode_options

    return partial(backend, config_patches=list_mode_options(mode))


@contextmanager
def backward_compiler(wrap: Callable[..., Any]) -> Iterator[None]:
    """Within it, AOTAutograd compiles a backward graph by `wrap(compiler, graph, example inputs)`."""
    from torch._dynamo.backends import common
    from torch._functorch import config

    original = common.aot_module_simplified

    def compile(*args: Any, **settings: Any) -> Any:
        inner = settings.get("bw_compiler") or settings["fw_compiler"]
        return original(*args, **settings | {"bw_compiler": partial(wrap, inner)})

    # A program from the cache has one part.
    replaced = mock.patch.object(common, "aot_module_simplified", compile)
    with replaced, config.patch(enable_autograd_cache=False):
        yield


def free_saved(node: Any) -> None:
    """Free what a compiled program saved on its autograd node itself, where no hook sees it."""
    node._tensors_no_vc_check = []


def checkpoint_hooks(hooks: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Within it, torch.utils.checkpoint saves a region's tensors by `hooks(frame)`."""
    return mock.patch.object(checkpoint, "_checkpoint_hook", hooks)


def recompute(frame: Any) -> None:
    """Run a region of torch.utils.checkpoint again."""
    if "get_inputs" in dir(frame):  # from torch 2.13
        inputs = frame.get_inputs()
    else:
        saver = frame.input_saver.grad_fn
        inputs = saver.get_args(saver.saved_tensors)
    checkpoint._run_fn_with_dynamo_disabled(frame.recompute_fn, *inputs)


def run_backward(
    edges: Sequence[Any], gradients: Sequence[Any], weights: Sequence[Any] = ()
) -> None:
    """Add up gradients from edges of autograd's graph on, as torch.autograd.backward, in which 2.11 takes no edge of a Python function.

    Args:
        edges: where to begin.
        gradients: the gradients there.
        weights: leaves that get gradients. None of them: all.
    """
    torch.autograd.graph._engine_run_backward(
        tuple(edges), tuple(gradients), False, False, tuple(weights), True, accumulate_grad=True
    )


def nodes_between(roots: list[Any], ends: list[Any]) -> set[Any]:
    """Return the nodes of autograd's graph on all ways from `roots` to `ends`."""
    from torch.distributed.pipelining import _backward  # a second, which only pipelines need

    return _backward.reverse_closure(ends, set(), _backward.construct_reverse_graph(roots))[0]


def enable_loss_parallel() -> None:
    """Enable DTensor's cross entropy over a split vocabulary, in all forward and backward passes from now on.

    torch's loss_parallel() enables it within a block of code, which would have to contain both passes.
    """
    from torch.distributed.tensor.parallel.loss import _enable_custom_loss_ops

    _enable_custom_loss_ops()


def set_timeout(timeout: timedelta, *, but_not_of: dist.ProcessGroup | None = None) -> None:
    """Set the time limit of the collectives of every process group from now on, except `but_not_of`.

    gloo's sends and receives (pipeline parallelism on a CPU) keep the limit with which their group was made.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if group is not but_not_of:
            _set_pg_timeout(timeout, group)


def forget_mesh() -> None:
    """End all process groups but the default one, with everything that torch keeps of their meshes and compiled programs.

    torch caches shardings by the shape and the names of a mesh: a mesh of the same shape would get the groups of the ended one.
    """
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # By its type: `isinstance` would ask objects that stand for others. A loop would keep its last object alive.
    found = [thing for thing in gc.get_objects() if type(thing) is type(_with_random_state)]
    for cached in found:
        if str(cached.__module__).startswith("torch.distributed"):
            cached.cache_clear()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # Each thread caches in C++, too: this one, and that of an accelerator's backward passes.
    clear = torch._C._clear_DTensor_sharding_propagator_cache
    clear()
    number = torch.zeros((), device=device, requires_grad=True)
    number.register_hook(lambda _: clear())
    number.backward()
    torch.compiler.reset()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def limit_gloo(*, loopback: bool) -> None:
    """Limit each new gloo group to one thread. With `loopback`, it listens on 127.0.0.1 only.

    torch gives a group two threads. Both assign the name of their last completed operation to one std::string without a lock
    (ProcessGroupGloo::runLoop, `lastCompletedWorkName`), and free it twice if the name does not fit into the string itself
    ("ALLGATHER_COALESCED", which is DTensor's all-gather). The heap is then corrupt, and the process dies later, at any place:
    docs/architecture.md. GLOO_SOCKET_IFNAME wins over `loopback`.
    """
    gloo = dist.ProcessGroupGloo
    original = getattr(gloo.__init__, "original", gloo.__init__)

    def init(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = _GLOO_TIMEOUT,
        **settings: Any,
    ) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            options = gloo_options(timeout, host="127.0.0.1" if loopback else "")
            for name, value in settings.items():  # from torch 2.15: enable_reconfigure
                setattr(options, name, value)
        options._threads = 1
        original(self, store, rank, size, options)

    init.original = original  # pyrefly: ignore[missing-attribute]
    gloo.__init__ = init


_GLOO_TIMEOUT = timedelta(minutes=30)  # torch's


def gloo_options(timeout: timedelta, *, host: str) -> Any:
    """Return the options of a gloo group that listens on the interfaces of GLOO_SOCKET_IFNAME.

    Without this variable it listens on the address of `host`. If that is empty, gloo chooses.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # torch reads the variable like this if it makes the devices itself. Its default device ignores the variable.
    interfaces = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    places = [{"interface": n} for n in interfaces] or [{"hostname": host}] * bool(host)
    try:
        made = [gloo.create_device(**place) for place in places]
        made = made or [gloo.create_default_device()]
    except RuntimeError:
        # A host with IPv6 only has no 127.0.0.1, and perhaps no name that gloo can use.
        names = [name for _, name in socket.if_nameindex() if (name == "lo") == bool(host)]
        made = [gloo.create_device(interface=names[0])]
    options._devices, options._timeout = made, timeout
    return options


def enclose_calls(module: nn.Module, *, name: str) -> tuple[bool, Callable[[], None]]:
    """Run every call of `module`, with its hooks and compiled code, in a profiler range, from outside.

    torch looks for a compiled call first, and takes any function. A hook would be compiled with the module. Returns whether
    the module is compiled, and a function that undoes the change.
    """
    compiled = module.__dict__.get("_compiled_call_impl")
    call = compiled or module._call_impl

    def enclosed(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return call(*args, **kwargs)

    def undo() -> None:
        if compiled is None:
            del module.__dict__["_compiled_call_impl"]
        else:
            module.__dict__["_compiled_call_impl"] = compiled

    module.__dict__["_compiled_call_impl"] = enclosed
    return compiled is not None, undo


def record_memory_history(max_entries: int) -> None:
    """Keep the newest allocations of the CUDA allocator from now on, with their stacks."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(path: Path) -> None:
    """Write the recorded allocations of `record_memory_history`, and all current allocations, as a pickle."""
    torch.cuda.memory._dump_snapshot(str(path))
