"""The seam: one function builds everything a training step needs, from the config, a device type and a mesh.

The trainer calls it with a real device and process group, the simulator with fake ones, the parity tests with a
few gloo ranks. It is the same program each time, and that is why the simulator and the tests can be believed. So
nothing in here names a device or a backend, and nothing waits for one: what a step computes comes back as
tensors on the device, for the caller to read when it likes.

One step, with the global batch of B sequences spread over dp ranks and A micro-batches:

    valid tokens of the global batch      one all-reduce
    A x (forward, loss / valid, backward) loss summed over tokens; gradients summed over ranks (FSDP, DDP)
    clip, update, zero                    or each parameter in the backward pass (optim/early.py)

Loss and gradients are divided by the one global count before anything is added up, so every layout and every A
compute the same numbers to rounding. Under pipeline parallelism a rank holds one stage or several, and a micro-batch
is what the pipeline cuts into microbatches of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.batches import LocalBatch, Localizer, MicroBatch, sum_valid
from titan.config.model import family as import_family
from titan.config.model import model_config
from titan.config.quantize import quantize_section
from titan.config.schema import (
    ActivationCheckpointSection,
    CompileSection,
    Float8Section,
    JobConfig,
    LRSchedulerSection,
    ParallelismSection,
)
from titan.loss import Kernels, LossSum, VocabularyShard, leave_output_to_loss
from titan.models.attention import InnerAttention
from titan.optim.clipping import clip_gradients
from titan.optim.early import EarlyStep
from titan.optim.optimizers import build_optimizer
from titan.optim.schedule import learning_rate_factor
from titan.parallel import initialize, materialize
from titan.parallel.apply import ParallelPlan, parallelize
from titan.parallel.async_tp import Rewrites, enable_async_tp
from titan.parallel.compile import CompileLog
from titan.parallel.context import Method
from titan.parallel.float8 import Conversion, Float8Error, apply_float8, precompute_scales
from titan.parallel.fsdp import set_gradient_sync
from titan.parallel.mesh import axis_size, submesh
from titan.parallel.pipeline import Pipeline, PipelinePlan, plan_pipeline, take_stages
from titan.parallel.schedules import splits_backward
from titan.parallel.shims import can_split_custom_functions

# How the TOML names the methods. "alltoall" is TorchTitan's ring, which rotates by all-to-all.
_CONTEXT_METHODS: dict[str, Method] = {
    "allgather": "allgather",
    "alltoall": "ring",
    "ring": "ring",
    "ulysses": "ulysses",
}


@dataclass(frozen=True)
class StepReport:
    """What a step computed, as scalars on the device; reading one waits for it.

    loss: mean over the global batch's valid tokens, in nats. grad_norm: global, before clipping.
    num_valid: valid tokens of the global batch. local_losses: this rank's sums, one for each micro-batch; zeros
    on a pipeline stage that is not the last.
    """

    loss: Tensor
    grad_norm: Tensor
    num_valid: Tensor
    local_losses: Tensor


@dataclass(frozen=True)
class Groups:
    """Process groups a step sums over; None where it is one rank.

    data: ranks with different samples. tokens: with different tokens, context-parallel ones too. loss: those of
    all pipeline stages. stages: the pipeline.
    """

    data: dist.ProcessGroup | None
    tokens: dist.ProcessGroup | None
    loss: dist.ProcessGroup | None
    stages: dist.ProcessGroup | None

    @staticmethod
    def of(mesh: DeviceMesh) -> Groups:
        def group(*axes: str) -> dist.ProcessGroup | None:
            part = submesh(mesh, *axes, flatten=True)
            return None if part is None else part.get_group()

        return Groups(
            data=group("dp_replicate", "dp_shard"),
            tokens=group("dp_replicate", "dp_shard", "cp"),
            loss=group("pp", "dp_replicate", "dp_shard", "cp"),
            stages=group("pp"),
        )


@dataclass
class Program:
    """A model, laid out and with weights, and the steps that train and evaluate it.

    parts: the whole model, or this rank's pipeline stages.
    """

    parts: list[nn.Module]
    pipeline: Pipeline | None
    optimizer: torch.optim.Optimizer
    early_step: EarlyStep | None
    device: torch.device
    mesh: DeviceMesh
    groups: Groups
    localize: Localizer
    loss_sum: LossSum
    sync_every_microbatch: bool
    schedule_section: LRSchedulerSection
    total_steps: int
    max_norm: float
    microbatch_size: int
    async_tp: Rewrites | None  # what the compiler made of it
    compile_log: CompileLog | None
    float8: list[Conversion]  # which layers compute in 8 bits
    precompute_scales: bool
    on_gradients: Callable[[], None] | None = (
        None  # called with whole gradients, before they are clipped
    )

    def train_step(
        self,
        batches: Sequence[MicroBatch],
        *,
        step: int,
        accept: Callable[[Tensor, Tensor], bool] | None = None,
    ) -> StepReport:
        """Train on this rank's micro-batches of step 1, 2, ...: forward, backward, clip, update.

        accept: given loss and gradient norm, says whether to update; all ranks must say the same. It waits for the device, so
        that the host no longer runs ahead.
        """
        self._compute_scales()
        local = [self.localize(batch) for batch in batches]
        num_valid = _sum(sum_valid(local), self.groups.tokens)
        self.set_learning_rate(step)
        if self.compile_log is not None:
            torch.compiler.cudagraph_mark_step_begin()  # outputs of the last step may be overwritten
        losses = []
        for number, batch in enumerate(local):
            is_last = number == len(local) - 1
            if self.early_step is not None:
                self.early_step.active = is_last
            losses.append(self._forward_backward(batch, num_valid, sync=is_last))
        grad_norm = self._clip()
        local_losses = torch.stack(losses)
        loss = _sum(local_losses.sum(), self.groups.loss) / num_valid
        # Of offloaded parameters, the norm is on the host.
        grad_norm = grad_norm.to(self.device, non_blocking=True)
        if self.early_step is None:
            if accept is None or accept(loss, grad_norm):
                self.optimizer.step()
            self.optimizer.zero_grad()
        return StepReport(loss, grad_norm, num_valid, local_losses)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Summed loss in nats and number of valid tokens over all ranks' batches, as device scalars."""
        self._compute_scales()
        for part in self.parts:
            part.eval()
        loss = torch.zeros((), device=self.device)
        num_valid = torch.zeros((), dtype=torch.int64, device=self.device)
        for batch in map(self.localize, batches):
            loss += self._forward(batch)
            num_valid += sum_valid([batch])
        for part in self.parts:
            part.train()
        return _sum(loss, self.groups.loss), _sum(num_valid, self.groups.tokens)

    def _compute_scales(self) -> None:
        if self.precompute_scales:
            for part in self.parts:
                precompute_scales(part)

    def set_learning_rate(self, step: int) -> float:
        """Set each group's learning rate for a step, its own peak times the schedule; returns that of the first."""
        factor = learning_rate_factor(
            step, section=self.schedule_section, total_steps=self.total_steps
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]

    def _clip(self) -> Tensor:
        """The global norm of the gradients, which are then clipped by it; of those that are used up already, the norm."""
        if self.early_step is not None:
            return self.early_step.finish()
        if self.on_gradients is not None:
            self.on_gradients()
        parameters = [p for part in self.parts for p in part.parameters()]
        with torch.profiler.record_function("titan: clip"):
            return clip_gradients(parameters, max_norm=self.max_norm, stages=self.groups.stages)

    def _forward_backward(self, batch: LocalBatch, num_valid: Tensor, *, sync: bool) -> Tensor:
        """Add the gradients of a micro-batch; returns its loss, summed over this rank's tokens."""
        if self.pipeline is not None:
            losses = self.pipeline.step(
                batch.tokens_BS, batch.labels_BS, divide_by=num_valid, **_inputs(batch)
            )
            return self._total(losses)
        (model,) = self.parts
        set_gradient_sync(model, self.sync_every_microbatch or sync)
        loss_sum = self.loss_sum(model(batch.tokens_BS, **_inputs(batch)), batch.labels_BS)
        (loss_sum / num_valid).backward()
        return loss_sum.detach()

    def _forward(self, batch: LocalBatch) -> Tensor:
        """Loss of a micro-batch, summed over this rank's tokens."""
        if self.pipeline is not None:
            whole, rest = divmod(len(batch.tokens_BS), self.microbatch_size)
            losses = self.pipeline.eval(
                batch.tokens_BS,
                batch.labels_BS,
                num_microbatches=1 if rest else whole,
                **_inputs(batch),
            )
            return self._total(losses)
        (model,) = self.parts
        return self.loss_sum(model(batch.tokens_BS, **_inputs(batch)), batch.labels_BS)

    def _total(self, losses: list[Tensor]) -> Tensor:
        """The sum, which is nothing but on the last pipeline stage."""
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)


def build_program(config: JobConfig, *, device: torch.device, mesh: DeviceMesh) -> Program:
    """Build model, parallelism, loss, optimizer and schedule; weights are drawn from debug.seed.

    The default process group must be initialised and `mesh` lie over it. The config must have passed
    titan.config.rules, which is where a user's mistakes are told.
    """
    training, parallel = config.training, config.parallelism
    family, sizes = import_family(config.model.name), model_config(config.model)
    with torch.device("meta"), _default_dtype(torch_dtype(training.dtype)):
        model = family.build_model(sizes)
    plan = _parallel_plan(config, family=family, num_kv_heads=sizes.n_kv_heads)
    if plan.output_in_loss:
        leave_output_to_loss(model.output)
    tp = submesh(mesh, "tp")
    float8 = _convert(config, model, plan=plan, mesh=mesh)
    async_tp = None
    if tp is not None and parallel.enable_async_tensor_parallel:
        async_tp = enable_async_tp(tp.get_group())
    pp = submesh(mesh, "pp")
    num_microbatches = training.local_batch_size // parallel.pipeline_parallel_microbatch_size
    stages: dict[int, nn.Module] = {0: model}
    schedule = None
    if pp is not None:
        stage_plan = pipeline_plan(parallel, sizes.n_layers, num_microbatches)
        schedule = stage_plan.schedule
        numbers = schedule.stages_of(pp.get_local_rank())
        stages = take_stages(model, stage_plan.modules, numbers=numbers)
    for stage in stages.values():
        parallelize(stage, mesh=mesh, plan=plan)
        # Offloaded parameters live on the host.
        materialize(stage, device=torch.device("cpu") if plan.cpu_offload else device)
        initialize(stage, seed=config.debug.seed, std_of=model.init_std)
    last = stages[max(stages)]
    loss_sum = LossSum(
        config.loss.chunk_tokens,
        shard=_vocabulary_shard(mesh, sizes.vocab_size) if plan.loss_parallel else None,
        output=getattr(last, "output", None) if plan.output_in_loss else None,
        kernels=Kernels.compiled(config.compile.backend)
        if config.compile.enable and "loss" in config.compile.components
        else Kernels(),
    )
    num_blocks = sum(len(stage.get_submodule("layers")) for stage in stages.values())  # pyright: ignore
    pipeline = None
    if pp is not None and schedule is not None:
        pipeline = Pipeline(stages, schedule=schedule, mesh=pp, device=device, loss_fn=loss_sum)
    context = submesh(mesh, "cp")
    parts = list(stages.values())
    optimizer = build_optimizer(
        config.optimizer,
        [named for part in parts for named in part.named_parameters()],
        seed=config.debug.seed,
    )
    early = getattr(config.optimizer, "early_step_in_backward", False)
    return Program(
        parts=parts,
        pipeline=pipeline,
        optimizer=optimizer,
        early_step=EarlyStep(optimizer) if early else None,
        device=device,
        mesh=mesh,
        groups=Groups.of(mesh),
        localize=Localizer(
            device, context, plan.context_balanced, needs_positions=bool(context or pipeline)
        ),
        loss_sum=loss_sum,
        # Sharded gradients are small, whole ones are the size of the model: reduce each micro-batch's, unless
        # the whole ones are there anyway.
        sync_every_microbatch=axis_size(mesh, "dp_shard", "cp") > 1,
        schedule_section=config.lr_scheduler,
        total_steps=training.steps,
        max_norm=training.max_norm,
        microbatch_size=parallel.pipeline_parallel_microbatch_size,
        async_tp=async_tp,
        compile_log=_compile_log(config.compile, num_blocks),
        float8=float8,
        # Under TP always: FSDP alone would take the maximum of a rank's part, and the numbers would depend on the layout.
        precompute_scales=_gathers_float8(config, mesh)
        and (
            config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp or tp is not None
        ),
    )


def _parallel_plan(config: JobConfig, *, family: ModuleType, num_kv_heads: int) -> ParallelPlan:
    training, parallel = config.training, config.parallelism
    same = training.mixed_precision_param == training.dtype
    method = _CONTEXT_METHODS[parallel.context_parallel_rotate_method]
    compiled = config.compile.components if config.compile.enable else []
    ac = config.activation_checkpoint
    by_op = ac.mode == "selective" and ac.selective_ac_option == "op"
    # Under pipeline parallelism a microbatch follows the other: gathering again for each would cost more.
    reshard = {"always": True, "never": False}.get(
        parallel.fsdp_reshard_after_forward, parallel.pipeline_parallel_degree == 1
    )
    return ParallelPlan(
        param_dtype=None if same else torch_dtype(training.mixed_precision_param),
        reduce_dtype=torch_dtype(training.mixed_precision_reduce),
        reshard_after_forward=reshard,
        cpu_offload=training.enable_cpu_offload,
        prefetch=parallel.fsdp_prefetch,
        tensor_plan=family.TENSOR_PLAN,
        num_kv_heads=num_kv_heads,
        loss_parallel=not parallel.disable_loss_parallel,
        output_in_loss=config.loss.chunk_output
        and not parallel.disable_loss_parallel
        and (not _splits_backward(parallel) or can_split_custom_functions()),
        attention_type=InnerAttention,
        context_method=method,
        compile_backend=config.compile.backend if "model" in compiled else "",
        compile_mode=config.compile.mode,
        memory_budget=ac.memory_budget if ac.mode == "memory_budget" else 1.0,
        recompute_every=_recompute_every(ac),
        recompute_keep=tuple(ac.op_keep) if by_op else (),
        recompute_keep_modules=tuple(ac.op_keep_modules) if by_op else (),
        preserve_rng_state=ac.preserve_rng_state,
        offload_activations=ac.cpu_offload,
        context_balanced=parallel.splits_from_both_ends,
    )


def _convert(
    config: JobConfig, model: nn.Module, *, plan: ParallelPlan, mesh: DeviceMesh
) -> list[Conversion]:
    """Convert linear layers to float8 or MXFP8, if the job asks for it."""
    section = quantize_section(config)
    if section is None:
        return []
    if _splits_backward(config.parallelism) and not can_split_custom_functions():
        raise Float8Error(
            f"torch {torch.__version__} cannot split the backward pass of float8 layers, as this pipeline schedule "
            "does; use 1F1B or Interleaved1F1B, or torch 2.13"
        )
    return apply_float8(
        model,
        recipe=section.recipe_name or "tensorwise",
        filter_fqns=section.filter_fqns,
        emulate=section.emulate,
        keep={"output": "the loss applies it (loss.chunk_output)"} if plan.output_in_loss else {},
        fsdp_all_gather=_gathers_float8(config, mesh),
        tensor_plan=plan.tensor_plan,
        tp=axis_size(mesh, "tp"),
        num_kv_heads=plan.num_kv_heads,
    )


def _splits_backward(section: ParallelismSection) -> bool:
    return section.pipeline_parallel_degree > 1 and splits_backward(
        section.pipeline_parallel_schedule, csv=section.pipeline_parallel_schedule_csv
    )


def _gathers_float8(config: JobConfig, mesh: DeviceMesh) -> bool:
    """Asked for, and there are parameters to gather."""
    section = quantize_section(config)
    return (
        isinstance(section, Float8Section)
        and section.enable_fsdp_float8_all_gather
        and axis_size(mesh, "dp_shard", "cp") > 1
    )


def _recompute_every(section: ActivationCheckpointSection) -> int:
    option = section.selective_ac_option
    if section.mode in ("none", "memory_budget"):
        return 0
    return 1 if section.mode == "full" or option == "op" else int(option)


def _compile_log(section: CompileSection, num_blocks: int) -> CompileLog | None:
    names = {"model": f"{num_blocks} blocks", "loss": "the loss"}
    what = [names[component] for component in section.components]
    return CompileLog(" and ".join(what)) if section.enable and what else None


def pipeline_plan(
    section: ParallelismSection, num_layers: int, num_microbatches: int
) -> PipelinePlan:
    """The stages and the schedule of a job with a pipeline. Raises ValueError."""
    return plan_pipeline(
        num_layers,
        num_ranks=section.pipeline_parallel_degree,
        num_microbatches=num_microbatches,
        schedule=section.pipeline_parallel_schedule,
        csv=section.pipeline_parallel_schedule_csv,
        layers_per_stage=section.pipeline_parallel_layers_per_stage,
        first_less=section.pipeline_parallel_first_stage_less_layers,
        last_less=section.pipeline_parallel_last_stage_less_layers,
        modules=section.module_fqns_per_model_part,
    )


def _inputs(batch: LocalBatch) -> dict[str, Tensor | None]:
    return {"positions_BS": batch.positions_BS, "document_ids_BS": batch.document_ids_BS}


def _sum(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def _vocabulary_shard(mesh: DeviceMesh, vocab_size: int) -> VocabularyShard | None:
    """This rank's part of the logits, cut as DTensor cuts: equal parts rounded up, the last one shorter."""
    tp = submesh(mesh, "tp")
    if tp is None:
        return None
    start = tp.get_local_rank() * -(-vocab_size // tp.size())
    return VocabularyShard(tp.get_group(), start=start, mesh=tp)


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
