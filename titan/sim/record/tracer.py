"""Tracer: every operation that torch dispatches on fake tensors becomes an event of titan.sim.record.trace.

The tracer sits between autograd and the fake tensors. Tensor subclasses (DTensor, torchao's) are
unwrapped before it, so it sees the plain operations that a device runs. It does not see
computations that torch makes for itself: output shapes for DTensor, compilation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from titan.parallel import selective
from titan.parallel.torch_compat import AsyncCollectiveTensor
from titan.sim.record import device, torch_compat
from titan.sim.record.module_scope import ScopeTracker
from titan.sim.record.operators import (
    EXPANDED,
    Operator,
    argument_of,
    classify,
    kernel_of,
    tensors_in,
    workspace_bytes,
)
from titan.sim.record.storages import Storages
from titan.sim.record.trace import HOST, Event, Free, Host, Kernel, Launch, Synchronize
from titan.sim.record.transfers import Collective, Transfers, collective_of

_PLAIN = {Tensor, torch_compat.FakeTensor, nn.Parameter}
_device_of = torch.ops.prim.device.default
_under_way = torch.ops._c10d_functional._wrap_tensor_autograd.default
_wait = torch.ops._c10d_functional.wait_tensor.default
_read = torch.ops.aten._local_scalar_dense.default
_LEAST_HOST_BYTES = 2**20  # a smaller computation on the host is part of issuing work
# Operators with FSDP's gathered and scattered buffers, whose memory is neither a parameter's nor an activation's.
_UNSHARDED = {
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "fsdp::chunk_cat",
    "fsdp::chunk_cat_mixed_dtype",
    "fsdp::all_gather_copy_in",
}


class Tracer(TorchDispatchMode):
    """Dispatch mode that records the operations inside a FakeTensorMode.

    Attributes:
        events: recorded events. Assign a new list to start over.
        scopes: current place in the program.
        storages: memory of the program.
        transfers: collectives of the program.
        microbatches: repetition of microbatches; None if all of them run.
        replays_programs: whether compiled programs are replayed, in place of running them each
            time.
        on_compilation: called when a compilation begins.
        on_backward_error: called with an error inside a backward pass, which may end the process.
        running: last operation, for messages.
        error: last error in an operation.
    """

    supports_higher_order_operators = True

    def __init__(self, mesh: DeviceMesh | None, *, replays_programs: bool = True) -> None:
        """Begin to trace in this process.

        Args:
            mesh: mesh whose axes give groups their names. None: the meshes that the program builds.
            replays_programs: replay compiled programs, in place of running them each time.
        """
        super().__init__()
        self.replays_programs = replays_programs
        self.events: list[Event] = []
        # Memory that is alive when a backward pass begins was saved for it.
        self.scopes = ScopeTracker(lambda: self.storages.categorize_new("activations"))
        self.storages = Storages(
            self.record, scope=self.scopes.current, stream=device.current_stream
        )
        self.transfers = Transfers(self.record, stream=device.current_stream)
        self.microbatches: Any = None  # None: all of them run
        self.running: Any = None  # for messages: the operation that came last
        self.error: Exception | None = None
        self.on_compilation: Callable[[], None] = lambda: None
        self.on_backward_error: Callable[[Exception], None] = lambda _: None
        self._paused = 0
        self._compiled = False
        self._operators: dict[Any, Operator] = {}
        self._collectives: dict[Any, Collective | None] = {}
        self._kernels: dict[Kernel, Kernel] = {}
        device.report_to(self.record)
        selective.watch_selected_calls = lambda operation, place: self.scopes.within(
            call=f"{operation}@{place}"
        )
        self._patch()
        if mesh is None:
            torch_compat.watch_meshes(self.transfers.note_mesh)
            torch_compat.allow_swapping_fake_tensors()
        else:
            self.transfers.note_mesh(mesh)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile runs under this mode."""
        return True

    def begin(self) -> None:
        """Begin another program, with nothing left of the previous program."""
        self.storages.forget()
        gc.freeze()  # spare the collector imported and compiled objects
        self.events = []
        self.scopes.begin()
        device.begin()

    def begin_step(self) -> list[Event]:
        """Begin a step. Return the list that gets its events."""
        self.events = []
        self.scopes.begin_step()
        self.storages.begin()
        return self.events

    def record(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside. Its result is a decorator, too."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record it."""
        # Where a tensor is: a question, and no operation to record.
        if func is _device_of:
            return args[0].fake_device
        # A subclass gets its own __torch_dispatch__ first, and its plain parts come here
        # afterwards.
        for kind in types:
            if kind not in _PLAIN:
                return NotImplemented
        kwargs = kwargs or {}
        if self._paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        try:
            return self._dispatch(func, args, kwargs)
        except Exception as error:
            self._note_error(error)
            raise

    def _note_error(self, error: Exception) -> None:
        """Keep an error that autograd's thread may lose."""
        # For a device in Python, torch may even abort: on the way out it restores the device's stream, which calls
        # Python, and that call fails while an error is set.
        self.error = error
        if torch_compat.in_backward():
            self.on_backward_error(error)

    # How an operator is handled, in order: a mark of autograd, a read of a value, one that runs
    # others inside, or itself.
    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on plain tensors and record it."""
        if func is _under_way:
            return AsyncCollectiveTensor(args[0])
        if func is _wait:  # the tensor itself, where its fake kernel would make another
            self.transfers.finish(args[0])
            return args[0]
        # For messages: the operation that fails is often this one.
        self.running = func
        op = self._operators.get(func)
        if op is None:
            op = self._operators[func] = classify(func)
            self._collectives[func] = collective_of(func)
        if func is _read:
            return self._read(args[0])
        # torch turns a mode off inside its own dispatch. On again, it records the operations of the
        # expansion.
        if func in EXPANDED and args[0].fake_device.type == device.NAME:
            with self:
                return EXPANDED[func](*args, **kwargs)
        if op.name == "aten::set_":
            with torch_compat.uncached_calls(args[0]):
                result = func(*args, **kwargs)
        elif op.updates:  # in place, so that shapes stay: torch would hash long lists
            result = None
        elif (
            self._compiled and "out" in kwargs
        ):  # of the right shape; not all have a fake kernel
            result = kwargs["out"]
        else:
            result = func(*args, **kwargs)
        # A view or the like: no kernel ran, and no memory was taken.
        if op.kind is None and not op.makes:
            return result
        self._record_call(op, args, kwargs, result)
        return result

    def _record_call(self, op: Operator, args: Any, kwargs: Any, result: Any) -> None:
        """Record the memory, and the transfer or launch, of a call that has run."""
        outputs: Any = [result] if isinstance(result, Tensor) else list(tensors_in([result]))
        on_device = False
        for tensor in outputs:
            if tensor.fake_device.type == device.NAME:
                on_device = True
                # A view's storage is known already.
                if op.makes:
                    self.storages.add(tensor)
        # FSDP's buffers: the gathered parameter, and the whole gradient that waits to be reduced.
        if op.name in _UNSHARDED:
            whole = args[1:2] if op.name == "c10d::_reduce_scatter_base_" else (*args, result)
            self.storages.categorize(tensors_in((*whole, *kwargs.values())), "unsharded")
        collective = self._collectives[op.func]
        if collective is not None:
            self.transfers.issue(
                collective, op.func, args, kwargs, result, self.scopes.current()
            )
            return
        if op.kind is None:
            return
        # No result on the device: the host computed, or it read from the device.
        if not on_device:
            inputs = list(tensors_in((*args, *kwargs.values())))
            if not inputs and not outputs:
                return
            # A read from the device is a copy, which goes on below.
            if not any(t.fake_device.type == device.NAME for t in inputs):
                self.launch_on_host(kernel_of(op, args, kwargs, result))
                return
        host: Host = "compiled" if self._compiled else "eager"
        kernel = kernel_of(op, args, kwargs, result, host=host)
        # FlashAttention's scratch memory ends with the kernel.
        stream = device.current_stream()
        workspace = [
            self.storages.allocate(size, stream, "temporary", self.scopes.current())
            for size in workspace_bytes(op, args)
        ]
        self.launch(kernel)
        for event in workspace:
            self.record(Free(event.block))
        # A copy that blocks makes the host wait until the device has done all that came before.
        if kernel.kind == "host_copy" and not argument_of(
            op.func, "non_blocking", args, kwargs
        ):
            self.record(Synchronize(stream, f"{op.name} between device and host"))

    def launch_on_host(self, kernel: Kernel) -> None:
        """Record a computation of the host itself: the norm and the update of offloaded parameters."""
        if kernel.read_bytes + kernel.write_bytes >= _LEAST_HOST_BYTES:
            self.launch(kernel, HOST)

    def _compilation_begins(self) -> None:
        """Pause the recording."""
        self._paused += 1
        self.on_compilation()

    def _compilation_ends(self) -> None:
        """Go on with the recording."""
        self._paused -= 1

    def launch(self, kernel: Kernel, stream: int | None = None) -> None:
        """Record the launch of a kernel on a stream, or on the current stream."""
        # One object for equal kernels, so that pricing can go by identity.
        kernel = self._kernels.setdefault(kernel, kernel)
        stream = device.current_stream() if stream is None else stream
        self.record(Launch(kernel, stream, self.scopes.current()))

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Count launches inside as launches of compiled code."""
        before, self._compiled = self._compiled, True
        try:
            yield
        finally:
            self._compiled = before
            self.scopes.enter_compiled("", False)

    def _read(self, tensor: Any) -> int | float | bool:
        """Return a value, which fake tensors lack: 1 for numbers, so that divisions work; False for booleans, so that loops end."""
        if tensor.fake_device.type == device.NAME:
            self.record(Synchronize(device.current_stream(), "a value is read"))
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else 1

    def _patch(self) -> None:
        """Replace the private functions of torch that would disturb the recording."""
        torch_compat.pause_in_compilation(self._compilation_begins, self._compilation_ends)
        torch_compat.pause_in_sharding_propagation(self.pause())
        torch_compat.defer_waits()
        torch_compat.report_unpack_errors(self._note_error)
        torch_compat.compute_meshes_unfaked(self.pause())
        torch_compat.cache_mesh_slices()
        torch_compat.make_shards_lazily()
        # Not an operator, so it is not dispatched: FSDP frees and takes memory by it.
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            if not self._paused:
                self.storages.resize(storage, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # pyrefly: ignore[bad-assignment]
