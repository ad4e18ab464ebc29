"""Say what a model is trained on, in one class beside it: batches, the loss, what validation reports, and samples.

The trainer, the training step, validation and the simulator ask a `Task`, and know nothing of what it holds. The usual one is
`NextToken`. A family, or another package, provides its own with `build_task` (titan/config/task.py).

A loss is a sum, and is divided by one number of the global batch: the valid tokens, patches or samples of all ranks and
micro-batches. So every layout and every accumulation computes the same. What is random belongs to the number of a sample
(`titan.data.order.derive_key`), not to a rank or a step: then a run goes on exactly on any layout.

    loader, validation_loader   the batches of a data-parallel rank
    complete, microbatch        what the model's forward, and the loss, get of a batch
    loss                        the sum over a micro-batch, of the model's output and its targets
    measure, report             what a row of validation says
    sample                      what the model makes, written beside a validation
    prompt_with, draw           what `titan generate` makes of a file or a text, of models that take or give more than text
    fake_batch                  shapes and dtypes, for the simulator
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.checks.machine import open_tokenizer
from titan.config.loss import loss_function
from titan.config.model import model_config
from titan.config.schema import JobConfig
from titan.config.task import task_module, task_options
from titan.data import DataError
from titan.data.base import RankShare, Samples, TensorBatch
from titan.data.loader import Collate, Loader
from titan.data.packing import Batch
from titan.data.scoring import Scorer
from titan.data.statistics import unigram_bits_per_byte
from titan.data.text import (
    collate_rows,
    describe_sources,
    num_bytes,
    training_samples,
    validation_samples,
)
from titan.data.tokenizer import Tokenizer
from titan.loss import IGNORED, Kernels, LossSum, VocabularyShard, compiled_loss, product_of
from titan.parallel.float8 import Conversion
from titan.parallel.mesh import submesh

if TYPE_CHECKING:
    from titan.hook import Run
    from titan.train_step import TrainStep

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Microbatch:
    """Hold what a rank computes with: its part of a batch, on its device.

    input: the first argument of the model's forward, (B, S, ...), which the first pipeline stage takes. inputs: further arguments by
    name, of every stage. targets: what the loss compares the output with. All have B samples in their first dimension.
    num_valid: what this rank adds to the divisor of the loss, an int64 scalar.
    """

    input: Tensor
    targets: Tensor
    num_valid: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class Task(ABC):
    """Define a task. The methods say what a subclass must define, and what it may replace.

    A class whose `loss` can do more than take whole logits says so beside it, and a subclass with another `loss` says it again:

    applies_output: it applies the output layer if it gets one. knows_shards: of tensor-parallel ranks, it takes each one's part of the vocabulary.
    """

    tokenizer: Tokenizer | None = None
    applies_output: bool = False
    knows_shards: bool = False

    def __init__(self, config: JobConfig, options: Any = None) -> None:
        """options: the task's `TaskOptions`, of `[task] options`."""
        self.config, self.options = config, options

    # ---- data

    @abstractmethod
    def samples(self, split: str, *, rank: int, world: int) -> Samples:
        """Return the samples of a split, "train" or "validation". Raises DataError. The order may depend on debug.seed for "train" only."""

    @abstractmethod
    def collate(self, samples: Samples) -> Collate:
        """Return what makes a batch, on the CPU, of what `samples.get` returns, given `first_sample`, the number of the first."""

    def loader(self, *, rank: int, world: int, accumulation: int = 1) -> Loader:
        """Return the training data of a data-parallel rank, of `world`. Raises DataError."""
        batch = self.config.training.local_batch_size
        return self._loader("train", RankShare(rank=rank, world=world, batch=batch), accumulation)

    def validation_loader(self, *, rank: int, world: int) -> Loader:
        """Return the validation data of a data-parallel rank. Raises DataError."""
        batch = self.config.validation.local_batch_size
        return self._loader("validation", RankShare(rank=rank, world=world, batch=batch))

    def _loader(self, split: str, share: RankShare, accumulation: int = 1) -> Loader:
        samples = self.samples(split, rank=share.rank, world=share.world)
        return Loader(
            samples,
            share=share,
            collate=self.collate(samples),
            dataloader=self.config.training.dataloader,
            accumulation=accumulation,
        )

    @abstractmethod
    def describe(self) -> str:
        """Return what the data are, for the page at the start of a run."""

    @abstractmethod
    def fake_batch(self) -> TensorBatch:
        """Return a batch of zeros as a loader would give it, with training.local_batch_size samples. The simulator calls it where no data are."""

    # ---- the step

    def complete(self, batch: Any, *, device: torch.device, is_cut: bool) -> TensorBatch:
        """Return a loader's batch as `microbatch` wants it, before it is moved and cut.

        is_cut: a model part gets a part of each sequence, or begins past the embedding.
        """
        return batch

    @abstractmethod
    def microbatch(self, batch: Any) -> Microbatch:
        """Return what a rank computes with, of its part of a batch on its device."""

    @abstractmethod
    def loss(
        self, mesh: DeviceMesh, *, output: nn.Module | None, float8: Sequence[Conversion]
    ) -> LossFunction:
        """Return what maps the model's output and the targets of a micro-batch to their summed loss, an fp32 scalar.

        output: the output layer if the loss is to apply it, which only tasks with `predicts_tokens` and `applies_output` are asked for.
        float8: layers in 8 bits.
        """

    # ---- validation

    def measure(self, batch: Any) -> float:
        """Return a number of a validation batch on the CPU, whose sum over all batches and ranks `report` gets."""
        return 0

    def report(self, run: Run, *, loss: float, num_valid: float, measured: float) -> dict[str, Any]:
        """Return the columns of a validation beside its loss, of sums over all batches and ranks."""
        return {}

    def sample(self, run: Run) -> Mapping[str, str] | None:
        """Write what the model makes below `run.run_dir`, or return texts by their prompts. All ranks call it after each validation."""
        return None

    # ---- `titan generate`

    def prompt_with(
        self, file: Path, text: str
    ) -> tuple[list[int], Callable[[Tensor], Mapping[str, Tensor]]]:
        """Return the ids of a text with a file, and what maps ids (1, S) to further arguments of the model's forward. Raises DataError."""
        raise DataError(f"{file}: {self.config.model.name} takes text alone")

    def draw(self, model: nn.Module, text: str, *, seed: int, file: Path) -> None:
        """Write what the model makes of a text into a file, for models that predict no tokens. Raises DataError."""
        raise DataError(
            f"{file}: {type(self).__name__} has no `draw`, which says what the model makes"
        )


class NextToken(Task):
    """Predict the next token of text (the default)."""

    applies_output = True
    knows_shards = True

    @cached_property
    def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the job's tokenizer. Raises DataError."""
        return open_tokenizer(self.config)

    def samples(self, split: str, *, rank: int, world: int) -> Samples:
        of_split = training_samples if split == "train" else validation_samples
        return of_split(self.config, tokenizer=self.tokenizer, rank=rank, world=world)

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
            document_ends_BN=None if ids is None else ids[:, : -(-ids.shape[1] // 256)].int(),
        )

    def complete(self, batch: Any, *, device: torch.device, is_cut: bool) -> Batch:
        """Return the batch with positions where a model part could not count them itself. batch: anything with the tensors of `Batch`."""
        positions_BS = batch.positions_BS
        if positions_BS is None and is_cut:
            length = batch.tokens_BS.shape[1]
            positions_BS = torch.arange(length, device=device).expand(batch.tokens_BS.shape)
        whole = Batch(
            tokens_BS=batch.tokens_BS,
            labels_BS=batch.labels_BS,
            positions_BS=positions_BS,
            document_ids_BS=batch.document_ids_BS,
            document_ends_BN=getattr(batch, "document_ends_BN", None),  # another loader may lack it
        )
        if not self.num_further:
            return whole
        # On the device, where pinned memory goes without a wait.
        return whole.to(device).with_further_targets(self.num_further)

    @cached_property
    def num_further(self) -> int:
        """Return how many further tokens the model learns to predict."""
        return getattr(model_config(self.config.model), "num_mtp_modules", 0)

    def microbatch(self, batch: Any) -> Microbatch:
        names = ("positions_BS", "document_ids_BS", "document_ends_BN", "further_targets_BSM")
        targets = batch.labels_BS
        if self.num_further:
            targets = torch.cat([targets[..., None], batch.further_labels_BSM], dim=-1)
        return Microbatch(
            batch.tokens_BS,
            targets,
            (batch.labels_BS != IGNORED).sum(),
            {name: value for name in names if (value := getattr(batch, name, None)) is not None},
        )

    def loss(
        self, mesh: DeviceMesh, *, output: nn.Module | None, float8: Sequence[Conversion]
    ) -> LossFunction:
        config = self.config
        compiles = config.compile.enable and "loss" in config.compile.components
        backend = config.compile.backend if compiles else ""
        product = None
        if output is not None and any(c.name == "output" and not c.kept for c in float8):
            product = product_of(output, backend=backend)
        shared = not config.parallelism.disable_loss_parallel
        sizes = model_config(config.model)
        loss = LossSum(
            config.loss.chunk_tokens,
            shard=VocabularyShard.of(submesh(mesh, "tp"), sizes.vocab_size) if shared else None,
            output=output,
            kernels=Kernels.compiled(backend) if backend else None,
            product=product,
            custom=compiled_loss(loss_function(config.loss), backend=backend),
        )
        return FurtherLoss(loss, sizes.mtp_coeff) if self.num_further else loss

    def measure(self, batch: Any) -> float:
        """Return the bytes of text, for a figure that does not depend on the tokenizer."""
        return num_bytes(batch, self.tokenizer)

    def report(self, run: Run, *, loss: float, num_valid: float, measured: float) -> dict[str, Any]:
        return {
            "bits_per_byte": loss / math.log(2) / measured if measured else None,
            # Only rank 0 prints it, and computing it reads the text.
            "unigram_bits_per_byte": self._unigram_bits(run) if run.rank == 0 else None,
        }

    def scorer(self, train_step: TrainStep) -> Scorer:
        """Return what scores texts with the model of the run, always the same."""
        if not hasattr(self, "_scorer"):
            self._scorer = Scorer(train_step, self.tokenizer)
        return self._scorer

    def sample(self, run: Run) -> Mapping[str, str]:
        """Return the greedy continuations of validation.prompts."""
        section = self.config.validation
        if not section.prompts:
            return {}
        scorer = self.scorer(run.train_step)
        prompts = [scorer.encode(prompt) for prompt in section.prompts]
        new = scorer.continue_greedily(
            prompts,
            num_new=section.prompt_tokens,
            batch=section.local_batch_size,
        )
        texts = map(self.tokenizer.continuation, prompts, new)
        return dict(zip(section.prompts, texts, strict=True))

    def _unigram_bits(self, run: Run) -> float | None:
        """Return the bits per byte that byte frequencies alone reach on the validation text, as a yardstick."""
        if not hasattr(self, "_bits"):
            assert run.validation_loader is not None
            self._bits = unigram_bits_per_byte(
                run.loader, validation=run.validation_loader, tokenizer=self.tokenizer
            )
        return self._bits


@dataclass(frozen=True)
class FurtherLoss:
    """Train on further tokens besides (DeepSeek-V3, arXiv:2412.19437, eq. 24 and 25).

    The value is the loss of the next token, comparable with that of other models. The gradient is that of its sum with `coeff` times the
    mean over the modules of multi-token prediction, which goes to `means`, one for each call with a gradient; a reader clears them before a step.
    """

    loss: LossSum
    coeff: float
    means: list[Tensor] = field(default_factory=list)

    def __call__(self, input: Tensor, labels_BSN: Tensor) -> Tensor:
        """Return the sum. input: of B rows for the next token, then of B for each further one, whose labels are labels_BSN[..., 1:]."""
        further = labels_BSN.shape[-1] - 1
        scales = [1.0, *[self.coeff / further] * further]
        # At once, since each call of the loss would keep a gradient of the output layer in fp32.
        labels = labels_BSN.movedim(-1, 0).flatten(0, 1)
        total, sums = self.loss.scaled(input, labels, scales)
        mean = sums[1:].mean()
        if torch.is_grad_enabled():
            self.means.append(mean)
            del self.means[:-10_000]  # more than a step has: nobody reads them
        return sums[0] + (total - total.detach())


def task_of(config: JobConfig) -> Task:
    """Return the task of a job, whose options have been checked."""
    module = task_module(config)
    return NextToken(config) if module is None else module.build_task(config, task_options(config))
