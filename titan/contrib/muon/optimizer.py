"""Muon (Jordan et al., 2024, kellerjordan.github.io/posts/muon): momentum with equalized singular values, for matrices of blocks.

Another optimizer has all other parameters (embedding, output layer, norms).

    M <- beta M + (1 - beta) G                        stored: one moment rather than Adam's two
    U <- NewtonSchulz(G + beta (M - G))               U S V^T -> about U V^T; without `nesterov`, of M
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(R, C)) U  the update's elements are as large as AdamW's, so that
                                                      its learning rate serves (arXiv:2502.16982, section 2.2)

Newton-Schulz needs whole matrices, and ranks hold shards. So each rank owns some whole matrices of a batch: for each mesh
axis that shards matrices, one all-to-all gathers the shards of N matrices to their owners, N / ranks to each, and another
all-to-all gives the updates back as shards. No rank repeats the work of another rank, except replicas (DDP, HSDP).

Example: two ranks with FSDP, and two batches, X and Y, of three (4, 6) matrices each. Each rank holds shards (3, 2, 6) of a
batch. Of X, rank 0 owns two matrices, (2, 4, 6), and rank 1 one, (1, 4, 6). The remainder of Y goes to rank 1: rank 0 owns one
matrix and rank 1 two. Rank 0 runs these rounds:

    1  send the shards of X, (3, 2, 6); the other optimizer steps
    2  send the shards of Y, (3, 2, 6); receive X, (2, 4, 6), orthogonalize it, send the updates
    3  receive Y, (1, 4, 6), orthogonalize it, send the updates; receive the updates of X, (3, 2, 6), and change its weights
    4  receive the updates of Y, (3, 2, 6), and change its weights

So the shards of Y travel while X is orthogonalized, and the updates of X travel while Y is orthogonalized. A batch has
matrices of one shape, up to a number of bytes, so that small matrices share one matmul.

N matrices of a batch, n of this rank; R rows, r of a shard; C columns
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan.config.schema import MuonSection
from titan.optim.optimizers import allocate_state, build_adam, is_matrix
from titan.optim.rounding import RoundingSeeds
from titan.optim.states import Allocates, begin_step, local
from titan.parallel.float8 import plain

# a X + b (X X^T) X + c (X X^T)^2 X lifts small singular values fast and leaves those near 1 within 0.7 .. 1.2 (Jordan).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LARGEST = 2**23  # elements that are copied to fp32 at once: 32 MiB
BATCH_BYTES = (
    2**27
)  # of a rank's matrices of a batch in `ns_dtype`, of which it holds about ten copies; a larger matrix comes alone

# A collective over matrices as a generator: it yields while the collective runs, and returns the received matrices.
Exchange = Generator[None, None, Tensor]
# An update of a batch, or of all batches, which yields while a collective runs.
Update = Generator[None, None, None]


class Muon(Allocates, torch.optim.Optimizer):
    """Muon for matrices, and another optimizer for the other parameters.

    Attributes:
        others: optimizer of the other parameters. Its groups are also groups of this optimizer.
        momentum: as in SGD.
        nesterov: as in SGD.
        ns_steps: iterations of Newton-Schulz.
        ns_dtype: precision of Newton-Schulz and of the collectives.
        seeds: seeds of stochastic rounding. None: round to the nearest.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        *,
        others: torch.optim.Optimizer,
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        seeds: RoundingSeeds | None = None,
    ) -> None:
        """Create the optimizer, without state.

        Args:
            matrices: two-dimensional parameters, or stacks of matrices (experts), in which each matrix is treated separately.
            others: optimizer of the other parameters.
            lr: learning rate.
            weight_decay: decoupled weight decay.
            momentum: as in SGD.
            nesterov: as in SGD.
            ns_steps: iterations of Newton-Schulz.
            ns_dtype: precision of Newton-Schulz and of the collectives.
            seeds: seeds of stochastic rounding. None: round to the nearest.
        """
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self.momentum, self.nesterov = momentum, nesterov
        self.ns_steps, self.ns_dtype, self.seeds = ns_steps, ns_dtype, seeds
        self.others = others
        # The groups are shared with `others`, so a learning rate is set once.
        self.param_groups += others.param_groups
        others.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch has made new groups and a new state, which `others` must share again.
        self.others.param_groups, self.others.state = self.param_groups[1:], self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = torch.enable_grad()(closure)() if closure else None
        group = self.param_groups[0]
        rounds = _interleave(self._updates(group))
        next(rounds, None)
        self.others.step()  # while the first all-to-all runs
        for _ in rounds:
            pass
        return loss

    def _updates(self, group: dict[str, Any]) -> Iterator[Update]:
        turn = 0
        for batch in _batches(begin_step(self, group), itemsize=self.ns_dtype.itemsize):
            yield self._update(batch, group, turn)
            turn += len(batch)

    def _update(self, batch: list[Tensor], group: dict[str, Any], turn: int) -> Update:
        """Update matrices of one shape and layout. Yields while a collective runs.

        `turn` is the number of parameters in earlier batches, which is equal on all ranks: groups that share a batch along
        several axes must agree on the owners.
        """
        cuts = cuts_of(batch[0])
        # All matrices of the batch at once: they have one shape and layout.
        x = self._momentum(batch)
        stacked = x.shape
        x = x.flatten(0, -3)  # each expert of a stack is a matrix of the batch
        counts = []
        # One all-to-all per mesh axis that splits the matrices. After the last each rank has whole matrices.
        for cut in cuts:
            ranks = cut.group.size()
            each, rest = divmod(len(x), ranks)
            # One more for each of the `rest` ranks from `turn` on.
            counts.append([each + ((rank - turn) % ranks < rest) for rank in range(ranks)])
            turn //= ranks
            x = yield from collect(x, cut, counts=counts[-1])
        x = newton_schulz(x, steps=self.ns_steps)
        for cut in reversed(cuts):
            x = yield from give_back(x, cut, counts=counts.pop())
        x = x.view(stacked)
        # Makes the root mean square of an update like Adam's, 0.2, for any shape (arXiv:2502.16982).
        scale = group["lr"] * 0.2 * math.sqrt(max(batch[0].shape[-2:]))
        for part in _parts(batch):
            mine = [local(p) for p in batch[part]]
            new = torch.stack(mine).float().mul_(1 - group["lr"] * group["weight_decay"])
            new.sub_(x[part], alpha=scale)
            if self.seeds:
                from torchao.optim.quant_utils import _fp32_to_bf16_sr

                first = batch[part][0]
                with self.seeds.seeded(first, self.state[first]["step"].item()):
                    new = _fp32_to_bf16_sr(new)
            torch._foreach_copy_(mine, list(new.unbind()))

    def init_state(self, matrix: Tensor) -> None:
        """Fill the state with zeros, laid out like the matrix."""
        self.state[matrix]["step"] = torch.tensor(0.0)  # on the host
        self.state[matrix]["momentum"] = torch.zeros_like(plain(matrix))

    def allocate(self) -> None:
        for matrix in self.param_groups[0]["params"]:
            if not self.state[matrix]:
                self.init_state(matrix)
        allocate_state(self.others)

    def _momentum(self, batch: list[Tensor]) -> Tensor:
        """Update the momentum, and return the local shards to orthogonalize, stacked."""
        x = torch.empty(
            len(batch), *local(batch[0]).shape, dtype=self.ns_dtype, device=batch[0].device
        )
        for part in _parts(batch):
            grads = [local(p.grad) for p in batch[part]]
            averages = [local(self.state[p]["momentum"]) for p in batch[part]]
            # In place: this is the stored moment.
            torch._foreach_lerp_(averages, grads, 1 - self.momentum)
            if self.nesterov:
                averages = torch._foreach_lerp(grads, averages, self.momentum)
            torch._foreach_copy_(list(x[part].unbind()), averages)
        return x


def build_muon(
    section: MuonSection, named: Mapping[str, nn.Parameter], *, seed: int
) -> torch.optim.Optimizer:
    """Build the optimizer of a section (optimizer.Muon of `titan.extensions`).

    Args:
        section: [optimizer]. Its blocks are the children of `layers`, a name that every model family shares.
        named: trained parameters of the model, or of this rank's stages, by name.
        seed: seed of stochastic rounding.
    """
    in_blocks = {k: p for k, p in named.items() if k.startswith("layers.") and is_matrix(k, p)}
    rest = {name: p for name, p in named.items() if name not in in_blocks}
    adam_lr = section.lr if section.adam_lr is None else section.adam_lr
    others = build_adam(section, rest, lr=adam_lr, seed=seed)
    if not in_blocks:  # a pipeline stage of the embedding alone
        return others
    matrices = list(in_blocks.values())
    fastest = "float32" if matrices[0].device.type == "cpu" else "bfloat16"
    return Muon(
        matrices,
        others=others,
        lr=section.lr,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        nesterov=section.nesterov,
        ns_steps=section.ns_steps,
        ns_dtype=getattr(torch, section.ns_dtype or fastest),
        seeds=RoundingSeeds(in_blocks, seed=seed) if section.stochastic_rounding else None,
    )


def newton_schulz(x_NRC: Tensor, *, steps: int) -> Tensor:
    """Return matrices with the same singular vectors and singular values near 1.

    Args:
        x_NRC: whole matrices.
        steps: number of iterations.

    Returns:
        Matrices (N, R, C) in the dtype of x.
    """
    if x_NRC.shape[-2] > x_NRC.shape[-1]:  # the Gram matrix of the short side is smaller
        return newton_schulz(x_NRC.mT, steps=steps).mT
    a, b, c = COEFFICIENTS
    # The Frobenius norm bounds the largest singular value, so the iteration starts at 1 or below.
    x = x_NRC / x_NRC.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        # x <- a x + (b G + c G^2) x with G = x x^T
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@dataclass(frozen=True)
class Cut:
    """Split of a matrix by one mesh axis.

    Attributes:
        group: ranks of the axis.
        dim: dimension that is split.
        size: its length before the split.
    """

    group: dist.ProcessGroup
    dim: int
    size: int

    @property
    def part(self) -> int:
        """Return the length of a full part. The last parts may be shorter."""
        return -(-self.size // self.group.size())

    def length(self) -> int:
        """Return the length of this rank's part."""
        return max(0, min(self.part, self.size - self.group.rank() * self.part))


def cuts_of(parameter: Tensor) -> list[Cut]:
    """Return the cuts of a parameter's matrices, the last cut first, which is the order in which shards are joined.

    Splits between the matrices of a stack are not among them.
    """
    if not isinstance(parameter, DTensor):
        return []
    # Axes that replicate do not split matrices.
    axes = [
        i for i, place in enumerate(parameter.placements) if not isinstance(place, Replicate)
    ]
    # FSDP splits the shards of tensor parallelism; on the same dimension DTensor calls that a strided shard.
    axes.sort(key=lambda i: hasattr(parameter.placements[i], "split_factor"))
    cuts, shape = [], list(parameter.shape)
    for axis in axes:
        dim: int = parameter.placements[axis].dim  # pyrefly: ignore[missing-attribute]
        if (place := dim - (parameter.ndim - 2)) >= 0:
            cuts.append(Cut(parameter.device_mesh.get_group(axis), dim=place, size=shape[dim]))
            shape[dim] = cuts[-1].length()
    return cuts[::-1]


def collect(x_NrC: Tensor, cut: Cut, *, counts: list[int]) -> Exchange:
    """Gather shards of N matrices to their owners.

    Args:
        x_NrC: this rank's shards, in rows or in columns.
        cut: the split to undo.
        counts: number of matrices that each rank owns.

    Returns:
        The whole matrices that this rank owns, (n, R, C). Yields while the all-to-all runs.
    """
    ranks, n = cut.group.size(), counts[cut.group.rank()]
    # Equal parts, since the all-to-all sends blocks of one size.
    sent = _pad(x_NrC, dim=cut.dim, size=cut.part)
    received = yield from _all_to_all(sent, [n] * ranks, counts, cut.group)
    # (ranks x n, ...) -> (n, ..., ranks x part, ...): the parts side by side, without the padding of the last parts.
    whole = received.unflatten(0, (ranks, n)).movedim(0, 1 + cut.dim)
    return whole.flatten(1 + cut.dim, 2 + cut.dim).narrow(1 + cut.dim, 0, cut.size)


def give_back(x_nRC: Tensor, cut: Cut, *, counts: list[int]) -> Exchange:
    """Return the owners' matrices to all ranks, as shards.

    Args:
        x_nRC: the whole matrices that this rank owns.
        cut: the split to apply.
        counts: number of matrices that each rank owns.

    Returns:
        This rank's shards of all N matrices, (N, r, C). Yields while the all-to-all runs.
    """
    ranks, n = cut.group.size(), counts[cut.group.rank()]
    whole = _pad(x_nRC, dim=cut.dim, size=cut.part * ranks)
    parts = whole.unflatten(1 + cut.dim, (ranks, cut.part)).movedim(1 + cut.dim, 0)
    received = yield from _all_to_all(parts.flatten(0, 1), counts, [n] * ranks, cut.group)
    return received.narrow(1 + cut.dim, 0, cut.length())


def _all_to_all(
    sent: Tensor, ours: list[int], theirs: list[int], group: dist.ProcessGroup
) -> Exchange:
    """Start an all-to-all, yield while it runs, and return the received blocks."""
    received = sent.new_empty(sum(ours), *sent.shape[1:])
    work = dist.all_to_all_single(
        received, sent.contiguous(), ours, theirs, group=group, async_op=True
    )
    assert work is not None
    yield
    work.wait()
    return received


def _interleave(updates: Iterator[Update]) -> Update:
    """Run all updates interleaved: each round starts one more update and advances the others by one stage, then yields."""
    under_way: list[Update] = []
    while True:
        under_way += islice(updates, 1)
        if not under_way:
            return
        # The newest first: its all-to-all must run before an older update computes.
        for update in under_way[::-1]:
            if next(update, "done") == "done":
                under_way.remove(update)
        yield


def _pad(x_NRC: Tensor, *, dim: int, size: int) -> Tensor:
    missing = size - x_NRC.shape[1 + dim]
    if not missing:
        return x_NRC
    return F.pad(x_NRC, (0, 0, 0, missing) if dim == 0 else (0, missing))


def _parts(batch: Sequence[Tensor]) -> list[slice]:
    """Return slices of a batch whose fp32 copies are made at once."""
    size = max(1, LARGEST // max(1, local(batch[0]).numel()))
    return [slice(start, start + size) for start in range(0, len(batch), size)]


def _batches(matrices: list[Any], *, itemsize: int) -> Iterator[list[Any]]:
    """Yield batches of matrices of one shape and layout.

    For each rank that shards it, a batch has as many whole matrices as fit into BATCH_BYTES, or one.
    """
    alike = defaultdict(list)
    for matrix in matrices:
        # Matrices of one batch are stacked, and cut along the same axes.
        alike[matrix.shape, getattr(matrix, "placements", ())].append(matrix)
    # The largest first. Ranks share each kind evenly.
    for same in sorted(alike.values(), key=lambda same: -same[0].numel()):
        # The size of whole matrices, since ranks may hold shards of different sizes. Of a stack, a rank has some matrices only.
        whole = math.prod(same[0].shape[-2:]) * math.prod(local(same[0]).shape[:-2])
        ranks = math.prod(cut.group.size() for cut in cuts_of(same[0]))
        size = ranks * max(1, BATCH_BYTES // (max(1, whole) * itemsize))
        for start in range(0, len(same), size):
            yield same[start : start + size]
