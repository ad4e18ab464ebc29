"""The trainer wires the parts and owns the loop.

    set up   process group, mesh, program (model, parallelism, optimizer), data, checkpoints, what users see
    resume   from the newest checkpoint, if there is one
    loop     batch -> step -> read back what the step before computed -> log, validate, save
    end      a last save, and status.json says how it ended

What a step computes stays on the device until it is needed: the host reads the results of one step while the
device works on the next (on a CPU, where nothing is gained by that, at once).
"""

from __future__ import annotations

import gc
import logging
import math
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan.checkpoint import huggingface
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import TIMEOUT
from titan.checkpoint.export import Export, export_state
from titan.checkpoint.manager import CheckpointError, CheckpointManager, SaveFailed
from titan.checkpoint.storage import Location, as_location
from titan.config.machine import open_tokenizer
from titan.config.model import model_config
from titan.config.quantize import quantize_section
from titan.config.render import to_toml
from titan.config.resume_diff import changed_settings
from titan.config.rules import resolve_layout
from titan.config.schema import JobConfig
from titan.data.loader import Loader, build_loader, build_validation_loader, merge_states
from titan.data.packing import Batch
from titan.data.statistics import unigram_bits_per_byte
from titan.faults import Fault
from titan.health import flight_recorder
from titan.health.monitor import Failure
from titan.health.recovery import Recovery, SpikeError, StepAction
from titan.health.signals import EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR, StopRequest
from titan.health.watchdog import Watchdog
from titan.observe.chronicle import Chronicle
from titan.observe.clock import StepTimer
from titan.observe.console import Console
from titan.observe.hardware import by_name, recognise
from titan.observe.memory import peak_memory
from titan.observe.metrics import MetricsLog, StepRow, ValidationRow, model_tflops
from titan.observe.profiler import Profiler
from titan.observe.runinfo import open_rank_log, write_environment, write_status
from titan.observe.sinks import MissingExtra
from titan.observe.startup import startup_page
from titan.parallel import build_mesh
from titan.parallel.activation import KeepError
from titan.parallel.float8 import Float8Error, require_hardware, table
from titan.parallel.mesh import axis_rank
from titan.parallel.replicas import ReplicaError, require_equal_replicas
from titan.parallel.shims import set_timeout
from titan.parallel.start import start_process_group
from titan.program import StepReport, build_program, torch_dtype
from titan.readback import Readback
from titan.untrusted import InputError

RunError = (SaveFailed, SpikeError, ReplicaError)
UserError = (InputError, MissingExtra, Float8Error, KeepError)


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm is not a number; the message names the step, the ranks and the samples."""


@dataclass(frozen=True)
class Pending:
    """A step whose results have not been read yet."""

    step: int
    first_sample: int
    report: StepReport
    readback: Readback  # the fields of a Result
    skipped: bool


@dataclass(frozen=True)
class Result:
    """What every rank knows of a step; flags are above zero if some rank says so."""

    loss: float
    grad_norm: float
    stop: float  # asked to stop
    save: float  # a save is due by the clock
    save_failed: float  # in the background, noticed in this step
    own_s: Sequence[float] = ()  # of every rank, at logged steps; titan/observe/ranks.py


class Trainer:
    """One rank of a training run. `config` must have passed titan.config.rules."""

    def __init__(
        self,
        config: JobConfig,
        *,
        stop: StopRequest | None = None,
        connected: Callable[[], None] = lambda: None,
        agree: Callable[[Failure], Failure] = lambda mine: mine,
    ) -> None:
        """connected: called once the process group is there. agree: as the Watchdog's."""
        self.config = config
        self.stop = stop or StopRequest()
        self.rank, self.world_size = _rank_and_world()
        self.run_dir = Path(config.job.dump_folder)
        self.rank_log = open_rank_log(self.run_dir, self.rank)
        if self.rank == 0:
            write_status(self.run_dir, state="running")
        self.step, self.tokens_seen = 0, 0
        self.device = self._init_distributed()
        connected()
        self._seed()
        quantize = quantize_section(config)
        if quantize and not quantize.emulate:
            require_hardware(quantize.recipe_name or "tensorwise", self.device)
        self.layout = resolve_layout(config, self.world_size)
        self.mesh = build_mesh(
            self.device.type,
            pp=self.layout.pp,
            dp_replicate=self.layout.dp_replicate,
            dp_shard=self.layout.dp_shard,
            cp=self.layout.cp,
            tp=self.layout.tp,
        )
        flight_recorder.name_axes(self.mesh)
        self._build_data()  # first, for it fails more often than the model, and sooner
        self.program = build_program(config, device=self.device, mesh=self.mesh)
        self.hugging_face = self._hugging_face()
        self.checkpoints = CheckpointManager(config.checkpoint, run_dir=self.run_dir)
        self.changes: list[str] = []  # of settings since the checkpoint
        self.decision = ""  # the last about a step that was not taken
        self.recovery = Recovery(config.fault_tolerance, device=self.device)
        self.fault = Fault.from_environment(parts=self.program.parts, rank=self.rank)
        self.pending: deque[Pending] = deque()
        # On a CPU the results are there as soon as the step returns.
        self.max_pending = 0 if self.device.type == "cpu" else 1
        self._resume()
        self._open_outputs()
        self._tell_of_saves()  # that some are damaged, too
        self.watchdog = Watchdog(
            config.fault_tolerance.step_timeout_seconds,
            run_dir=self.run_dir,
            rank=self.rank,
            world_size=self.world_size,
            agree=agree,
        )
        if config.checkpoint.async_mode == "async_with_pinned_mem":
            self.program.optimizer.register_step_pre_hook(self._before_update)

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> int:
        """Train to the last step, or until asked to stop; returns the exit code."""
        steps = self.config.training.steps
        if self.step >= steps:
            self.console.message(f"nothing to do: step {self.step:,} of {steps:,} is done")
            return self._end("done", EXIT_DONE)
        if self.config.checkpoint.create_seed_checkpoint:
            if self.step == 0 and self.resumed_from is None:
                self._save(final=True)
            return self._end("done", EXIT_DONE)
        gc.disable()  # collected on all ranks at once, every gc_freq steps
        try:
            while self.step < steps:
                if self._one_step():
                    # What was not saved would be stopped again and again by whoever requeues it.
                    saved = self.checkpoints.can_save
                    return self._end("stopped", EXIT_STOPPED if saved else EXIT_USER_ERROR)
        except torch.OutOfMemoryError:
            self.profiler.out_of_memory()
            raise
        finally:
            gc.enable()
        return self._end("done", EXIT_DONE)

    def _one_step(self) -> bool:
        """Train one step, then log, validate and save as due. True: asked to stop, and saved."""
        config, steps = self.config, self.config.training.steps
        self.step += 1
        step = self.step
        set_up_s = config.comm.init_timeout_seconds if step == self.first_step else 0
        self.watchdog.begin(step, extra_s=set_up_s)
        self.chronicle.begin(step, timer=self.timer)
        if step % config.training.gc_freq == 0:
            gc.collect(1)
        with self.timer.pause("profiling"):
            self.profiler.begin(step)
        with self.timer.data_wait():
            batches = self.loader.next_step()
        first_sample = self.loader.state_dict()["position"] - self.sequences_per_step
        if self.fault is not None:
            size = config.training.local_batch_size
            starts = [batch.first_sample for batch in batches]
            self.fault.before_step(step, [range(first, first + size) for first in starts])
        judge = self.recovery.judge if self.recovery.is_on else None
        report = self.program.train_step(batches, step=step, accept=judge)
        self.tokens_seen += self.tokens_per_step
        if self.recovery.decision.action == StepAction.REWIND:
            self._rewind(first_sample)
            return False
        skipped = self.recovery.decision.action == StepAction.SKIP
        last = step == steps
        log = last or step % config.metrics.log_freq == 0 or step == 1
        scalars = [report.loss, report.grad_norm, self._flags(with_own_times=log)]
        self.pending.append(Pending(step, first_sample, report, Readback(scalars), skipped))
        self._tell_of_verdict(first_sample)
        every = config.fault_tolerance.check_replicas_every_n_steps
        if every and step % every == 0:
            require_equal_replicas(self.program.parts)

        validate = config.validation.enable and (last or step % config.validation.freq == 0)
        save = self.checkpoints.should_save(step, last_step=steps)
        results = self._read(all_of_them=log or validate or save)
        stop = any(result.stop for result in results)
        if self.checkpoints.can_save and (stop or any(result.save for result in results)):
            save = True
            results += self._read(all_of_them=True)
        with self.timer.pause("profiling"):
            self.profiler.end()
        self.watchdog.end()
        if step == self.first_step:
            self._after_first_step()
        self.console.advance(step)
        validation = self._validate() if validate else None
        if save:
            self._save(final=last or stop)
        self.chronicle.write_norms(self.metrics)
        if log or validation:
            self._log(results[-1], validation)
            self._warn_of_compilations()
        return stop and not last

    def _read(self, *, all_of_them: bool) -> list[Result]:
        """Results of the steps that are due. Raises NonFiniteError and SaveFailed, on all ranks in the same step."""
        results = []
        while len(self.pending) > (0 if all_of_them else self.max_pending):
            done = self.pending.popleft()
            loss, grad_norm, stop, save, save_failed, *own_s = done.readback.values()
            result = Result(loss, grad_norm, stop, save, save_failed, own_s)
            if not (done.skipped or (math.isfinite(loss) and math.isfinite(grad_norm))):
                raise NonFiniteError(self._describe_non_finite(done, loss, grad_norm))
            if result.save_failed and self.config.checkpoint.on_failure == "stop":
                raise SaveFailed('a checkpoint could not be saved, and on_failure = "stop"')
            self.chronicle.saw(done.step, loss=loss, grad_norm=grad_norm)
            results.append(result)
        return results

    def _describe_non_finite(self, done: Pending, loss: float, grad_norm: float) -> str:
        """Which ranks and samples; every rank reads the same loss and norm, so all of them come here."""
        bad = [not math.isfinite(x) for x in Readback(list(done.report.local_losses)).values()]
        by_rank: list[Any] = [None] * self.world_size
        dist.all_gather_object(by_rank, (self.dp_rank, bad))
        per_pass = self.config.training.local_batch_size
        places = []
        for rank, (dp_rank, flags) in enumerate(by_rank):
            for number, flag in enumerate(flags):
                if flag:
                    start = done.first_sample + (number * self.layout.dp + dp_rank) * per_pass
                    places.append(f"rank {rank}: samples {start} to {start + per_pass - 1}")
        what = self.recovery.decision.reason or f"loss {loss}, gradient norm {grad_norm}"
        where = "; ".join(places) or (
            f"the loss is finite on every rank; samples of the step: {done.first_sample} to "
            f"{done.first_sample + self.sequences_per_step - 1}"
        )
        return (
            f"step {done.step}: {what} ({where}). Weights are not saved; "
            "the last checkpoint is from before. Lower optimizer.lr, or look at these samples."
        )

    # ---- steps that are not taken --------------------------------------------------------------

    def _tell_of_verdict(self, first_sample: int) -> None:
        """What was decided of this step, if it was anything but to train. Raises SpikeError where the run is to stop."""
        verdict = self.recovery.decision
        if verdict.action == StepAction.TRAIN:
            return
        samples = f"samples {first_sample} to {first_sample + self.sequences_per_step - 1}"
        text = f"step {self.step}, {samples}: {verdict.reason}"
        if verdict.action == StepAction.STOP:
            self._read(all_of_them=True)  # a loss that is no number has its own, longer message
            raise SpikeError(f"{text}. Weights are not saved; the last checkpoint is from before")
        done = {StepAction.WARN: "TRAINED ON", StepAction.SKIP: "NO UPDATE BY THIS STEP"}[
            verdict.action
        ]
        self._announce(f"{text}. {done}")

    def _rewind(self, first_sample: int) -> None:
        """Back to the newest checkpoint, and on without the samples of the steps before the one that failed."""
        failed_at, verdict = self.step, self.recovery.decision
        self.checkpoints.poll(wait=True)
        path = self.checkpoints.newest()
        if path is None:
            raise NonFiniteError(
                f"step {failed_at}: {verdict.reason}, and there is no checkpoint to rewind to"
            )
        self.pending.clear()  # whoever asked to stop will be heard in the next step
        self._load(path, model_only=False, exclude=set())
        end = first_sample + self.sequences_per_step
        most = self.config.fault_tolerance.rewind_steps * self.sequences_per_step
        first = max(self.loader.state_dict()["position"], end - most)
        self.loader.skip(first, end)
        self._announce(
            f"step {failed_at}: {verdict.reason}. BACK TO STEP {self.step}, ON WITHOUT SAMPLES {first} TO {end - 1}"
        )
        self.watchdog.end()
        with self.timer.pause("profiling"):
            self.profiler.end()
        self.metrics.close()
        self.metrics = self._open_metrics()
        self.chronicle.events.rewind(failed_at, to=self.step, spent=self.timer.total_s)
        self.timer = StepTimer(total_steps=self.config.training.steps, step=self.step)
        self.logged_step = self.step

    def _announce(self, text: str) -> None:
        """To the log of every rank, the console and status.json."""
        logging.getLogger("titan").warning(text)
        self.decision = text
        self.chronicle.events.write("decision", step=self.step, text=text)
        self._write_status()

    def _write_status(self) -> None:
        if self.rank == 0:
            write_status(self.run_dir, state="running", step=self.step, reason=self.decision)

    # ---- what is due now and then --------------------------------------------------------------

    def _warn_of_compilations(self) -> None:
        log = self.program.compile_log
        for warning in log.warnings() if log is not None else ():
            logging.getLogger("titan").warning(f"step {self.step}: {warning}")

    def _log(self, result: Result, validation: ValidationRow | None) -> None:
        num_steps = self.step - self.logged_step
        window = self.timer.window(step=self.step, tokens=num_steps * self.tokens_per_step)
        self.logged_step = self.step
        tflops = model_tflops(
            tokens_per_s=window.tokens_per_s,
            flops_per_token=self.flops_per_token,
            num_ranks=self.world_size,
        )
        memory = peak_memory(reset=True)
        row = StepRow(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=self.program.optimizer.param_groups[0]["lr"],
            tokens=self.tokens_seen,
            tokens_per_s=window.tokens_per_s,
            step_s=window.step_s,
            eta_s=window.eta_s,
            data_wait_s=window.data_wait_s,
            memory_gib=memory.reserved_gib,
            memory_active_gib=memory.active_gib,
            memory_kind=memory.kind,
            tflops=tflops,
            mfu=tflops * 1e12 / self.peak_flops if self.peak_flops else None,
            validation_s=window.paused_s.get("validation", 0.0),
            checkpoint_s=window.paused_s.get("checkpoint", 0.0),
            num_skipped=self.recovery.num_skipped,
            num_rewinds=self.recovery.num_rewinds,
            **self.chronicle.columns(
                step=self.step, window=window, timer=self.timer, own_s=result.own_s
            ),
        )
        self.metrics.write(row, validation)
        self.console.step(row)
        if validation is not None:
            self.console.validation(validation)
        self._write_status()

    def _validate(self) -> ValidationRow:
        assert self.validation is not None, "rules.py demands validation data"
        sizes: list[int] = []

        def batches(loader: Loader) -> Iterator[Batch]:
            for batch in loader.validation_batches(self.config.validation.steps):
                sizes.append(loader.num_bytes(batch))
                yield batch

        with self.timer.pause("validation"):
            loss_sum, num_valid = self.program.evaluate(batches(self.validation))
            num_bytes = torch.tensor(sum(sizes), device=self.device)
            if self.program.groups.data is not None:
                dist.all_reduce(num_bytes, group=self.program.groups.data)
            loss, valid, size = Readback([loss_sum, num_valid, num_bytes]).values()
        loss_per_token = loss / max(valid, 1)
        self.chronicle.events.write(
            "validation", step=self.step, spent=self.timer.total_s, loss=loss_per_token
        )
        return ValidationRow(
            step=self.step,
            validation_loss=loss_per_token,
            bits_per_byte=loss / math.log(2) / size if size else None,
            unigram_bits_per_byte=self.unigram_bits_per_byte if self.rank == 0 else None,
        )

    def _save(self, *, final: bool) -> None:
        """Save this step. final: the run ends with it, so that it has to succeed, and is waited for."""
        section = self.config.checkpoint
        last = self.step == self.config.training.steps
        with self.timer.pause("checkpoint"):
            try:
                self.checkpoints.save(
                    self.step,
                    self._state(),
                    metadata={
                        "format": 1,
                        "step": self.step,
                        "tokens": self.tokens_seen,
                        "sequences_per_step": self.sequences_per_step,
                        "data": self._data_state(),
                        "recovery": self.recovery.state_dict(),
                        "config": to_toml(self.config),
                    },
                    model_only=last and section.last_save_model_only,
                    wait=final,
                )
            except SaveFailed as error:
                if final or section.on_failure == "stop":
                    raise
                self.checkpoints.failed(error)
            if last and section.last_save_in_hf:
                self._export()
        self._tell_of_saves()
        self.chronicle.events.write("save", step=self.step, spent=self.timer.total_s)

    def _export(self) -> None:
        """The weights as a Hugging Face folder."""
        assert self.hugging_face is not None, "made at the start where it is wanted"
        set_timeout(TIMEOUT)  # ranks wait for the slowest disk, and the run is over
        # In the checkpoint's own folder, as TorchTitan does; transformers needs a local one.
        place = self.checkpoints.folder
        place = place if isinstance(place, Path) else self.run_dir / "huggingface"
        folder = place / f"step-{self.step}"
        state = checkpoints.model_state(self.program.parts)
        export_state(folder, state, self.hugging_face, group=self.checkpoints.group)
        self.console.message(f"saved {folder} for transformers")

    def _hugging_face(self) -> Export | None:
        """The model in Hugging Face's terms, if the job needs it: known at the start, and not after the last step."""
        config, section = self.config, self.config.checkpoint
        if not (section.initial_load_in_hf or section.last_save_in_hf):
            return None
        return Export.of(
            config.model,
            tokenizer=self.tokenizer,
            tokenizer_path=config.tokenizer.path,
            seq_len=config.training.seq_len,
            dtype=torch_dtype(section.export_dtype),
        )

    def _before_update(self, *_: Any) -> None:
        """A copy of the state that is still being made must be whole before the state changes."""
        with self.timer.pause("checkpoint"):
            self.checkpoints.staging.before_update()

    def _tell_of_saves(self) -> None:
        for text in self.checkpoints.drain_messages():
            self.console.message(text)

    def _flags(self, *, with_own_times: bool) -> torch.Tensor:
        """What any rank knows that all must act upon in the same step: stop, save, save_failed and own_s of a Result."""
        save_failed = not self.checkpoints.poll()
        self._tell_of_saves()
        flags = [self.stop.requested, self.checkpoints.is_due_by_time(), save_failed]
        if with_own_times:
            flags += self.chronicle.own_times(
                data_wait_s=self.timer.data_wait_s, num_steps=self.step - self.logged_step
            )
        agreed = torch.tensor(flags, dtype=torch.float32, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed

    # ---- state ---------------------------------------------------------------------------------

    def _state(self) -> checkpoints.StateDict:
        """Everything a resumed run needs; see titan/checkpoint/manager.py for the names."""
        parts, optimizer = self.program.parts, self.program.optimizer
        return {
            **checkpoints.model_state(parts),
            **checkpoints.optimizer_state(parts, optimizer),
            **checkpoints.rng_state(self.rank, self.device),
        }

    def _data_state(self) -> dict[str, Any]:
        """The loader's state, with what each data-parallel rank knows of its own part."""
        states: list[Any] = [None] * self.world_size
        dist.all_gather_object(states, (self.dp_rank, self.loader.state_dict()))
        return merge_states(list(dict(states).values()))

    def _resume(self) -> None:
        """Load the newest checkpoint of the run folder, or where there is none the one to start from."""
        section = self.config.checkpoint
        path, model_only = self.checkpoints.step_to_resume(), False
        if path is None and section.enable and section.initial_load_in_hf:
            assert self.hugging_face is not None, "made above, where it is wanted"
            model, group = self.hugging_face.model, self.checkpoints.group
            path = Path(section.initial_load_path or self.config.model.hf_assets_path)
            state = checkpoints.model_state(self.program.parts)
            huggingface.load(path, state, model=model, group=group)
            self.resumed_from = path
            return
        if path is None and section.enable and section.initial_load_path:
            path, model_only = (
                as_location(section.initial_load_path),
                section.initial_load_model_only,
            )
            self.checkpoints.require_whole(path)
        self.resumed_from = path
        if path is None:
            return
        self._load(path, model_only=model_only, exclude=set(section.exclude_from_loading))

    def _load(self, path: Location, *, model_only: bool, exclude: set[str]) -> None:
        parts, optimizer = self.program.parts, self.program.optimizer
        checkpoints.load(path, checkpoints.model_state(parts))
        if model_only:
            return
        metadata = checkpoints.read_metadata(path, "step", "tokens", "data")
        step, steps = metadata["step"], self.config.training.steps
        if metadata.get("model_only") and step < steps:
            raise CheckpointError(
                f"{path} holds weights only, so that the run cannot go on to step {steps}; resume from an earlier "
                "step with checkpoint.load_step, or begin a new run with checkpoint.initial_load_path"
            )
        has_optimizer = step > 0 and not metadata.get("model_only")
        if has_optimizer and "optimizer" not in exclude:
            checkpoints.load(path, checkpoints.empty_optimizer_state(path, parts, optimizer))
        try:
            if "train_state" not in exclude:
                self.step, self.tokens_seen = step, metadata["tokens"]
                self.changes = changed_settings(
                    metadata.get("config") or "",
                    self.config,
                    sequences=(metadata.get("sequences_per_step"), self.sequences_per_step),
                )
                self.recovery.load_state_dict(metadata.get("recovery", {}))
            if "dataloader" not in exclude:
                self.loader.load_state_dict(metadata["data"])
            checkpoints.load_rng_state(path, self.rank, self.device)
        except InputError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: its state is not one of this program: {error}"
            ) from error

    # ---- setting up and ending -----------------------------------------------------------------

    def _init_distributed(self) -> torch.device:
        return start_process_group(
            init_timeout_s=self.config.comm.init_timeout_seconds,
            expandable_segments=self.config.training.expandable_segments,
        )

    def _after_first_step(self) -> None:
        """Everything is set up and compiled: from now on a collective that takes long is one that hangs."""
        saving = self.checkpoints.group.process_group if self.config.checkpoint.enable else None
        limit = timedelta(seconds=self.config.comm.train_timeout_seconds)
        set_timeout(limit, but_not_of=saving)
        if self.program.compile_log is not None:
            self.console.message(self.program.compile_log.summary())
        rewrites = self.program.async_tp
        if rewrites is not None:
            self.console.message(str(rewrites))
            if rewrites.num_graphs and not rewrites.fired:
                logging.getLogger("titan").warning(
                    "async TP is on, but nothing was rewritten: communication is not hidden"
                )

    def _seed(self) -> None:
        seed = self.config.debug.seed
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if self.config.debug.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def _build_data(self) -> None:
        config, training = self.config, self.config.training
        self.tokenizer, self.sizes = open_tokenizer(config), model_config(config.model)
        self.dp_rank = axis_rank(self.mesh, "dp_replicate", "dp_shard")
        self.sequences_per_step = (
            training.local_batch_size * self.layout.dp * self.layout.accumulation
        )
        self.tokens_per_step = self.sequences_per_step * training.seq_len
        self.flops_per_token = self.sizes.flops_per_token(
            training.seq_len, causal=config.metrics.mfu_convention == "causal"
        )
        place = {"tokenizer": self.tokenizer, "rank": self.dp_rank, "world": self.layout.dp}
        self.loader = build_loader(
            training,
            data=config.data,
            seed=config.debug.seed,
            accumulation=self.layout.accumulation,
            **place,
        )
        self.validation = None
        if config.validation.enable:
            self.validation = build_validation_loader(
                config.validation, training=training, data=config.data, **place
            )

    @cached_property
    def unigram_bits_per_byte(self) -> float | None:
        """What byte frequencies alone reach on the validation text; a yardstick for bits per byte."""
        assert self.validation is not None
        return unigram_bits_per_byte(self.loader, validation=self.validation)

    def _open_outputs(self) -> None:
        config = self.config
        self.first_step = self.step + 1
        self.logged_step = self.step
        is_cpu = self.device.type == "cpu"
        self.device_name = (
            "CPU" if is_cpu else torch.get_device_module(self.device).get_device_name()
        )
        name = config.hardware.name
        hardware = recognise(self.device_name) if name == "auto" else by_name(name)
        precision = config.training.mixed_precision_param
        self.peak_flops = hardware.peak_flops.get(precision) if hardware else None
        self.console = Console(config.metrics, rank=self.rank, total_steps=config.training.steps)
        self.chronicle = Chronicle(
            config, run_dir=self.run_dir, rank=self.rank, program=self.program, step=self.step
        )
        self.metrics = self._open_metrics()
        if self.rank == 0:
            (self.run_dir / "config.toml").write_text(to_toml(config))
            write_environment(
                self.run_dir, device_names=[self.device_name], world_size=self.world_size
            )
            write_status(self.run_dir, state="running", step=self.step)
        self.console.startup(
            startup_page(
                config,
                self.sizes,
                self.layout,
                run_dir=self.run_dir,
                device_name=self.device_name,
                hardware=hardware,
                tokenizer=f"{self.tokenizer.kind}, {self.tokenizer.vocab_size:,} tokens",
                resume_step=self.step,
                tokens_seen=self.tokens_seen,
            )
        )
        quantize = quantize_section(config)
        if quantize:
            recipe = quantize.recipe_name or "tensorwise"
            self.console.message(
                table(
                    self.program.float8,
                    recipe=recipe,
                    emulated=quantize.emulate,
                    compiled=config.compile.enable and "model" in config.compile.components,
                )
            )
        if self.resumed_from:
            self.console.message(f"starting from {self.resumed_from}")
        if self.changes:
            self.console.message(f"changed since it was saved: {'; '.join(self.changes)}")
        if config.job.print_config:
            self.console.message(to_toml(config))
        self.timer = StepTimer(total_steps=config.training.steps, step=self.step)
        self.profiler = Profiler(
            config.profiling,
            run_dir=self.run_dir,
            rank=self.rank,
            device=self.device,
            parts=self.program.parts,
            say=self.console.message,
        )

    def _open_metrics(self) -> MetricsLog:
        return MetricsLog(
            self.run_dir,
            section=self.config.metrics,
            rank=self.rank,
            resume_step=self.step,
            job_config=self.config.model_dump(),
        )

    def _end(self, state: Any, code: int) -> int:
        reason = ""
        if state == "stopped":
            name = self.stop.signal_name or "a signal to another rank"
            told = f"stopped by {name} after step {self.step:,}"
            if self.checkpoints.can_save:
                self.console.message(f"{told}; run the same command to go on")
            else:
                reason = self._why_unsaved(told)
                self.console.message(reason)
        self.chronicle.events.end(state, step=self.step, spent=self.timer.total_s, exit_code=code)
        if reason:
            self.chronicle.events.discard(self.step, kept=self.first_step - 1)
        if self.rank == 0:
            self.console.message(self.chronicle.events.summary())
            write_status(self.run_dir, state=state, exit_code=code, step=self.step, reason=reason)
        self.stop.exit_code = code
        return code

    def _why_unsaved(self, told: str) -> str:
        setting = "load_only = true" if self.config.checkpoint.enable else "enable = false"
        steps = f"the steps since {self.first_step:,}" if self.first_step > 1 else "all steps"
        return (
            f"{told}. NOTHING WAS SAVED, because of checkpoint.{setting}: {steps} are lost, and the same command does "
            "them again"
        )

    def close(self) -> None:
        """End threads, files and the process group."""
        self.watchdog.close()
        self.checkpoints.close()
        self.chronicle.close()
        self.profiler.close()
        self.loader.close()
        self.console.close()
        self.metrics.close()
        logging.getLogger("titan").removeHandler(self.rank_log)
        self.rank_log.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
