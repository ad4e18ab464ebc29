"""Tensor parallelism: each matrix is split over a mesh axis, and the sequence is split between the matrices.

The pattern is Megatron's (arXiv:1909.08053) with sequence parallelism (arXiv:2205.05198), on DTensor. A plan beside the
model names a style for each module. The model itself does not change. With S the sequence and tp ranks:

    style            weight        input -> output of the module, local shapes
    vocab_embedding  rows V/tp     (B, S) -> (B, S/tp, D): each rank looks up its rows, reduce-scatter
    sequence         replicated    (B, S/tp, D) -> same: a norm of each rank's tokens
    gather_input     none          first tensor (B, S/tp, D) -> (B, S, D), all-gather; other arguments are unchanged;
                                   `gather_input:x` gathers the argument `x` of forward
    gather_heads     values /tp    the same for a module that holds a parameter with one value or row for each query head
    gather_whole     replicated    the same for a module whose own parameters all ranks use as they are
    colwise          columns /tp   (B, S, D) -> (B, S, F/tp)
    kv_colwise       columns /tp   like `colwise`; replicated if there are more ranks than key/value heads: each rank
                                   then keeps the one head that its query heads read; `kv_colwise:2` for a layer with 2 such heads
    gather_colwise   columns /tp   (B, S/tp, L) -> (B, S, F/tp): all-gather first; the columns are key/value heads
    gather_shared    none          (B, S/tp, K) -> (B, S, K), all-gather of keys that the heads of all ranks share
    rowwise          rows /tp      (B, S, F/tp) -> (B, S/tp, D), reduce-scatter
    whole            replicated    (B, S, D) -> same: no sequence parallelism, every rank computes all of it
    whole_input      none          the same for a module with split layers: the gradients of its input are added up before one
                                   all-reduce, and so are the partial sums that it returns
    rowwise_whole    rows /tp      (B, S, F/tp) -> (B, S, D), all-reduce
    rowwise_part     rows /tp      (B, S, F/tp) -> (B, S, D), a partial sum on each rank, for `whole_input` around it
    tokens           none          (B, S/tp, D) -> same, as a plain tensor: experts, which take each rank's own tokens
    token_weights    replicated    like `sequence`, with a plain tensor as output: the matrix of a router, or a norm after attention or a
                                   feed-forward layer, whose input is a plain tensor
    local_tokens     replicated    (B, S/tp, D) -> same, for a module of any code that treats each token alone, with all inside: a
                                   router with its experts, or a feed-forward layer without a plan
    partial          replicated    (B, S, D) -> (B, S, F), on plain tensors, within `gather_input`: latents or norms that this rank's
                                   heads use, so that its gradients are partial sums
    colwise_part     columns /tp   the same with split columns
    replicated       replicated    the same with whole gradients: between `colwise_gather` and `rowwise_split`
    colwise_gather   columns /tp   (B, S, D) -> (B, S, F), all-gather of the columns: fused matrices, which code cuts by channel
    rowwise_split    rows /tp      (B, S, F) -> (B, S/tp, D): each rank takes its part of F, reduce-scatter
    experts          -             unchanged: `apply_ep` and FSDP split experts
    head_norm        replicated    (B, S, H/tp, K) -> same: a norm of each of the rank's heads
    head_vector      values /tp    none -> (H/tp,): a module that returns its weight, a number for each query head
    own_heads        none          (B, H, S, K) -> (B, H, S, V) on plain tensors, for a module that treats each head alone: each rank computes
                                   its heads, all-gather after
    cut_sequence     replicated    (N, T, ...) -> (N, T'/tp, D): every rank computes the output and keeps its part; zeros after T
                                   make the parts equal
    place            none          x (B, S/tp, D), features (N, T/tp, D), index (B, S) -> (B, S/tp, D): all-gather of features;
                                   each rank takes its part of the index; the arguments have this order
    width_norm       channels /tp  (B, S, F/tp) -> same: a norm over the channels of all ranks, all-reduce of the squares
    vocab_output     columns V/tp  (B, S/tp, D) -> (B, S, V/tp) for the vocabulary-parallel loss, or (B, S, V);
                                   -> (B, S, D) if the loss multiplies by the weight
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .alike import require_alike_modules
from .float8 import is_tensorwise, rows_style
from .random_numbers import require_own_part
from .tensor_styles import (
    SEQUENCE_DIM,
    AllGatherFeatures,
    Around,
    GatherSequence,
    LocalWeights,
    OwnHeads,
    ReplicatedHeads,
    SequenceShard,
    argument_names,
    cut_sequence,
    gathered,
    local,
    read_as,
    replicated,
    summed,
    width_shard,
)

GATHER, GATHER_HEADS, GATHER_WHOLE = "gather_input", "gather_heads", "gather_whole"
_LINEAR = ("colwise", "rowwise", "vocab_output")
"""Words in the names of styles that split an nn.Linear."""


def _take_by_position(module: nn.Module) -> None:
    """Register a hook that moves a first argument by name to its position, from which all styles read it."""
    names = argument_names(module)[:1]

    def reorder(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args or not kwargs:
            return args, kwargs
        first = names[0] if names and names[0] in kwargs else next(iter(kwargs))
        return (kwargs[first],), {
            name: value for name, value in kwargs.items() if name != first
        }

    module.register_forward_pre_hook(reorder, with_kwargs=True)


def apply_tp(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    plan: Mapping[str, str],
    num_kv_heads: int,
    loss_parallel: bool = True,
    output_in_loss: bool = False,
) -> None:
    """Split `model` in place over the one axis of `mesh`. Shared parameters stay shared.

    The number of ranks must divide the length of the sequence, the number of query heads and the outputs of each `colwise`
    layer. It must divide the number of key/value heads, or be a multiple of it.

    Args:
        model: the model, or a pipeline stage of it. It may be on the meta device.
        mesh: mesh with the tp axis only.
        plan: pattern of module names (`layers.*.attention.wq`) -> style, from the table above. The first pattern that
            matches counts. A module that no pattern matches does not change. A pattern may match nothing, as on a pipeline stage.
        num_kv_heads: number of key/value heads of the whole model.
        loss_parallel: keep the logits split over the vocabulary.
        output_in_loss: the loss multiplies by the output layer's weight.

    Raises:
        KeyError: a style is unknown.
        ValueError: no pattern matches a module; a number does not divide (the sequence: in the forward pass); a module is not the nn.Linear or nn.Embedding
            that its style splits; or a trainable parameter has no style, so that nobody would add up its gradients over the
            ranks, of which each sees its own tokens only.
    """
    # The logits, a DTensor's local part, are a view; nobody writes to them.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    size = mesh.size()
    require_alike_modules(model, num_ranks=size)
    styles = _styles(loss_parallel=loss_parallel, output_in_loss=output_in_loss)
    style_of = check_plan(model, plan, size=size, num_kv_heads=num_kv_heads)
    if not any(style_of.values()):
        raise ValueError(
            f"no module of {type(model).__name__} matches the plan ({', '.join(plan) or 'empty'}); it has {', '.join(filter(None, style_of))}"
        )
    # torch's styles replace parameters. Remember the shared and the frozen ones, and restore both afterwards.
    shared = _shared_parameters(model)
    frozen = [
        name for name, parameter in model.named_parameters() if not parameter.requires_grad
    ]
    for name, module in list(model.named_modules()):
        style, _, argument = style_of[name].partition(":")
        if style in (GATHER, GATHER_HEADS, GATHER_WHOLE):
            parallelize_module(module, mesh, GatherSequence(name, argument))
            if style != GATHER:
                own = LocalWeights(split=style == GATHER_HEADS, sums=False, inside=False)
                parallelize_module(module, mesh, own)
        elif style and style != "experts":
            _take_by_position(module)
            heads = int(argument or num_kv_heads)
            if style == "vocab_embedding":
                module.register_forward_pre_hook(partial(_require_whole_parts, size=size))
            if style == "rowwise" and is_tensorwise(module):
                parallelize_module(module, mesh, rows_style(mesh, sequence_dim=SEQUENCE_DIM))
            else:
                buffers = dict(module._buffers)
                # With more ranks than key/value heads, ranks share a head: it cannot be split further.
                is_shared = style == "kv_colwise" and heads % size != 0
                own_style = ReplicatedHeads(heads) if is_shared else styles[style]
                parallelize_module(module, mesh, own_style)
                if style == "vocab_embedding" and buffers:  # such as a factor of embeddings
                    module._buffers.update(buffers)
                    read_as(module, buffers, partial(replicated, mesh=mesh))
    for (first, first_name), *others in shared:
        for module, name in others:
            module.register_parameter(name, first._parameters[first_name])
    for name in frozen:  # torch's styles replace parameters
        model.get_parameter(name).requires_grad_(False)
    require_own_part(model, mesh)
    experts = [name for name, style in style_of.items() if style == "experts"]
    _require_all_split(model, left=lambda p: not isinstance(p, DTensor), but=experts)


def style_names() -> list[str]:
    """Return the names of all styles but "experts", which expert parallelism reads."""
    return [
        *_styles(loss_parallel=True, output_in_loss=False),
        GATHER,
        GATHER_HEADS,
        GATHER_WHOLE,
    ]


def check_plan(
    model: nn.Module, plan: Mapping[str, str], *, size: int, num_kv_heads: int
) -> dict[str, str]:
    """Return the style of each module of `model` by its name, "" for none. Needs no mesh.

    Args:
        model: the model, or a pipeline stage of it.
        plan: pattern of module names -> style, as in `apply_tp`.
        size: number of tensor-parallel ranks.
        num_kv_heads: number of key/value heads of the whole model.

    Raises:
        KeyError: a style is unknown.
        ValueError: the plan does not fit the model, as in `apply_tp`.
    """
    styles = style_names()
    # "gather_input:x" is a style with an argument.
    known = {*styles, "experts"}
    if unknown := sorted(s for s in {*plan.values()} if s.split(":")[0] not in known):
        raise KeyError(f"unknown style {', '.join(unknown)}; there are {', '.join(styles)}")
    # "kv_colwise:2" and "width_norm:2" have numbers of heads, of layers with others than most.
    numbers = {int(n) for s in plan.values() for n in s.split(":")[1:] if n.isdecimal()}
    for heads in (num_kv_heads, *sorted(numbers)):
        if heads % size and size % heads:
            raise ValueError(
                f"{heads} key/value heads do not divide by {size} ranks, nor they by the heads"
            )
    # The first pattern that matches counts.
    style_of = {
        name: next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), "")
        for name, _ in model.named_modules()
    }
    _require_fit(model, style_of, size=size, num_kv_heads=num_kv_heads)
    # A style makes DTensors of the parameters in its module and below. These styles only move inputs and outputs.
    moving = (GATHER, "gather_shared", "place", "tokens", "whole_input", "")
    split = [name for name, style in style_of.items() if style.split(":")[0] not in moving]
    _require_all_split(model, left=lambda _: True, but=split)
    return style_of


def _styles(*, loss_parallel: bool, output_in_loss: bool) -> dict[str, ParallelStyle]:
    """Return the styles of the table above, but those that gather an input, by name."""
    sharded, whole = Shard(SEQUENCE_DIM), Replicate()
    on_plain_tensors = LocalWeights()
    from_whole = RowwiseParallel(input_layouts=whole, output_layouts=sharded)
    logits = ColwiseParallel(
        input_layouts=sharded, output_layouts=Shard(-1) if loss_parallel else whole
    )
    return {
        "vocab_embedding": from_whole,
        "sequence": SequenceShard(),
        "tokens": PrepareModuleInput(
            input_layouts=(sharded,), desired_input_layouts=(sharded,), use_local_output=True
        ),
        "token_weights": SequenceShard(use_local_output=True),
        "head_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "head_vector": Around(Shard(0), give=local),
        "width_norm": Around(Shard(0), take=width_shard, give=local),
        "colwise": ColwiseParallel(),
        "kv_colwise": ColwiseParallel(),
        "local_tokens": on_plain_tensors,
        "partial": on_plain_tensors,
        "replicated": LocalWeights(sums=False),
        "colwise_part": LocalWeights(split=True),
        "colwise_gather": ColwiseParallel(output_layouts=whole),
        "rowwise_split": from_whole,
        "gather_colwise": ColwiseParallel(input_layouts=sharded),
        "gather_shared": Around(give=gathered),
        "cut_sequence": Around(whole, take=replicated, give=cut_sequence, inside=True),
        "own_heads": OwnHeads(),
        "place": AllGatherFeatures(),
        "rowwise": RowwiseParallel(output_layouts=sharded),
        "whole": Around(whole, take=replicated, give=summed),
        "whole_input": Around(take=replicated, give=summed),
        "rowwise_whole": RowwiseParallel(output_layouts=whole),
        "rowwise_part": RowwiseParallel(output_layouts=Partial(), use_local_output=False),
        "vocab_output": Around(Shard(0), take=gathered) if output_in_loss else logits,
    }


def _require_all_split(
    model: nn.Module, *, left: Callable[[Tensor], bool], but: Sequence[str]
) -> None:
    """Raise ValueError if `left` is true of a trainable parameter, except in the modules `but`."""
    # Such a parameter would get the gradient of this rank's tokens only.
    inside = tuple(f"{module}." for module in but)
    if names := [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and left(parameter) and not name.startswith(inside)
    ]:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(
            f"the plan of tensor parallelism has no style for {', '.join(names[:5])}{more}: name their modules, norms as 'sequence'"
        )


def _require_fit(
    model: nn.Module, style_of: Mapping[str, str], *, size: int, num_kv_heads: int
) -> None:
    """Raise ValueError for a module of a type that its style cannot split, or with parts that are not whole heads."""
    head_sizes: dict[
        str, set[int]
    ] = {}  # of keys and values, by the name of their attention module
    for name, whole_style in style_of.items():
        style, _, number = whole_style.partition(":")
        module: Any = model.get_submodule(name)
        kind = nn.Embedding if style == "vocab_embedding" else None
        kind = nn.Linear if any(word in style for word in _LINEAR) else kind
        if kind is not None and not isinstance(module, kind):
            raise ValueError(
                f"the style {style} splits an nn.{kind.__name__}, and {name} is a {type(module).__name__}: put an "
                f"nn.{kind.__name__} in its place (transformers' Conv1D is an nn.Linear with its weight transposed)"
            )
        if style == "kv_colwise":
            heads = int(number or num_kv_heads)
            head_size, rest = divmod(module.out_features, heads)
            if rest:
                raise ValueError(
                    f"the {module.out_features} outputs of {name} are not {heads} key/value heads of one size"
                )
            head_sizes.setdefault(name.rpartition(".")[0], set()).add(head_size)
    for name, whole_style in style_of.items():
        style, _, number = whole_style.partition(":")
        heads = int(number) if number.isdecimal() else num_kv_heads
        if style in ("gather_colwise", "width_norm") and heads % size:
            raise ValueError(f"the {heads} heads of {name} do not divide by {size} ranks")
        if style != "colwise":
            continue
        columns: Any = model.get_submodule(name).out_features
        if columns % size:
            raise ValueError(f"the {columns} outputs of {name} do not divide by {size} ranks")
        # In a module with keys and values, the queries come first. A feed-forward matrix, which has no heads, may follow.
        sizes = head_sizes.pop(name.rpartition(".")[0], set())
        if sizes and all(columns // size % head_size for head_size in sizes):
            heads = " or ".join(map(str, sorted(sizes)))
            raise ValueError(
                f"the {columns} outputs of {name}, in heads of {heads}, are not whole heads on each of {size} ranks"
            )


def _require_whole_parts(_: nn.Module, args: tuple[Any, ...], *, size: int) -> None:
    length = args[0].shape[SEQUENCE_DIM]
    if length % size:
        raise ValueError(f"a sequence of {length} tokens does not divide by {size} ranks")


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places (module, name) of each parameter that several modules share."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [group for group in places.values() if len(group) > 1]
