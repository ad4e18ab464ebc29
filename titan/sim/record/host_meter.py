"""HostMeter of the host: the CPU time of a tiny step by part of the program, on real CPU tensors under torch's fake process group.

What a host does in a step hardly depends on sizes: Python, autograd's nodes, DTensor's placements, FSDP's hooks, views and torch's
dispatcher cost the same with 64 channels as with 4,096. So the job's own program runs with tiny sizes (host_time.py), several times
with nothing but a clock at the borders of the parts:

    forward, backward               what is outside of blocks: embedding, loss, the trainer's own work
    forward block, backward block   calls of "layers.N", and what autograd runs for them; a recomputation is part of the backward pass
    forward hooks, backward hooks   FSDP's hooks in blocks
    clip, optimizer

Two more steps run under a dispatch mode. It counts events as a trace does, and finds out what a CPU kernel costs more than a tiny
operation: that is the kernel, which runs on a device elsewhere. What is left is the pace of a part, in tiny operations, so that it
holds for another host, other depths and other numbers of micro-batches:

    blocks, their hooks     for each call of a block, hooks included in a block's
    all others              for each event. An operation over lists of tensors counts for each tensor

Example: 4 calls of blocks take 13.2 ms in the forward pass, of which 2.0 ms are CPU kernels beyond tiny operations. A tiny operation
takes 1.4 us. The pace is 11.2 ms / 1.4 us / 4 = 2,000 tiny operations for each call.
"""

from __future__ import annotations

import functools
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import thread_time_ns
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
from titan.sim.record.operators import classify, tensors_in
from titan.sim.record.program import Program, job_program
from titan.sim.record.transfers import collective_of

_BLOCK = re.compile(r"(.*\.)?layers\.\d+")
_ROUNDS = 8
"""Measured steps, and bursts of tiny operations between them. Medians count, so that other work on the machine slows both."""
_BURST = 1000
_LARGEST = 20_000_000  # parameters of a tiny model of another package, whose sizes may have other names
_UNDER_WAY = torch.ops._c10d_functional._wrap_tensor_autograd.default  # no operation of its own
_FSDP = "torch.distributed.fsdp._fully_shard"
_HOOKS = (
    ("_fsdp_state", "FSDPState._pre_forward"),
    ("_fsdp_state", "FSDPState._post_forward"),
    ("_fsdp_state", "FSDPState._pre_backward"),
    ("_fsdp_state", "FSDPState._root_post_backward_final_callback"),
    ("_fsdp_param_group", "FSDPParamGroup.post_backward"),
)


class HostMeter:
    """Clock that charges the host's time to the part of the program that runs.

    Attributes:
        clock: Nanoseconds of this thread.
        part: Part that runs now.
        spent: Nanoseconds by part.
        calls: Number of calls of blocks, without recomputations.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.part = "forward"
        self.spent: Counter[str] = Counter()
        self.calls = 0
        self._since = clock()

    def enter(self, part: str) -> None:
        """Charge the time until now to the part that ran, and the time from now on to another."""
        now = self.clock()
        self.spent[self.part] += now - self._since
        self.part, self._since = part, now

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
        with ExitStack() as replaced:
            for module, name in _HOOKS:
                owner, _, method = name.partition(".")
                of = torch_compat.find(f"{_FSDP}.{module}", owner)
                wrapped = self.wrap("hooks")(getattr(of, method))
                replaced.enter_context(patch.object(of, method, wrapped))
            yield

    @contextmanager
    def watch(self, program: Program) -> Iterator[None]:
        """Enter the parts of a program as it reaches them."""
        for part in program.parts:
            for name, module in part.named_modules():
                if _BLOCK.fullmatch(canonical_name(f"{name}.").rstrip(".")):
                    module.__dict__["_compiled_call_impl"] = self._block(module._call_impl)
        with ExitStack() as replaced:
            places = [(*place, "clip") for place in program.clips]
            places += [(optimizer, "step", "optimizer") for optimizer in program.optimizers]
            places += [(torch.autograd, "backward", "backward")]
            for where, name, part in places:
                wrapped = self.wrap(part)(getattr(where, name))
                replaced.enter_context(patch.object(where, name, wrapped))
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


@dataclass
class Census(TorchDispatchMode):
    """Dispatch mode that counts a step's events by part, and keeps the least time of each distinct call.

    Attributes:
        meter: Knows the part that runs.
        events: Number of events by part. An operation over lists of tensors counts for each tensor.
        calls: Number of calls by part and distinct call.
        least: Least nanoseconds of each distinct call.
    """

    meter: HostMeter
    events: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, Any]] = field(default_factory=Counter)
    least: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._operators: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor's own operations come here afterwards
        kwargs = kwargs or {}
        clock = self.meter.clock
        start = clock()
        result = func(*args, **kwargs)
        took = clock() - start
        if not isinstance(func, torch._ops.OpOverload):
            return result
        if func not in self._operators:
            self._operators[func] = (
                classify(func),
                func is not _UNDER_WAY and collective_of(func),
            )
        op, collective = self._operators[func]
        if not collective and op.kind is None:
            return result
        part, inputs = self.meter.part, list(tensors_in(args))
        self.events[part] += max(1, num_tensors(args)) if op.kind == "optimizer" else 1
        if not collective:
            call = (func, tuple((t.shape, t.dtype) for t in inputs))
            self.calls[part, call] += 1
            self.least[call] = min(took, self.least.get(call, took))
        return result

    def kernels(self, tiny: int) -> Counter[str]:
        """Return the nanoseconds by part that CPU kernels take beyond tiny operations, which take `tiny`."""
        total: Counter[str] = Counter()
        for (part, call), count in self.calls.items():
            total[part] += count * max(0, self.least[call] - tiny)
        return total


def num_tensors(args: Any) -> int:
    """Return the length of the first list of tensors among arguments."""
    lists = (a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor))
    return len(next(lists, ()))


def measure_job(config: JobConfig, layout: Layout, **options: Any) -> dict[str, float]:
    """Return the pace of a tiny job, in a process of its own. `options` are those of `measure`."""
    if config.model.sizes.num_params > _LARGEST:
        raise ValueError("its sizes have names of their own, and are not made small")
    device = torch.device("cpu")
    store = torch_compat.find("torch.testing._internal.distributed.fake_pg", "FakeStore")()
    dist.init_process_group("fake", store=store, rank=0, world_size=layout.world_size)
    try:
        mesh = build_mesh(device.type, **layout.degrees)
        return measure(lambda: job_program(config, layout, device, mesh), **options)
    finally:
        dist.destroy_process_group()


def measure(
    build: Callable[[], Program],
    *,
    clock: Callable[[], int] = thread_time_ns,
    keep_kernels: bool = False,
    rounds: int = _ROUNDS,
) -> dict[str, float]:
    """Return the host's pace by part, in tiny operations.

    Args:
        build: Builds the program, with tiny sizes, on CPU tensors. The process group is there.
        clock: Nanoseconds of this thread.
        keep_kernels: Leave CPU kernels in, to compare with a real step on a CPU.
        rounds: Measured steps.
    """
    torch.set_num_threads(1)
    meter = HostMeter(clock)
    steps: list[Counter[str]] = []
    bursts: list[float] = []
    a, b = torch.ones(16, 64), torch.ones(16, 64)
    with ExitStack() as stack:
        stack.enter_context(meter.watch_hooks())
        program = build()
        stack.enter_context(valid_counts())
        stack.enter_context(meter.watch(program))
        gc.collect()
        gc.disable()  # as the trainer does
        stack.callback(gc.enable)
        program.train(1)  # the first step makes states and learns shapes
        for step in range(2, rounds + 2):
            bursts.append(_each(clock, lambda: torch.add(a, b)))
            meter.enter("forward")
            meter.spent.clear()
            meter.calls = 0
            program.train(step)
            meter.enter("forward")
            steps.append(Counter(meter.spent))
        calls, census, alone = meter.calls, Census(meter), Census(meter)
        for step in range(2):  # the same calls twice, so that each has a quick one
            census.events.clear()
            census.calls.clear()
            with census:
                program.train(rounds + 2 + step)
        with alone:
            for _ in range(100):
                torch.add(a, b)
    spent = Counter({part: median(s[part] for s in steps) for part in steps[0]})
    if not keep_kernels:
        spent.subtract(census.kernels(min(alone.least.values())))
    return paces(spent, census.events, calls, tiny=median(bursts))


def paces(
    spent: Mapping[str, float], events: Mapping[str, int], calls: int, *, tiny: float
) -> dict[str, float]:
    """Return the pace of each part in tiny operations.

    Args:
        spent: Nanoseconds of the host by part.
        events: Number of events by part.
        calls: Number of calls of blocks.
        tiny: Nanoseconds of a tiny operation.
    """
    result: dict[str, float] = {}
    for part in spent:
        phase, _, inner = part.partition(" ")
        if not inner and events.get(part):
            result[part] = max(0.0, spent[part]) / events[part] / tiny
        elif inner:
            inside = spent[part] + (spent.get(f"{phase} hooks", 0) if inner == "block" else 0)
            result[part] = max(0.0, inside) / calls / tiny
    return result


def _each(clock: Callable[[], int], work: Callable[[], Any]) -> float:
    """Return the nanoseconds of one of many calls."""
    start = clock()
    for _ in range(_BURST):
        work()
    return (clock() - start) / _BURST


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
