"""The trainer: the parts of a run, and its loop. Everything that happens beside training is a hook (titan/run/hook.py).

    set-up   process group, mesh, data, program (model, parallelism, optimizer), hooks
    start    hooks resume from a checkpoint; console, clock and event log open; hooks start
    loop     next batch -> train_step -> hooks; a step may begin a phase (titan/config/phases.py)
    end      status.json records how the run ended, or another trainer goes on in the layout of the next phase

The host reads the numbers of one step while the device works on the next. On a CPU that would gain nothing, so there it
reads them at once.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan.base.async_scalars import AsyncScalars, to_device
from titan.base.hardware import by_name, recognise
from titan.base.run_folder import CONFIG, open_rank_log, write_environment, write_status
from titan.base.run_writer import run_files
from titan.base.signals import EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR, StopRequest
from titan.checks.rules import resolve_layout
from titan.config.phases import phase_at, phases_of
from titan.config.quantize import eight_bit_sections
from titan.config.render import to_toml
from titan.config.schema import JobConfig, Section
from titan.data.tokenizer_files import keep_tokenizer
from titan.observe.clock import StepTimer
from titan.observe.console import Console
from titan.observe.run_log import EventLog
from titan.observe.startup import startup_page
from titan.parallel import build_mesh
from titan.parallel.block_attention import prefer_backend
from titan.parallel.float8 import require_hardware, table
from titan.parallel.init_distributed import start_process_group
from titan.parallel.mesh import axis_rank
from titan.parallel.torch_compat import set_timeout
from titan.run.hook import Hook, StartPoint, StepResult
from titan.run.progress import RunProgress
from titan.run.supervisor import Supervisor
from titan.step.random_draws import seed_all
from titan.step.resolved import resolve_job
from titan.step.train_step import build_train_step
from titan.tasks.trial import try_loss

_LOG = logging.getLogger("titan")


class Trainer(RunProgress):
    """One rank of a training run."""

    def __init__(
        self,
        config: JobConfig,
        *,
        hooks: Callable[[Trainer], Iterable[Hook]] = lambda _: (),
        stop: StopRequest | None = None,
        supervisor: Supervisor | None = None,
        begin: StartPoint = StartPoint(),  # noqa: B008 (frozen)
    ) -> None:
        """Set the run up. `run` trains.

        Args:
            config: must have passed titan.checks.rules.
            hooks: returns the hooks of this trainer in their order; titan.run.standard_hooks.standard_hooks returns those of `titan train`.
            stop: asked after each step whether to stop.
            supervisor: what watches over the run; None: nothing does.
            begin: step and process of the beginning. It decides the layout of a job whose phases have several.
        """
        super().__init__()
        self.config, self.begin = config, begin
        self.stop_request = stop or StopRequest()
        self.supervisor = supervisor or Supervisor(config, self.stop_request)
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.run_dir = Path(config.job.dump_folder)
        self.files = run_files(self.run_dir)
        self.rank_log = open_rank_log(self.run_dir, self.rank)
        if self.rank == 0:
            write_status(self.run_dir, state="running")
        self.device = self._init_distributed()  # pyrefly: ignore[read-only]
        config = config.on_device(self.device.type)
        phases = phases_of(config, world_size=self.world_size)
        first = phase_at(phases, begin.step + 1).config
        sections: dict[str, Section] = {"parallelism": first.parallelism}
        if begin.events:  # a layout change loads the full state, whatever the job excludes
            loads = {"load_step": begin.step, "exclude_from_loading": []}
            sections["checkpoint"] = config.checkpoint.model_copy(update=loads)
        self.config = config = config.with_sections(sections)
        self.supervisor.beat()
        seed_all(config.debug)
        # The order is the user's: cheap checks first, then what reads files, then the model.
        self.layout = resolve_layout(first, self.world_size)
        _LOG.info("mesh: %s, on %s", self.layout.degrees, self.device)
        self._build_mesh()
        _LOG.info("data, task and loss")
        self._build_data()  # before the model, since it fails more often, and sooner
        try_loss(self.task, self.mesh, self.device)
        _LOG.info("model, its parallel form and optimizer")
        self.train_step = build_train_step(self.job, device=self.device, mesh=self.mesh)
        self._enter_phase(begin.step + 1)
        # Groups of a mesh start with torch's limits. All of them exist now, and none has communicated yet.
        set_timeout(timedelta(seconds=config.comm.init_timeout_seconds))
        self.last_step = config.training.steps
        self.max_pending = 0 if self.device.type == "cpu" else 1
        self.hooks = list(hooks(self))
        _LOG.info("set up, with the hooks %s", ", ".join(type(h).__name__ for h in self.hooks))

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> int | None:
        """Train to the last step, or until a signal asks to stop.

        Returns:
            The exit code; None if the next step has another layout, and `leave` says where its trainer begins.
        """
        if not self.is_started:
            self.start()
        gc.disable()  # ranks that collect at different times wait for each other; see train_one_step
        try:
            while self.step < self.last_step and not (self.is_stopping or self.changes_layout):
                self.train_one_step()
        except Exception as error:
            for hook in self.hooks:
                hook.failed(error)
            raise
        finally:
            gc.enable()
        return None if self.changes_layout and not self.is_stopping else self._end()

    def leave(self) -> StartPoint:
        """End this trainer at a layout change. Return the start point of the next trainer, in the same process."""
        events = None
        if self.is_started:
            events = self.events
            events.set_up(self.timer.total_s)
        self._end_parts()
        return StartPoint(step=self.step, device=self.device, events=events)

    def train_one_step(self) -> None:
        """Train one step. The order of the calls is that of the collectives."""
        self.is_void = False
        for hook in self.hooks:
            hook.before_step()
        self.step += 1
        step = self.step
        for hook in self.hooks:
            hook.step_begin()
        self._enter_phase(step)
        if step % self.config.training.gc_freq == 0:
            gc.collect(1)
        with self.timer.data_wait():
            batches = self.loader.next_step()
        # The loader's position is already that after this step.
        first_sample = self.loader.state_dict()["position"] - self.sequences_per_step
        for hook in self.hooks:
            hook.before_forward(batches)
        report = self.train_step.train(batches, step=step, accept=self._judge())
        # Also for a step that is judged bad: its samples are used up.
        self.tokens_seen += self.tokens_per_step
        for hook in self.hooks:
            hook.updated(report)
            if self.is_void:  # the run continues from an earlier step
                return
        flags = {hook: hook.flags() for hook in self.hooks}
        scalars = AsyncScalars(
            [report.loss, report.grad_norm, self._max_over_ranks(flags), *report.groups]
        )
        self.pending.append(
            StepResult(step, first_sample, report, scalars=scalars, flags=flags)
        )
        self.read_results(keep=self.max_pending)
        # Reading waits for the device, so only the steps that log, validate or save do it.
        if any(hook.needs_results() for hook in self.hooks):
            self.read_results()
        for hook in self.hooks:
            hook.step_end()

    def read_results(self, *, keep: int = 0) -> None:
        """Wait for the numbers of all steps but the newest `keep`, and give them to the hooks."""
        while len(self.pending) > keep:
            self.result = result = self.pending.popleft()
            assert result.scalars is not None, "set by train_one_step"
            result.loss, result.grad_norm, stop, *flags = result.scalars.values()
            # The maxima come back in the order in which the flags were sent.
            for hook, own in result.flags.items():
                result.flags[hook], flags = flags[: len(own)], flags[len(own) :]
            result.groups = flags
            for hook in self.hooks:
                hook.result(result)
            self.is_stopping |= stop > 0

    def _judge(self) -> Callable[[Tensor, Tensor], bool] | None:
        """Return the function that decides whether a step updates the weights, or None if each step does."""
        if not (judges := [hook for hook in self.hooks if hook.judges]):
            return None
        return lambda loss, grad_norm: all(hook.accept(loss, grad_norm) for hook in judges)

    def _max_over_ranks(self, flags: dict[Hook, Sequence[float]]) -> Tensor:
        """Return the maximum over ranks of "stop", then of all flags."""
        numbers = [
            self.stop_request.requested,
            *(flag for of_hook in flags.values() for flag in of_hook),
        ]
        # One all-reduce for all hooks, whatever their number.
        agreed = to_device(numbers, self.device)
        if self.world_size > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed

    # ---- set-up --------------------------------------------------------------------------------

    def _init_distributed(self) -> torch.device:
        return self.begin.device or connect(self.config)

    def _build_mesh(self) -> None:
        # FP8 units are asked for before a model is built.
        for recipe, section in eight_bit_sections(self.config):
            if not section.emulate:
                require_hardware(recipe, self.device)
        prefer_backend(self.config.model.attention_backend, self.device.type)
        self.mesh = build_mesh(self.device.type, **self.layout.degrees)
        self.supervisor.see_mesh(self.mesh)

    def _build_data(self) -> None:
        config = self.config
        self.job = resolve_job(config, self.layout, device=self.device.type)
        self.task, self.sizes, self.phases = self.job.task, self.job.sizes, self.job.phases
        self.tokenizer = self.task.tokenizer
        self.dp_rank = axis_rank(self.mesh, "dp_replicate", "dp_shard")
        # Ranks that differ only in tp, cp or pp get the same samples.
        share = {"rank": self.dp_rank, "world": self.layout.dp}
        self.loader = self.task.loader(**share, accumulation=self.layout.accumulation)
        self.validation_loader = None
        if config.validation.enable:
            self.validation_loader = self.task.validation_loader(**share)

    def start(self) -> None:
        """Resume, open the console and the records of the run, and print what is about to run. `run` calls it."""
        # Before the console opens: the page at the top says where the run resumes.
        for hook in self.hooks:
            hook.resume()
        if self.changes_layout:
            return  # the step that was loaded has another layout than the launcher thought
        config = self.config
        self.first_step = self.step + 1
        is_cpu = self.device.type == "cpu"
        device_name = (
            "CPU" if is_cpu else torch.get_device_module(self.device).get_device_name()
        )
        name = config.hardware.name
        self.hardware = recognise(device_name) if name == "auto" else by_name(name)
        self.console = Console(config.metrics, rank=self.rank, total_steps=self.last_step)
        self.events = self.begin.events or EventLog(
            self.run_dir,
            rank=self.rank,
            step=self.step,
            world_size=self.world_size,
            host=socket.gethostname(),
        )
        self.is_open = True
        if self.rank == 0:
            self.files.replace(CONFIG, to_toml(config))
            if self.tokenizer is not None:
                keep = partial(keep_tokenizer, self.tokenizer, self.run_dir)
                self.files.attempt("tokenizer", keep, last=True)
            write_environment(
                self.run_dir, device_names=[device_name], world_size=self.world_size
            )
        self.write_status()
        self.console.startup(
            startup_page(
                config,
                self.sizes,
                self.layout,
                run_dir=self.run_dir,
                device_name=device_name,
                hardware=self.hardware,
                data=self.task.describe(),
                resume_step=self.step,
                tokens_seen=self.tokens_seen,
                ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", 0)),
            )
        )
        samples = [loader.samples for loader in (self.loader, self.validation_loader) if loader]
        for line in dict.fromkeys(line for part in samples for line in part.unread):
            self.console.message(line, always=True)
        if quantize := self.job.techniques.quantize:
            recipe = quantize.recipe_name or "tensorwise"
            compiled, emulated = self.job.techniques.compiles_blocks, quantize.emulate
            self.console.message(
                table(
                    self.train_step.float8, recipe=recipe, emulated=emulated, compiled=compiled
                )
            )
        if config.job.print_config:
            self.console.message(to_toml(config))
        if self.step >= self.last_step:
            text = f"nothing to do: step {self.step:,} of {self.last_step:,} is done"
            self.console.message(text, always=True)
        self.timer = StepTimer(total_steps=self.last_step, step=self.step)
        self.is_started = True
        for hook in self.hooks:
            hook.start()

    # ---- the end -------------------------------------------------------------------------------

    def _end(self) -> int:
        """Record how the run ended. Return the exit code."""
        state, code, reason = "done", EXIT_DONE, ""
        is_lost = False
        if self.is_stopping and self.step < self.last_step:
            state, code = "stopped", EXIT_STOPPED
            is_lost = self.saved_step != self.step
            signal_name = self.stop_request.signal_name or "a signal to another rank"
            text = f"stopped by {signal_name} after step {self.step:,}"
            if is_lost:
                # A scheduler that starts the run again would stop it in the same place forever.
                code = EXIT_USER_ERROR
                first, why = self.first_step, self.config.checkpoint.why_unsaved
                steps = f"the steps since {first:,}" if first > 1 else "all steps"
                text = reason = (
                    f"{text}. NOTHING WAS SAVED, because of {why}: {steps} are lost, and the same command repeats them"
                )
            else:
                text += "; run the same command to continue"
            self.console.message(text, always=True)
        self.events.end(state, step=self.step, spent=self.timer.total_s, exit_code=code)
        # Nothing was saved since this start, so its steps count as lost.
        if is_lost:
            self.events.discard(self.step, kept=self.first_step - 1)
        if self.rank == 0:
            self.console.message(self.events.summary(), always=True)
            write_status(
                self.run_dir, state=state, exit_code=code, step=self.step, reason=reason
            )
        # The grace time may still end the process, and should then leave with this code.
        self.stop_request.exit_code = code
        return code

    def close(self, *, failed: bool = False) -> None:
        """End threads, files and, unless the run has failed, the process group.

        Ending the group waits for collectives that the other ranks of a failed run may never join.
        """
        if self.is_open:  # set-up and resume may have failed
            self.events.end("failed", step=self.step)
        self._end_parts(is_last=True)
        # Last: closing hooks may still communicate.
        if dist.is_initialized() and not failed:
            dist.destroy_process_group()

    def _end_parts(self, *, is_last: bool = False) -> None:
        for hook in self.hooks:
            hook.close()
        if is_last:
            self.files.report()
        if self.is_open:
            self.console.close()
        self.loader.close()
        _LOG.removeHandler(self.rank_log)
        self.rank_log.close()


def connect(config: JobConfig) -> torch.device:
    """Start the process group of a job. Return this rank's device."""
    if config.groups.enable:
        # NCCL's watchdog would end this process a minute after it has lost a group, though torchft goes on without that group.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    return start_process_group(
        init_timeout_s=config.comm.init_timeout_seconds,
        expandable_segments=config.training.expandable_segments,
        host_tensors=config.training.enable_cpu_offload,
    )
