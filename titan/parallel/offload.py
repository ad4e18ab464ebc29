"""Offload of activations to host memory until the backward pass.

The tensors that a block saves for its backward pass are copied to the host while later blocks compute, and back while the backward
pass of the next block runs. It pays if the copies take less time than the computation that hides them: with long sequences and wide
models. With full activation checkpointing, only block inputs are copied.

Values do not change. Parameters stay on the device, and so do tensors that are too small to be worth a copy. A storage is copied
once, even if several views of it are saved.

An example with 4 blocks: the forward pass of block 1 hides the copies of block 0. The backward pass of block 2 starts the copies
of block 1 back. Block 3 keeps its tensors, since its backward pass comes at once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from .torch_compat import ActivationWrapper, waited
from .traits import blocks_in

_SMALLEST_BYTES = 2**14


def apply_offload(
    model: nn.Module, *, container: str = "layers", smallest_bytes: int = _SMALLEST_BYTES
) -> Offloader:
    """Wrap every block in `model.<container>` except the last, in place. The last one's backward pass comes at once.

    The wrapper goes around activation checkpointing and compilation, and inside FSDP.

    Args:
        model: a model that has the container.
        container: name of the container of the blocks.
        smallest_bytes: storages below this size stay on the device.

    Returns:
        The state that the blocks share.

    Raises:
        ValueError: there are less than two blocks.
    """
    offloader = Offloader(smallest_bytes)
    blocks, found = blocks_in(model, container)
    if len(found) == 1:
        raise ValueError(
            f"{container} has one block, whose backward pass comes at once: there is nothing to offload"
        )
    for name, block in list(found.items())[:-1]:
        blocks.register_module(name, _Offloaded(block, offloader))
    return offloader


class Offloader:
    """State that the blocks of a model share.

    Attributes:
        smallest_bytes: storages below this size stay on the device.
        num_bytes: number of bytes copied to the host so far.
        stream: stream of the copies, or None before the first one and on a CPU.
        latest: the last forward pass that began.
    """

    def __init__(self, smallest_bytes: int = _SMALLEST_BYTES) -> None:
        self.smallest_bytes = smallest_bytes
        self.num_bytes = 0
        self.stream: torch.Stream | None = None
        self.latest: weakref.ref[_Run] | None = None

    def run(self, block: nn.Module | None = None) -> _Run:
        """Begin one forward pass of `block`, and link it to the pass before.

        Args:
            block: the block, whose parameters stay on the device. None: no parameter is saved.
        """
        # The link to the block before lets the backward pass restore one block ahead.
        run = _Run(self, block, before=self.latest)
        self.latest = weakref.ref(run)
        return run

    def copy_stream(self, device: torch.device) -> torch.Stream | None:
        """Return the stream on which copies run, made at the first call. None on a CPU.

        Args:
            device: device of the saved tensors.
        """
        if self.stream is None and device.type != "cpu":
            self.stream = torch.Stream(device)
        return self.stream


class _Run:
    """One forward pass of one block, until its backward pass. Only the tensors that autograd saved keep it alive."""

    def __init__(
        self, offloader: Offloader, block: nn.Module | None, *, before: weakref.ref[_Run] | None
    ) -> None:
        self.offloader, self.before = offloader, before
        self.copies: list[_Copy] = []
        # The key is address and version. An entry lives as long as its storage: another storage may get the address.
        self.newest: weakref.WeakValueDictionary[tuple[int, int], _Copy] = (
            weakref.WeakValueDictionary()
        )
        # A block's own parameters are on the device anyway, and FSDP frees them.
        of_block = block.parameters() if block else ()
        parameters = (p.to_local() if isinstance(p, DTensor) else p for p in of_block)
        self.resident = {p.untyped_storage()._cdata for p in parameters}

    def pack(self, tensor: Tensor) -> Any:
        # A DTensor is stored as its local part and its layout.
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
        key = (
            storage._cdata,
            tensor._version,
        )  # a tensor that was written to since is copied again
        copy = self.newest.get(key)
        if copy is None:
            copy = _Copy(storage, tensor.device, self.offloader.copy_stream(tensor.device))
            newest = self.newest
            copy.original = weakref.ref(storage, lambda _: newest.pop(key, None))
            self.newest[key] = copy
            self.copies.append(copy)
            self.offloader.num_bytes += storage.nbytes()
        # The place of this view in the storage, to make it again on the way back.
        view = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())
        return copy, view

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # For a DTensor, `pack` returned its packed local part and its layout.
        what, how = packed
        if not isinstance(what, _Copy):
            mesh, placements, shape, stride = how
            return DTensor.from_local(
                self.unpack(what), mesh, placements, run_check=False, shape=shape, stride=stride
            )
        # Backward asks for the last saved tensor first: copy all of this block back, and start with the block before.
        self.begin_restoring()
        if self.before and (before := self.before()) is not None:
            before.begin_restoring()
        dtype, *place = how
        return torch.empty(0, dtype=dtype, device=what.device).set_(what.restored(), *place)

    def begin_restoring(self) -> None:
        for copy in self.copies:
            copy.begin_restoring()


class _Copy:
    """A storage's bytes on the host, and on the device again after they are asked for.

    On an accelerator, both copies use page-locked memory and a separate stream. The host waits for neither.
    """

    def __init__(
        self, storage: torch.UntypedStorage, device: torch.device, stream: torch.Stream | None
    ) -> None:
        self.device, self.stream = device, stream
        self.original: Any = (
            None  # a weak reference, with a callback for the end of the storage
        )
        self.on_device: Tensor | None = None
        self.ready: torch.Event | None = None
        # The whole storage as bytes, whichever views of it were saved.
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        if stream is None:
            self.host = flat.clone()
            return
        self.host = torch.empty_like(flat, device="cpu", pin_memory=True)
        # The copy may begin once the kernels that wrote the storage are done.
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream:
            self.host.copy_(flat, non_blocking=True)
        flat.record_stream(stream)  # its memory is not reused before the copy ends

    def begin_restoring(self) -> None:
        # On a CPU the copy is made at once: there is no stream to hide it on.
        if self.on_device is None and self.stream is None:
            self.on_device = self.host.clone()
        elif self.on_device is None and self.stream is not None:
            with self.stream:
                self.on_device = self.host.to(self.device, non_blocking=True)
            self.ready = self.stream.record_event()

    def restored(self) -> torch.UntypedStorage:
        """Return the bytes on the device. The current stream waits for them."""
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
