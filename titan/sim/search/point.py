"""Point of the search of `titan plan`: the settings that it varies, as overrides of a job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypeAlias

from titan.config.layout import AXES
from titan.parallel.schedules import stages_per_rank

Settings = dict[str, str]
"""Overrides of a job."""
_PIPELINE = "parallelism.pipeline_parallel_"
RESHARD = {2: "never", 3: "always"}  # fsdp_reshard_after_forward by ZeRO stage
# Additional techniques on request: settings, and about the share of the time that remains with
# them.
ALSO: dict[str, tuple[Settings, float]] = {
    "compile": ({"compile.enable": "true"}, 0.87),
    "float8": ({"model.converters": "quantize.linear.float8"}, 0.78),
    "async_tp": ({"parallelism.enable_async_tensor_parallel": "true"}, 0.95),
}


Kind: TypeAlias = "tuple[tuple[str, bool], ...]"
"""Axes in use, and whether each crosses nodes."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Settings that the search varies.

    Attributes:
        replicate: degree of replication (HSDP).
        shard: degree of sharding (FSDP).
        tp: degree of tensor parallelism.
        cp: degree of context parallelism.
        pp: degree of pipeline parallelism.
        batch: sequences of a forward pass on a rank.
        ep: degree of expert parallelism; 0 for a model without experts.
        microbatch: sequences of a microbatch in a pipeline.
        schedule: pipeline schedule.
        stages: pipeline stages on each rank.
        recompute: mode of activation checkpointing.
        zero: ZeRO stage. With 2, gathered parameters stay until the backward pass.
        also: names of additional techniques (`ALSO`).
    """

    replicate: int
    shard: int
    tp: int
    cp: int
    pp: int
    batch: int
    ep: int = 0  # of a model without experts
    microbatch: int = 1
    schedule: str = "1F1B"
    stages: int = 1  # on each rank
    recompute: str = "none"
    zero: int = 3  # 2: keep gathered parameters until the backward pass
    also: tuple[str, ...] = ()

    @property
    def split(self) -> tuple[int, ...]:
        """Split of the model, without batch, recomputation and replicas."""
        return self.tp, self.cp, self.pp, self.ep

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the axes, outermost first."""
        return {axis: getattr(self, axis.removeprefix("dp_")) for axis in AXES}

    def __str__(self) -> str:
        used = [f"{axis} {n}" for axis, n in self.degrees.items() if n > 1]
        ep = f", ep {self.ep}" if self.ep > 1 else ""
        return f"{' x '.join(used) or 'one rank'}{ep}"

    @property
    def checkpointing(self) -> Settings:
        """Section activation_checkpoint."""
        is_every = self.recompute.isdecimal()
        mode, option = ("selective", self.recompute) if is_every else (self.recompute, "op")
        return {"mode": mode, "selective_ac_option": option}

    def settings(self, global_batch: int, *, num_layers: int) -> Settings:
        """Return the point as overrides of a job."""
        found: dict[str, int | str] = {
            AXES[axis]: degree for axis, degree in self.degrees.items()
        }
        if self.ep:
            found["parallelism.expert_parallel_degree"] = self.ep
        if self.pp > 1:
            found[f"{_PIPELINE}schedule"] = self.schedule
            found[f"{_PIPELINE}microbatch_size"] = self.microbatch
            if self.stages > stages_per_rank(self.schedule):
                # The embedding and the output layer count as a layer each.
                layers = -(-(num_layers + 2) // (self.pp * self.stages))
                found[f"{_PIPELINE}layers_per_stage"] = layers
        # The default is ZeRO-3 where weights are sharded, without a pipeline, and ZeRO-2 elsewhere.
        is_default = self.zero == (3 if self.pp == 1 < self.shard * self.cp else 2)
        reshard = "default" if is_default else RESHARD[self.zero]
        found["parallelism.fsdp_reshard_after_forward"] = reshard
        found["training.local_batch_size"] = self.batch
        found["training.global_batch_size"] = global_batch
        found |= {f"activation_checkpoint.{key}": n for key, n in self.checkpointing.items()}
        found |= {key: value for name in self.also for key, value in ALSO[name][0].items()}
        return {key: str(value) for key, value in found.items()}


def words(settings: Settings) -> list[str]:
    """Return overrides as words of a command line."""
    return [f"--{key}={value}" for key, value in settings.items()]


def distance(one: Point, other: Point) -> int:
    """Return the number of settings that differ, without settings that follow from others (the shards from the axes)."""
    a, b = asdict(one), asdict(other)
    different = {key for key in a if a[key] != b[key]}
    # Degrees multiply to the world size, so changing one changes the shards.
    if different & {"tp", "cp", "pp", "replicate"}:
        different -= {"shard", "zero"}
    # With other degrees, batch and schedule often have to change along.
    if "pp" in different or "tp" in different:
        different -= {"batch", "microbatch", "schedule", "stages"}
    if "schedule" in different:
        different -= {"stages"}
    return len(different)
