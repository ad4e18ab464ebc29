"""Candidates of `titan plan`: degrees of the axes, ZeRO, batch, schedule and recomputation of a job.

The formula only decides the candidates to simulate, and their order. The ranking is the
simulator's. The formula is

    seconds = (FLOPs, with recomputation / achievable rate + TP's gathers and scatters) / (1 - bubble)
              + FSDP's transfers, beyond the part of the computation that hides them

Candidates that titan.observe.estimate finds far too big are left out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod

from titan.checks.rules import check_to_run, resolve_layout
from titan.config.errors import ConfigError, divisors
from titan.config.layout import Layout
from titan.config.load import load_from_argv
from titan.config.model import model_config
from titan.config.phases import longest_sequence
from titan.config.schema import JobConfig
from titan.observe.estimate import estimate_memory, keeps_gathered, stacked_params
from titan.parallel.schedules import build_schedule, stages_per_rank
from titan.sim.price.profiles import Profile

# FLOPs against no recomputation. A full one adds the forward pass, a third of all. Selective
# recomputes part of it, "2" does it in every second block.
_RECOMPUTE = {"none": 1.0, "selective": 1.1, "2": 7 / 6, "full": 4 / 3}
_HIDDEN = 0.7  # of the computation, that FSDP's transfers hide behind
_MARGIN = 1.1  # of the memory, that a candidate may seem to need: the estimate is one
_LONG = 16384  # tokens, from which on sequences may be worth splitting
_MOST_STAGES = 16
_RESHARD = {2: "never", 3: "always"}  # fsdp_reshard_after_forward by ZeRO stage
_SCHEDULES = {
    "1F1B": (1,),
    "Interleaved1F1B": (2, 4),
    "InterleavedZeroBubble": (2, 4),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}
"""Stages that each rank may have."""
# Additional techniques on request: settings, and about the share of the time that remains with them.
ALSO: dict[str, tuple[dict[str, str], float]] = {
    "compile": ({"compile.enable": "true"}, 0.87),
    "float8": ({"model.converters": "quantize.linear.float8"}, 0.78),
    "async_tp": ({"parallelism.enable_async_tensor_parallel": "true"}, 0.95),
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """Settings that the search varies.

    Attributes:
        replicate: Degree of replication (HSDP).
        shard: Degree of sharding (FSDP).
        tp: Degree of tensor parallelism.
        cp: Degree of context parallelism.
        pp: Degree of pipeline parallelism.
        batch: Sequences of a forward pass on a rank.
        ep: Degree of expert parallelism; 0 for a model without experts.
        microbatch: Sequences of a microbatch in a pipeline.
        schedule: Pipeline schedule.
        stages: Pipeline stages on each rank.
        recompute: Mode of activation checkpointing.
        zero: ZeRO stage. With 2, gathered parameters stay until the backward pass.
        also: Names of additional techniques (`ALSO`).
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
    def kind(self) -> tuple[int, ...]:
        """Split of the model, without batch, recomputation and replicas."""
        # Candidates of one kind compete with each other first. Replicas of a good one are its neighbours.
        return self.tp, self.cp, self.pp, self.ep

    @property
    def checkpointing(self) -> dict[str, str]:
        """Section activation_checkpoint."""
        is_every = self.recompute.isdecimal()
        mode, option = ("selective", self.recompute) if is_every else (self.recompute, "op")
        return {"mode": mode, "selective_ac_option": option}

    def settings(self, global_batch: int, *, num_layers: int) -> dict[str, str]:
        """Return the point as overrides of a job."""
        degrees: dict[str, int | str] = {
            "data_parallel_replicate_degree": self.replicate,
            "data_parallel_shard_degree": self.shard,
            "tensor_parallel_degree": self.tp,
            "context_parallel_degree": self.cp,
            "pipeline_parallel_degree": self.pp,
        }
        if self.ep:
            degrees["expert_parallel_degree"] = self.ep
        if self.pp > 1:
            degrees |= {
                "pipeline_parallel_schedule": self.schedule,
                "pipeline_parallel_microbatch_size": self.microbatch,
            }
            if self.stages > stages_per_rank(self.schedule):
                # The embedding and the output layer count as a layer each.
                layers = -(-(num_layers + 2) // (self.pp * self.stages))
                degrees["pipeline_parallel_layers_per_stage"] = layers
        # The default is ZeRO-3 where weights are sharded, without a pipeline, and ZeRO-2 elsewhere.
        is_default = self.zero == (3 if self.pp == 1 < self.shard * self.cp else 2)
        degrees["fsdp_reshard_after_forward"] = "default" if is_default else _RESHARD[self.zero]
        more = (settings for name in self.also for settings in ALSO[name][0].items())
        return {
            **{f"parallelism.{key}": str(value) for key, value in degrees.items()},
            "training.local_batch_size": str(self.batch),
            "training.global_batch_size": str(global_batch),
            **{f"activation_checkpoint.{key}": value for key, value in self.checkpointing.items()},
            **dict(more),
        }


class Search:
    """Search for candidates of a job.

    Attributes:
        job: Files and overrides of the job.
        config: The job.
        profile: The hardware.
        world_size: Number of devices.
        global_batch: Sequences of a step.
        model: Sizes of the model.
        seen: Points that were chosen.
        also: Combinations of additional techniques.
    """

    def __init__(
        self,
        job: Sequence[str],
        config: JobConfig,
        profile: Profile,
        *,
        world_size: int,
        also: Sequence[str] = (),
    ) -> None:
        self.job, self.config, self.profile = job, config.on_device(profile.device_kind), profile
        self.world_size = world_size
        self.global_batch = _global_batch(config, world_size)
        self.model = model_config(config.model)
        self.seen: set[Point] = set()
        # Every combination of the requested techniques.
        self.also = [
            tuple(itertools.compress(also, taken))
            for taken in itertools.product((False, True), repeat=len(also))
        ]

    @cached_property
    def points(self) -> list[Point]:
        """All points that divide evenly and may fit, the most promising first."""
        return sorted(filter(self._may_fit, self._combinations()), key=self.seconds)

    def own(self) -> Point | None:
        """Return the job as it is, or None if it cannot run or has a setting that is not searched."""
        try:
            layout = resolve_layout(self.config, self.world_size)
        except ConfigError:
            return None
        training = self.config.training
        parallel, ac = self.config.parallelism, self.config.activation_checkpoint
        recompute = ac.mode if ac.selective_ac_option == "op" else ac.selective_ac_option
        recompute = recompute if ac.mode == "selective" else ac.mode
        if recompute not in _RECOMPUTE or ac.op_keep_by_block:
            return None
        point = Point(
            replicate=layout.dp_replicate,
            shard=layout.dp_shard,
            tp=layout.tp,
            cp=layout.cp,
            pp=layout.pp,
            ep=parallel.expert_parallel_degree if getattr(self.model, "num_experts", 0) else 0,
            batch=training.local_batch_size,
            recompute=recompute,
            zero=2 if keeps_gathered(self.config, layout) else 3,
        )
        if layout.pp == 1:
            return point
        schedule = parallel.pipeline_parallel_schedule
        if schedule not in _SCHEDULES or parallel.pipeline_parallel_layers_per_stage:
            return None
        size, stages = parallel.pipeline_parallel_microbatch_size, stages_per_rank(schedule)
        return replace(point, microbatch=size, schedule=schedule, stages=stages)

    def _combinations(self) -> Iterator[Point]:
        """Yield all points that divide evenly."""
        model, length = self.model, longest_sequence(self.config)
        # A rank's heads are whole, and TP stays within a node.
        tps = [n for n in _powers(self.profile.gpus_per_node) if model.n_kv_heads % n == 0]
        # Short sequences gain nothing from being split, except where the job itself does.
        cps = [n for n in _powers(self.world_size) if n == 1 or length // n >= _LONG // 2]
        cps = [*{*cps, self.config.parallelism.context_parallel_degree}]
        for tp in tps:
            for cp in cps:
                # Powers of two cover the sensible degrees, and keep the number of points in the
                # thousands.
                for pp in _powers(min(_MOST_STAGES, model.n_layers)):
                    dp, rest = divmod(self.world_size, tp * cp * pp)
                    if rest or not dp or self.global_batch % dp:
                        continue
                    for replicate in (n for n in _powers(dp) if dp % n == 0):
                        yield from self._batches(replicate, dp // replicate, tp, cp, pp)

    def _batches(self, replicate: int, shard: int, tp: int, cp: int, pp: int) -> Iterator[Point]:
        """Yield the points of one layout."""
        per_rank = self.global_batch // (replicate * shard)
        layout = Point(replicate=replicate, shard=shard, tp=tp, cp=cp, pp=pp, batch=per_rank)
        # Expert parallelism borrows the ranks of these axes.
        lent, experts = shard * cp * tp, getattr(self.model, "num_experts", 0)
        eps = [n for n in _powers(lent) if lent % n == 0 and experts % n == 0] if experts else [0]
        for recompute, ep, zero, more in itertools.product(_RECOMPUTE, eps, (3, 2), self.also):
            plain = replace(layout, recompute=recompute, ep=ep, zero=zero, also=more)
            if zero == 3 and shard * cp == 1 < replicate:  # DDP gathers nothing
                continue
            if pp == 1:
                # Without a pipeline, accumulation makes up for a smaller batch.
                yield from (replace(plain, batch=batch) for batch in divisors(per_rank))
                continue
            # A pipeline needs a microbatch for each rank, and layers for each stage.
            for schedule, counts in _SCHEDULES.items():
                for stages, microbatch in itertools.product(counts, divisors(per_rank)):
                    if per_rank // microbatch >= pp and stages * pp <= self.model.n_layers:
                        yield replace(
                            plain, microbatch=microbatch, schedule=schedule, stages=stages
                        )

    def _may_fit(self, point: Point, *, margin: float = _MARGIN) -> bool:
        """Return whether the estimated memory fits.

        The config is changed only as far as the formula reads it.
        """
        changes = {
            "training": {"local_batch_size": point.batch},
            "activation_checkpoint": point.checkpointing,
            "parallelism": {
                "fsdp_reshard_after_forward": _RESHARD[point.zero],
                "pipeline_parallel_schedule": point.schedule,
                "pipeline_parallel_microbatch_size": point.microbatch,
                "expert_parallel_degree": point.ep or 1,
            },
        }
        sections = {k: getattr(self.config, k).model_copy(update=v) for k, v in changes.items()}
        config = self.config.model_copy(update=sections)
        memory = estimate_memory(config, self.model, self._layout(point))
        return memory["total"] < margin * self.profile.usable_gib

    def _layout(self, point: Point) -> Layout:
        """Return the layout of a point."""
        passes = self.global_batch // (point.replicate * point.shard * point.batch)
        return Layout(
            pp=point.pp,
            dp_replicate=point.replicate,
            dp_shard=point.shard,
            cp=point.cp,
            tp=point.tp,
            accumulation=passes,
        )

    def seconds(self, point: Point) -> float:
        """Return the seconds of a step by the formula above."""
        model, profile, training = self.model, self.profile, self.config.training
        layout = self._layout(point)
        tokens = self.global_batch * training.seq_len
        dtype = training.compute_dtype
        peak = profile.peak_tflops.get(dtype, profile.peak_tflops["bfloat16"]) * 1e12
        share = profile.matmul_share.get(dtype, profile.matmul_share["bfloat16"])
        # FLOPs count a causal mask's half of attention, as kernels compute it.
        flops = tokens / self.world_size * model.flops_per_token(training.seq_len, causal=True)
        compute = flops * _RECOMPUTE[point.recompute] / (peak * share)
        compute *= prod(ALSO[name][1] for name in point.also)

        # TP moves activations (2 bytes) into and out of attention and of the feed-forward layer, in
        # the forward pass, the backward pass, and where the forward pass is repeated.
        local_tokens = tokens / (layout.dp * point.cp)
        passes = 3 if point.recompute == "full" else 2
        moved = local_tokens * model.dim * 2 * (1 - 1 / point.tp) * 4 * passes
        within = model.n_layers / point.pp * moved / (profile.ring_gb_per_s * 1e9)

        microbatches = point.batch // point.microbatch
        bubble = (
            _bubble(point.schedule, point.pp, point.stages, microbatches) if point.pp > 1 else 0.0
        )

        # For each pass FSDP gathers weights once or twice (2 bytes) and reduces gradients once (4 bytes).
        # With replicas, an all-reduce adds up the shards of gradients.
        shards = point.shard * point.cp
        num_stacked = model.n_layers * stacked_params(model)
        held = (model.num_params - num_stacked) / (point.tp * point.pp)
        held += num_stacked / ((point.ep or 1) * point.pp)
        near, far = shards * point.tp, point.replicate * shards * point.tp
        gathered = 2 + 2 if point.zero == 3 else 2
        volume = held * (1 - 1 / shards) * (gathered + 4) * layout.accumulation
        data_parallel = volume / (self.speed(near, stride=point.tp) * 1e9)
        summed = held / shards * 2 * 4 * (1 - 1 / point.replicate)
        data_parallel += summed / (self.speed(far, stride=near) * 1e9)
        # Tokens are dispatched to their experts, and combined, as often as TP moves activations.
        if point.ep > 1:
            dispatched = local_tokens / point.tp * model.top_k
            moved = dispatched * model.dim * 2 * (1 - 1 / point.ep) * 2 * passes
            speed = self.speed(point.ep, stride=profile.gpus_per_node)
            within += model.n_layers / point.pp * moved / (speed * 1e9)
        # The bubble stretches the work within a stage. FSDP's transfers hide behind the computation in
        # part.
        step = (compute + within) / (1 - bubble)
        return step + max(0.0, data_parallel - _HIDDEN * compute)

    def speed(self, span: int, *, stride: int) -> float:
        """Return the GB/s of a group whose ranks are `stride` apart, among `span` consecutive ranks."""
        profile = self.profile
        if span <= profile.gpus_per_node:
            return profile.ring_gb_per_s
        # Each member on a node has a card of its own (titan/sim/price/network.py), and a ring uses all of them. A dispatch
        # of tokens has one for each rank, as if the others were far away.
        cards = max(1, profile.gpus_per_node // stride)
        return min(profile.ring_gb_per_s, cards * profile.nic_gb_per_s * profile.nic_share)

    def single_changes(self, own: Point) -> list[Point]:
        """Choose points one change of recomputation, ZeRO or TP away from the job, as a user would try first."""
        near = [replace(own, recompute=mode) for mode in _RECOMPUTE]
        if own.shard * own.cp > 1:
            near.append(replace(own, zero=5 - own.zero))
        ranks = own.shard * own.tp
        for tp in (n for n in _powers(self.profile.gpus_per_node) if ranks % n == 0):
            per_rank, rest = divmod(self.global_batch, own.replicate * (ranks // tp))
            if not rest:
                near.append(replace(own, tp=tp, shard=ranks // tp, batch=gcd(own.batch, per_rank)))
        # The formula may be far off. These few are worth a simulation.
        return [p for p in near if self._may_fit(p, margin=2 * _MARGIN) and self._is_new(p)]

    def first(self, count: int) -> list[Point]:
        """Choose the `count` most promising new points, of each kind in turn."""
        chosen: list[Point] = []
        taken = Counter[tuple[int, ...]]()
        # One of each kind, then a second one, then up to 4, ...: no kind crowds out the others.
        for most in (1, 2, 4, 8, 10**9):
            for point in self.points:
                if len(chosen) >= count:
                    return sorted(chosen, key=self.seconds)
                if taken[point.kind] < most and self._is_new(point):
                    taken[point.kind] += 1
                    chosen.append(point)
        return sorted(chosen, key=self.seconds)

    def neighbours(self, centres: Sequence[Point], count: int) -> list[Point]:
        """Choose up to `count` new points, each one change away from a centre, in the order of the centres."""
        near = (p for centre in centres for p in self.points if _distance(p, centre) == 1)
        return list(itertools.islice(filter(self._is_new, near), count))

    def _is_new(self, point: Point) -> bool:
        """Return whether a point is legal and was not chosen before, and note that it is chosen."""
        if point in self.seen or not self.legal(point):
            return False
        self.seen.add(point)
        return True

    def settings(self, point: Point) -> dict[str, str]:
        """Return a point as overrides of the job."""
        return point.settings(self.global_batch, num_layers=self.model.n_layers)

    def legal(self, point: Point) -> bool:
        """Return whether the job's own rules allow this point."""
        settings = self.settings(point)
        try:
            config = load_from_argv([*self.job, *(f"--{k}={v}" for k, v in settings.items())])
            check_to_run(config, world_size=self.world_size)
        except ConfigError:
            return False
        return True


@lru_cache
def _bubble(name: str, ranks: int, stages: int, microbatches: int) -> float:
    """Return the share of a pipeline's time that a rank idles.

    The time to fill and drain the pipeline does not grow with the microbatches.
    """
    few = min(microbatches, 4 * ranks)
    try:
        schedule = build_schedule(
            name, num_ranks=ranks, num_stages=ranks * stages, num_microbatches=few
        )
    except ValueError:
        return 0.99  # not legal
    share = schedule.bubble_fraction()
    idle = few * share / (1 - share)
    return idle / (microbatches + idle)


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [1 << n for n in range(max(1, most).bit_length()) if 1 << n <= most]


def _distance(one: Point, other: Point) -> int:
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


def _global_batch(config: JobConfig, world_size: int) -> int:
    """Return the sequences of a step: from the job, or from its layout, or from plain data parallelism."""
    training = config.training
    if training.global_batch_size > 0:
        return training.global_batch_size
    try:
        return training.local_batch_size * resolve_layout(config, world_size).dp
    except ConfigError:
        return training.local_batch_size * world_size
