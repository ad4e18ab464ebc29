"""Candidates of `titan plan`: degrees of the axes, ZeRO, batch, schedule and recomputation of a job.

The formula only decides the candidates to simulate, and their order. The ranking is the
simulator's. The formula is

    seconds = (FLOPs, with recomputation / achievable rate + TP's gathers and scatters) / (1 - bubble)
              + FSDP's transfers, beyond the part of the computation that hides them

Candidates that titan.sim.estimate finds far too big are left out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import gcd, inf, prod
from operator import attrgetter
from typing import Any

from titan.checks.rules import check_to_run, resolve_layout
from titan.config.errors import ConfigError, divisors
from titan.config.layout import AXES, Layout, keeps_gathered
from titan.config.load import load_from_argv
from titan.config.phases import longest_sequence
from titan.config.schema import JobConfig
from titan.parallel.schedules import build_schedule, stages_per_rank
from titan.sim.estimate import estimate_memory, stacked_params
from titan.sim.price.profiles import Profile

from .point import ALSO, RESHARD, Kind, Point, Settings, distance, words
from .variants import Search

# FLOPs against no recomputation. A full one adds the forward pass, a third of all. Selective
# recomputes part of it, "2" does it in every second block.
_RECOMPUTE = {"none": 1.0, "selective": 1.1, "2": 7 / 6, "full": 4 / 3}
_HIDDEN = 0.7  # of the computation, that FSDP's transfers hide behind
_MARGIN = 1.1  # of the memory, that a candidate may seem to need: the estimate is one
_LONG = 16384  # tokens, from which on sequences may be worth splitting
_MOST_STAGES = 16
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"
_HOPELESS = 1.5  # times the best time by the formula: a kind is not explored for its own sake
# Points of a kind that are checked against the rules, before the kind counts as refused.
_TRIES = 8
_SCHEDULES = {
    "1F1B": (1,),
    "Interleaved1F1B": (2, 4),
    "InterleavedZeroBubble": (2, 4),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}
"""Stages that each rank may have."""


class LayoutSearch(Search):
    """Search for a job's layout: its candidates, beside their simulations.

    Attributes:
        config: the job.
        global_batch: sequences of a step.
        model: sizes of the model.
        seen: points that were chosen.
        also: combinations of additional techniques.
        held: keys of the job that no candidate changes.
        refusals: why the job's rules refuse a point that was looked at, or "".
    """

    def __init__(
        self,
        job: Sequence[str],
        config: JobConfig,
        profile: Profile,
        *,
        world_size: int,
        processes: int | None = None,
        also: Sequence[str] = (),
        global_batch: int = 0,
        held: Collection[str] = (),
    ) -> None:
        super().__init__(job, world_size, profile, processes)
        self.config = config.on_device(profile.device_kind)
        self.global_batch = global_batch or sequences_of(config, world_size)
        self.model = config.model.sizes
        self.seen = set[Point]()
        self.held, self.refusals = held, dict[Point, str]()
        self.also = [
            tuple(itertools.compress(also, taken))
            for taken in itertools.product((False, True), repeat=len(also))
        ]

    @cached_property
    def points(self) -> list[Point]:
        """All points that divide evenly and may fit, the most promising first."""
        own = self.config.training.local_batch_size
        # Where transfers are hidden, the formula is the same for each local batch and each stage of
        # ZeRO. Then the job's own batch is first, and large ones next, and ZeRO-2, which transfers
        # less.
        points = filter(self._may_fit, self.combinations())
        return sorted(points, key=lambda p: (self.seconds(p), p.batch != own, -p.batch, p.zero))

    def own(self) -> Point | None:
        """Return the job as it is, or None if it cannot run or has a setting that is not searched."""
        try:
            layout = resolve_layout(self.config, self.world_size)
        except ConfigError:
            return None
        training, parallel = self.config.training, self.config.parallelism
        recompute = _recompute(self.config)
        if recompute not in _RECOMPUTE or self.config.activation_checkpoint.op_keep_by_block:
            return None
        degrees: Any = {axis.removeprefix("dp_"): n for axis, n in layout.degrees.items()}
        point = Point(
            **degrees,
            ep=parallel.expert_parallel_degree if self.model.num_experts else 0,
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

    def combinations(self) -> Iterator[Point]:
        """Yield all points that divide evenly."""
        model, length = self.model, longest_sequence(self.config)
        # A rank's heads are whole, and TP stays within a node.
        tps = [n for n in _powers(self.profile.gpus_per_node) if model.n_kv_heads % n == 0]
        # Short sequences gain nothing from being split, except where the job itself does.
        cps = {n for n in _powers(self.world_size) if n == 1 or length // n >= _LONG // 2}
        cps.add(self.config.parallelism.context_parallel_degree)
        # Powers of two cover the sensible degrees, and keep the number of points in the thousands.
        pps = _powers(min(_MOST_STAGES, model.n_layers))
        degrees = (self.values(AXES[a], n) for a, n in (("tp", tps), ("cp", cps), ("pp", pps)))
        for tp, cp, pp in itertools.product(*degrees):
            dp, rest = divmod(self.world_size, tp * cp * pp)
            if not dp or rest or self.global_batch % dp:
                continue
            for replicate in self.values(AXES["dp_replicate"], _powers(dp)):
                shard, rest = divmod(dp, replicate)
                if not rest and shard in self.values(AXES["dp_shard"], [shard]):
                    batch = self.global_batch // dp
                    yield from _with_layout(
                        self,
                        Point(
                            replicate=replicate, shard=shard, tp=tp, cp=cp, pp=pp, batch=batch
                        ),
                    )

    def values(self, key: str, values: Iterable[Any]) -> list[Any]:
        """Return the values of a key to try: of a key that is held, the job's alone."""
        section, _, name = key.partition(".")
        return [getattr(getattr(self.config, section), name)] if key in self.held else [*values]

    def kind(self, point: Point) -> Kind:
        """Return the axes in use, innermost first, each with whether it crosses nodes."""
        found, span = {}, 1
        for axis, degree in reversed(point.degrees.items()):
            span *= degree  # ranks from the first to the last of a group
            if degree > 1:
                found[axis] = span > self.profile.gpus_per_node
        # Expert parallelism borrows the ranks of the innermost axes.
        if point.ep > 1:
            found["ep"] = point.ep > self.profile.gpus_per_node
        # Data parallelism counts once, by what crosses nodes: shards, else replicas, else nothing.
        shards, replicas = (found.pop(axis, None) for axis in ("dp_shard", "dp_replicate"))
        if (shards, replicas) != (None, None):
            axis = "dp_shard" if shards else "dp_replicate" if replicas else "dp"
            found[axis] = axis != "dp"
        return tuple(found.items())

    def same_layout(self, point: Point) -> list[Point]:
        """Return the legal points with a point's layout, in all local batches and modes of recomputation, the largest first."""
        per_rank = self.global_batch // (point.replicate * point.shard)
        batches = (
            [per_rank] if point.pp > 1 else reversed(divisors(per_rank)) if per_rank else []
        )
        pairs = itertools.product(batches, _RECOMPUTE)
        near = (replace(point, batch=batch, recompute=mode) for batch, mode in pairs)
        return [p for p in near if self._layout(p).accumulation and self.legal(p)]

    def _may_fit(self, point: Point, *, margin: float = _MARGIN) -> bool:
        """Return whether the estimated memory fits."""
        return self.estimated_gib(point) < margin * self.profile.usable_gib

    def estimated_gib(self, point: Point) -> float:
        """Return the memory of a point by formula.

        The config is changed only as far as the formula reads it.
        """
        changes: dict[str, dict[str, Any]] = {
            "training": {"local_batch_size": point.batch},
            "activation_checkpoint": point.checkpointing,
            "parallelism": {
                "fsdp_reshard_after_forward": RESHARD[point.zero],
                "pipeline_parallel_schedule": point.schedule,
                "pipeline_parallel_microbatch_size": point.microbatch,
                "expert_parallel_degree": point.ep or 1,
            },
        }
        sections = {k: getattr(self.config, k).model_copy(update=v) for k, v in changes.items()}
        config = self.config.model_copy(update=sections)
        return estimate_memory(config, self.model, self._layout(point))["total"]

    def _layout(self, point: Point) -> Layout:
        """Return the layout of a point."""
        passes = self.global_batch // (point.replicate * point.shard * point.batch)
        return Layout(**point.degrees, accumulation=passes)

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
            _bubble(point.schedule, point.pp, point.stages, microbatches)
            if point.pp > 1
            else 0.0
        )

        # For each pass FSDP gathers weights once or twice (2 bytes) and reduces gradients once (4
        # bytes). With replicas, an all-reduce adds up the shards of gradients.
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
        # The bubble stretches the work within a stage. FSDP's transfers hide behind the computation
        # in part.
        step = (compute + within) / (1 - bubble)
        return step + max(0.0, data_parallel - _HIDDEN * compute)

    def speed(self, span: int, *, stride: int) -> float:
        """Return the GB/s of a group whose ranks are `stride` apart, among `span` consecutive ranks."""
        profile = self.profile
        if span <= profile.gpus_per_node:
            return profile.ring_gb_per_s
        # Each member on a node has a card of its own (titan/sim/price/network.py), and a ring uses
        # all of them. A dispatch of tokens has one for each rank, as if the others were far away.
        cards = max(1, profile.gpus_per_node // stride)
        return min(profile.ring_gb_per_s, cards * profile.nic_gb_per_s * profile.nic_share)

    def single_changes(self, own: Point) -> list[Point]:
        """Choose points one change of recomputation, ZeRO, TP or EP away from the job, as a user would try first."""
        near = [replace(own, recompute=mode) for mode in _RECOMPUTE]
        if own.shard * own.cp > 1:
            near.append(replace(own, zero=5 - own.zero))
        ranks = own.shard * own.tp
        for tp in (n for n in _powers(self.profile.gpus_per_node) if ranks % n == 0):
            per_rank, rest = divmod(self.global_batch, own.replicate * (ranks // tp))
            if not rest:
                near.append(
                    replace(own, tp=tp, shard=ranks // tp, batch=gcd(own.batch, per_rank))
                )
        if own.ep:
            lent = own.shard * own.cp * own.tp
            near += [replace(own, ep=ep) for ep in _powers(lent) if lent % ep == 0]
        # The formula may be far off. These few are worth a simulation.
        return [p for p in near if self._may_fit(p, margin=2 * _MARGIN) and self._is_new(p)]

    def first(self, count: int) -> list[Point]:
        """Choose the `count` most promising new points, of each kind and of each split in turn."""
        chosen: list[Point] = []
        taken = Counter[tuple[Any, ...]](map(self.kind, self.seen))
        promising = _HOPELESS * min(map(self.seconds, self.points[:1]), default=0.0)
        kinds = [point for point in self.points if self.seconds(point) < promising]
        # One of each kind in the first half. Then one of each split, then a second one, then up to
        # 4, ...: none crowds out the others.
        split = attrgetter("split")
        rounds = [(kinds, self.kind, 1, count - count // 2)]
        rounds += [(self.points, split, most, count) for most in (1, 2, 4, 8, 10**9)]
        for points, group, most, limit in rounds:
            for point in points:
                if len(chosen) < limit and taken[group(point)] < most and self._is_new(point):
                    taken.update([self.kind(point), point.split])
                    chosen.append(point)
        return sorted(chosen, key=self.seconds)

    def untried(self) -> list[Point]:
        """Return the most promising legal point of each kind of which none was chosen, the most promising first."""
        seen, tried, best = {*map(self.kind, self.seen)}, Counter[Kind](), dict[Kind, Point]()
        for point in self.points:
            kind = self.kind(point)
            # The rules refuse some kinds altogether.
            if kind not in seen | best.keys() and tried[kind] < _TRIES:
                tried[kind] += 1
                if self.legal(point):
                    best[kind] = point
        return [*best.values()]

    def neighbours(self, centres: Sequence[Point], count: int) -> list[Point]:
        """Choose up to `count` new points, each one change away from a centre, in the order of the centres."""
        near = (p for centre in centres for p in self.points if distance(p, centre) == 1)
        return self._new(near, count)

    def data_parallel(self, *, spreads_experts: bool, below_gib: float = inf) -> list[Point]:
        """Choose the best new point with data parallelism alone, or beside expert parallelism, whose memory by formula is below a limit."""
        alone = (p for p in self.points if p.pp == p.cp == p.tp == 1)
        alone = (p for p in alone if (p.ep > 1) == spreads_experts)
        return self._new((p for p in alone if self.estimated_gib(p) < below_gib), 1)

    def _new(self, points: Iterable[Point], count: int) -> list[Point]:
        return [*itertools.islice(filter(self._is_new, points), count)]

    def _is_new(self, point: Point) -> bool:
        """Return whether a point is legal and was not chosen before, and note that it is chosen."""
        if point in self.seen or not self.legal(point):
            return False
        self.seen.add(point)
        return True

    def settings(self, point: Point) -> Settings:
        """Return a point as overrides of the job."""
        found = point.settings(self.global_batch, num_layers=self.model.n_layers)
        if self.config.phase:  # in a phase with other degrees, the shards follow from them
            found[AXES["dp_shard"]] = "-1"
        if self.config.parallelism.layout != "fixed":
            found["parallelism.layout"] = "fixed"
        return {key: value for key, value in found.items() if key not in self.held}

    def legal(self, point: Point) -> bool:
        """Return whether the job's own rules allow this point."""
        if point not in self.refusals:  # several rounds ask
            self.refusals[point] = ""
            try:
                config = load_from_argv([*self.job, *words(self.settings(point))], warn=False)
                check_to_run(config, world_size=self.world_size)
            except ConfigError as error:
                problem = error.problems[0]
                self.refusals[point] = f"{problem.key}: {problem.message}"
        return not self.refusals[point]


def _with_layout(search: LayoutSearch, layout: Point) -> Iterator[Point]:
    """Yield the points of one layout, whose batch is all that a rank computes in a step."""
    per_rank, pp, experts = layout.batch, layout.pp, search.model.num_experts
    # Expert parallelism borrows the ranks of these axes.
    lent = layout.shard * layout.cp * layout.tp
    eps = search.values("parallelism.expert_parallel_degree", _powers(lent))
    eps = [n for n in eps if lent % n == 0 and experts % n == 0] if experts else [0]
    reshards = search.values(_RESHARD, RESHARD.values())
    zeros = [zero for zero in (3, 2) if RESHARD[zero] in reshards]
    # If the job holds its own mode of recomputation, it is the mode that the formula takes for
    # it.
    own = _recompute(search.config)
    modes: Iterable[str] = _RECOMPUTE
    if "activation_checkpoint.mode" in search.held:
        modes = [own if own in _RECOMPUTE else "selective"]
    for recompute, ep, zero, more in itertools.product(modes, eps, zeros, search.also):
        plain = replace(layout, recompute=recompute, ep=ep, zero=zero, also=more)
        if zero == 3 and layout.shard * layout.cp == 1 < layout.replicate:
            continue  # DDP gathers nothing
        if pp == 1:
            # Without a pipeline, accumulation makes up for a smaller batch.
            yield from (replace(plain, batch=batch) for batch in divisors(per_rank))
            continue
        # A pipeline needs a microbatch for each rank, and layers for each stage.
        sizes = search.values(_MICROBATCH, divisors(per_rank))
        sizes = [n for n in sizes if per_rank % n == 0 and per_rank // n >= pp]
        for schedule in search.values(_SCHEDULE, _SCHEDULES):
            counts = _SCHEDULES.get(schedule) or (stages_per_rank(schedule),)
            for stages, size in itertools.product(counts, sizes):
                if stages * pp <= search.model.n_layers:
                    yield replace(plain, microbatch=size, schedule=schedule, stages=stages)


def _recompute(config: JobConfig) -> str:
    """Return the job's own recomputation, as a point has it: its mode, or a number, of which one block recomputes."""
    ac = config.activation_checkpoint
    option = str(ac.selective_ac_option)
    return option if ac.mode == "selective" and option != "op" else ac.mode


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


def sequences_of(config: JobConfig, world_size: int) -> int:
    """Return the sequences of a step: from the job, or from its layout, or from plain data parallelism."""
    training = config.training
    if training.global_batch_size > 0:
        return training.global_batch_size
    try:
        return training.local_batch_size * resolve_layout(config, world_size).dp
    except ConfigError:
        return training.local_batch_size * world_size
