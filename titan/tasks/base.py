"""Training tasks. A `Task` provides the batches, the loss, the validation metrics and the samples of a model.

The trainer, the training step, validation and the simulator ask a `Task`, and know nothing of its data. The usual task is
`NextToken` (next_token.py). A family names another one of titan's tasks, and another package provides its own
(titan/config/task.py).

A loss is a sum, and is divided by one number of the global batch: the valid tokens, patches or samples of all ranks and
micro-batches. So every layout and every accumulation computes the same. Random numbers belong to the number of a sample
(`titan.data.order.derive_key`), not to a rank or a step, so a run continues exactly on any layout.

    loader, validation_loader   the batches of a data-parallel rank
    complete, microbatch        arguments of the model's forward and targets of the loss, made of a batch
    loss                        the sum over a micro-batch, of the model's output and its targets
    measure, report             the columns of a validation's row
    generate                    samples of the model, written beside a validation
    prompt_with, draw           samples for `titan generate`, of models that take or give more than text
    fake_batch                  shapes and dtypes, for the simulator
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.config.schema import JobConfig
from titan.data import DataError
from titan.data.base import Samples, ShardSpec, TensorBatch
from titan.data.loader import Collate, Loader
from titan.data.tokenizer import Tokenizer
from titan.losses.groups import GroupSums
from titan.parallel.float8 import Conversion
from titan.parallel.mesh import StepGroups

LossFunction = Callable[[Tensor, Tensor], Tensor]
B = TypeVar("B", bound=TensorBatch)


class Scorable(Protocol):
    """Part of a training step that scores and generates: the model parts, and where they run."""

    config: JobConfig
    mesh: DeviceMesh
    device: torch.device
    groups: StepGroups
    context: DeviceMesh | None
    model_parts: list[nn.Module]
    loss_sum: Any  # of next tokens: a LossSum
    num_replicas: int

    def score(
        self,
        batches: Iterable[TensorBatch],
        of_rows: Callable[[Tensor, Tensor], Tensor],
        *,
        width: int,
    ) -> Tensor: ...

    def to_local(self, batch: TensorBatch) -> Microbatch: ...


class SampleContext(Protocol):
    """The part of a run that `report` and `generate` may use."""

    rank: int
    run_dir: Path
    step: int
    device: torch.device
    loader: Loader
    validation_loader: Loader | None

    @property
    def train_step(self) -> Scorable: ...


@dataclass(frozen=True)
class Microbatch:
    """A rank's part of a batch, on its device. All tensors have B samples in their first dimension.

    Attributes:
        input: first argument of the model's forward, (B, S, ...), which the first pipeline stage takes.
        targets: second argument of the loss.
        num_valid: this rank's part of the divisor of the loss, an int64 scalar.
        inputs: further arguments of every stage's forward, by name.
    """

    input: Tensor
    targets: Tensor
    num_valid: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class Task(ABC, Generic[B]):
    """A training task. A subclass defines the abstract methods, and may replace the others.

    A class whose `loss` can do more than take whole logits says so in two attributes. A subclass with another `loss` says it again.

    Attributes:
        tokenizer: of tasks with text.
        applies_output: the loss applies the output layer if it gets one.
        knows_shards: the loss takes the vocabulary shard of each tensor-parallel rank.
        sums_groups: the loss takes targets of titan/losses/groups.py, and adds to `group_sums`.
        group_sums: the sums of the loss of each group.
    """

    tokenizer: Tokenizer | None = None
    applies_output: bool = False
    knows_shards: bool = False
    sums_groups: bool = False
    group_sums: GroupSums = GroupSums()

    def __init__(self, config: JobConfig, options: Any = None) -> None:
        """Keep the job and the options.

        Args:
            config: the job.
            options: the task's `TaskOptions`, of `[task] options`.
        """
        self.config, self.options = config, options

    @cached_property
    def sizes(self) -> Any:
        """Return the model's sizes, as its family defines them."""
        return self.config.model.sizes

    @classmethod
    def loss_can(cls, name: str) -> bool:
        """Return whether the class that defines `loss` sets one of these attributes."""
        return vars(next(c for c in cls.__mro__ if "loss" in vars(c))).get(name, False)

    # ---- data

    @abstractmethod
    def dataset(self, split: str, *, rank: int, world: int) -> Samples:
        """Return the dataset of a data-parallel rank. Only the training order may depend on debug.seed.

        Args:
            split: "train" or "validation".
            rank: number of the data-parallel rank.
            world: number of data-parallel ranks.

        Raises:
            DataError: the data cannot be read.
        """

    @abstractmethod
    def collate(self, samples: Samples) -> Collate:
        """Return the collate function of a dataset.

        It maps the return value of `samples.get` and `first_sample`, the number of the first sample, to a batch on the CPU.
        """

    def loader(self, *, rank: int, world: int, accumulation: int = 1) -> Loader:
        """Return the training data of a data-parallel rank, of `world`. Raises DataError."""
        batch = self.config.training.local_batch_size
        return self._loader(
            "train", ShardSpec(rank=rank, world=world, batch=batch), accumulation
        )

    def validation_loader(self, *, rank: int, world: int) -> Loader:
        """Return the validation data of a data-parallel rank. Raises DataError."""
        batch = self.config.validation.local_batch_size
        return self._loader("validation", ShardSpec(rank=rank, world=world, batch=batch))

    def _loader(self, split: str, share: ShardSpec, accumulation: int = 1) -> Loader:
        samples = self.dataset(split, rank=share.rank, world=share.world)
        return Loader(
            samples,
            share=share,
            collate=self.collate(samples),
            dataloader=self.config.training.dataloader,
            accumulation=accumulation,
            order=self.order() if split == "train" else {},
        )

    def order(self) -> dict[str, Any]:
        """Return the settings that decide which training sample comes next, by key. A run that resumes with others is refused."""
        return {"debug.seed": self.config.debug.seed}

    @abstractmethod
    def describe(self) -> str:
        """Return a line about the data, for the page at the start of a run."""

    @abstractmethod
    def fake_batch(self) -> TensorBatch:
        """Return a batch of zeros with the shapes of a loader's, of training.local_batch_size samples. The simulator has no data."""

    def random_batch(self, seed: int) -> TensorBatch:
        """Return a batch like `fake_batch` with random numbers, on which `titan certify` compares layouts.

        Replace it if numbers must belong together. The default draws token ids along the sequence, and floats in [0, 1).
        """
        generator = torch.Generator().manual_seed(seed)
        batch = self.fake_batch()

        def draw(name: str, x: Tensor) -> Tensor:
            if x.is_floating_point():
                return torch.rand(x.shape, generator=generator)
            highest = (self.sizes.vocab_size or 1) if name in batch.ALONG_SEQUENCE else 1
            return (
                torch.randint(highest, x.shape, generator=generator) if highest > 1 else x + 1
            )

        return batch.map(draw)

    # ---- the step

    def complete(self, batch: B, *, device: torch.device, is_cut: bool) -> B:
        """Return a loader's batch, completed for `microbatch`, before it is moved and cut.

        Args:
            batch: a loader's batch.
            device: where the rank computes.
            is_cut: a model part gets a part of each sequence, or begins past the embedding.
        """
        return batch

    @abstractmethod
    def microbatch(self, batch: B) -> Microbatch:
        """Return the arguments of model and loss, of a rank's part of a batch on its device."""

    @abstractmethod
    def loss(
        self, mesh: DeviceMesh, *, output: nn.Module | None, float8: Sequence[Conversion]
    ) -> LossFunction:
        """Return the loss function. It maps the model's output and the targets of a micro-batch to their summed loss, an fp32 scalar.

        Args:
            mesh: the job's device mesh.
            output: the output layer if the loss has to apply it; only for tasks with `predicts_tokens` and `applies_output`.
            float8: the model's layers that compute in 8 bits.
        """

    # ---- validation

    def measure(self, batch: B) -> float:
        """Return a number of a validation batch on the CPU. `report` gets the sum over all batches and ranks."""
        return 0

    def report(
        self, run: SampleContext, *, loss: float, num_valid: float, measured: float
    ) -> dict[str, Any]:
        """Return the columns of a validation beside its loss.

        Args:
            run: the run.
            loss: summed loss over all batches and ranks, in nats.
            num_valid: number of valid targets over all batches and ranks.
            measured: sum of `measure` over all batches and ranks.
        """
        return {}

    def generate(self, run: SampleContext) -> Mapping[str, str] | None:
        """Write samples of the model below `run.run_dir`, or return texts by their prompts. All ranks call it after each validation."""
        return None

    # ---- `titan generate`

    def prompt_with(
        self, file: Path, text: str
    ) -> tuple[list[int], Callable[[Tensor], Mapping[str, Tensor]]]:
        """Return a prompt of a text and a file, for `titan generate --image`.

        Returns:
            The token ids, and a function that maps ids (1, S) to further arguments of the model's forward.

        Raises:
            DataError: the model takes text alone, or the file cannot be read.
        """
        raise DataError(f"{file}: {self.config.model.name} takes text alone")

    def draw(self, model: nn.Module, text: str, *, seed: int, file: Path) -> None:
        """Write a sample of a model that predicts no tokens, for `titan generate --output`.

        Raises:
            DataError: the task draws nothing, or nothing of this text or into this kind of file.
        """
        raise DataError(f"{file}: {type(self).__name__} has no `draw`, which writes a sample")
