"""Keep activations in host memory until the backward pass.

What a block saves for its backward pass is copied to the host while later blocks compute, and back while the backward pass of the
block after it runs. It pays where the copies are shorter than the computation they hide behind: long sequences, wide
models. With full activation checkpointing, block inputs are all there is to copy.

Values do not change. Parameters stay where they are, and so does what is too small to be worth a copy. A storage is copied once,
however many views of it are saved.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from .torch_compat import ActivationWrapper, waited

_SMALLEST_BYTES = 2**14


def apply_offload(
    model: nn.Module, *, container: str = "layers", smallest_bytes: int = _SMALLEST_BYTES
) -> Offloader:
    """Wrap every block in `model.<container>` but the last, whose backward pass comes at once, in place.

    smallest_bytes: storages below this size stay on the device. Goes around activation checkpointing and
    compilation, inside FSDP.
    """
    offloader = Offloader(smallest_bytes)
    blocks = model.get_submodule(container)
    for name, block in list(blocks.named_children())[:-1]:
        blocks.register_module(name, _Offloaded(block, offloader))
    return offloader


class Offloader:
    """Hold what the blocks of a model share. num_bytes: copied to the host so far."""

    def __init__(self, smallest_bytes: int = _SMALLEST_BYTES) -> None:
        self.smallest_bytes = smallest_bytes
        self.num_bytes = 0
        self.stream: torch.Stream | None = None
        self.latest: weakref.ref[_Run] | None = None

    def run(self, block: nn.Module | None = None) -> _Run:
        """Begin one forward pass of `block`, and link it to the pass before. None: no parameter is packed."""
        # The link to the block before lets the backward pass restore one block ahead.
        run = _Run(self, block, before=self.latest)
        self.latest = weakref.ref(run)
        return run

    def copy_stream(self, device: torch.device) -> torch.Stream | None:
        """Return the stream that copies run on, made at the first call. None on a CPU."""
        if self.stream is None and device.type != "cpu":
            self.stream = torch.Stream(device)
        return self.stream


class _Run:
    """One forward pass of one block, until its backward pass; only what autograd saved of it keeps it alive."""

    def __init__(
        self, offloader: Offloader, block: nn.Module | None, *, before: weakref.ref[_Run] | None
    ) -> None:
        self.offloader, self.before = offloader, before
        self.copies: list[_Copy] = []
        # By address and version, as long as the storage lives: another may get its address.
        self.newest: weakref.WeakValueDictionary[tuple[int, int], _Copy] = (
            weakref.WeakValueDictionary()
        )
        # A block's own parameters are on the device anyway, and FSDP frees them by itself.
        of_block = block.parameters() if block else ()
        parameters = (p.to_local() if isinstance(p, DTensor) else p for p in of_block)
        self.resident = {p.untyped_storage()._cdata for p in parameters}

    def pack(self, tensor: Tensor) -> Any:
        # A DTensor is stored as its local part and what is needed to put it together again.
        if isinstance(tensor, DTensor):
            spec = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
            return self.pack(waited(tensor.to_local())), spec
        tensor = waited(tensor)
        if type(tensor) not in (Tensor, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        # Small tensors are not worth a copy; parameters stay on the device anyway.
        if storage.nbytes() < self.offloader.smallest_bytes or storage._cdata in self.resident:
            return tensor
        key = (storage._cdata, tensor._version)  # what was written to since is another copy
        copy = self.newest.get(key)
        if copy is None:
            copy = _Copy(storage, tensor.device, self.offloader.copy_stream(tensor.device))
            copy.original = weakref.ref(storage, partial(_forget, self.newest, key))
            self.newest[key] = copy
            self.copies.append(copy)
            self.offloader.num_bytes += storage.nbytes()
        # Where in the storage this view is, to make it again on the way back.
        view = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        return copy, view

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # What `pack` returned for a DTensor: its packed local part, and its layout.
        what, how = packed
        if not isinstance(what, _Copy):
            mesh, placements, shape, stride = how
            return DTensor.from_local(
                self.unpack(what), mesh, placements, run_check=False, shape=shape, stride=stride
            )
        # Backward asks for the last saved tensor first: bring all of this block back, and start on the one before.
        self.begin_restoring()
        if (before := self.before and self.before()) is not None:
            before.begin_restoring()
        dtype, *place = how
        return torch.empty(0, dtype=dtype, device=what.device).set_(what.restored(), *place)  # pyright: ignore

    def begin_restoring(self) -> None:
        for copy in self.copies:
            copy.begin_restoring()


def _forget(copies: Any, key: tuple[int, int], _: Any) -> None:
    copies.pop(key, None)


class _Copy:
    """Hold a storage's bytes on the host, and on the device again once they are asked for.

    On an accelerator both copies use page-locked memory and a separate stream. The host waits for neither.
    """

    def __init__(
        self, storage: torch.UntypedStorage, device: torch.device, stream: torch.Stream | None
    ) -> None:
        self.device, self.stream = device, stream
        self.original: Any = None  # a weak reference, and what happens at its end
        self.on_device: Tensor | None = None
        self.ready: torch.Event | None = None
        # The whole storage as bytes, whichever views of it were saved.
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)  # pyright: ignore
        if stream is None:
            self.host = flat.clone()
            return
        self.host = torch.empty_like(flat, device="cpu", pin_memory=True)
        # The copy may begin once the kernels that wrote the storage are done.
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            self.host.copy_(flat, non_blocking=True)
        flat.record_stream(stream)  # its memory is not given away before it is copied

    def begin_restoring(self) -> None:
        # On a CPU the copy is made at once: there is no stream to hide it on.
        if self.on_device is None and self.stream is None:
            self.on_device = self.host.clone()
        elif self.on_device is None and self.stream is not None:
            with self.stream:
                self.on_device = self.host.to(self.device, non_blocking=True)
            self.ready = self.stream.record_event()

    def restored(self) -> torch.UntypedStorage:
        """Return the bytes on the device, there before what the current stream does next."""
        assert self.on_device is not None
        if self.ready is not None:
            current = torch.accelerator.current_stream(self.device)
            # The device waits for the copy; the host does not.
            current.wait_event(self.ready)
            self.on_device.record_stream(current)
        return self.on_device.untyped_storage()


class _Offloaded(ActivationWrapper):
    def __init__(self, block: nn.Module, offloader: Offloader) -> None:
        super().__init__(block)
        self._offloader = offloader

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation saves nothing for backward.
        if not torch.is_grad_enabled():
            return self._checkpoint_wrapped_module(*args, **kwargs)
        run = self._offloader.run(self._checkpoint_wrapped_module)
        with saved_tensors_hooks(run.pack, run.unpack):
            return self._checkpoint_wrapped_module(*args, **kwargs)
