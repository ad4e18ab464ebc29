"""Forward passes of a model on meta, which compute nothing: what its modules are called with, and whether it runs in parts.

A pipeline stage lacks modules, and a tensor-parallel rank has some heads and channels. Both are tried here, so that a model whose code does
not allow it is refused before a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import attention
from .adopt import Ends
from .errors import UnsupportedModelError, refusing
from .flows import Flows
from .plan import Part

_PROBE_LENGTH = 8
_NO_DATA = "its forward pass does not run without data"


class Watch(TorchDispatchMode):
    """Watch for operations that layouts would compute in another way.

    These are random numbers, which ranks draw in other orders (dropout modules are an exception: titan gives them generators), and
    convolutions over tokens, which would stop at the borders of ranks and cross those of documents (titan's own do not).

    Attributes:
        where: name of the module that draws, or "".
        convolves: name of the module that was called last before a convolution, or "".
        flows: where the outputs of linear layers go.
    """

    def __init__(self, parts: dict[int, Part]) -> None:
        super().__init__()
        self.parts, self.where, self.convolves = parts, "", ""
        self.flows = Flows()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self.where:
            last = [*self.parts.values()][-1]
            if not isinstance(last.module, nn.modules.dropout._DropoutNd):
                self.where = last.name
        if func is torch.ops.aten.convolution.default:
            self.convolves = self.convolves or [*self.parts.values()][-1].name
        result = func(*args, **(kwargs or {}))
        self.flows.follow(func, args, kwargs, result)
        return result


@contextmanager
def _on_meta(model: Any) -> Iterator[None]:
    """Run without gradients, and keep tensors that are no buffers, which a forward pass may move to the device of its input."""
    owners = [*model.modules(), *model.hf.modules()]
    plain = [(m, k, v) for m in owners for k, v in vars(m).items() if torch.is_tensor(v)]
    try:
        with torch.no_grad():
            yield
    finally:
        for module in owners:  # such as frequencies of long sequences, which a first call makes
            for name in [k for k, v in vars(module).items() if torch.is_tensor(v)]:
                del module.__dict__[name]
        for module, name, tensor in plain:
            module.__dict__[name] = tensor


def run_once(model: Any) -> list[Part]:
    """Return each module with parameters and what it is called with, of one forward pass on meta.

    Args:
        model: the `TransformersModel`.

    Raises:
        UnsupportedModelError: titan cannot run the model.
    """
    parts: dict[int, Part] = {}
    handles, is_again = [], []

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        given = next(iter(tensors), None)
        part = parts.setdefault(id(module), Part(name, module))
        if not is_again:
            part.is_late = part.is_late or id(model.layers["0"]) in parts
            part.sources = dict(seen.flows.of(given))
        part.input = given
        is_block = re.fullmatch(r"layers\.\d+", name) is not None
        if is_block and sum(x.shape == tensors[0].shape for x in tensors) > 1:
            model.reads_twice = name

    def after(name: str, module: nn.Module, _: Any, __: Any, output: Any) -> None:
        parts[id(module)].output = output
        if isinstance(module, nn.Linear) and isinstance(output, Tensor) and not is_again:
            seen.flows.begin(name, output, -1)
        if name.startswith("layers.") and name.count(".") == 1:
            model.returns = len(output) if isinstance(output, tuple) else 0

    for name, module in model.named_modules():
        if name and name != "layers":
            hooks = partial(before, name), partial(after, name)
            handles.append(module.register_forward_pre_hook(hooks[0], with_kwargs=True))
            handles.append(module.register_forward_hook(hooks[1], with_kwargs=True))
    try:
        tokens = torch.zeros(1, _PROBE_LENGTH, dtype=torch.int64, device="meta")
        seen = Watch(parts)
        with refusing(_NO_DATA), _on_meta(model), attention.recording() as record, seen:
            record.follow = seen.flows.begin
            model(tokens, document_ids_BS=tokens)
        is_again.append(True)
        # Once more as in a run, in which transformers makes no masks.
        model.hf.config._attn_implementation = attention.RUN
        with refusing(_NO_DATA), _on_meta(model), attention.recording():
            model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    if seen.where:
        raise UnsupportedModelError(f"{seen.where} draws random numbers in training")
    _complete(parts, record, seen.flows)
    model.without_documents, model.reach = record.without_documents, record.reach
    mixers = {*record.calls, *record.recurrences}
    for name, block in model.layers.items():
        if not any(id(module) in mixers for module in block.modules()):
            raise UnsupportedModelError(
                f"layers.{name} ({type(block).__name__}) has neither attention through transformers' interface nor a recurrence that titan has"
            )
    if seen.convolves:
        raise UnsupportedModelError(
            f"a convolution follows {seen.convolves}, and titan cannot split it over ranks and documents"
        )
    return [*parts.values()]


def _complete(parts: dict[int, Part], record: attention.Probe, flows: Flows) -> None:
    """Fill in what a part does beside its call."""
    for part in parts.values():
        part.attention = record.calls.get(id(part.module))
        part.recurrence = record.recurrences.get(id(part.module))
        part.is_cut = part.name in flows.cut
        if part.attention is not None:
            part.roles = tuple({*flows.of(x)} for x in part.attention.inputs)


def fails(model: Any, first: list[str]) -> str:
    """Return why the model does not run without modules that other pipeline stages have, or ""."""
    shape, dtype = [1, _PROBE_LENGTH], torch.int64
    if model.tok_embeddings is None:
        shape, dtype = [*shape, model.config.dim], torch.get_default_dtype()
    try:
        with _on_meta(model), attention.recording():
            model(torch.zeros(shape, dtype=dtype, device="meta"))
    except Exception as error:
        text = " ".join(str(error).split())[:100]
        return f"its forward pass does not run in stages, with {', '.join(first)} on the first: {text}"
    return ""


def fails_in_parts(model: Any, plan: dict[str, str]) -> str:
    """Return why the code does not run with half of the heads and channels, as on two tensor-parallel ranks, or ""."""
    if "gather_heads" in plan.values() or any(
        block.heads % 2 for block in model.config.heads_of_blocks
    ):
        return ""

    def half(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output[..., : output.shape[-1] // 2]

    def whole(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        weight = next(
            module.parameters()
        )  # (outputs, inputs) of a matrix, (channels,) of a norm
        return F.pad(args[0], (0, weight.shape[-1] - args[0].shape[-1]))

    handles = []
    for name, module in model.named_modules():
        style = next((s for pattern, s in plan.items() if fnmatchcase(name, pattern)), "")
        style, _, number = style.partition(":")
        if style == "kv_colwise" and int(number or model.config.n_kv_heads) % 2:
            continue  # both ranks compute the one head
        if style in ("colwise", "kv_colwise", "colwise_part", "gather_colwise", "width_norm"):
            handles.append(module.register_forward_hook(half))
        if style in ("rowwise", "width_norm"):
            handles.append(module.register_forward_pre_hook(whole))
    text = fails(model, [])
    for handle in handles:
        handle.remove()
    _, _, why = text.partition(" on the first: ")
    return f"its code does not run with a part of the heads: {why}" if text else ""


def place_by_use(model: Any, ends: Ends, probe: list[Part]) -> tuple[Ends, str]:
    """Sort the modules beside the blocks by their calls, which may come in another order than their names.

    Modules without parameters that run after the blocks, such as a plain norm, move to the last stage.

    Args:
        model: the `TransformersModel`.
        ends: modules with parameters beside the blocks.
        probe: calls of modules, in their order.

    Returns:
        The modules before and after the blocks, and the name of a plain module that runs before and after them, or "".
    """
    parts = {part.name: part for part in probe}
    late = [*parts][[*parts].index("layers.0") :]
    both = [*ends.first, *ends.last]
    first = [n for n in both if n not in late and (n in parts or n in ends.first)]
    plain = [n for n in model.on_all_stages if n in parts and parts[n].is_late]
    shared = "".join([n for n in plain if n not in late][-1:])
    moved = [n for n in plain if n in late]
    model.on_all_stages = tuple(n for n in model.on_all_stages if n not in moved)
    return Ends(first, [*moved[::-1], *(n for n in both if n not in first)]), shared
