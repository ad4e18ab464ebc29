"""Next-token prediction, the task of language models, with multi-token prediction as an option.

B batch, S sequence, N next tokens of each position (the next one, and one for each module of multi-token prediction)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.config.loss import loss_function
from titan.config.plug_ins import door, parts_of
from titan.data.base import Samples, TensorBatch
from titan.data.loader import Collate
from titan.data.packing import Batch
from titan.data.sources import source_names, training_sources
from titan.data.special_tokens import SpecialTokens
from titan.data.text import (
    collate_rows,
    describe_sources,
    num_bytes,
    order_of,
    training_samples,
    validation_samples,
)
from titan.data.tokenizer import Tokenizer, open_tokenizer
from titan.losses.groups import GroupSums, with_groups
from titan.losses.loss import (
    IGNORED,
    Kernels,
    LossSum,
    VocabularyShard,
    logits_fn_of,
)
from titan.parallel.float8 import Conversion
from titan.parallel.mesh import submesh
from titan.tasks.base import LossFunction, Microbatch, SampleContext, Task


@door("validation")
class Generate(Protocol):
    """Function that writes texts during a validation. It returns them by their prompts."""

    def __call__(self, run: SampleContext, /) -> Mapping[str, str]: ...


class NextToken(Task[Batch]):
    """Next-token prediction (the default task)."""

    applies_output = True
    knows_shards = True
    sums_groups = True

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Return the job's tokenizer."""
        return open_tokenizer(self.config)

    def dataset(self, split: str, *, rank: int, world: int) -> Samples:
        of_split = training_samples if split == "train" else validation_samples
        return of_split(self.config, tokenizer=self.tokenizer, rank=rank, world=world)

    def order(self) -> dict[str, Any]:
        return order_of(self.config)

    def collate(self, samples: Samples) -> Collate:
        return collate_rows(samples, self.config.data)

    def describe(self) -> str:
        tokenizer = f"{self.tokenizer.kind}, {self.tokenizer.vocab_size:,} tokens"
        return f"{describe_sources(self.config)}; tokenizer {tokenizer}"

    def fake_batch(self) -> Batch:
        training, data = self.config.training, self.config.data

        def numbers() -> Tensor:
            shape = (training.local_batch_size, training.seq_len)
            return torch.zeros(shape, dtype=torch.int64)

        ids = numbers() if data.document_mask else None
        return Batch(
            tokens_BS=numbers(),
            labels_BS=numbers(),
            positions_BS=numbers() if data.reset_positions else None,
            document_ids_BS=ids,
            cu_seqlens_BN=None if ids is None else ids[:, : -(-ids.shape[1] // 256)].int(),
        )

    def random_batch(self, seed: int) -> TensorBatch:
        """Return a batch of random tokens: documents of about twenty, and padding of another length in each sequence."""
        return self.batch_of_rows(self.random_rows(seed))

    def batch_of_rows(self, rows_BT: np.ndarray) -> TensorBatch:
        """Return a batch of samples, int64 (B, S + 1), in which id 1 ends documents."""
        samples: Any = SimpleNamespace(special_tokens=SpecialTokens(None, 1))
        return self.collate(samples)(rows_BT, first_sample=0)

    def random_rows(self, seed: int) -> np.ndarray:
        """Return random samples, int64 (B, S + 1)."""
        training = self.config.training
        shape = (training.local_batch_size, training.seq_len + 1)
        rows_BT = np.random.default_rng(seed).integers(2, self.sizes.vocab_size, shape)
        for number, row_T in enumerate(rows_BT):
            row_T[11 + number % 7 :: 23] = 1  # the end of a document
            # Valid tokens must be counted over all ranks: none may have as many as another.
            row_T[shape[1] - 3 * (number % 8) :] = IGNORED
        return rows_BT

    def complete(self, batch: Batch, *, device: torch.device, is_cut: bool) -> Batch:
        """Return the batch with positions, if a model part could not count them itself. It may be anything with the tensors of `Batch`."""
        positions_BS = batch.positions_BS
        if positions_BS is None and is_cut:
            length = batch.tokens_BS.shape[1]
            positions_BS = torch.arange(length, device=device).expand(batch.tokens_BS.shape)
        whole = Batch(
            tokens_BS=batch.tokens_BS,
            labels_BS=batch.labels_BS,
            positions_BS=positions_BS,
            document_ids_BS=batch.document_ids_BS,
            cu_seqlens_BN=getattr(batch, "cu_seqlens_BN", None),  # another loader may lack it
            groups_BS=batch.groups_BS if isinstance(batch, Batch) else None,
        )
        if not self.num_mtp_modules:
            return whole
        # On the device, where pinned memory goes without a wait.
        return whole.to(device).with_mtp_targets(self.num_mtp_modules)

    @cached_property
    def num_mtp_modules(self) -> int:
        """Return the number of modules for multi-token prediction."""
        return self.sizes.num_mtp_modules

    def microbatch(self, batch: Batch) -> Microbatch:
        names = ("positions_BS", "document_ids_BS", "cu_seqlens_BN", "mtp_targets_BSM")
        targets, further = batch.labels_BS, batch.mtp_labels_BSM
        if self.group_sums.count and batch.groups_BS is not None:
            targets = with_groups(targets, batch.groups_BS)
        if further is not None:
            further = with_groups(further, -1) if self.group_sums.count else further
            targets = torch.cat([targets[..., None], further], dim=-1)
        return Microbatch(
            batch.tokens_BS,
            targets,
            (batch.labels_BS != IGNORED).sum(),
            {
                name: value
                for name in names
                if (value := getattr(batch, name, None)) is not None
            },
        )

    @cached_property
    def group_sums(self) -> GroupSums:
        """Return the sums of the loss of each source, if there are several and nothing replaces the cross entropy."""
        sources = training_sources(self.config)
        is_own = not self.loss_can("sums_groups") or loss_function(self.config.loss)
        return GroupSums(() if is_own or len(sources) == 1 else source_names(sources))

    def loss(
        self, mesh: DeviceMesh, *, output: nn.Module | None, float8: Sequence[Conversion]
    ) -> LossFunction:
        config = self.config
        backend = config.compile.backend_of("loss")
        logits_fn = None
        if output is not None and any(c.name == "output" and not c.kept for c in float8):
            logits_fn = logits_fn_of(output, backend=backend)
        custom = loss_function(config.loss)
        shared = not config.parallelism.disable_loss_parallel
        loss = LossSum(
            config.loss.chunk_tokens,
            shard=VocabularyShard.of(submesh(mesh, "tp"), self.sizes.vocab_size)
            if shared
            else None,
            output=output,
            kernels=Kernels.compiled(backend) if backend else None,
            logits_fn=logits_fn,
            custom=torch.compile(custom, backend=backend) if custom and backend else custom,
            groups=self.group_sums,
        )
        return MTPLoss(loss, self.sizes.mtp_coeff) if self.num_mtp_modules else loss

    def measure(self, batch: Batch) -> float:
        """Return the number of bytes of text, for a figure that does not depend on the tokenizer."""
        return num_bytes(batch, self.tokenizer)

    def report(
        self, run: SampleContext, *, loss: float, num_valid: float, measured: float
    ) -> dict[str, Any]:
        return {
            "bits_per_byte": loss / math.log(2) / measured if measured else None,
        }

    def generate(self, run: SampleContext) -> Mapping[str, str]:
        """Return texts by their prompts, of the installed parts that generate."""
        texts: dict[str, str] = {}
        for generate in parts_of(Generate):
            texts |= generate(run)
        return texts


@dataclass(frozen=True, eq=False)  # a pipeline's runners have it as a key
class MTPLoss:
    """Loss of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, equations 24 and 25).

    The value is the loss of the next token, which is comparable with that of other models. The gradient is that of this loss plus
    `coeff` times the mean loss of the modules for multi-token prediction.

    Attributes:
        loss: loss of next tokens.
        coeff: weight of the mean over the modules.
        means: mean over the modules, for each call with a gradient. The reader clears the list before a step.
    """

    loss: LossSum
    coeff: float
    means: list[Tensor] = field(default_factory=list)

    def __call__(self, input: Tensor, labels_BSN: Tensor) -> Tensor:
        """Return the sum. The input has B sequences for the next token, then B for each module, whose labels are labels_BSN[..., 1:]."""
        num_modules = labels_BSN.shape[-1] - 1
        scales = [1.0, *[self.coeff / num_modules] * num_modules]
        # At once, since each call of the loss would keep a gradient of the output layer in fp32.
        labels = labels_BSN.movedim(-1, 0).flatten(0, 1)
        total, sums = self.loss.scaled(input, labels, scales)
        mean = sums[1:].mean()
        if torch.is_grad_enabled():
            self.means.append(mean)
            del self.means[:-10_000]  # more than a step has: nobody reads them
        return sums[0] + (total - total.detach())
