"""Work of the host in a step, counted by part of the program on a tiny step of the job, on real CPU tensors under torch's fake process group.

What a host does in a step hardly depends on sizes: Python, autograd's nodes, DTensor's placements, FSDP's hooks, views and torch's
dispatcher cost the same with 64 channels as with 4,096. So the job's own program runs with tiny sizes (host_time.py), and two things
are counted in each part: calls of Python functions, and operations that reach torch's dispatcher, views included.

    forward, backward               what is outside of blocks: embedding, loss, the trainer's own work
    forward block, backward block   calls of "layers.N", and what autograd runs for them; a recomputation is part of the backward pass
    forward hooks, backward hooks   FSDP's hooks in blocks
    clip, optimizer

Counts are the same on every machine and in every process. Weights, measured once (`CALL`, `OPERATION`), turn them into tiny operations, whose time a
profile states for its hosts (`host_tiny_us`). The pace holds for other depths and other numbers of micro-batches:

    blocks, their hooks     for each call of a block, hooks included in a block's
    all others              for each event. An operation over lists of tensors counts for each tensor

Example: 4 calls of blocks make 11,200 Python calls and 276 operations in the forward pass. The pace is
(0.6 x 11,200 + 2.5 x 276) / 4 = 1,850 tiny operations for each call.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan.config.layout import Layout
from titan.config.schema import JobConfig
from titan.parallel import build_mesh, collectives, expert
from titan.parallel.init_weights import canonical_name
from titan.sim.record import torch_compat
from titan.sim.record.operators import classify, lists_in, tensors_in
from titan.sim.record.program import Program, job_program

_BLOCK = re.compile(r"(.*\.)?layers\.\d+")
CALL, OPERATION = 0.6, 2.5
"""Tiny operations that a call of a Python function and an operation take in forward and backward passes: scripts/bench/host.py fitted them
to twelve jobs on a server's x86 core, whose parts they miss by 16% in the mean."""
UPDATE_CALL = 0.24
"""The same for a call while gradients are clipped and weights updated, where operations take lists of tensors."""
_LARGEST = 20_000_000  # parameters of a tiny model of another package, whose sizes may have other names
_HOOKS = {
    "_fsdp_state.FSDPState": (
        "_pre_forward",
        "_post_forward",
        "_pre_backward",
        "_root_post_backward_final_callback",
    ),
    "_fsdp_param_group.FSDPParamGroup": ("post_backward",),
}


class HostMeter:
    """Counts of the host's work, charged to the part of the program that runs.

    Attributes:
        part: part that runs now.
        python: calls of Python functions by part, while `profile` is the thread's profiler.
        calls: number of calls of blocks, without recomputations.
    """

    def __init__(self) -> None:
        self.part = "forward"
        self.python: Counter[str] = Counter()
        self.calls = 0
        self._comparison: Any = None  # frame of the comparison that runs now

    def profile(self, frame: Any, event: str, argument: Any) -> None:
        """Count a call, as Python calls a profiler.

        Comparisons are left out, with what they call. DTensor looks up its specs in hash tables: how many keys a lookup compares
        depends on their hashes, which change with addresses and PYTHONHASHSEED.
        """
        if event == "return" and frame is self._comparison:
            self._comparison = None
        elif event == "call" and self._comparison is None:
            if frame.f_code.co_name == "__eq__":
                self._comparison = frame
            else:
                self.python[self.part] += 1

    def enter(self, part: str) -> None:
        """Charge what comes to a part."""
        self.part = part

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Run a part, and return to the part that ran before."""
        before = self.part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def wrap(self, part: str) -> Callable[[Any], Any]:
        """Return a decorator that runs a function as a part. "hooks" are those of FSDP's object that comes first, apart for a block's."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)  # titan.parallel knows FSDP's hooks by their module
            def metered(*args: Any, **kwargs: Any) -> Any:
                now = part
                if part == "hooks":
                    now = (
                        f"{self.part.split()[0]} hooks" if _serves_block(args[0]) else self.part
                    )
                with self.within(now):
                    return function(*args, **kwargs)

            return metered

        return decorate

    @contextmanager
    def watch_hooks(self) -> Iterator[None]:
        """Wrap FSDP's hooks. Build the program inside, since it keeps bound methods."""
        places = []
        for owner, methods in _HOOKS.items():
            of = torch_compat.find("torch.distributed.fsdp._fully_shard", owner)
            places += [(of, method, "hooks") for method in methods]
        with self._wrapped(places):
            yield

    @contextmanager
    def _wrapped(self, places: Iterable[tuple[Any, str, str]]) -> Iterator[None]:
        """Run functions as parts: an object with the function, its name, and the part."""
        with ExitStack() as replaced:
            for where, name, part in places:
                wrapped = self.wrap(part)(getattr(where, name))
                replaced.enter_context(patch.object(where, name, wrapped))
            yield

    @contextmanager
    def watch(self, program: Program) -> Iterator[None]:
        """Enter the parts of a program as it reaches them."""
        for part in program.parts:
            for name, module in part.named_modules():
                if _BLOCK.fullmatch(canonical_name(f"{name}.").rstrip(".")):
                    module.__dict__["_compiled_call_impl"] = self._block(module._call_impl)
        places = [(*place, "clip") for place in program.clips]
        places += [(optimizer, "step", "optimizer") for optimizer in program.optimizers]
        with self._wrapped([*places, (torch.autograd, "backward", "backward")]):
            yield

    def _block(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call of a block. Its backward pass begins when the gradient of its output is there, and ends with the next block's."""
        forward = self.wrap("forward block")(call)

        def entering(part: str) -> Callable[[Tensor], None]:
            return lambda _: self.enter(part)

        def enclosed(*args: Any, **kwargs: Any) -> Any:
            # A recomputation is within the block's backward pass, and a checkpoint's wrapper has the block's own name.
            if torch_compat.in_backward() or self.part.endswith("block"):
                return call(*args, **kwargs)
            for tensor in tensors_in(args):
                # The first block's input. That of other blocks is an output, whose gradient begins a block.
                if tensor.requires_grad and not hasattr(tensor, "of_block"):
                    tensor.register_hook(entering("backward"))
            self.calls += 1
            result = forward(*args, **kwargs)
            for tensor in tensors_in([result]):
                if tensor.requires_grad:
                    tensor.of_block = True
                    tensor.register_hook(entering("backward block"))
            return result

        return enclosed


def _serves_block(owner: Any) -> bool:
    """Return whether FSDP's object, a state or its group, shards a block."""
    one = getattr(
        owner, "_fsdp_param_group", owner
    )  # a state of torch before 2.12 has one group
    groups = getattr(owner, "_fsdp_param_groups", [one])
    first = next((g._module_fqn or "" for g in groups if hasattr(g, "_module_fqn")), "")
    first = first.partition(",")[0]
    return bool(_BLOCK.fullmatch(canonical_name(f"{first}.").rstrip(".")))


class Census(TorchDispatchMode):
    """Dispatch mode that counts a step's operations by part.

    Attributes:
        meter: knows the part that runs.
        operations: operations by part, views included.
        events: those that a trace has as events. An operation over lists of tensors counts for each tensor.
    """

    def __init__(self, meter: HostMeter) -> None:
        super().__init__()
        self.meter = meter
        self.operations: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._kind_of = functools.cache(lambda func: classify(func).kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor's own operations come here afterwards
        part = self.meter.part
        self.operations[part] += 1
        kind = self._kind_of(func)
        if kind is not None:
            lists = lists_in(args) if kind == "optimizer" else []
            self.events[part] += len(lists[0]) if lists else 1
        return func(*args, **(kwargs or {}))


def count_job(config: JobConfig, layout: Layout) -> dict[str, float]:
    """Return the host's pace in a tiny job, in a separate process.

    Raises:
        ValueError: The job is not tiny.
    """
    if config.model.sizes.num_params > _LARGEST:
        raise ValueError("its sizes have names of their own, and are not made small")
    device = torch.device("cpu")
    store = torch_compat.find("torch.testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", store=store, rank=0, world_size=layout.world_size)
    try:
        mesh = build_mesh(device.type, **layout.degrees)
        return count(lambda: job_program(config, layout, device, mesh))
    finally:
        dist.destroy_process_group()


def count(build: Callable[[], Program]) -> dict[str, float]:
    """Return the host's pace by part, in tiny operations.

    Args:
        build: builds the program, with tiny sizes, on CPU tensors. The process group is there.
    """
    torch.set_num_threads(1)
    meter = HostMeter()
    with ExitStack() as stack:
        stack.enter_context(meter.watch_hooks())
        program = build()
        stack.enter_context(valid_counts())
        stack.enter_context(meter.watch(program))
        gc.collect()
        gc.disable()  # as the trainer does
        stack.callback(gc.enable)
        program.train(1)  # the first step makes states and learns shapes
        before, meter.calls = sys.getprofile(), 0
        sys.setprofile(meter.profile)
        try:
            program.train(2)
        finally:
            sys.setprofile(before)
        calls, census = meter.calls, Census(meter)
        with census:
            program.train(3)
    return paces(meter.python, census.operations, census.events, calls)


def paces(
    python: Mapping[str, int],
    operations: Mapping[str, int],
    events: Mapping[str, int],
    calls: int,
) -> dict[str, float]:
    """Return the pace of each part in tiny operations.

    Args:
        python: calls of Python functions by part.
        operations: operations by part.
        events: number of events by part.
        calls: number of calls of blocks.
    """
    work: dict[str, float] = {}
    for part, number in python.items():
        updates = part in ("clip", "optimizer")
        others = CALL * number + OPERATION * operations.get(part, 0)
        work[part] = UPDATE_CALL * number if updates else others
    result: dict[str, float] = {}
    for part in work:
        phase, _, inner = part.partition(" ")
        if not inner and events.get(part):
            result[part] = work[part] / events[part]
        elif inner:
            hooks = work.get(f"{phase} hooks", 0.0) if inner == "block" else 0.0
            result[part] = (work[part] + hooks) / calls
    return result


@contextmanager
def valid_counts() -> Iterator[None]:
    """Make an all-to-all of whole numbers return what it was given: a fake group leaves garbage, which the program would count with."""
    start = collectives.start_all_to_all

    def valid(x: Tensor, **kwargs: Any) -> Tensor:
        result = start(x, **kwargs)
        return result if x.is_floating_point() else collectives.wait(result).copy_(x)

    with (
        patch.object(collectives, "start_all_to_all", valid),
        patch.object(expert, "start_all_to_all", valid),
    ):
        yield
