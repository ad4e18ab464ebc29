"""Hook of a run in replica groups: it divides each step's samples among the groups, and undoes a step that a lost group broke.

Example: three groups of two data-parallel ranks each, with local_batch_size 4. A step has 3 x 2 x 4 = 24 samples.

    step 1  position  0   group 0: samples  0-7    group 1:  8-15   group 2: 16-23    commits
    step 2  position 24   group 0: samples 24-31   group 1: 32-39   group 2: 40-47    group 1 is lost: does not commit
    step 2  position 24   group 0: samples 24-31                    group 2: 32-39    repeated, commits
    step 3  position 40   group 0: samples 40-47                    group 2: 48-55    commits

In the repeated step group 2 has rank 1 of 2 (2 of 3 before), so its first data-parallel rank is 2 of 4 (4 of 6 before).
Gradients are divided by the tokens of 16 samples, not of 24. No sample is lost or used twice, and step 4 begins at 56. When
group 1 returns, it takes the weights and the position from a peer, and steps have 24 samples again.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from titan.base.untrusted import InputError
from titan.config.render import to_toml
from titan.data.base import ShardSpec
from titan.observe.clock import Window
from titan.optim.optimizers import allocate_state
from titan.optim.states import local
from titan.run.checkpointing import Checkpointing
from titan.run.hook import Hook
from titan.run.progress import RunProgress
from titan.run.step_limit import StepLimit
from titan.step.train_step import StepReport

from .agreement import differences
from .replica_groups import ReplicaGroups
from .section import groups_of


class Elastic(Hook):
    """Membership of a replica group.

    It is the first hook. A step that a lost group broke has wrong numbers: it is repeated before another hook judges or records it.

    With n groups, a step has n times the samples of one group. Losses and gradients are divided by the tokens of all groups. If
    a group is lost, the step does not commit: the other groups repeat it, with the samples after the last committed step.
    """

    judges = is_first = True

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.groups = ReplicaGroups(
            groups_of(trainer.config),
            device=trainer.device,
            state=self.state,
            load=self._load,
        )
        self.is_committed = self.has_quorum = False
        self.before: dict[str, Any] = {}
        self.began_s = 0.0
        self.size = 0

    def resume(self) -> None:
        """Join the groups that are training, if there are any. Otherwise Checkpointing loads the state from disk.

        This is also the quorum of the first step: groups that know each other wait for each other's sums.
        """
        self._begin()
        self.has_quorum = True

    def before_step(self) -> None:
        """Make the quorum of the next step."""
        if not self.has_quorum:
            self._begin()
        self.has_quorum = False

    def step_begin(self) -> None:
        """Take this group's share of the step's samples, and report a change of the number of groups."""
        trainer = self.trainer
        self.groups.at(trainer.step - 1)
        groups, batch = self.groups, trainer.config.training.local_batch_size
        share = ShardSpec(
            rank=groups.rank * trainer.layout.dp + trainer.dp_rank,
            world=groups.size * trainer.layout.dp,
            batch=batch,
        )
        trainer.reshare(share, num_groups=groups.size, is_writer=groups.rank == 0)
        trainer.train_step.join_groups(groups.size, groups.sum_)
        self.before, self.began_s = trainer.loader.state_dict(), time.monotonic()
        groups.agree(
            {
                "step": trainer.step,
                "first_sample": self.before["position"],
                "tokens": trainer.tokens_seen,
                "samples of the step": trainer.sequences_per_step,
            }
        )
        if groups.size != self.size:
            if self.size:
                trainer.announce(
                    f"step {trainer.step}: {self.size} -> {groups.size} replica groups"
                )
            self.size = groups.size

    def updated(self, report: StepReport) -> None:
        """Undo a step that did not commit."""
        if self.is_committed:
            return
        trainer = self.trainer
        why = self.groups.failure
        trainer.announce(
            f"step {trainer.step}: a replica group was lost ({why}); its samples come again"
        )
        trainer.events.repeat(time.monotonic() - self.began_s)
        trainer.repeat(self.before)
        if limit := trainer.hook(StepLimit):
            limit.step_end()  # the next quorum may take long

    def columns(self, window: Window, result: Any) -> dict[str, Any]:
        """Return the number of groups and the step's first sample."""
        return {"replica_groups": self.size, "first_sample": result.first_sample}

    def close(self) -> None:
        self.groups.close()

    def accept(self, loss: Tensor, grad_norm: Tensor) -> bool:
        """Return whether the step commits, the same on all ranks of a group."""
        self.is_committed = self.groups.commit()
        return self.is_committed

    def _begin(self) -> None:
        self.waited_for = ""
        trainer = self.trainer
        with trainer.timer.pause("quorum") if trainer.is_started else nullcontext():
            self.groups.begin(
                step=trainer.step,
                text=to_toml(trainer.config),
                waiting=self._wait,
                require_same=self._require_same,
            )

    def _wait(self, reason: str) -> None:
        """Report the reason of waiting, and save unsaved steps, once."""
        trainer = self.trainer
        needed = groups_of(trainer.config).min_replicas
        text = f"waiting for {needed} replica group{'s' * (needed > 1)}: {reason}"
        if text == self.waited_for:
            return
        self.waited_for = text
        if not trainer.is_started:
            print(text, flush=True)
            return
        trainer.announce(text)
        checkpointing = trainer.hook(Checkpointing)
        if (
            checkpointing
            and checkpointing.manager.can_save
            and trainer.saved_step != trainer.step
        ):
            checkpointing.save_now()

    def _require_same(self, name: str, other: str) -> None:
        """Check that another group's job, as TOML, has another number and the same settings, except harmless ones.

        Raises:
            InputError: A setting differs, or the number does not.
        """
        mine = f"group-{groups_of(self.trainer.config).replica_id}"
        if name == mine:
            raise InputError(
                f"fault_tolerance.replica_id: {name} trains already; give each group its own number"
            )
        if changes := differences(other, to_toml(self.trainer.config)):
            raise InputError(f"{mine} runs another job than {name}: {'; '.join(changes)}")

    # ---- healing

    def state(self) -> dict[str, Any]:
        checkpointing = self.trainer.hook(Checkpointing)
        assert checkpointing is not None
        tensors = {name: local(tensor) for name, tensor in checkpointing.state().items()}
        return {"tensors": tensors, "metadata": json.dumps(checkpointing.metadata())}

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        trainer, metadata = self.trainer, json.loads(state["metadata"])
        checkpointing = trainer.hook(Checkpointing)
        assert checkpointing is not None
        if not allocate_state(trainer.train_step.optimizer):
            raise InputError(
                "fault_tolerance.enable: this optimizer cannot take over a peer's state"
            )
        mine = checkpointing.state()
        for name, tensor in state["tensors"].items():
            if not name.startswith("rng."):
                local(mine[name]).copy_(tensor)
        checkpointing.take_over(metadata)
