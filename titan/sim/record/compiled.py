"""torch.compile on the fake device: Inductor does all its work for a GPU, except that it writes no Triton kernels.

Dynamo traces, AOTAutograd and the partitioner split the graph into saved and recomputed values,
Inductor rewrites, lowers and fuses, plans the reuse of memory, and writes its Python program around
the kernels. That program runs on fake tensors under the tracer, which sees its allocations, matmuls
and transfers as those of any other program, and keeps them (compiled_replay.py). A call of a fused
kernel is recorded as a launch that reads and writes the fused group's buffers.

Not modelled: kernels that Inductor chooses by measuring ("max-autotune" takes the same kernels as
the default mode), and the cheaper launches of CUDA graphs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titan.parallel.selective import call_program
from titan.sim.record import async_tp, inductor
from titan.sim.record.compiled_replay import RecordedProgram
from titan.sim.record.device import NAME
from titan.sim.record.operators import size_bytes
from titan.sim.record.trace import Kernel

if TYPE_CHECKING:
    from titan.sim.record.tracer import Tracer

# Inductor's settings: nothing is measured, since there is nothing to measure on; nothing is checked when the program runs.
_SETTINGS: dict[str, Any] = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "shape_padding": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    "triton.cudagraphs": False,
    "triton.autotune_at_compile_time": False,
    "graph_partition": False,
}


# How Dynamo names a compiled module, or the one in torch's wrapper for activation checkpointing, in older torch and newer. A layer of
# transformers with linear attention passes itself as an argument.
_ITSELF = re.compile(
    r"^(?:L\['self'\]|L\['function'\]\.__self__|L\['kwargs'\]\['titan_layer'\])(\._checkpoint_wrapped_module|\.__dict__\['_modules'\]\['_checkpoint_wrapped_module'\])?\.?"
)


def install(tracer: Tracer) -> None:
    """Make torch.compile's default backend compile for the fake device from now on."""
    # It misses templates of kernels to choose from, none of which it would choose.
    logging.getLogger("torch._inductor.template_heuristics").setLevel(logging.CRITICAL)
    async_tp.install(tracer)
    inductor.read_numbers_in_guards()
    inductor.register_device(NAME, _Scheduling, _Wrapper)
    inductor.replace_compiler(
        lambda *args, **kwargs: _compile(tracer, *args, **kwargs), _SETTINGS
    )


def _compile(
    tracer: Tracer,
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    is_backward: bool = False,
    is_inference: bool = False,
    graph_id: int | None = None,
    **_: Any,
) -> Callable[[list[Any]], Any]:
    """Run Inductor's inner compiler until it has written its program, and return that program as a callable."""
    # Inductor would write C++ for it, and look for a compiler.
    if {x.device.type for x in inputs if isinstance(x, Tensor)} == {"cpu"}:
        return _HostProgram(tracer, graph)
    code, names = inductor.write_program(
        graph, inputs, is_backward=is_backward, is_inference=is_inference, graph_id=graph_id
    )
    # The program is Python source with free names: kernels, constants and a few of Inductor's
    # helpers.
    program: dict[str, Any] = {}
    exec(compile(code, f"<compiled {graph_id}>", "exec"), program)
    for value in names.values():
        if isinstance(value, _Fused):
            value.launch = tracer.launch
    program |= names
    # A "raw stream" is only handed on to `_Fused.run`, which ignores it.
    program["get_raw_stream"] = int
    program["reinterpret_tensor"] = _reinterpret
    compiled = RecordedProgram(tracer, program["call"])
    # `_Wrapper` writes calls of `enter_module` before each operation.
    program["enter_module"] = tracer.scopes.enter_compiled
    if is_backward:
        return compiled
    # As a program of Inductor's own: a selective checkpoint around it sees it as one operation.
    call = partial(call_program, compiled)
    setattr(call, "_boxed_call", True)  # noqa: B010  inputs come in a list
    return call


class _HostProgram:
    """Compiled program of tensors on the host (the update of offloaded parameters).

    It counts as one loop that reads the inputs, and writes the outputs and the inputs that it
    changes.
    """

    def __init__(self, tracer: Tracer, graph: torch.fx.GraphModule) -> None:
        self.tracer, self.graph = tracer, graph
        nodes = list(graph.graph.nodes)
        inputs = [n for n in nodes if n.op == "placeholder"]
        # Functionalisation turns in-place updates of inputs into copies at the end of the graph.
        written = {n.args[0] for n in nodes if n.target is torch.ops.aten.copy_.default}
        self.changed = [i for i, node in enumerate(inputs) if node in written]
        self._boxed_call = True  # inputs come in a list

    def __call__(self, args: list[Any]) -> Any:
        """Run the program, and record one launch on the host."""
        with self.tracer.pause():
            outputs = self.graph(*args)
        changed = [args[i] for i in self.changed]
        sizes = [
            sum(size_bytes(t) for t in ts if isinstance(t, Tensor))
            for ts in (args, [*changed, *outputs])
        ]
        self.tracer.launch_on_host(
            Kernel(
                "fused: on the host",
                "pointwise",
                read_bytes=sizes[0],
                write_bytes=sizes[1],
                host="compiled",
            )
        )
        # The convention of a boxed call: the callee empties the list, so that inputs can end early.
        args.clear()
        return outputs


@dataclass
class _Fused:
    """Replacement of a compiled kernel, which records its launch.

    Attributes:
        kernel: the kernel as the trace describes it.
        pointers: names of its arguments, if it was compiled for tensors of any size.
        launch: records a launch.
    """

    kernel: Kernel
    pointers: tuple[str, ...]
    launch: Callable[[Kernel], None] = lambda _: None

    def run(self, *args: Any, stream: Any) -> None:
        """Record a launch with these arguments."""
        kernel = self.kernel
        # Compiled for any size: the bytes are known only now, from the tensors that come. Their
        # sizes come after them.
        if self.pointers:
            pairs = zip(self.pointers, args, strict=False)
            sizes = [(name, size_bytes(x)) for name, x in pairs if isinstance(x, Tensor)]
            kernel = replace(
                kernel,
                # in_out pointers are read and written, so they count on both sides.
                read_bytes=sum(size for name, size in sizes if not name.startswith("out_ptr")),
                write_bytes=sum(size for name, size in sizes if not name.startswith("in_ptr")),
            )
        self.launch(kernel)


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    """Return a view of a tensor's memory, as Inductor's reinterpret_tensor does."""
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


class _Scheduling(inductor.TritonScheduling):
    """Inductor's scheduling, which emits calls of fused kernels without the kernels."""

    kernel_type = inductor.SilentKernel

    def define_kernel(self, src_code: str, node_schedule: Any, kernel: Any) -> str:
        """Describe a fused kernel, and return the name under which the program calls it."""
        graph = inductor.V.graph
        node = graph.scheduler.current_node
        fused = inductor.fused_name(node_schedule)
        # A kernel that only writes (a fill) has no reads.
        first = next(iter(node.read_writes.reads or node.read_writes.writes))
        kernels = graph.wrapper_code.kernels
        name = f"kernel_{len(kernels)}"
        # Dynamic shapes: lengths are symbols, so the launcher has to measure its arguments.
        for_any_size = any(not length.is_number for length in kernel.numels.values())
        read_bytes, write_bytes = (
            0 if for_any_size else kernel.moved_bytes(node, reads=reads)
            for reads in (True, False)
        )
        described = Kernel(
            f"fused: {fused}",
            "pointwise",
            dtype=str(graph.get_dtype(first.name))[6:],
            read_bytes=read_bytes,
            write_bytes=write_bytes,
            host="compiled",
            transposes=kernel.transposes,
        )
        kernels[name] = _Fused(described, inductor.pointers(kernel) if for_any_size else ())
        return name


class _Wrapper(inductor.PythonWrapperCodegen):
    """Writer of Inductor's program, which adds each operation's place in the model before the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, _Fused] = {}
        self.recomputed: set[torch.fx.Node] | None = None

    @staticmethod
    def create(is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, *rest: Any) -> Any:
        """Return the writer of a graph; torch's own for a subgraph."""
        if is_subgraph:
            return inductor.PythonWrapperCodegen.create(
                True, subgraph_name, parent_wrapper, *rest
            )
        return _Wrapper()

    # Headers that would import Triton and ask CUDA for a stream.
    def write_triton_header_once(self) -> None:
        """Write nothing: the header would import Triton."""

    def write_get_raw_stream_header(self) -> None:
        """Write nothing: the header would ask CUDA for a stream."""

    def enter_context(self, ctx: torch.fx.Node) -> None:
        """Write the module that the next operation belongs to."""
        super().enter_context(ctx)
        if self.recomputed is None:
            # Found once for each graph.
            self.recomputed = _recomputed(ctx.graph) if inductor.V.graph.is_backward else set()
        self.writeline(f"enter_module({_module_of(ctx)!r}, {ctx in self.recomputed})")


def _module_of(node: torch.fx.Node) -> str:
    """Return the path of the module, within the compiled module, in which a node of a graph was traced."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    # Innermost last. Backward nodes carry the stack of the forward node that they belong to.
    paths = [path for path, _ in stack.values()]
    return _ITSELF.sub("", paths[-1]) if paths else ""


def _recomputed(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes of a backward graph that repeat a part of the forward pass.

    The partitioner has tagged most nodes. A node without a tag comes from an autograd.Function's
    backward or from a pass. It belongs to the backward pass if it depends on a node of the backward
    pass.
    """
    tags: dict[torch.fx.Node, str | None] = {}
    for node in graph.nodes:
        tag = node.meta.get("partitioner_tag")
        if tag is None:
            # Nodes come in topological order, so the tags of its inputs are known.
            passes = {tags[n] for n in node.all_input_nodes} - {None}
            tag = next((t for t in ("is_backward", "is_forward") if t in passes), None)
        if node.op == "placeholder":  # a gradient, or a saved value
            tag = "is_backward" if node.name.startswith("tangents") else None
        tags[node] = tag
    return {node for node, tag in tags.items() if tag == "is_forward"}
