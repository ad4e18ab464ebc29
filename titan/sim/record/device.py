"""Fake accelerator: the device type "sim", which torch believes to run on and which records its work.

It is torch's PrivateUse1 backend in Python, so that any build of torch will do. Tensors on it are
fake (no memory, no values); its streams and events only report the host's calls. Whether a device
has a kernel of an operator decides how torch decomposes an operation. So the kernels of CUDA are
declared, as on an H100: fused attention, fused RMSNorm.

There is one device per process, and a process records one trace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

from titan.parallel import documents
from titan.parallel.block_attention import AttentionSpec
from titan.sim.record import autocast, torch_compat
from titan.sim.record.trace import (
    COMPUTE_STREAM,
    AwaitEvent,
    AwaitStream,
    RecordEvent,
    Synchronize,
)

NAME = "sim"
_aten = torch.ops.aten

# Receiver of the device's events; the recorder replaces it.
_report: Callable[[Any], None] = lambda _: None  # noqa: E731
_stream_numbers, _event_numbers = count(), count()
_TYPE = 20  # c10::DeviceType::PrivateUse1
SECOND_STREAM = COMPUTE_STREAM + 1
"""Stream that fused collectives and matmuls of compiled programs alternate with, in any program."""


def begin() -> None:
    """Restart the numbering of streams for another program."""
    # Streams that the program makes are numbered in order, so equal programs get equal traces.
    global _stream_numbers
    _stream_numbers = count(SECOND_STREAM + 1)


def report_to(function: Callable[[Any], None]) -> None:
    """Set the function that receives the calls of streams and events, as events of titan.sim.record.trace."""
    global _report
    _report = function


def number_of_event() -> int:
    """Return a number that no event has yet."""
    return next(_event_numbers)


class Stream:
    """Fake stream, with the methods of torch.cuda.Stream that torch and titan call."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, number: int | None = None, **_: Any
    ) -> None:
        self.number = next(_stream_numbers) if number is None else number
        self.stream_id, self.device_index, self.device_type = self.number, 0, _TYPE
        # A stack, since one stream may be entered within itself.
        self._before: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        """Report a wait for all work of another stream."""
        _report(AwaitStream(self.number, other.number))

    def wait_event(self, event: Event) -> None:
        """Report a wait for an event."""
        # An event that was never recorded is done, as in CUDA.
        if event.number >= 0:
            _report(AwaitEvent(self.number, event.number))

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event on this stream, and return it."""
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        """Report that the host waits for this stream."""
        _report(Synchronize(self.number, "stream synchronised"))

    def query(self) -> bool:
        """Return True: all work is done."""
        # There is no progress to ask about during a recording. "Done" is the answer that makes no
        # caller poll.
        return True

    def __enter__(self) -> Stream:
        self._before.append(_module.current)
        _module.current = self
        return self

    def __exit__(self, *_: Any) -> None:
        _module.current = self._before.pop()


class Event:
    """Fake event. Each recording has a separate number, so that a wait refers to the last recording."""

    def __init__(self, *_: Any, **__: Any) -> None:
        # Not recorded yet.
        self.number = -1

    def record(self, stream: Stream | None = None) -> Event:
        """Report a recording of this event."""
        self.number = number_of_event()
        _report(RecordEvent((stream or _module.current).number, self.number))
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for this event."""
        (stream or _module.current).wait_event(self)

    def synchronize(self) -> None:
        """Report that the host waits for this event."""
        # Stream -1: the host waits.
        if self.number >= 0:
            _report(AwaitEvent(-1, self.number))

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True


class Module:
    """Fake device module torch.sim, with the functions of torch.cuda that torch and titan call."""

    Stream, Event = Stream, Event

    def __init__(self) -> None:
        self.default = self.current = Stream(number=COMPUTE_STREAM)

    def stream(self, stream: Stream | None) -> Any:
        return nullcontext() if stream is None else stream

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def default_stream(self, device: Any = None) -> Stream:
        return self.default

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def synchronize(self, device: Any = None) -> None:
        _report(Synchronize(-1, "device synchronised"))

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        """Return False. torch asks this before it seeds a device's generators."""
        # torch asks this before it seeds a device's generators.
        return False

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Tensor:
        # The size does not matter: activation checkpointing saves and restores it unread.
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        # An H100. Libraries choose kernels by it: float8 needs 8.9, FlashAttention 8.0.
        return (9, 0)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_module = Module()
_library: list[Any] = []  # registrations live as long as it does


def current() -> Stream:
    """Return the stream that the host issues to."""
    return _module.current


def current_stream() -> int:
    """Return the number of the stream that the host issues to."""
    return _module.current.number


def register() -> torch.device:
    """Register the device with torch, and return it. Only the first call in a process counts."""
    if not _library:
        torch_compat.register_backend(NAME, _module)
        kernels, fallbacks = (torch.library.Library(name, "IMPL") for name in ("aten", "_"))
        _library.extend([kernels, fallbacks])
        _declare(kernels)
        autocast.declare(kernels, fallbacks, NAME)
    return torch.device(NAME, 0)


# Operators that torch decomposes, or runs by other means, on a device without a kernel for them.
_DECLARED = (
    "silu_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    # No kernel of NVIDIA's devices: it stands for FlexAttention.
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)


# Fake tensors stop a call before it reaches the backend, so a declared kernel is looked up and
# never run.
def _never(*_: Any, **__: Any) -> Any:
    """Raise AssertionError.

    Fake tensors stop a call before it reaches the backend, so a declared kernel never runs.
    """
    raise AssertionError("a kernel of the fake device ran: its tensors must be fake")


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask as an additive bias, as fused kernels take it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=q.dtype, device=q.device))


def _declare(library: Any) -> None:
    """Declare the kernels of an H100."""
    for name in _DECLARED:
        library.impl(name, _never, "PrivateUse1")
    # Autograd would see the composite operation otherwise, and take it apart before the kernels
    # above are asked.
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    documents.flex_attention = _flex_attention
    library.impl("rms_norm", _rms_norm, "AutogradPrivateUse1")
    try:
        torch_compat.find("torch._meta_registrations", f"meta_{_DECLARED[-1]}")
    except torch_compat.MissingName:  # torch 2.11
        library.impl(_DECLARED[-1], _flex_gradients, "Meta")


def _flex_gradients(_: Tensor, *inputs: Tensor, **__: Any) -> tuple[Tensor | None, ...]:
    """Return gradients of queries, keys and values, and none of a bias."""
    return (*map(torch.empty_like, inputs[:3]), None)


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run RMSNorm as one fused kernel."""
    return _aten._fused_rms_norm(x, shape, weight, eps)[0]


def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    scale: float | None = None,
    return_aux: AuxRequest | None = None,
    **_: Any,
) -> Any:
    """Run one fused kernel in place of compiled FlexAttention.

    A sliding window is recorded as attention over `window` keys.
    """
    if spec.window:
        k, v = k[:, :, : spec.window], v[:, :, : spec.window]
    out, lse, *_more = _aten._scaled_dot_product_fused_attention_overrideable(
        q, k, v, None, 0.0, spec.causal, scale=scale
    )
    return (out, AuxOutput(lse=lse)) if return_aux else out


def _attention(
    q_BHSK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose a kernel of attention as sdp_utils.cpp does on compute capability 9.0, among those that `prefer_backend` left.

    With 16-bit inputs this is flash, which stands for cuDNN, too (attention.py of titan.sim.price), or cuDNN if there is a mask. With 32-bit inputs, and if the
    head dimensions of values and keys differ (which flash does not support), it is the
    memory-efficient kernel, except for grouped heads, which torch computes by separate matmuls.
    titan's models copy heads first in that case (titan/parallel/block_attention.py: match_heads).
    With 16-bit inputs cuDNN supports such values, too: the memory-efficient operation is recorded,
    and cost.py prices it as cuDNN's.
    """
    q, k, v = q_BHSK, k_BGTK, v_BGTK
    is_short, allowed = q.dtype in (torch.bfloat16, torch.float16), torch.backends.cuda
    is_flash = is_short and attn_mask is None and q.shape[-1] == v.shape[-1]
    if is_flash and allowed.flash_sdp_enabled():
        return _aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
    attn_mask = _added(attn_mask, q)
    # The kernel saves logsumexp for backward only where a gradient will be asked for.
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    settings = (attn_mask, needs_grad, dropout_p, is_causal)
    if is_short and attn_mask is not None and allowed.cudnn_sdp_enabled():
        return _aten._scaled_dot_product_cudnn_attention(q, k, v, *settings, scale=scale)[0]
    if q.shape[1] == k.shape[1] and allowed.mem_efficient_sdp_enabled():
        return _aten._scaled_dot_product_efficient_attention(q, k, v, *settings, scale=scale)[0]
    return _aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
