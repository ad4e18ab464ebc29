"""Two evaluations of the same forward and backward pass, compared bit for bit on each rank, every `fault_tolerance.replay_every` steps.

For each output of a module and its gradient, and for each parameter's gradient, a rank keeps one number that follows from every bit and its
place. A device that computes right gives equal numbers. Nothing is gathered but the place of the first difference.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from titan.base.failure import RunFailure
from titan.data.base import TensorBatch
from titan.optim.states import local
from titan.run.hook import Hook
from titan.run.progress import RunProgress

from .digests import mixed
from .module_hooks import hook_outputs, is_recomputation

Place = tuple[str, str, int]
"""Kind, module or parameter, and number of the call."""
Bits = dict[Place, Tensor]
_WORDS = 2**20  # of 8 bytes, at a time: memory for 24 MiB
_MULTIPLIER = 0x2545F4914F6CDD1D  # odd, so that no bit is lost


class BitsError(RunFailure):
    """Different bits of the same computation. The message names rank, host and module."""

    kind = "replay_differs"


def bits_of(parts: Sequence[nn.Module], passes: Callable[[], object]) -> Bits:
    """Return the fingerprints of what a forward and backward pass computes, in order.

    It leaves no gradients, and buffers as they were.

    Args:
        parts: the model. Its parameters have no gradients.
        passes: runs the passes.
    """
    bits: Bits = {}
    calls = Counter[tuple[str, str]]()
    last: Any = None

    def note(kind: str, name: str, x: Tensor | None) -> None:
        if x is None:  # no gradient comes from behind
            return
        calls[kind, name] += 1
        bits[kind, name, calls[kind, name]] = fingerprint(x)

    def see(name: str, _: nn.Module, __: Any, out: Any) -> None:
        # A parent may return what its child did, and two hooks see an output that no layout changes.
        nonlocal last
        if out is last:
            return
        last, again = out, is_recomputation()
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                kind = "output" if x.is_floating_point() else "choice"
                note("recomputed " * again + kind, name, x)
                if x.requires_grad and not again:
                    x.register_hook(partial(note, "output gradient", name))

    buffers = [buffer for part in parts for buffer in part.buffers()]
    before = [buffer.clone() for buffer in buffers]
    # What a rank computes itself, and what its layout makes of it.
    hooks = [
        h
        for part in parts
        for early in (True, False)
        for h in hook_outputs(part, see, first=early)
    ]
    try:
        passes()
        for part in parts:
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    note("gradient", name, parameter.grad)
    finally:
        for remove in reversed(hooks):
            remove()
        last = None
        with torch.no_grad():
            for buffer, kept in zip(buffers, before, strict=True):
                buffer.copy_(kept)
        for part in parts:
            part.zero_grad()
    return bits


def first_difference(
    one: Mapping[Place, Tensor], two: Mapping[Place, Tensor]
) -> tuple[int, Place] | None:
    """Return number and place of the first difference of two evaluations, or None. It waits for the device."""
    pairs = enumerate(zip_longest(one.items(), two.items()))
    return next(((number, (a or b)[0]) for number, (a, b) in pairs if a != b), None)


@torch.no_grad()
def fingerprint(x: Tensor) -> Tensor:
    """Return a number that follows from each bit of a rank's part of a tensor and its place, as a scalar int64 on its device.

    It is a sum modulo 2**64 of words of 8 bytes, each times an odd number of its place. So any one bit that changes changes it.
    """
    data = local(x).detach().resolve_conj().contiguous().flatten().view(torch.uint8)
    data = nn.functional.pad(data, (0, -len(data) % 8))
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words in data.view(torch.int64).split(_WORDS):
        # An odd factor leaves the highest bit what it is, so two flips of it would cancel.
        words = words ^ (words >> 32)
        total = total * _MULTIPLIER + (words * _factors(words.device)[: len(words)]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    """Return odd factors for the words of a piece."""
    return mixed(torch.arange(_WORDS, device=device) * 0x1E3779B97F4A7C15) | 1


def describe(found: Iterable[tuple[int, Place, int, str] | None]) -> str:
    """Return which ranks differ first, and where, or "".

    Args:
        found: for each rank, its first difference, its number and its host.
    """
    differing = [one for one in found if one is not None]
    if not differing:
        return ""
    earliest, (kind, name, _), *_ = min(differing)
    first = [one for one in differing if one[0] == earliest]
    who = " and ".join(f"rank {rank} on {host}" for *_, rank, host in first[:4])
    who += f" and {len(first) - 4} more" if len(first) > 4 else ""
    return f"{who}: other bits the second time, first in the {kind} of {name or 'the model'}"


# ---- the hook -------------------------------------------------------------------------------------


class Replay(Hook):
    """Check of the devices before a step. The step itself computes what it would compute without it."""

    priority = 30

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, self.section = trainer, trainer.config.fault_tolerance

    def before_forward(self, batches: Sequence[TensorBatch]) -> None:
        """Compute the first micro-batch of a step twice.

        Raises:
            BitsError: bits differ on some rank, and the run has to stop. All ranks raise it.
        """
        trainer = self.trainer
        if trainer.step % self.section.replay_every:
            return
        parts = trainer.train_step.model_parts
        with self._deterministic():
            one, two = (bits_of(parts, lambda: self._passes(batches)) for _ in range(2))
        found = first_difference(one, two)
        mine = None if found is None else (*found, trainer.rank, platform.node())
        of_all: list[Any] = [mine] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(of_all, mine)
        if not (text := describe(of_all)):
            return
        text = f"replay before step {trainer.step}: {text}"
        if self.section.on_replay_mismatch == "stop":
            raise BitsError(
                f"{text}. Its device or memory is broken, or an operation adds up in another order each time: "
                "debug.deterministic = true rules that out"
            )
        trainer.announce(f"{text}. TRAINED ON")

    def _passes(self, batches: Sequence[TensorBatch]) -> None:
        """Run the forward and backward pass of the first micro-batch, as the step will."""
        step, trainer = self.trainer.train_step, self.trainer
        (model,) = step.model_parts
        step.draws.begin(trainer.step)
        step.compute_scales()
        step.balance.begin(
            num_sequences=trainer.sequences_per_step, num_tokens=trainer.tokens_per_step
        )
        batch = step.to_local(batches[0])
        step.prepare_backward(model, is_last=True)
        loss = step.loss_sum(model(batch.input, **batch.inputs), batch.targets)
        (loss / batch.input.numel()).backward()

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Use deterministic algorithms within the context. Compiled programs keep theirs, since a switch would compile others."""
        before = torch.get_deterministic_debug_mode()
        if self.trainer.train_step.compile_log is None and not before:
            torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def hook(trainer: RunProgress) -> Replay | None:
    """Return the hook of a run with `fault_tolerance.replay_every`."""
    return Replay(trainer) if trainer.config.fault_tolerance.replay_every else None
