"""Loss over a sharded vocabulary: the shard of a rank, and the collectives between the ranks of a tensor-parallel group.

N tokens, C tokens of a chunk, V vocabulary or this rank's shard of it
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan.parallel.torch_compat import enable_loss_parallel

IGNORED = -100  # torch's cross entropy leaves this label out


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of logits that are split over the vocabulary as DTensor splits them (loss parallel).

    Attributes:
        group: the ranks that hold all shards.
        start: first column of this rank's shard.
        mesh: mesh of the group, with one axis, for torch's own loss.
        vocab_size: size of the whole vocabulary, for a package's loss.
    """

    group: dist.ProcessGroup
    start: int
    mesh: DeviceMesh | None = None
    vocab_size: int = 0

    @staticmethod
    def of(tp: DeviceMesh | None, vocab_size: int) -> VocabularyShard | None:
        """Return this rank's shard: shards are of equal size, rounded up, and the last one is shorter."""
        if tp is None:
            return None
        start = tp.get_local_rank() * -(-vocab_size // tp.size())
        return VocabularyShard(tp.get_group(), start=start, mesh=tp, vocab_size=vocab_size)


def gather_vocabulary(logits_CV: Tensor, shard: VocabularyShard) -> Tensor:
    """Gather logits over the vocabulary: (C, V/tp) to (C, V)."""
    size = dist.get_world_size(shard.group)
    width = -(-shard.vocab_size // size)
    # The last ranks may have fewer columns, and a collective takes equal parts.
    mine_CW = F.pad(logits_CV, (0, width - logits_CV.shape[1])).contiguous()
    gathered = mine_CW.new_empty(size * len(mine_CW), width)
    dist.all_gather_into_tensor(gathered, mine_CW, group=shard.group)
    whole_CV = gathered.view(size, len(mine_CW), width).transpose(0, 1).flatten(1)
    return whole_CV[:, : shard.vocab_size]


def sum_over_vocabulary(
    lse_C: Tensor, target_logit_C: Tensor, is_mine_C: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over the whole vocabulary and the target's logit, from those of this rank's shard.

    There are two all-reduces. The first finds the largest log-sum-exp of each token. The second sums the ranks' exponentials and the
    target's logit, which one rank has.
    """
    # Subtract the largest before taking exponentials, as in any log-sum-exp.
    largest_C = lse_C.clone()
    dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=group)
    sums_2C = torch.stack(
        [(lse_C - largest_C).exp(), torch.where(is_mine_C, target_logit_C, 0.0)]
    )
    dist.all_reduce(sums_2C, group=group)
    return largest_C + sums_2C[0].log(), sums_2C[1]


def local_shard(weight: DTensor, shard: VocabularyShard | None) -> Tensor:
    """Return this rank's shard of a weight that is split over the ranks of `shard` and over no others."""
    mesh, ranks = weight.device_mesh, dist.get_process_group_ranks
    if (
        shard is None
        or mesh.ndim > 1
        or weight.placements != (Shard(0),)
        or ranks(mesh.get_group()) != ranks(shard.group)
    ):
        raise ValueError(
            f"the output layer's weight is laid out as {weight.placements} over {mesh}: take it from the layer after the forward "
            "pass, when FSDP has gathered it; where tensor parallelism splits its rows, give `shard` with that group"
        )
    return weight.to_local()


def plain_over_vocabulary(
    logits_NV: Tensor, labels_N: Tensor, mesh: DeviceMesh, *, start: int
) -> Tensor:
    """Return torch's loss parallel: the cross entropy of an fp32 copy of logits that are split over the vocabulary."""
    enable_loss_parallel()
    # The last ranks may have fewer columns. All must give one shape, or labels are looked for in the wrong places: equal parts.
    rank = mesh.get_local_rank()
    columns = -(-start // rank) if rank else logits_NV.shape[1]
    whole = DTensor.from_local(
        logits_NV.float(),
        mesh,
        [Shard(1)],
        run_check=False,
        shape=torch.Size([len(logits_NV), columns * mesh.size()]),
        stride=(columns * mesh.size(), 1),
    )
    labels = DTensor.from_local(labels_N, mesh, [Replicate()], run_check=False)
    loss = F.cross_entropy(whole, labels, ignore_index=IGNORED, reduction="sum")
    assert isinstance(loss, DTensor)
    return loss.to_local()
