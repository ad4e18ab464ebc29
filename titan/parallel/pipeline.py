"""Pipeline parallelism: a model is cut into stages, and microbatches pass through them.

    split_stages     the modules of each stage, and the order of each rank's work (stage_split.py, schedules.py)
    extract_stages   copies of the model without the modules of other stages (stages.py)
    Pipeline         trains and evaluates the stages of this rank, which may be parallelised further

The model is any nn.Module whose forward skips children that are None (embedding, norm, output layer) and loops over a ModuleDict
of layers. Activations go from stage to stage as the first argument of forward. torch's torch.distributed.pipelining runs the
stages. This file works around its faults, and its changes from 2.11 to 2.15, and says so at each place. Gradients are plain sums
over microbatches, for a loss that is a sum divided by a global count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from .compile import is_compiled
from .schedules import Action, Schedule
from .split_backward import backward_input, backward_weight, saving_for_two_passes

LossFunction = Callable[[Tensor, Tensor], Tensor]
Boundary = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
_FORWARD = ("FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD")


class Pipeline:
    """The stages of this rank, with the steps that train and evaluate the whole pipeline.

    Every rank of the axis calls the same methods with the same batches, and each rank uses the tensors that its stages need.
    Further inputs (positions, document ids) go to the forward of every stage by name. All tensors are split into microbatches along
    their first dimension.

    Attributes:
        stages: materialised and parallelised module of each of `schedule.stages_of(rank)`.
        schedule: order of the ranks' actions.
        group: process group of the pp axis.
        device: device of this rank.
        loss_fn: (output of the last stage, targets) -> scalar sum.
        boundary: (input, further inputs of a microbatch) -> tensor, on meta for example, with the shape and dtype that each stage
            sends to the next one.
        is_first: this rank has the first stage.
        is_last: this rank has the last stage.
    """

    idle: int | None = None
    """A target that adds nothing to the loss, for runs that only compile. None: there is none."""
    compiles_first = True
    """Whether compiled stages run once before the first step of a shape, all ranks at the same time."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        schedule: Schedule,
        mesh: DeviceMesh,
        device: torch.device,
        loss_fn: LossFunction,
        boundary: Boundary,
    ) -> None:
        expected = schedule.stages_of(mesh.get_local_rank())
        assert sorted(stages) == expected, (
            f"this rank has stages {expected}, not {sorted(stages)}"
        )
        assert mesh.size() == schedule.num_ranks
        self.stages = dict(sorted(stages.items()))
        self.schedule = schedule
        self.group = mesh.get_group()
        self.device = device
        self.loss_fn = loss_fn
        self.boundary = boundary
        self.is_first = 0 in stages
        self.is_last = schedule.num_stages - 1 in stages
        # torch's buffers have the shapes of the first call, so there is one runner for each shape.
        self._runners: dict[Any, Any] = {}
        self._divisor: Tensor | float = 1.0
        self._sums: list[Tensor] = []

    def step(
        self,
        input: Tensor,
        targets: Tensor,
        *,
        divide_by: Tensor | float = 1.0,
        **inputs: Tensor | None,
    ) -> list[Tensor]:
        """Run forward and backward, and add the gradients of loss_fn / divide_by to existing ones.

        Args:
            input: a batch.
            targets: targets of the batch.
            divide_by: divisor of the loss.
            **inputs: further inputs of every stage.

        Returns:
            The undivided loss of each microbatch if `is_last`, else an empty list.
        """
        count, given = self.schedule.num_microbatches, _without_none(inputs)
        is_new = self._key("train", input, count, given) not in self._runners
        runner = self.runner("train", input, count, inputs=given)
        if is_new and self.compiles_first:
            self._compile(input, targets, given)
        # An attribute, since torch passes the loss function an output and a target only.
        self._divisor = divide_by
        self._sums.clear()
        runner.step(
            *self._args(input),
            target=self._target(targets),
            return_outputs=False,
            **given,
        )
        losses, self._sums = self._sums, []
        return losses

    @torch.no_grad()
    def eval(
        self,
        input: Tensor,
        targets: Tensor,
        *,
        num_microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        **inputs: Tensor | None,
    ) -> list[Tensor]:
        """Run forward on any number of microbatches.

        Args:
            input: a batch.
            targets: targets of the batch.
            num_microbatches: number of microbatches. None: the schedule's.
            loss_fn: takes the place of the pipeline's loss. It may return a tensor of any shape.
            **inputs: further inputs of every stage.

        Returns:
            The loss of each microbatch if `is_last`, else an empty list.
        """
        count = num_microbatches or self.schedule.num_microbatches
        given = _without_none(inputs)
        runner = self.runner(
            "eval", input, count, inputs=given, loss_fn=loss_fn or self.loss_fn
        )
        losses: list[Tensor] = []
        runner.eval(
            *self._args(input),
            target=self._target(targets),
            losses=losses,
            return_outputs=False,
            **given,
        )
        return losses

    @torch.no_grad()
    def forward(
        self, input: Tensor, *, num_microbatches: int = 1, **inputs: Tensor | None
    ) -> Tensor | None:
        """Return the output of the whole model if `is_last`, else None.

        Args:
            input: a batch.
            num_microbatches: number of microbatches.
            **inputs: further inputs of every stage.
        """
        given = _without_none(inputs)
        runner = self.runner("forward", input, num_microbatches, inputs=given)
        return runner.eval(*self._args(input), **given)

    def change(self, schedule: Schedule) -> None:
        """Continue with another number of microbatches, or another length of sequences.

        Args:
            schedule: the new schedule, with the same stages on each rank.
        """
        self.schedule = schedule
        # The next step makes runners for its shapes. Old runners would keep their memory.
        self._runners.clear()

    def _args(self, input: Tensor) -> tuple[Tensor, ...]:
        return (input,) if self.is_first else ()

    def _target(self, targets: Tensor) -> Tensor | None:
        return targets if self.is_last else None

    def _divided_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss_sum = self.loss_fn(output, target)
        self._sums.append(loss_sum.detach())
        return loss_sum / self._divisor

    def _key(
        self,
        kind: str,
        input: Tensor,
        num_microbatches: int,
        inputs: Mapping[str, Tensor],
        loss_fn: Any = None,
    ) -> Any:
        # torch's stages allocate receive buffers for the shapes of their first call, which further inputs may decide.
        further = tuple((name, value.shape) for name, value in inputs.items())
        return kind, num_microbatches, input.shape, further, loss_fn

    def runner(
        self,
        kind: Literal["train", "eval", "forward"],
        input: Tensor,
        num_microbatches: int,
        *,
        inputs: Mapping[str, Tensor],
        loss_fn: LossFunction | None = None,
    ) -> Any:
        if len(input) % num_microbatches:
            raise ValueError(
                f"a batch of {len(input)} sequences does not divide into {num_microbatches} microbatches"
            )
        key = self._key(kind, input, num_microbatches, inputs, loss_fn)
        if key not in self._runners:
            if kind == "forward":  # generation calls it with ever longer sequences
                self._runners = {k: r for k, r in self._runners.items() if k[0] != "forward"}
            rows = len(input) // num_microbatches
            stages = self._torch_stages(input[:rows], _first(inputs, rows), kind == "train")
            if kind == "train":
                self._runners[key] = self._build_training(stages)
            else:
                self._runners[key] = self._build_forward(stages, num_microbatches, loss_fn)
        return self._runners[key]

    def _compile(self, input: Tensor, targets: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Run each compiled stage forward and backward on noise, and undo all effects.

        All ranks compile at the same time.
        """
        rows = len(input) // self.schedule.num_microbatches
        first, more = input[:rows], _first(inputs, rows)
        for number, stage in self.stages.items():
            if not any(map(is_compiled, stage.modules())):
                continue
            undo, x = _remember(stage, self.device), first
            for parameter in stage.parameters():
                parameter.grad = None
            if number:
                x = torch.randn_like(self.boundary(first, more), device=self.device)
                x.requires_grad_()
            output = stage(x, **more)
            if number == self.schedule.num_stages - 1:
                idle = targets if self.idle is None else torch.full_like(targets, self.idle)
                output = self.loss_fn(output, idle[:rows])
            output.backward(torch.zeros_like(output))
            undo()

    def _build_training(self, stages: list[Any]) -> Any:
        """Build the runner of training steps.

        GPipe and 1F1B use torch's classes, which gather FSDP's parameters block by block. All other schedules use the runtime
        that is the base of torch's other classes, which gathers a stage at a time.
        """
        # torch would divide gradients by the number of microbatches, but the loss is divided already.
        settings = {"loss_fn": self._divided_loss, "scale_grads": False}
        count = self.schedule.num_microbatches
        single = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}.get(self.schedule.name)
        if single is not None:
            return single(stages[0], count, **settings)
        runtime = _PipelineScheduleRuntime(stages, count, **settings)
        runtime._prepare_schedule_with_comms(_torch_actions(self.schedule.order))
        return runtime

    def _build_forward(
        self, torch_stages: list[Any], num_microbatches: int, loss_fn: LossFunction | None
    ) -> Any:
        """Build the runner of a breadth-first order, and keep its forward part only.

        torch's own eval() runs the backward actions, too, as empty shells, and fails on V-shaped schedules. With a separate order,
        validation may have another number of microbatches than training.
        """
        order = [
            [Action(s, "F", m) for s in stages for m in range(num_microbatches)]
            + [Action(s, "B", m) for s in reversed(stages) for m in range(num_microbatches)]
            for stages in map(self.schedule.stages_of, range(self.schedule.num_ranks))
        ]
        runtime = _PipelineScheduleRuntime(torch_stages, num_microbatches, loss_fn=loss_fn)
        # The runtime adds sends and receives to the order of computations.
        runtime._prepare_schedule_with_comms(_torch_actions(order))
        runtime.pipeline_order_with_comms = {
            rank: [action for action in actions if action.computation_type.name in _FORWARD]
            for rank, actions in runtime.pipeline_order_with_comms.items()
        }
        return runtime

    def _torch_stages(
        self, input: Tensor, inputs: Mapping[str, Tensor], has_backward: bool
    ) -> list[Any]:
        sent = self.boundary(input, inputs).to("meta").requires_grad_(has_backward)
        return [
            Stage(
                module,
                number,
                self.schedule.num_stages,
                self.device,
                group=self.group,
                splits=has_backward and self.schedule.splits_backward,
                # The last stage's output goes nowhere, so that its shape does not matter.
                input_args=sent if number else input.to("meta"),
                output_args=sent,
            )
            for number, module in self.stages.items()
        ]


class Stage(PipelineStage):
    """torch's stage, with workarounds for its faults (docs/architecture.md). Shapes are given, so torch runs no pass to learn them."""

    def __init__(
        self, module: nn.Module, *args: Any, splits: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(module, *args, **kwargs)
        # torch computes the first stage's whole backward pass in W.
        self._splits = splits and not self.is_first
        self._sent = kwargs["output_args"]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Remove messages to the rank itself: torch 2.11 makes them at the turn of a V, and gloo cannot send them."""
        return [
            op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()
        ]

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a microbatch. Raise ValueError if the next stage waits for an output of another shape or dtype."""
        with saving_for_two_passes() if self._splits else nullcontext():
            output, sent = super().forward_one_chunk(*args, **kwargs), self._sent
        if self.is_last:
            return output
        if (output.shape, output.dtype) != (sent.shape, sent.dtype):
            raise ValueError(
                f"stage {self.stage_index} sends {tuple(output.shape)} in {output.dtype}; the pipeline's boundary says "
                f"{tuple(sent.shape)} in {sent.dtype}"
            )
        return output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Compute one of the two parts of a backward pass, or all of it as torch does."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, FSDPModule):
            # Gradients are reduced once, after the last microbatch.
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "weight":
            return (), backward_weight(bwd_kwargs["param_groups"])
        names = ("stage_output", "output_grads", "input_values")
        return backward_input(*(bwd_kwargs[name] for name in names))

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Do nothing, since `forward_one_chunk` checks the outputs.

        torch 2.11 would check the last stage's output, too, whose shape nobody needs.
        """

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep gradients for a new shape of batches.

        From 2.13 on, torch throws away FSDP's gradients here, even those of an earlier batch of the same optimizer step.
        """


def _reshard(module: nn.Module) -> None:
    """Free gathered parameters. They have no gradients; their shards have them."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _remember(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Return a function that undoes, once, the effects of a pass through a module.

    It restores the gradients, the buffers and the state of random generators.
    """
    _reshard(module)
    sources: list[Any] = [torch.random]
    if device.type != "cpu":
        sources.append(torch.get_device_module(device))
    states = [(source, source.get_rng_state()) for source in sources]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]

    def undo() -> None:
        _reshard(module)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
        for source, state in states:
            source.set_rng_state(state)
        # Free the memory of the copies.
        for kept in (gradients, buffers, states):
            kept.clear()

    return undo


def _torch_actions(order: Sequence[Sequence[Action]]) -> dict[int, list[_Action | None]]:
    return {
        rank: [_Action(a.stage, _ComputationType(a.kind), a.microbatch) for a in actions]
        for rank, actions in enumerate(order)
    }


def _first(inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    return {name: value[:rows] for name, value in inputs.items()}


def _without_none(inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if value is not None}
