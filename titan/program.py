"""The seam: one function builds everything a training step needs, from the config, a device type and a mesh.

The trainer calls it with a real device and process group, the simulator with fake ones, the parity tests with a
few gloo ranks. It is the same program each time, and that is why the simulator and the tests can be believed. So
nothing in here names a device or a backend, and nothing waits for one: what a step computes comes back as
tensors on the device, for the caller to read when it likes.

One step, with the global batch of B sequences spread over dp ranks and A micro-batches:

    valid tokens of the global batch      one all-reduce
    A x (forward, loss / valid, backward) loss summed over tokens; gradients summed over ranks (FSDP, DDP)
    clip, set learning rate, update, zero

Loss and gradients are divided by the one global count before anything is added up, so every layout and every A
compute the same numbers to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.config.rules import model_config
from titan.config.sections import JobConfig, LRSchedulerSection, OptimizerSection
from titan.data.packing import IGNORED
from titan.loss import VocabularyShard, cross_entropy_sum
from titan.models.attention import InnerAttention
from titan.optim.clipping import clip_gradients
from titan.optim.optimizers import build_optimizer
from titan.optim.schedule import learning_rate_factor
from titan.parallel import initialize, materialize
from titan.parallel.apply import ParallelPlan, parallelize
from titan.parallel.context import Method, shard_sequence
from titan.parallel.fsdp import set_gradient_sync
from titan.parallel.mesh import axis_size, submesh

# How the TOML names the methods. "alltoall" is TorchTitan's ring, which rotates by all-to-all.
_CONTEXT_METHODS: dict[str, Method] = {
    "allgather": "allgather",
    "alltoall": "ring",
    "ring": "ring",
    "ulysses": "ulysses",
}


class MicroBatch(Protocol):
    """What a step reads of a batch; titan.data's Batch is one. All int64, (B, S), on any device."""

    @property
    def tokens_BS(self) -> Tensor: ...
    @property
    def labels_BS(self) -> Tensor: ...
    @property
    def positions_BS(self) -> Tensor | None: ...
    @property
    def document_ids_BS(self) -> Tensor | None: ...


@dataclass(frozen=True)
class StepReport:
    """What a step computed, as scalars on the device; reading one waits for it.

    loss: mean over the global batch's valid tokens, in nats. grad_norm: global, before clipping.
    num_valid: valid tokens of the global batch. local_losses: this rank's sums, one for each micro-batch.
    """

    loss: Tensor
    grad_norm: Tensor
    num_valid: Tensor
    local_losses: Tensor


@dataclass(frozen=True)
class SequenceSplit:
    """Which part of each sequence this rank holds (context parallelism)."""

    rank: int
    size: int
    balanced: bool

    def of(self, tensor_BS: Tensor) -> Tensor:
        return shard_sequence(
            tensor_BS, dim=1, rank=self.rank, size=self.size, balanced=self.balanced
        )


@dataclass(frozen=True)
class LocalBatch:
    """A micro-batch on this rank's device, and of its part of the sequence."""

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor | None
    document_ids_BS: Tensor | None


@dataclass
class Program:
    """A model, laid out and with weights, and the steps that train and evaluate it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    mesh: DeviceMesh
    data_group: dist.ProcessGroup | None  # ranks with different samples; None: one
    loss_group: (
        dist.ProcessGroup | None
    )  # ranks with different tokens: those, and context-parallel ones
    context: SequenceSplit | None
    sync_every_microbatch: bool
    optimizer_section: OptimizerSection
    schedule_section: LRSchedulerSection
    total_steps: int
    max_norm: float
    chunk_tokens: int
    vocabulary_shard: VocabularyShard | None  # loss parallel

    def train_step(self, batches: Sequence[MicroBatch], *, step: int) -> StepReport:
        """Train on this rank's micro-batches of step 1, 2, ...: forward, backward, clip, update."""
        local = [self._localize(batch) for batch in batches]
        num_valid = self._sum_over_tokens(sum_valid(local))
        losses = []
        for number, batch in enumerate(local):
            is_last = number == len(batches) - 1
            set_gradient_sync(self.model, self.sync_every_microbatch or is_last)
            loss_sum = self._loss_sum(batch)
            (loss_sum / num_valid).backward()
            losses.append(loss_sum.detach())
        grad_norm = clip_gradients(self.model.parameters(), max_norm=self.max_norm)
        self.set_learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        local_losses = torch.stack(losses)
        loss = self._sum_over_tokens(local_losses.sum()) / num_valid
        return StepReport(loss, grad_norm, num_valid, local_losses)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Summed loss in nats and number of valid tokens over all ranks' batches, as device scalars."""
        self.model.eval()
        loss = torch.zeros((), device=self.device)
        num_valid = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in map(self._localize, batches):
            loss += self._loss_sum(batch)
            num_valid += sum_valid([batch])
        self.model.train()
        return self._sum_over_tokens(loss), self._sum_over_tokens(num_valid)

    def set_learning_rate(self, step: int) -> float:
        """Set and return the learning rate of a step."""
        factor = learning_rate_factor(
            step, section=self.schedule_section, total_steps=self.total_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer_section.lr * factor
        return self.optimizer_section.lr * factor

    def _loss_sum(self, batch: LocalBatch) -> Tensor:
        logits_BSV = self.model(batch.tokens_BS, batch.positions_BS, batch.document_ids_BS)
        return cross_entropy_sum(
            logits_BSV,
            batch.labels_BS,
            chunk_tokens=self.chunk_tokens,
            shard=self.vocabulary_shard,
        )

    def _sum_over_tokens(self, value: Tensor) -> Tensor:
        if self.loss_group is not None:
            dist.all_reduce(value, group=self.loss_group)
        return value

    def _localize(self, batch: MicroBatch) -> LocalBatch:
        """On the device, and this rank's part of the sequence."""
        tokens_BS, positions_BS = batch.tokens_BS, batch.positions_BS
        if self.context is not None and positions_BS is None:
            # A part does not know its place.
            positions_BS = torch.arange(tokens_BS.shape[1]).expand(tokens_BS.shape)

        def local(tensor_BS: Tensor | None) -> Any:
            if tensor_BS is None:
                return None
            part = tensor_BS if self.context is None else self.context.of(tensor_BS)
            return part.to(self.device, non_blocking=True)

        return LocalBatch(
            local(tokens_BS),
            local(batch.labels_BS),
            local(positions_BS),
            local(batch.document_ids_BS),
        )


def sum_valid(batches: Sequence[LocalBatch]) -> Tensor:
    """Labels that are trained on, over the batches; a scalar int64 on their device."""
    return torch.stack([(batch.labels_BS != IGNORED).sum() for batch in batches]).sum()


def build_program(config: JobConfig, *, device: torch.device, mesh: DeviceMesh) -> Program:
    """Build model, parallelism, loss, optimizer and schedule; weights are drawn from debug.seed.

    The default process group must be initialised and `mesh` lie over it. The config must have passed
    titan.config.rules, which is where a user's mistakes are told.
    """
    training = config.training
    with torch.device("meta"), _default_dtype(torch_dtype(training.dtype)):
        family = import_family(config.model.name)
        sizes = model_config(config.model)
        model = family.build_model(sizes)
    param_dtype = torch_dtype(training.mixed_precision_param)
    method = _CONTEXT_METHODS[config.parallelism.context_parallel_rotate_method]
    # Ulysses runs whole sequences, whose work needs no balancing.
    balancer = config.parallelism.context_parallel_load_balancer
    balanced = balancer == "headtail" and method != "ulysses"
    plan = ParallelPlan(
        param_dtype=None if training.mixed_precision_param == training.dtype else param_dtype,
        reduce_dtype=torch_dtype(training.mixed_precision_reduce),
        reshard_after_forward=config.parallelism.fsdp_reshard_after_forward != "never",
        cpu_offload=training.enable_cpu_offload,
        tensor_plan=family.TENSOR_PLAN,
        num_kv_heads=sizes.n_kv_heads,
        loss_parallel=not config.parallelism.disable_loss_parallel,
        attention_type=InnerAttention,
        context_method=method,
        context_balanced=balanced,
    )
    parallelize(model, mesh=mesh, blocks=list(model.layers.values()), plan=plan)
    materialize(model, device=device)
    initialize(model, seed=config.debug.seed, std_of=model.init_std)
    cp = submesh(mesh, "cp")
    return Program(
        model=model,
        optimizer=build_optimizer(config.optimizer, model.parameters()),
        device=device,
        mesh=mesh,
        data_group=_group(mesh, "dp_replicate", "dp_shard"),
        loss_group=_group(mesh, "dp_replicate", "dp_shard", "cp"),
        context=SequenceSplit(cp.get_local_rank(), cp.size(), balanced) if cp else None,
        # Sharded gradients are small, whole ones are the size of the model: reduce each micro-batch's, unless
        # the whole ones are there anyway.
        sync_every_microbatch=axis_size(mesh, "dp_shard", "cp") > 1,
        optimizer_section=config.optimizer,
        schedule_section=config.lr_scheduler,
        total_steps=training.steps,
        max_norm=training.max_norm,
        chunk_tokens=config.loss.chunk_tokens,
        vocabulary_shard=_vocabulary_shard(mesh, sizes.vocab_size) if plan.loss_parallel else None,
    )


def _group(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup | None:
    part = submesh(mesh, *axes, flatten=True)
    return None if part is None else part.get_group()


def _vocabulary_shard(mesh: DeviceMesh, vocab_size: int) -> VocabularyShard | None:
    """This rank's part of the logits, cut as DTensor cuts: equal parts rounded up, the last one shorter."""
    tp = submesh(mesh, "tp")
    if tp is None:
        return None
    return VocabularyShard(tp.get_group(), start=tp.get_local_rank() * -(-vocab_size // tp.size()))


def import_family(name: str) -> ModuleType:
    """The package of a model family: titan.models.<name>, or one registered as `titan.models`."""
    for entry in entry_points(group="titan.models"):
        if entry.name == name:
            return entry.load()
    return import_module(f"titan.models.{name}")


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16."""
    return getattr(torch, name)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
