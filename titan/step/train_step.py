"""The training step, and the one function that builds everything it needs (the seam): `build_train_step`.

The trainer calls it with a real device and process group, the simulator with fake ones, and the parity tests with a few gloo ranks.
All of them run the same program, which is why the simulator and the tests can be believed. So no code here names a device or a
backend, or waits for a device. A step returns its numbers as tensors on the device, and the caller decides when to read them.

One step, with the global batch of B sequences spread over dp ranks and A micro-batches:

    valid tokens of the global batch      one all-reduce
    A x (forward, loss / valid, backward) loss summed over tokens; gradients summed over ranks (FSDP, DDP)
    clip, update, zero                    or each parameter in the backward pass (optim/in_backward.py)

Loss and gradients are divided by the one global count before anything is added up, so every layout and every A
compute the same numbers to rounding. Under pipeline parallelism a rank holds one stage or several, and a micro-batch
is what the pipeline cuts into smaller microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.base.async_scalars import AsyncScalars
from titan.base.untrusted import InputError
from titan.config.phases import Phase
from titan.config.schema import JobConfig
from titan.data.base import TensorBatch
from titan.losses.loss import IGNORED
from titan.optim.averaged import build_average
from titan.optim.clipping import clip_gradients
from titan.optim.expert_bias import ExpertBiasBalancer
from titan.optim.fused_adam import FusedAdam
from titan.optim.in_backward import OptimizerInBackward
from titan.optim.optimizers import build_optimizer
from titan.optim.schedule import learning_rate_factor
from titan.parallel import initialize, materialize, shard_sequence
from titan.parallel.async_tp import Rewrites, enable_async_tp
from titan.parallel.compile import CompileLog
from titan.parallel.float8 import Conversion, gathers_float8, precompute_scales
from titan.parallel.mesh import StepGroups, axis_size, build_sparse_mesh, submesh
from titan.step.loss_scale import LossScale
from titan.step.parallelize import (
    backward_preparer,
    compile_log_of,
    moes_of,
    parallelize,
    require_trained,
)
from titan.step.random_draws import RandomDraws
from titan.step.resolved import ResolvedJob
from titan.step.whole_model import build_whole_model, sent_by_stage
from titan.tasks.base import LossFunction, Microbatch

if TYPE_CHECKING:
    from titan.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class StepReport:
    """The numbers of a step, as scalars on the device. Reading one waits for the device.

    Attributes:
        loss: mean over the valid tokens of the global batch, in nats.
        grad_norm: global gradient norm before clipping.
        num_valid: valid tokens of the global batch.
        local_losses: this rank's summed loss of each micro-batch; zeros on a pipeline stage that is not the last.
        has_targets: num_valid is above 0. Otherwise the weights were not updated.
        groups: sums of the groups of the global batch (titan/losses/groups.py).
    """

    loss: Tensor
    grad_norm: Tensor
    num_valid: Tensor
    local_losses: Tensor
    has_targets: bool = True
    groups: Sequence[Tensor] = ()


@dataclass
class TrainStep:
    """A model with its layout and weights, and the steps that train and evaluate it.

    Attributes:
        job: the resolved job.
        model_parts: the whole model, or this rank's pipeline stages.
        pipeline: runs the stages, if there is pipeline parallelism.
        optimizer: updates the parameters of all parts.
        device: where the rank computes.
        mesh: the device mesh.
        loss_sum: the task's loss.
        async_tp: graphs that async TP has rewritten.
        compile_log: compilations and recompilations.
        float8: layers that compute in 8 bits.
        is_fake: tensors hold no numbers, as in the simulator. Random numbers are not drawn, and labels cannot be counted.
        in_backward: updates parameters in the backward pass, if the job asks for that.
        groups: process groups of the step's sums.
        average: average of the weights, if the job keeps one.
        balance: balances the load of experts by their routing biases.
    """

    job: ResolvedJob
    model_parts: list[nn.Module]
    pipeline: Pipeline | None
    optimizer: torch.optim.Optimizer
    device: torch.device
    mesh: DeviceMesh
    loss_sum: LossFunction
    async_tp: Rewrites | None
    compile_log: CompileLog | None
    float8: list[Conversion]
    is_fake: bool = False

    def __post_init__(self) -> None:
        self.on_gradients: list[Callable[[], None]] = []
        self.on_event: Callable[[str], None] = lambda _: None
        self.before_change: Callable[..., None] = lambda: None
        self.join_groups(1, lambda _: None)
        self.config, self.task = self.job.config, self.job.task
        self.group_sums = self.task.group_sums
        if self.pipeline is not None and self.task.loss_can("sums_groups"):
            self.pipeline.idle = IGNORED
        early = self.config.steps_in_backward
        self.in_backward = OptimizerInBackward(self.optimizer) if early else None
        self.groups = StepGroups.of(self.mesh)
        self.average = build_average(self.model_parts, self.config)
        moes = (moes_of(part).items() for part in self.model_parts)
        self.balance = ExpertBiasBalancer.of(dict(chain(*moes)), self.mesh)
        self.prepare_backward = backward_preparer(self.job)
        self.shape = _shape(self.config)  # of the micro-batches of this phase
        self.context = submesh(self.mesh, "cp")
        self.draws = RandomDraws(
            self.config, self.model_parts, mesh=self.mesh, device=self.device
        )
        in_fp16 = self.config.training.compute_dtype == "float16"
        self.loss_scale = LossScale() if in_fp16 else None
        # Kept, because a walk over the modules costs a small model a hundredth of its step.
        self.parameters = [p for part in self.model_parts for p in part.parameters()]
        self.num_replicas = axis_size(self.mesh, "dp_replicate", "dp_shard")  # of the data

    def train(
        self,
        batches: Sequence[TensorBatch],
        *,
        step: int,
        accept: Callable[[Tensor, Tensor], bool] | None = None,
    ) -> StepReport:
        """Train on this rank's micro-batches of step 1, 2, ...: forward, backward, clip, update.

        Args:
            batches: batches of the task, on any device. A batch of text is anything with the tensors of `titan.data.packing.Batch`.
            step: number of the step.
            accept: maps loss and gradient norm to the decision whether to update, the same on all ranks. It waits for the device, so
                the host no longer runs ahead.

        Returns:
            The numbers of the step.
        """
        if not self.is_fake:
            self.draws.begin(step)
        self.compute_scales()
        local = [self.to_local(batch) for batch in batches]
        num_valid = _sum(_count_valid(local), self.groups.tokens)
        self.sum_over_groups([num_valid])
        # Copied while the step runs. The host waits for the step before, and not for this one.
        targets = None if self.is_fake else AsyncScalars([num_valid])
        divisor = num_valid.clamp(min=1)
        replicas = self.num_replicas * self.num_groups
        num_sequences = sum(len(batch.input) for batch in local) * replicas
        num_parts = 1 if self.context is None else self.context.size()
        num_tokens = num_sequences * local[0].input.shape[1] * num_parts
        if self.loss_scale is not None:  # also of the terms that balance experts
            scale = self.loss_scale.value
            divisor, num_tokens = divisor / scale, num_tokens / scale
            num_sequences /= scale
        self.balance.begin(num_sequences=num_sequences, num_tokens=num_tokens)
        # The rate is a function of the step alone, so a resumed run needs no scheduler state.
        self.set_learning_rate(step)
        self.group_sums.begin(self.device)
        losses = []
        for number, batch in enumerate(local, start=1):
            is_last = number == len(local)
            # Only the last micro-batch completes a gradient, so only then may a parameter be updated.
            if self.in_backward is not None:
                self.in_backward.active = is_last and (
                    targets is None or targets.values()[0] > 0
                )
            losses.append(self._forward_backward(batch, divisor, is_last=is_last))
        self.draws.end()
        self.sum_over_groups([p.grad for p in self.parameters if p.grad is not None])
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.parameters)
        # From here on gradients are complete: reduced over ranks, and summed over micro-batches.
        grad_norm = self._clip()
        local_losses = torch.stack(losses)
        loss = _sum(local_losses.sum(), self.groups.loss)
        of_groups = self._sum_groups()
        self.sum_over_groups([loss, *of_groups])
        loss = loss / num_valid.clamp(min=1)
        self.balance.sum_loads(self.sum_over_groups)
        # The norm of offloaded parameters is on the host.
        grad_norm = grad_norm.to(self.device, non_blocking=True)
        accepted = self.in_backward is not None or accept is None or accept(loss, grad_norm)
        has_targets = targets is None or targets.values()[0] > 0
        accepted = accepted and has_targets
        if self.loss_scale is not None and not self.is_fake:
            [norm] = AsyncScalars([grad_norm]).values()
            accepted = self.loss_scale.update(norm) and accepted
        # Before the weights: replica groups may synchronize at the end of the optimizer's step, and average the biases too.
        self.balance.finish(accepted=accepted)
        if accepted and self.in_backward is None:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None and accepted:
            self.average.update(step)
        return StepReport(loss, grad_norm, num_valid, local_losses, has_targets, of_groups)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[TensorBatch]) -> tuple[Tensor, Tensor]:
        """Return the summed loss in nats, and the number of valid tokens, of all ranks' batches, as scalars on the device."""
        loss = torch.zeros((), device=self.device)
        num_valid = torch.zeros((), dtype=torch.int64, device=self.device)
        self.group_sums.begin(self.device)
        with self._evaluating():
            for batch in map(self.to_local, batches):
                loss += self._total(self._forward(batch))
                num_valid += _count_valid([batch])
        self._sum_groups()
        return _sum(loss, self.groups.loss), _sum(num_valid, self.groups.tokens)

    @torch.no_grad()
    def score(
        self, batches: Iterable[TensorBatch], of_rows: LossFunction, *, width: int
    ) -> Tensor:
        """Return this rank's part of the figures of each sample of its batches.

        The parts of pipeline- and context-parallel ranks add up. All ranks pass the same number of batches, of the same shapes.

        Args:
            batches: batches of the task.
            of_rows: maps the model's output and the targets of B samples to figures (B, width) fp64.
            width: figures of a sample.

        Returns:
            Figures (samples, width) fp64, in the order of the samples.
        """
        with self._evaluating():
            rows = [
                torch.cat(parts)
                if (parts := self._forward(batch, of_rows))
                else torch.zeros(
                    len(batch.input), width, dtype=torch.float64, device=self.device
                )
                for batch in map(self.to_local, batches)
            ]
        return torch.cat(rows)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Put the model in evaluation mode within a block."""
        self.compute_scales()
        for part in self.model_parts:
            part.eval()
        yield
        for part in self.model_parts:
            part.train()

    def to_local(self, batch: TensorBatch) -> Microbatch:
        """Return the batch on this rank's device and, under context parallelism, its shard of each sequence."""
        is_cut = self.context is not None or self.pipeline is not None
        batch = self.task.complete(batch, device=self.device, is_cut=is_cut)
        balanced = self.config.parallelism.splits_from_both_ends

        def part(name: str, tensor: Tensor) -> Tensor:
            # Whole, and cut on the device: a cut copy would not be in pinned memory, and the host would wait for it.
            tensor = tensor.to(self.device, non_blocking=True)
            if self.context is None or name not in batch.ALONG_SEQUENCE:
                return tensor
            rank, size = self.context.get_local_rank(), self.context.size()
            return shard_sequence(tensor, dim=1, rank=rank, size=size, balanced=balanced)

        return self.task.microbatch(batch.map(part))

    def compute_scales(self) -> None:
        if self.job.techniques.precomputes_scales:
            for part in filter(gathers_float8, self.model_parts):
                precompute_scales(part)

    def set_learning_rate(self, step: int) -> float:
        """Set the learning rate of each parameter group for a step, its own peak times the schedule. Return that of the first group."""
        factor = learning_rate_factor(
            step,
            section=self.config.lr_scheduler,
            total_steps=self.config.training.steps,
            phases=self.job.phases,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]

    def join_groups(self, num_groups: int, sum_: Callable[[Sequence[Tensor]], None]) -> None:
        """Train together with other replica groups.

        Args:
            num_groups: number of groups.
            sum_: sums tensors over the groups, in place.
        """
        self.num_groups, self.sum_over_groups = num_groups, sum_

    def call_with_gradients(self, function: Callable[[], None]) -> None:
        """Also call this function when the gradients of a step are complete, before they are clipped."""
        self.on_gradients.append(function)

    def call_before_change(self, function: Callable[..., None]) -> None:
        """Call a function before each update of the weights, and before they are exchanged for their average."""
        self.optimizer.register_step_pre_hook(function)
        self.before_change = function

    def change(self, phase: Phase) -> None:
        """Continue with the batch and the sequences of another phase of the job."""
        if self.compile_log is not None and (new := _shape(phase.config)) != self.shape:
            self.shape = new
            # Otherwise torch would compile for dynamic shapes, since it has seen two: slower than in a run that starts here.
            torch.compiler.reset()
        if self.pipeline is not None and phase.number in self.job.splits:
            self.pipeline.change(self.job.splits[phase.number].schedule)

    def _clip(self) -> Tensor:
        """Clip the gradients by their global norm and return the norm. Updates in the backward pass have already freed the gradients."""
        if self.in_backward is not None:
            return self.in_backward.finish()
        for function in self.on_gradients:
            function()
        with torch.profiler.record_function("titan: clip"):
            return clip_gradients(
                self.parameters,
                max_norm=self.config.training.max_norm,
                stages=self.groups.stages,
                optimizer=self.optimizer if isinstance(self.optimizer, FusedAdam) else None,
            )

    def _forward_backward(self, batch: Microbatch, divisor: Tensor, *, is_last: bool) -> Tensor:
        """Add the gradients of a micro-batch. Return its loss, summed over this rank's tokens."""
        if self.pipeline is not None:
            losses = self.pipeline.step(
                batch.input, batch.targets, divide_by=divisor, **batch.inputs
            )
            self.on_event("backward")
            return self._total(losses)
        (model,) = self.model_parts
        self.prepare_backward(model, is_last=is_last)
        loss = self._loss(batch)
        self.on_event("forward")
        # Divide before backward: gradients then add up over micro-batches and ranks to those of the global mean.
        (loss / divisor).backward()
        self.on_event("backward")
        return loss.detach()

    def _loss(self, batch: Microbatch, loss: LossFunction | None = None) -> Tensor:
        """Return the loss of a micro-batch, or what another function makes of the model's output."""
        (model,) = self.model_parts
        return (loss or self.loss_sum)(model(batch.input, **batch.inputs), batch.targets)

    def _forward(self, batch: Microbatch, loss: LossFunction | None = None) -> list[Tensor]:
        """Return the loss of a micro-batch, or of each microbatch of a pipeline, over this rank's tokens; an empty list before the last stage."""
        if self.pipeline is not None:
            size = self.config.parallelism.pipeline_parallel_microbatch_size
            # A batch that does not divide is one microbatch, so that validation may have any size.
            whole, rest = divmod(len(batch.input), size)
            return self.pipeline.eval(
                batch.input,
                batch.targets,
                num_microbatches=1 if rest else whole,
                loss_fn=loss,
                **batch.inputs,
            )
        return [self._loss(batch, loss)]

    def _sum_groups(self) -> Sequence[Tensor]:
        """Return the sums of the groups, if there are any, over all ranks."""
        return [_sum(sums_G2, self.groups.loss) for sums_G2 in self.group_sums.sums]

    def _total(self, losses: list[Tensor]) -> Tensor:
        """Return the sum of losses, which is 0 except on the last pipeline stage."""
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)


@contextmanager
def as_refusals() -> Iterator[None]:
    """Raise a ValueError of a helper of titan.parallel, which knows no jobs, as InputError."""
    try:
        yield
    except ValueError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        # Of the helper's own code, and not of torch's or a model's that it calls.
        raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
        if type(error) is ValueError and raised_in.startswith("titan.parallel."):
            raise InputError(error) from error
        raise


@as_refusals()
def build_train_step(job: ResolvedJob, *, device: torch.device, mesh: DeviceMesh) -> TrainStep:
    """Build model, parallelism, loss, optimizer and schedule; weights are drawn from debug.seed.

    Args:
        job: the job with its task, resolved for the ranks of `mesh` (titan/step/resolved.py).
        device: where the rank computes.
        mesh: built by `titan.parallel.build_mesh` over the default process group.
    """
    config, sizes, training = job.config, job.sizes, job.config.training
    model, float8 = build_whole_model(job)
    # Experts are laid out like everything else unless ranks share them, or tensor parallelism would leave them whole.
    sparse_mesh, ep = None, config.parallelism.expert_parallel_degree
    if sizes.num_experts and (ep > 1 or axis_size(mesh, "tp") > 1):
        sparse_mesh = build_sparse_mesh(mesh, ep=ep)
    async_tp, tp = None, submesh(mesh, "tp")
    if tp is not None and config.parallelism.enable_async_tensor_parallel:
        async_tp = enable_async_tp(tp.get_group())
    stages: dict[int, nn.Module] = {0: model}
    schedule = None
    pp = submesh(mesh, "pp")
    if pp is not None:
        from titan.parallel.stages import extract_stages

        split = next(iter(job.splits.values()))
        require_trained(model, split.modules)
        schedule, rank = split.schedule, pp.get_local_rank()
        stages = extract_stages(model, split.modules, numbers=schedule.stages_of(rank))
    # Layout first, then memory for this rank's shards alone, then weights.
    for stage in stages.values():
        parallelize(stage, job=job, mesh=mesh, sparse_mesh=sparse_mesh)
        home = torch.device("cpu") if training.enable_cpu_offload else device
        materialize(stage, device=home, buffers_on=device)
        initialize(stage, seed=config.debug.seed, std_of=model.init_std)
    in_loss = job.techniques.output_in_loss
    output = dict(stages[max(stages)].named_children()).get("output") if in_loss else None
    loss_sum = job.task.loss(mesh, output=output, float8=float8)
    pipeline = None
    if pp is not None and schedule is not None:
        from titan.parallel.pipeline import Pipeline

        pipeline = Pipeline(
            stages,
            schedule=schedule,
            mesh=pp,
            device=device,
            loss_fn=loss_sum,
            boundary=partial(sent_by_stage, job),
        )
    model_parts = list(stages.values())
    # pyrefly: ignore[bad-argument-type]
    num_blocks = sum(len(part.get_submodule("layers")) for part in model_parts)
    optimizer = build_optimizer(
        config.optimizer,
        [named for part in model_parts for named in part.named_parameters()],
        seed=config.debug.seed,
    )
    return TrainStep(
        job=job,
        model_parts=model_parts,
        pipeline=pipeline,
        optimizer=optimizer,
        device=device,
        mesh=mesh,
        loss_sum=loss_sum,
        async_tp=async_tp,
        compile_log=compile_log_of(config.compile, num_blocks),
        float8=float8,
    )


def _shape(config: JobConfig) -> tuple[int, int]:
    return config.training.local_batch_size, config.training.seq_len


def _count_valid(batches: Sequence[Microbatch]) -> Tensor:
    """Return the number of labels that are trained on, an int64 scalar on their device."""
    return torch.stack([batch.num_valid for batch in batches]).sum()


def _sum(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value
