"""Random numbers of a run, and those that a step draws on a rank, for dropout and the like.

Ranks that hold other samples, other parts of a sequence or other layers must drop other activations. Between the layers that tensor
parallelism splits, a rank has its part of the sequence, of the heads or of the columns, so its numbers are its own as well.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.base.untrusted import InputError
from titan.config.schema import JobConfig
from titan.config.schema_run import DebugSection
from titan.parallel.init_weights import derived_seed
from titan.parallel.random_numbers import drawing_modules, seed_generators

_LOG = logging.getLogger("titan")


class RandomDraws:
    """Seeds of torch's generators for each step, and a check in the first step for modules that draw without titan's knowledge.

    Attributes:
        seen: whether modules of this rank draw, or, on a CPU, whether the newest passes did.
    """

    def __init__(
        self,
        config: JobConfig,
        parts: Sequence[nn.Module],
        *,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        recompute = config.activation_checkpoint
        self.seed, self.device = config.debug.seed, device
        # Replica groups hold other samples, too.
        self.place = (config.groups.group_number, *(mesh.get_coordinate() or ()))
        recomputes = recompute.mode != "none" and not recompute.preserve_rng_state
        known = [module for part in parts for module in drawing_modules(part).values()]
        self.silent = [] if config.debug.draws else known
        self.seen = bool(known) and config.debug.draws
        self.is_refused = recomputes and not known
        self.before: Tensor | None = None
        self.source: Any = (
            torch.random if device.type == "cpu" else torch.get_device_module(device)
        )

    def begin(self, step: int) -> None:
        # By step, so that a resumed run draws the same; what resumes has no state to restore.
        seed_generators(derived_seed(self.seed, f"step {step} at {self.place}"), self.device)
        for module in self.silent:  # a validation puts all modules in training mode
            module.training = False
        if self.is_refused or self.device.type == "cpu":
            self.before = self.source.get_rng_state()

    def end(self) -> None:
        """Raise InputError if the passes have drawn random numbers that a recomputation would draw differently."""
        if self.before is None:
            return
        before, self.before = self.before, None
        self.seen = not torch.equal(before, self.source.get_rng_state())
        refused, self.is_refused = self.is_refused and self.seen, False
        if not refused:
            return
        text = (
            "the forward pass draws random numbers, and a recomputation would draw others, which makes gradients wrong: set "
            "activation_checkpoint.preserve_rng_state = true"
        )
        if self.device.type == "cpu":
            raise InputError(text)
        _LOG.warning(text)  # and no more: kernels of attention may count as drawing some


def seed_all(section: DebugSection) -> None:
    """Seed the generators of torch, Python and NumPy, and choose deterministic algorithms if the job asks for them."""
    seed = section.seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if section.deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
