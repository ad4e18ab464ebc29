"""Jobs drawn at random: layouts that mostly fit, with one or two wrong settings. Imports no torch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError, Problem
from titan.config.schema import JobConfig

PREFIX = "parallelism."
DEGREES = {
    "pp": f"{PREFIX}pipeline_parallel_degree",
    "dp_replicate": f"{PREFIX}data_parallel_replicate_degree",
    "dp_shard": f"{PREFIX}data_parallel_shard_degree",
    "cp": f"{PREFIX}context_parallel_degree",
    "tp": f"{PREFIX}tensor_parallel_degree",
}
TP, PP, ROTATE = DEGREES["tp"], DEGREES["pp"], f"{PREFIX}context_parallel_rotate_method"
BALANCER, RESHARD = (
    f"{PREFIX}context_parallel_load_balancer",
    f"{PREFIX}fsdp_reshard_after_forward",
)
SCHEDULE, MICROBATCH = (
    f"{PREFIX}pipeline_parallel_schedule",
    f"{PREFIX}pipeline_parallel_microbatch_size",
)
PER_STAGE = f"{PREFIX}pipeline_parallel_layers_per_stage"
FIRST = f"{PREFIX}pipeline_parallel_first_stage_less_layers"
LAST = f"{PREFIX}pipeline_parallel_last_stage_less_layers"
BATCH, GLOBAL, LENGTH = (
    "training.local_batch_size",
    "training.global_batch_size",
    "training.seq_len",
)
VALIDATION = "validation.seq_len"
ALL_KEYS = (
    *DEGREES.values(),
    ROTATE,
    BALANCER,
    RESHARD,
    SCHEDULE,
    PER_STAGE,
    FIRST,
    LAST,
    BATCH,
    GLOBAL,
    LENGTH,
    VALIDATION,
)
# Stages on each rank (0: any number), a microbatch for each stage, equal rounds of microbatches, backward in two parts.
SCHEDULES = {
    "GPipe": (1, False, False, False),
    "1F1B": (1, True, False, False),
    "Interleaved1F1B": (0, False, True, False),
    "LoopedBFS": (0, False, False, False),
    "InterleavedZeroBubble": (0, False, True, True),
    "ZBVZeroBubble": (2, False, False, True),
    "DualPipeV": (2, True, False, True),
}


@dataclass
class Case:
    """A job's settings by key, the fields of its model, and a number of ranks."""

    world: int
    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any) -> Any:
        return self.settings.get(key, default)

    def config(self) -> JobConfig:
        sections: dict[str, dict[str, Any]] = {
            "model": {"flavor": "tiny", "overrides": self.model}
        }
        for key, value in self.settings.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return JobConfig.model_validate(sections)

    def problems(self) -> list[Problem]:
        try:
            check_to_run(self.config(), world_size=self.world)
        except ConfigError as error:
            return error.problems
        return []

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.settings}, model {self.model}"


def draw(random: random.Random) -> Case:
    """A layout that mostly fits: numbers are made from each other, and now and then one is not."""

    def pick(*values: Any) -> Any:
        return random.choice(values)

    def seldom(chance: float = 0.12) -> bool:
        return random.random() < chance

    pp, replicate, cp, tp = (
        pick(1, 1, 2, 4, 3),
        pick(1, 1, 2, 3),
        pick(1, 1, 2, 4),
        pick(1, 1, 2, 4, 3),
    )
    shard, size = pick(1, 1, 2, 4), pick(1, 1, 2)
    world = pp * replicate * shard * cp * tp
    if seldom():
        world += pick(-1, 1, 2)
    world = max(1, min(world, 64))
    kv_heads = pick(1, 2, 3, 4)
    model = {
        "dim": 48 * 16,
        "n_layers": pick(2, 4, 8, 16, 13),
        "n_heads": kv_heads * pick(1, 2, 4, 3),
        "n_kv_heads": kv_heads,
        "head_dim": 16,
        "ffn_dim": 96 + (pick(1, 2, 3) if seldom() else 0),
        "vocab_size": pick(2048, 258, 259) if not seldom(0.08) else pick(3, 5, 9),
    }
    if seldom(0.03):
        model["tied_embeddings"] = True
    microbatches = pp * pick(1, 2, 4) if not seldom() else pick(1, 3, 5, 7)
    settings: dict[str, Any] = {
        DEGREES["dp_shard"]: -1 if not seldom(0.2) else shard,
        BATCH: size * microbatches + (seldom(0.05) and size > 1),
        LENGTH: 2 * cp * tp * pick(1, 2, 5) + (pick(1, cp, tp, 2) if seldom() else 0),
        "training.mixed_precision_param": "float32",
    }
    degrees = {PP: pp, DEGREES["dp_replicate"]: replicate, DEGREES["cp"]: cp, TP: tp}
    settings |= {key: degree for key, degree in degrees.items() if degree > 1}
    _draw_methods(settings, pick, seldom, unit=2 * cp * tp, size=size)
    if seldom(0.3):
        settings[GLOBAL] = settings[BATCH] * replicate * shard * pick(1, 2, 3) + (
            pick(1, 4) if seldom() else 0
        )
    return Case(world, settings, model)


def _draw_methods(
    settings: dict[str, Any], pick: Any, seldom: Any, *, unit: int, size: int
) -> None:
    if DEGREES["cp"] in settings:
        settings[ROTATE] = pick("allgather", "ring", "alltoall", "ulysses")
        settings[BALANCER] = (
            pick("headtail", "headtail", "none") if not seldom(0.05) else "ptrr"
        )
        settings["data.document_mask"] = seldom(0.25)
    if PP in settings:
        settings[SCHEDULE] = pick(*SCHEDULES)
        settings[MICROBATCH] = size
        settings[RESHARD] = pick("default", "never") if not seldom() else "always"
        if seldom(0.2):
            settings[PER_STAGE] = pick(1, 2, 3, 5)
        if seldom(0.2):
            settings[FIRST], settings[LAST] = pick(0, 1, 2, 4), pick(0, 1, 2, 4)
    if seldom(0.15):
        settings["validation.enable"], settings["validation.dataset"] = True, "synthetic"
        settings[VALIDATION] = unit * pick(1, 3) + (pick(1, 2) if seldom(0.3) else 0)
