"""torch's private names for compilation on the fake device.

They are apart from torch_compat.py because importing Inductor takes seconds.

Tried on torch 2.11 to 2.15. A missing name fails here, with an error that names it and the version
of torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan.sim.record.torch_compat import find, replace, unset_fake_temporarily

_compile_fx = "torch._inductor.compile_fx"
_settings: Any = find("torch._inductor", "config")
_common = "torch._inductor.codegen.common"
_triton = "torch._inductor.codegen.triton"


def _parsed_when_rendered(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap the parser of templates of kernels. Importing Inductor would parse them all, and none is rendered."""
    return lambda source: SimpleNamespace(render=lambda **values: parse(source).render(values))


replace(_common, "KernelTemplate._template_from_string", _parsed_when_rendered)
find(_compile_fx, "compile_fx")  # imports the rest, which recording processes inherit

V: Any = find("torch._inductor.virtualized", "V")
PythonWrapperCodegen: Any = find("torch._inductor.codegen.wrapper", "PythonWrapperCodegen")
TritonScheduling: Any = find(_triton, "TritonScheduling")
TritonKernel: Any = find(_triton, "TritonKernel")


_CACHED_BYTES = 50_000_000 // 132
"""Largest row that is still in the cache when a kernel reads it again: an H100 has 50 MB of L2, and each of its 132 SMs reads a row."""


class SilentKernel(TritonKernel):
    """Triton kernel that keeps its arguments, its reads and its writes, and writes no source."""

    inductor_meta = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.indices: set[Any] = set()
        self.num_loops = 0
        self.loops_of: defaultdict[str, set[int]] = defaultdict(set)

    def load(self, name: str, index: Any) -> Any:
        """Note an index that is read, and the loop in which it is read."""
        self.indices.add(index)
        if self.inside_reduction:
            self.loops_of[name].add(self.num_loops)
        return super().load(name, index)

    def codegen_body(self) -> None:
        """Note the end of a loop over the rows: what the next loop loads, it loads again."""
        super().codegen_body()
        self.num_loops += 1

    def moved_bytes(self, node: Any, *, reads: bool) -> int:
        """Return the bytes that the kernel reads, or those that it writes.

        Inductor's own count takes each buffer once, and no more than 1e9 elements of it. A softmax over a vocabulary whose rows exceed the
        cache reads them once in each of its loops.

        Args:
            node: the scheduler's node of the kernel, of known sizes.
            reads: whether to count reads.
        """
        buffers = node.get_read_write_buffer_accesses(
            include_reads=reads, include_writes=not reads
        )
        places = node.read_writes.reads if reads else node.read_writes.writes
        accesses = Counter(place.name for place in places)
        points = prod(self.numels.values())
        row = prod(tree.numel for tree in self.range_trees if tree.is_reduction)
        moved = 0
        for name in buffers:
            size = V.graph.get_dtype(name).itemsize
            passes = len(self.loops_of[name]) if reads and row * size > _CACHED_BYTES else 1
            # The result of a collective is a mutation of a buffer, which alone has a size.
            real_name = node.scheduler.mutation_real_name.get(name, name)
            touched, whole = points * accesses[name], V.graph.get_numel(real_name)
            # A buffer may have any size where the kernel's is known.
            is_known = isinstance(whole, int) or whole.is_number
            moved += size * (min(touched, whole) if is_known else touched) * max(passes, 1)
        return int(moved)

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        """Note an index that is written."""
        self.indices.add(index)
        super().store(name, index, value, mode)

    @property
    def transposes(self) -> bool:
        """Whether consecutive elements of two tensors lie along different dimensions of the tiles.

        A kernel may compute in tiles and not transpose: torch 2.11 uses tiles for a vector along
        each dimension, too.
        """
        along: set[str] = set()
        for index in self.indices:
            symbols = [s for s in index.free_symbols if s in self.range_tree_nodes]
            tiles = [self.range_tree_nodes[s].root.prefix for s in symbols]
            if {"x", "y"} <= {
                *tiles
            }:  # another index is that of a vector, which all tiles share
                strides = V.graph.sizevars.stride_hints(index, symbols)
                along |= {
                    tile for tile, stride in zip(tiles, strides, strict=True) if stride == 1
                }
        return {"x", "y"} <= along

    def codegen_kernel(self, name: str | None = None) -> str:
        """Return no source."""
        return ""


class _Device(find("torch._dynamo.device_interface", "DeviceInterface")):
    """Device interface of an H100, as far as Inductor asks: its answers decide how reductions are split."""

    Event, Stream = torch.Event, torch.Stream

    class Worker:
        """Properties of the device for Inductor's compile workers."""

        set_device = staticmethod(lambda device: None)
        current_device = staticmethod(lambda: 0)

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            """Return the properties of an H100 SXM."""
            # The figures of an H100 SXM.
            return SimpleNamespace(
                type="cuda",
                index=0,
                name="H100",
                multi_processor_count=132,
                cc=90,
                major=9,
                minor=0,
                regs_per_multiprocessor=65536,
                max_threads_per_multi_processor=2048,
                max_threads_per_block=1024,
                warp_size=32,
            )

    get_device_properties = Worker.get_device_properties
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    synchronize = staticmethod(lambda device=None: None)
    get_raw_stream = staticmethod(lambda device: 0)
    get_compute_capability = staticmethod(lambda device=None: 90)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)
    is_triton_capable = staticmethod(lambda device=None: True)
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)


def register_device(name: str, scheduling: type, wrapper: type) -> None:
    """Register the device with Dynamo and Inductor as a GPU.

    Args:
        name: device type.
        scheduling: Inductor's scheduling class.
        wrapper: class that writes Inductor's program.
    """
    find("torch._dynamo.device_interface", "register_interface_for_device")(name, _Device)
    find(_common, "init_backend_registration")()
    find(_common, "register_backend_for_device")(name, scheduling, wrapper)

    class Overrides(find(_common, "DeviceOpOverrides")):
        """Code that the generated program runs around its kernels. There is no device to select."""

        # The generated program enters these lines around its kernels. Here there is no device to
        # select.
        def device_guard(self, device_idx: int) -> str:
            return "torch.no_grad()"

        def set_device(self, device_idx: int) -> str:
            return "pass"

    find(_common, "register_device_op_overrides")(name, Overrides())
    # Inductor looks for the machine's GPU among these types, and the fake one is all there is.
    find("torch._inductor.utils", "GPU_TYPES")[:] = [name]
    # The scheduler refuses a GPU without Triton, which this machine need not have.
    replace("torch._inductor.scheduler", "has_triton", lambda _: lambda: True)
    # Its matmul with an fp32 result asks for devices by their names. It is torch's matmul in either case.
    matmul, lowering = torch.ops.aten.mm.dtype, "torch._inductor.lowering"
    find(lowering, "lowerings")[matmul] = find(lowering, "fallback_handler")(matmul)
    # It looks for softmax in one pass over its rows where it finds a device of that name.
    check, passes = "prepare_softmax_extra_check", "torch._inductor.fx_passes.post_grad"
    replace(passes, check, lambda _: lambda match: _settings.online_softmax)
    replace(
        "torch._inductor.fx_passes.joint_graph",
        "UniformValueConstantFolder._deduce_value",
        _deduce_on_host,
    )
    # Patterns of graphs are traced on a device, which does not matter and has to be there.
    host = torch.device("cpu")
    replace(
        "torch._inductor.fx_passes.joint_graph",
        "lazy_init",
        lambda init: lambda _=None: init(host),
    )


def replace_compiler(inner: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Compile graphs by `inner` after Inductor's passes over them, with these settings."""

    def wrap(compile_fx: Any) -> Any:
        def compile(*args: Any, **kwargs: Any) -> Any:
            if "inner_compile" not in kwargs:  # it calls itself
                kwargs |= {
                    "inner_compile": inner,
                    "config_patches": {**(kwargs.get("config_patches") or {}), **settings},
                }
            return compile_fx(*args, **kwargs)

        return compile

    replace(_compile_fx, "compile_fx", wrap)
    # Its cache of compiled graphs would hand out programs that our compiler has not made.
    find("torch._functorch", "config").enable_autograd_cache = False
    # Dynamo looks for expressions that guards share, for quicker guards.
    replace("torch._dynamo.guards", "PyExprCSEPass.count", lambda _: lambda *_: None)
    # It parses source files, for lines of a log.
    replace("torch._dynamo.symbolic_convert", "get_funcname", lambda _: lambda *_: "")


def read_numbers_in_guards() -> None:
    """Make the guards of compiled programs read a number itself.

    They read it from a tensor, which is fake here and has no value. torch 2.11 would then compile every call of a program
    with a number among its arguments again.
    """
    known = {"___as_tensor": lambda number: SimpleNamespace(item=lambda: number)}
    replace("torch._dynamo.guards", "_get_closure_vars", lambda get: lambda: get() | known)


def write_program(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_backward: bool,
    is_inference: bool,
    graph_id: int | None,
) -> tuple[str, dict[str, Any]]:
    """Do the work of Inductor's `codegen_and_compile`, without compiling.

    Returns:
        The source, and the objects that it refers to by name: the kernels that the wrapper
            collected, and constant tensors.
    """
    mode = find("torch._guards", "detect_fake_mode")(inputs)
    with (
        # Its pass for asynchronous tensor parallelism looks for NCCL.
        patch.object(torch.distributed, "is_nccl_available", lambda: True),
        unset_fake_temporarily(),
        torch.no_grad(),
        V.set_fake_mode(mode),
        find("torch._inductor.debug", "DebugContext")(),
    ):
        # As in compile_fx: views become reshapes, shapes are propagated, output strides are noted,
        # then the passes after autograd run.
        find(_compile_fx, "view_to_reshape")(graph)
        find(_compile_fx, "fake_tensor_prop")(graph, inputs)
        find(_compile_fx, "_recursive_record_original_output_strides")(graph)
        find(_compile_fx, "_recursive_post_grad_passes")(graph, is_inference=is_inference)
        # Lowering turns the graph into loops and calls, which `codegen` schedules, fuses and
        # writes.
        lowering = find("torch._inductor.graph", "GraphLowering")(
            graph,
            example_inputs=inputs,
            shape_env=find(_compile_fx, "shape_env_from_inputs")(inputs),
            graph_id=graph_id,
            is_inference=is_inference,
            is_backward=is_backward,
        )
        lowering.freeze_runtime_asserts()
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code, _ = lowering.codegen()
            return code.value, {**lowering.wrapper_code.kernels, **lowering.constants}


class _OnHost(TorchDispatchMode):
    """Dispatch mode that makes new tensors on the host, whatever device is asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def _deduce_on_host(deduce: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Inductor's evaluation of constants (tensors of one element), so that it computes real values."""

    def deduced(*args: Any) -> Any:
        with _OnHost():
            return deduce(*args)

    return deduced


def fused_name(schedule: Any) -> str:
    """Return a kernel's name, made of its fused operations."""
    return find("torch._inductor.utils", "get_fused_kernel_name")(
        schedule, "original_aten"
    ).removeprefix("fused_")


def pointers(kernel: Any) -> tuple[str, ...]:
    """Return the names of a kernel's arguments in order: in_ptr0, out_ptr0, in_out_ptr0, ..."""
    return tuple(str(argument.name) for argument in kernel.args.python_argdefs()[0])
