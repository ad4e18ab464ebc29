"""Expert parallelism: each rank of the ep axis holds some of the experts, and tokens travel to them and back.

`apply_ep` shards the stacked parameters of each MoE's experts over the axis, as DTensors, and sets the module's `dispatcher` to a
`TokenDispatcher`. A module needs two attributes: `experts`, whose parameters are stacked by expert and whose forward takes
tokens sorted by expert and a count for each expert; and `dispatcher`, which the module calls with tokens, counts and experts.

No token is dropped or padded. Each rank sends all its tokens, and a small all-to-all first tells how many will arrive. The host
reads these counts, which is the only time in a layer that it waits for the device.

An example with C = 2 ranks and E = 4 experts: rank 0 holds the experts 0 and 1. Rank 0 has N = 6 tokens with counts_E =
[1, 2, 2, 1], and rank 1 has 6 with [3, 0, 1, 2]. Rank 0 sends to = [3, 3] tokens and receives from_ = [3, 3], so R = 6: one
token for expert 0 and two for expert 1 from itself, three for expert 0 from rank 1. The counts of its experts are [4, 2].

The axis may cover any ranks that hold different tokens: data-parallel and context-parallel ranks, and tensor-parallel ranks,
whose tokens are shards of the sequence (mesh.py).

C ranks, E experts, e = E / C experts of this rank, N tokens to send, R tokens that arrive, D model
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .collectives import AsyncAllToAll, start_all_to_all, wait
from .context import shard_sequence
from .mesh import axis_rank, axis_size
from .module_kinds import (
    ExpertModule,
    RoutedExperts,
    RouterModule,
    is_kind,
    modules_of,
    stacked_experts,
)
from .selective import outside_selection
from .token_order import host_counts, inverted, permute, transposed_blocks


def apply_ep(model: nn.Module, *, mesh: DeviceMesh, moe_type: type[nn.Module]) -> None:
    """Shard the experts of each `moe_type` in `model` over the one axis of `mesh`, in place.

    Args:
        model: the model.
        mesh: mesh with the ep axis only.
        moe_type: class of the modules with `experts` and `dispatcher`.

    Raises:
        ValueError: there is no `moe_type`, or one lacks the attribute `dispatcher`, its experts hold no parameters, or the number of ranks does not divide
            the number of experts.
    """
    found = modules_of(model, moe_type)
    dispatching: dict[str, Any] = {
        name: m for name, m in found.items() if is_kind(m, ExpertModule)
    }
    # nn.Module means any module that dispatches tokens.
    lacking = [name for name in found if name not in dispatching and moe_type is not nn.Module]
    if lacking or not dispatching:
        where = f"{moe_type.__name__} in {type(model).__name__}"
        raise ValueError(
            f"expert parallelism found {where}, {lacking[0]}, without the attribute `dispatcher`, through which it must send its tokens"
            if lacking
            else f"expert parallelism found no {where} with the attribute `dispatcher`"
        )
    for name, module in dispatching.items():
        experts = stacked_experts(module)
        stacked = list(experts.named_parameters(recurse=False))
        if not stacked:
            raise ValueError(
                f"{name}.experts ({type(experts).__name__}) holds no parameters itself: stack those of all experts in one parameter each"
            )
        for key, parameter in stacked:
            if len(parameter) % mesh.size():
                raise ValueError(
                    f"the {len(parameter)} experts of {name} do not divide by {mesh.size()} ranks"
                )
            # Stacked parameters are split between experts, so a rank has whole experts.
            part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            split = nn.Parameter(part, requires_grad=parameter.requires_grad)
            experts.register_parameter(key, split)
        _give_local_parameters(experts)
        setattr(module, "dispatcher", TokenDispatcher(mesh))  # noqa: B010


class Routes(NamedTuple):
    """Routes of dispatched tokens, by which their results return.

    Attributes:
        order_R: places of the received tokens in the order of experts, int64 (R,).
        inverse_R: inverse permutation of order_R.
        to: number of tokens that this rank sent to each rank.
        from_: number of tokens that this rank received from each rank.
    """

    order_R: Tensor
    inverse_R: Tensor
    to: list[int]
    from_: list[int]


class TokenDispatcher:
    """Dispatch of tokens to the ranks that hold their experts, and combination of the results.

    N tokens of this rank, R tokens that it receives, D model, E experts, C ranks, e experts of a rank
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size = mesh.get_group().group_name, mesh.size()

    def __call__(
        self,
        tokens_ND: Tensor,
        counts_E: Tensor,
        experts: Callable[..., Tensor],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Return the results of the experts, (N, D), in the order of the tokens.

        Args:
            tokens_ND: tokens, sorted by expert.
            counts_E: number of tokens for each expert, int64.
            experts: maps tokens (R, D), sorted by expert, and counts (e,) to results (R, D).
            meanwhile: called while results are on their way back. Its backward pass runs while their gradients are on their way.
        """
        tokens_RD, counts_e, routes = self.dispatch(tokens_ND, counts_E)
        results = self.combine(experts(tokens_RD, counts_e), routes)
        meanwhile()
        return results.wait()

    def dispatch(self, tokens_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Routes]:
        """Send tokens to the ranks of their experts.

        Args:
            tokens_ND: tokens, sorted by expert.
            counts_E: number of tokens for each expert, int64.

        Returns:
            The tokens for this rank's experts (R, D), sorted by expert; their counts (e,); and their routes.
        """
        # A recomputation takes the routes of the forward pass: the host does not wait a second time.
        find = outside_selection(self.find_routes)  # the recomputation leaves it out
        counts_e, routes = _recall(self) or find(counts_E, len(tokens_ND))
        _remember(self, (counts_e, routes))
        sent = AsyncAllToAll(tokens_ND, group=self.group, to=routes.to, from_=routes.from_)
        tokens_RD = sent.wait()
        return permute(tokens_RD, routes.order_R, routes.inverse_R), counts_e, routes

    def combine(self, results_RD: Tensor, routes: Routes) -> AsyncAllToAll:
        """Start to send the experts' results back to the ranks of their tokens.

        Args:
            results_RD: results of this rank's experts, in the order of the dispatched tokens.
            routes: routes that `dispatch` returned.
        """
        results_RD = permute(results_RD, routes.inverse_R, routes.order_R)
        return AsyncAllToAll(results_RD, group=self.group, to=routes.from_, from_=routes.to)

    def find_routes(self, counts_E: Tensor, num_tokens: int) -> tuple[Tensor, Routes]:
        """Exchange counts with all ranks.

        Args:
            counts_E: number of this rank's tokens for each expert, int64.
            num_tokens: number of this rank's tokens.

        Returns:
            The number of tokens for each of this rank's experts (e,), and the tokens' routes.
        """
        ones = [1] * self.size
        # Experts are numbered rank by rank, so entry c has the counts of rank c's experts.
        sent_Ce = counts_E.view(self.size, -1)
        counts_Ce = wait(start_all_to_all(sent_Ce, group=self.group, to=ones, from_=ones))
        both = host_counts(torch.cat([sent_Ce.sum(1), counts_Ce.sum(1)]), num_tokens=num_tokens)
        to, from_ = both[: self.size], both[self.size :]
        # Tokens arrive sorted by sender, then by expert. The experts need them sorted by expert.
        inverse_R = transposed_blocks(counts_Ce, sum(from_))
        return counts_Ce.sum(0), Routes(inverted(inverse_R), inverse_R, to, from_)


def _give_local_parameters(module: nn.Module) -> None:
    """Replace each parameter by this rank's part, as a plain tensor, while forward runs.

    FSDP all-gathers the part before that, if it shards the module.
    """

    # Grouped matmuls take plain tensors. The split parameters come back after forward, where two micro-batches may be at once.
    def unwrap(module: nn.Module, *_: Any) -> None:
        calls, split = module.__dict__.get("_split_parameters", (0, dict(module._parameters)))
        module.__dict__["_split_parameters"] = calls + 1, split
        for name, parameter in split.items() if not calls else ():
            if isinstance(parameter, DTensor):
                # pyrefly: ignore[unsupported-operation]
                module._parameters[name] = parameter.to_local()

    def restore(module: nn.Module, *_: Any) -> None:
        calls, split = module.__dict__.pop("_split_parameters")
        if calls > 1:
            module.__dict__["_split_parameters"] = calls - 1, split
        else:
            module._parameters.update(split)

    module.register_forward_pre_hook(unwrap)
    module.register_forward_hook(restore, always_call=True)


def local_tokens(mesh: DeviceMesh, length: int, *, balanced: bool) -> Tensor:
    """Return the positions in the sequence of the tokens that this rank's experts see, int64.

    Args:
        mesh: the dense mesh.
        length: length of a sequence.
        balanced: context parallelism gives each rank a head and a tail of the sequence.
    """
    tokens, cp = torch.arange(length), axis_size(mesh, "cp")
    if cp > 1:
        rank = axis_rank(mesh, "cp")
        tokens = shard_sequence(tokens, dim=0, rank=rank, size=cp, balanced=balanced)
    return tokens.chunk(axis_size(mesh, "tp"))[axis_rank(mesh, "tp")]


class RoundRobin:
    """Routes that send tokens to all experts in turn, by position in the sequence: the same in every layout.

    A token's experts are far apart. With enough ranks they are on different ranks, as they would be with an even router.
    """

    def __init__(self, mesh: DeviceMesh, *, balanced: bool) -> None:
        self.mesh, self.balanced = mesh, balanced

    def get(self, moe: Any, tokens: Tensor) -> Tensor | None:
        """Return the experts of each token, int64 (B * S, top_k).

        Args:
            moe: the mixture of experts, with its config.
            tokens: tokens of this rank, (B, S, D).
        """
        length = tokens.shape[1] * axis_size(self.mesh, "cp", "tp")
        k, num_experts = moe.config.top_k, moe.config.num_experts
        places_S = local_tokens(self.mesh, length, balanced=self.balanced).to(tokens.device)
        turns_SK = places_S[:, None] * k + torch.arange(k, device=tokens.device)
        # Experts in columns, which take turns. Experts next to each other in a column are on one rank.
        columns = next(n for n in range(k, num_experts + 1) if num_experts % n == 0)
        turns_SK = turns_SK % num_experts
        ids_SK = turns_SK % columns * (num_experts // columns) + turns_SK // columns
        return ids_SK.repeat(len(tokens), 1)

    def put(self, moe: Any, ids_TK: Tensor) -> None: ...


# ---- recomputation -----------------------------------------------------------------------------


class _Record(threading.local):
    """Record of the checkpointed block that runs in this thread, and whether the block is being recomputed."""

    routes: dict[Any, Any] | None = None
    is_recomputation = False


_current = _Record()


def is_recomputation() -> bool:
    """Return whether a checkpointed block is being recomputed in this thread."""
    return _current.is_recomputation


class KeptRoutes:
    """Routes of the forward pass, for the recomputation.

    The recomputation sends each token to the same experts, and neither chooses nor counts again.
    """

    def get(self, moe: Any, tokens: Tensor) -> Tensor | None:
        # Returns None in a forward pass, which then chooses.
        """Return the experts that the forward pass chose, in a recomputation, else None.

        Args:
            moe: the mixture of experts.
            tokens: tokens of this rank. Not read.
        """
        return _recall(moe)

    def put(self, moe: Any, ids_TK: Tensor) -> None:
        """Keep the experts that the forward pass chose.

        Args:
            moe: the mixture of experts.
            ids_TK: experts of each token, int64 (T, top_k).
        """
        _remember(moe, ids_TK)


def keep_routes(
    block: nn.Module,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]] | None:
    """Return a function that makes the contexts of a checkpointed block's forward pass and recomputation.

    Args:
        block: a block, before it is wrapped.

    Returns:
        The function, or None if the block has no experts.
    """
    moes = [*modules_of(block, RoutedExperts).values()]
    for moe in moes:
        moe.route_sources.insert(0, KeptRoutes())
    for router in modules_of(block, RouterModule).values():
        # The recomputation leaves the choice out, so a selective checkpoint must not count its operations.
        router.choose = outside_selection(router.choose)
    return _contexts if moes else None


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    routes: dict[Any, Any] = {}
    return _Recording(routes, False), _Recording(routes, True)


class _Recording(AbstractContextManager[None]):
    """Context in which these routes are the current ones.

    A backward pass in two halves recomputes twice, and enters it twice.
    """

    def __init__(self, routes: dict[Any, Any], is_recomputation: bool) -> None:
        self.record = routes, is_recomputation
        self.before: list[tuple[dict[Any, Any] | None, bool]] = []

    def __enter__(self) -> None:
        self.before.append((_current.routes, _current.is_recomputation))
        _current.routes, _current.is_recomputation = self.record

    def __exit__(self, *_: Any) -> None:
        _current.routes, _current.is_recomputation = self.before.pop()


def _recall(key: Any) -> Any:
    return (_current.routes or {}).get(key) if _current.is_recomputation else None


def _remember(key: Any, value: Any) -> None:
    if _current.routes is not None and not _current.is_recomputation:
        _current.routes[key] = value
