"""Hook for checkpoints: saves, resumes, and exports to Hugging Face (titan/checkpoint/manager.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan.base.untrusted import InputError
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import TIMEOUT
from titan.checkpoint.identity import (
    change_lines,
    changed_model,
    changed_settings,
    job_facts,
    other_tokenizer,
    require_same_model,
    text_changes,
    text_facts,
)
from titan.checkpoint.manager import CheckpointError, CheckpointManager, SaveFailed
from titan.checkpoint.model_folders import model_folders
from titan.checkpoint.storage import Location, as_location
from titan.config.render import to_toml
from titan.optim.schedule import rate_jump
from titan.parallel.torch_compat import set_timeout
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress


class Checkpointing(Hook):
    """Checkpoints of a run, due by step, by time, or because the run has to stop. All ranks save together."""

    priority = (
        900  # a checkpoint has the columns of all hooks before it, and its own row after it
    )

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, self.section = trainer, trainer.config.checkpoint
        self.manager = CheckpointManager(
            self.section,
            run_dir=trainer.run_dir,
            # Another run may want to begin where the data or the learning rate changes.
            kept=frozenset(phase.first_step - 1 for phase in trainer.phases[1:]),
            require_same=partial(require_same_model, config=trainer.config),
        )
        # Described at the start, so that an error shows before the last step.
        self.export: Any = None
        if self.section.initial_load_in_hf or self.section.last_save_in_hf:
            self.export = model_folders().describe(trainer.config, trainer.tokenizer)
        self.resumed_from: Location | None = None
        self.changes: list[str] = []  # settings that differ from the checkpoint's
        # Differences of tokenizer, template and data; tensors of a folder that the model lacks.
        self.notes: list[str] = []
        self.jump = ""  # description of a jump of the learning rate
        self.is_due_by_time = False
        # The copy overlaps the next step until its update.
        if self.section.async_mode == "async_with_pinned_mem":
            trainer.train_step.call_before_change(self._wait_for_copy)

    def _wait_for_copy(self, *_: Any) -> None:
        with self.trainer.timer.pause("checkpoint"):
            self.manager.staging.before_update()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group that background saves use."""
        return self.manager.group.process_group if self.section.enable else None

    # ---- when ----------------------------------------------------------------------------------

    def start(self) -> None:
        trainer = self.trainer
        if self.resumed_from:
            trainer.console.message(f"starting from {self.resumed_from}")
        if self.changes:
            trainer.console.message(f"changed since it was saved: {'; '.join(self.changes)}")
        for text in self.notes:
            trainer.console.message(text, always=True)
        if self.jump and trainer.step < trainer.last_step:
            trainer.console.message(self.jump, always=True)
        self._print_messages()  # for example about a damaged checkpoint that was skipped
        # A seed checkpoint is a run of no steps, which saves the initial weights.
        if self.section.create_seed_checkpoint:
            if trainer.step == 0 and self.resumed_from is None:
                self._save(final=True)
            trainer.stop()

    def flags(self) -> Sequence[float]:
        """Return whether a save is due by this rank's clock, and whether a background save failed."""
        # Clocks and disks differ between ranks. The maximum over ranks is the same on all of them.
        # Checked in every step, so that all ranks learn of a failure in the same step.
        save_failed = not self.manager.poll()
        self._print_messages()
        return self.manager.is_due_by_time(), save_failed

    def result(self, result: StepResult) -> None:
        """Read the flags of all ranks.

        Raises:
            SaveFailed: a background save failed. All ranks raise it in the same step.
        """
        is_due, save_failed = result.flags[self]
        self.is_due_by_time |= is_due > 0
        if save_failed and self.section.on_failure == "stop":
            text = 'a checkpoint could not be saved, and on_failure = "stop"'
            raise SaveFailed(text, kind=self.manager.failure_kind)

    def needs_results(self) -> bool:
        trainer = self.trainer
        # All ranks read the same maxima, so all decide the same in the same step.
        is_due = self.is_due_by_time or trainer.is_stopping
        by_step = self.manager.should_save(trainer.step, last_step=trainer.last_step)
        return by_step or (is_due and self.manager.can_save)

    def step_end(self) -> None:
        if self.needs_results():
            # Cleared before the save: the clock restarts with it.
            self.is_due_by_time = False
            trainer = self.trainer
            final = (
                trainer.is_stopping
                or trainer.changes_layout
                or trainer.step == trainer.last_step
            )
            self._save(final=final)

    def take_over(self, metadata: Mapping[str, Any]) -> None:
        """Continue from a peer's `metadata`, whose tensors are loaded already."""
        self.load_train_state(metadata)
        self.changes.clear()  # a peer has the same settings
        self.trainer.loader.load_state_dict(metadata["data"])

    def save_now(self) -> None:
        """Save this step, due or not."""
        self._save(final=False)

    def close(self) -> None:
        self.manager.close()

    # ---- saving --------------------------------------------------------------------------------

    def _save(self, *, final: bool) -> None:
        """Save this step. If it is the `final` one, wait for the save and raise if it fails."""
        trainer, section = self.trainer, self.section
        if not trainer.is_writer:
            trainer.saved()  # another replica group saves
            return
        is_last = trainer.step == trainer.config.training.steps
        with trainer.timer.pause("checkpoint"):
            try:
                self.manager.save(
                    trainer.step,
                    self.state(),
                    metadata=self.metadata(),
                    model_only=is_last and section.last_save_model_only,
                    wait=final,
                )
                trainer.saved()
            except SaveFailed as error:
                if final or section.on_failure == "stop":
                    raise
                # Training goes on, and the next save may find room on the disk.
                self.manager.failed(error)
            if is_last and section.last_save_in_hf:
                self._export()
        self._print_messages()
        trainer.events.write("save", step=trainer.step, spent=trainer.timer.total_s)

    def state(self) -> checkpoints.StateDict:
        """Return all tensors that a resumed run needs; titan/checkpoint/manager.py lists the names."""
        trainer = self.trainer
        parts, optimizer = trainer.train_step.model_parts, trainer.train_step.optimizer
        return {
            **checkpoints.model_state(parts),
            **checkpoints.optimizer_state(parts, optimizer),
            **checkpoints.average_state(trainer.train_step.average),
            **checkpoints.rng_state(trainer.rank, trainer.device),
        }

    def metadata(self) -> dict[str, Any]:
        """Return the content of titan.json."""
        trainer, scale = self.trainer, self.trainer.train_step.loss_scale
        return {
            "format": 1,
            "step": trainer.step,
            "tokens": trainer.tokens_seen,
            "sequences_per_step": trainer.sequences_per_step,
            "data": self._data_state(),
            "config": to_toml(trainer.config),
            "text": self.text,
            "model": job_facts(trainer.config),
            **({"loss_scale": scale.state_dict()} if scale else {}),  # in float16
        } | {hook.state_key: hook.state_dict() for hook in trainer.hooks if hook.state_key}

    @cached_property
    def text(self) -> dict[str, Any]:
        """Return the identity of the run's tokenizer, template and data, on the rank that writes it."""
        tokenizer = None if self.trainer.rank else self.trainer.tokenizer
        return text_facts(self.trainer.config, tokenizer) if tokenizer else {}

    def _data_state(self) -> dict[str, Any]:
        """Return the loader's state, with the bookmarks of all data-parallel ranks if they read a stream."""
        trainer, state = self.trainer, {**self.trainer.loader.state_dict()}
        mine = state.pop("bookmark", None)
        if mine is None:
            return state
        found: list[Any] = [(trainer.dp_rank, mine)] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(found, found[0])
        by_rank = dict(found)
        return state | {"bookmarks": [by_rank[rank] for rank in range(len(by_rank))]}

    def _export(self) -> None:
        """Write the weights as a Hugging Face folder next to the checkpoints, as TorchTitan does."""
        assert self.export is not None, "built in the constructor"
        set_timeout(TIMEOUT)  # ranks wait for the slowest disk, and the run is over
        folder = self.manager.folder
        # transformers reads local folders only.
        folder = folder if isinstance(folder, Path) else self.trainer.run_dir / "huggingface"
        folder = folder / f"step-{self.trainer.step}"
        state = checkpoints.model_state(self.trainer.train_step.model_parts)
        model_folders().save(folder, state, self.export, group=self.manager.group)
        self.trainer.console.message(f"saved {folder} for transformers")

    def _print_messages(self) -> None:
        for text in self.manager.drain_messages():
            self.trainer.console.message(text)

    # ---- loading -------------------------------------------------------------------------------

    def resume(self) -> None:
        """Load the newest checkpoint of the run folder, or the job's initial weights if there is none."""
        if self.trainer.step:
            return  # a peer's state is newer
        # In order: this run's own checkpoints, a Hugging Face folder, a checkpoint of another run.
        section, trainer = self.section, self.trainer
        # Check this before a damaged step is set aside.
        tokenizer = trainer.tokenizer
        if tokenizer and (
            why := other_tokenizer(trainer.config, tokenizer, self.manager.folder)
        ):
            raise CheckpointError(why)
        _ = section.enable and self.text  # reads the files now, not at the first save
        path, model_only = self.manager.step_to_resume(), False
        if path is None and section.enable and section.initial_load_in_hf:
            assert self.export is not None, "built in the constructor"
            path = Path(section.initial_load_path or trainer.config.model.hf_assets_path)
            state = checkpoints.model_state(trainer.train_step.model_parts)
            model, group = self.export.model, self.manager.group
            self.notes = model_folders().load(path, state, model=model, group=group)
            if trainer.train_step.average is not None:
                trainer.train_step.average.restart()
        elif path is None and section.enable and section.initial_load_path:
            path = as_location(section.initial_load_path)
            model_only = section.initial_load_model_only
            self.manager.require_whole(path)
            require_same_model(path, trainer.config, but=section.initial_load_changes)
            self._load(
                path,
                is_strict=not section.initial_load_changes,
                model_only=model_only,
                exclude=set(section.exclude_from_loading),
            )
        elif path is not None:
            self._load(path, exclude=set(section.exclude_from_loading))
        self.resumed_from = path

    def load_newest(self) -> Location | None:
        """Load the newest checkpoint. Return its location, or None if there is none."""
        # A save in progress may become the newest.
        self.manager.poll(wait=True)
        path = self.manager.newest()
        if path is not None:
            self._load(path)
        return path

    def _load(
        self,
        path: Location,
        *,
        model_only: bool = False,
        exclude: set[str] | None = None,
        is_strict: bool = True,
    ) -> None:
        trainer, exclude = self.trainer, exclude or set()
        parts, optimizer = trainer.train_step.model_parts, trainer.train_step.optimizer
        # Weights come first: a job may load only these. With a pipeline, other ranks have other stages.
        gather = self.manager.group.gather if trainer.layout.pp > 1 else None
        self.manager.messages.extend(
            checkpoints.load_model(path, parts, gather=gather, is_strict=is_strict)
        )
        average = trainer.train_step.average
        if average is not None:
            average.restart()  # the checkpoint may have no average
        if model_only:
            return
        metadata = checkpoints.read_metadata(path, "step", "tokens", "data")
        step, steps = metadata["step"], trainer.config.training.steps
        if metadata.get("model_only") and step < steps:
            raise CheckpointError(
                f"{path} holds weights only, so the run cannot continue to step {steps}; resume from an earlier "
                "step with checkpoint.load_step, or begin a new run with checkpoint.initial_load_path"
            )
        # The optimizer has no state before the first step.
        has_optimizer = step > 0 and not metadata.get("model_only")
        if has_optimizer and "optimizer" not in exclude:
            checkpoints.load(path, checkpoints.empty_optimizer_state(path, parts, optimizer))
        averages = checkpoints.average_state(average)
        if averages.keys() <= checkpoints.stored_shapes(path).keys():
            checkpoints.load(path, averages)
        try:
            if "train_state" not in exclude:
                self.load_train_state(metadata)
            if "dataloader" not in exclude:
                trainer.loader.load_state_dict(metadata["data"])
            checkpoints.load_rng_state(path, trainer.rank, trainer.device)
        except InputError:
            raise
        # Anyone may have written the JSON of metadata: these errors are the file's fault.
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path}: its state does not fit this program: {error}"
            ) from error

    def load_train_state(self, metadata: Mapping[str, Any]) -> None:
        """Load the counters of a checkpoint, and the states of hooks in it."""
        trainer = self.trainer
        trainer.advance(metadata["step"], tokens=metadata["tokens"])
        if self.text:
            self.notes = text_changes(metadata.get("text") or {}, self.text)
        saved = metadata.get("config") or ""
        sequences = (metadata.get("sequences_per_step"), trainer.sequences_per_step)
        changes = changed_settings(saved, trainer.config, sequences=sequences)
        changes |= changed_model(metadata, trainer.config, of_training=True)
        self.changes = change_lines(changes)
        self.jump = rate_jump(
            saved, trainer.config, step=trainer.step, ranks=trainer.world_size
        )
        if (scale := trainer.train_step.loss_scale) is not None:
            scale.load_state_dict(metadata.get("loss_scale", {}))
        # Hooks that did not exist when the step was saved get an empty state.
        for hook in trainer.hooks:
            if hook.state_key:
                hook.load_state_dict(metadata.get(hook.state_key, {}))
