"""Silent bugs, planted in a rank before it trains: wrong numbers without an error. `titan diff` must name the module of each.

    python -m tests.support.silent_bugs              all of them; prints a table
    python -m tests.support.silent_bugs rope norm    those whose names hold a word

Twelve are faults of this project's own drills: of scripts/planted.py those that change the numbers of a step, and those of experts in
tests/support/planted.py. The other faults of scripts/planted.py do not change a step on given batches: order of samples, commit of a
checkpoint, rules of the config, memory and time in the simulator. The rest are bugs of other projects, rebuilt in titan's own code, with
the issue or pull request that reports each.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Replicate

from tests.support import planted
from tests.support.ranks import Pool
from titan.checks.layout_rules import resolve_layout
from titan.config.load import load_from_argv
from titan.contrib.muon import optimizer as muon
from titan.models.common import moe
from titan.models.llama3.model import Llama
from titan.numerics.certify import steps
from titan.numerics.certify.ranks import MORE
from titan.numerics.diff.compare import Comparison, compare
from titan.numerics.recorded import RecordedStep
from titan.numerics.recording import StepRecorder
from titan.parallel import (
    build_mesh,
    collectives,
    context,
    expert,
    fsdp,
    pipeline,
    ring,
    tensor,
    tensor_styles,
)
from titan.step import train_step
from titan.step.resolved import resolve_job
from titan.step.train_step import TrainStep, build_train_step

STEPS, RECORDED = 10, 3

# ---- jobs and layouts --------------------------------------------------------------------------

_SMALL = (
    *("train_configs/debug_model.toml", "--training.dataset=synthetic", "--training.seq_len=32"),
    *("--training.global_batch_size=8", "--training.local_batch_size=2", f"--training.steps={STEPS}"),
    *("--training.mixed_precision_param=float32", "--optimizer.lr=3e-3", "--optimizer.implementation=for-loop"),
)  # fmt: skip
_TWO = "--model.overrides.n_layers=2"
JOBS: dict[str, tuple[str, ...]] = {
    "dense": (*_SMALL, _TWO),
    "tied": (*_SMALL, _TWO, "--model.overrides.tied_embeddings=true"),
    "documents": (*_SMALL, _TWO, "--data.document_mask=true"),
    "windows": (*_SMALL, "--model.name=gpt_oss", _TWO),
    "Muon": (*_SMALL, _TWO, "--optimizer.name=Muon"),
    "experts": (*_SMALL, "--model.name=qwen3", "--model.flavor=tiny_moe", _TWO),
    "biases": (
        *(*_SMALL, "--model.name=qwen3", "--model.flavor=tiny_moe", _TWO),
        "--model.overrides.load_balance_coeff=1e-2",
    ),
}
_P = "--parallelism."
_TP, _CP = f"{_P}tensor_parallel_degree", f"{_P}context_parallel_degree"
_PP, _EP = f"{_P}pipeline_parallel_degree", f"{_P}expert_parallel_degree"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "TP 2": (2, (f"{_TP}=2",)),
    "TP 4": (4, (f"{_TP}=4",)),
    "CP 2": (2, (f"{_CP}=2",)),
    "CP 2, ring": (2, (f"{_CP}=2", f"{_P}context_parallel_rotate_method=ring")),
    "PP 2": (2, (f"{_PP}=2",)),
    "EP 2": (2, (f"{_EP}=2",)),
    "FSDP 2": (2, ()),
    "DDP 2": (2, (f"{_P}data_parallel_replicate_degree=2",)),
}


@dataclass(frozen=True)
class SilentBug:
    """A bug.

    Attributes:
        source: where it was reported.
        what: what it does, in words.
        job: one of `JOBS`.
        layout: one of `LAYOUTS`.
        plant: plants it in this process.
        first: kind and name of the first tensor that differs.
        step: step in which it differs.
    """

    source: str
    what: str
    job: str
    layout: str
    plant: Callable[[], None]
    first: tuple[str, str]
    step: int = 1


@dataclass(frozen=True)
class Trained:
    """Steps of a job on rank 0: records of the first ones, and the loss of all."""

    recorded: list[RecordedStep] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train(
    job: Sequence[str],
    bug: str = "",
    perturbed: int = 0,
    num_steps: int = STEPS,
    new_batches: bool = False,
) -> Trained:
    """Train a job on the ranks of the default process group, with a bug in it, and record its first steps.

    All steps have the same batch, since nothing could be learned from new random tokens in each: so the loss falls, as in a real run.
    With `new_batches`, each step has its own.
    """
    if bug:
        BUGS[bug].plant()
    config = load_from_argv([*job], warn=False)
    layout = resolve_layout(config, dist.get_world_size())
    mesh = build_mesh("cpu", **layout.degrees)
    built = build_train_step(
        resolve_job(config, layout, device="cpu"), device=torch.device("cpu"), mesh=mesh
    )
    recorder = StepRecorder(built, perturbed=perturbed)
    trained = Trained()
    batches = list(islice(steps._batches(built), num_steps if new_batches else 1))
    for number, batch in zip(range(1, num_steps + 1), cycle(batches), strict=False):
        if number <= RECORDED:
            recorder.begin(batch)
        report = built.train(batch, step=number)
        if number <= RECORDED:
            trained.recorded.append(recorder.end(number, report))
        trained.losses.append(report.loss.item())
    return trained


class Reference:
    """One process of each job, trained once: its steps, and those with one rounding more in each output."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kept: dict[tuple[str, ...], tuple[Trained, Trained]] = {}

    def of(self, job: tuple[str, ...], num_steps: int = STEPS) -> tuple[Trained, Trained]:
        """Return the steps of a job, and the disturbed ones."""
        if job not in self.kept:
            plain = self.pool.run(1, train, job, "", 0, num_steps)[0]
            self.kept[job] = plain, self.pool.run(1, train, job, "", 1, RECORDED)[0]
        return self.kept[job]


def found_with(
    bug: str, reference: Reference, num_steps: int = STEPS
) -> tuple[Comparison, dict[int, float]]:
    """Return what the comparison with one process finds, and the relative difference of the loss in some steps."""
    about = BUGS[bug]
    world, keys = LAYOUTS[about.layout]
    plain, moved = reference.of(JOBS[about.job], num_steps)
    wrong = reference.pool.run(world, train, (*JOBS[about.job], *keys), bug, 0, num_steps)[0]
    losses = [abs(b - a) / a for a, b in zip(plain.losses, wrong.losses, strict=False)]
    seen = {n: losses[n - 1] for n in (1, 3, 10) if n <= len(losses)}
    return compare(plain.recorded, wrong.recorded, moved.recorded), seen


# ---- this project's own drills (scripts/planted.py) ----------------------------------------------


def kept_loss_gradient() -> None:
    def gather(x: Any, mesh: Any) -> Tensor:
        whole = x.redistribute(placements=(Replicate(),))
        return whole.to_local(grad_placements=(Replicate(),))

    tensor.gathered = gather


def averaged_keys() -> None:
    scatter: Any = collectives.start_reduce_scatter
    collectives.start_reduce_scatter = lambda x, **options: scatter(
        # pyrefly: ignore[unsupported-operation]
        x / options["size"],
        **options,
    )


def scaled_by_microbatches() -> None:
    schedule = pipeline.Schedule1F1B
    pipeline.Schedule1F1B = lambda *args, **options: schedule(
        *args, **(options | {"scale_grads": True})
    )


def wrong_way_back() -> None:
    combine = expert.TokenDispatcher.combine

    def swapped(self: Any, results_RD: Tensor, routes: expert.Routes) -> Any:
        wrong = routes._replace(order_R=routes.inverse_R, inverse_R=routes.order_R)
        return combine(self, results_RD, wrong)

    expert.TokenDispatcher.combine = swapped


def halved_by_fsdp() -> None:
    whole = fsdp.reduce_gradients

    def halve(model: nn.Module, **options: Any) -> None:
        whole(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    fsdp.reduce_gradients = halve


def norm_of_one_stage() -> None:
    clip: Any = train_step.clip_gradients
    train_step.clip_gradients = lambda parameters, **options: clip(
        parameters, max_norm=options["max_norm"]
    )


def own_tokens_for_all() -> None:
    whole = train_step._sum

    def multiply(value: Tensor, group: Any) -> Tensor:
        if group is not None and value.dtype == torch.int64:
            return value * group.size()
        return whole(value, group)

    train_step._sum = multiply


# ---- bugs of other projects ----------------------------------------------------------------------


def _before_clipping(change: Callable[[dict[str, nn.Parameter]], Any]) -> None:
    """Change the complete gradients of each step."""
    clip = TrainStep._clip

    def changed(self: TrainStep) -> Tensor:
        change(dict(steps.named_parameters(self)))
        return clip(self)

    TrainStep._clip = changed


def unsummed_norm() -> None:
    def keep_own(parameters: dict[str, nn.Parameter]) -> None:
        parameter = parameters["norm.weight"]
        parameter.grad = _whole_as_it_is(parameter.grad)

    _before_clipping(keep_own)


def averaged_norms() -> None:
    def average(parameters: dict[str, nn.Parameter]) -> None:
        for parameter in parameters.values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements[0].is_partial():
                parameter.grad = grad / grad.device_mesh.size()

    _before_clipping(average)


def _whole_as_it_is(grad: Any) -> Tensor:
    return DTensor.from_local(
        grad.to_local(), grad.device_mesh, (Replicate(),), run_check=False
    )


def unsummed_keys_and_values() -> None:
    def apply(self: Any, module: nn.Module, mesh: Any) -> nn.Module:
        module = right(self, module, mesh)
        _before_clipping(
            lambda parameters: [
                setattr(p, "grad", _whole_as_it_is(p.grad))
                for name, p in parameters.items()
                if name.endswith((".wk.weight", ".wv.weight"))
            ]
        )
        return module

    right: Callable[..., nn.Module] = tensor_styles.ReplicatedHeads._apply
    tensor_styles.ReplicatedHeads._apply = apply


def positions_from_zero() -> None:
    rotations: Any = Llama.rotary_cos_sin
    Llama.rotary_cos_sin = lambda self, positions, *rest: rotations(self, None, *rest)


def leaking_documents() -> None:
    attend = context.ContextParallelAttention._attend

    def attend_to_all(self: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, sinks: Any) -> Tensor:
        return attend(self, q, k, v, None, sinks)

    context.ContextParallelAttention._attend = attend_to_all


def wrong_softmax_in_ring() -> None:
    add = ring._add_block_gradient

    def add_with_other_sums(
        dq: Tensor, dkv: Tensor, kv: Tensor, rows: Any, block: Any, options: Any
    ) -> None:
        grad, q, out, lse = rows
        shift = 0.0 if block.causal else math.log(2)  # the keys of other ranks
        add(dq, dkv, kv, (grad, q, out, lse + shift), block, options)

    ring._add_block_gradient = add_with_other_sums


def wiped_between_microbatches() -> None:
    run = TrainStep._forward_backward

    def wipe_first(self: TrainStep, *args: Any, **options: Any) -> Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        return run(self, *args, **options)

    TrainStep._forward_backward = wipe_first


def embedding_of_one_end() -> None:
    nn.Embedding.forward = lambda self, input: F.embedding(input, self.weight.detach())


def router_of_local_experts() -> None:
    weigh = moe.Router.weigh

    def of_local(self: moe.Router, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = weigh(self, scores_TE, ids_TK)
        num_local = self.config.num_experts // dist.get_world_size()
        is_local = ids_TK // num_local == dist.get_rank()
        return torch.where(is_local, weights_TK, weights_TK.detach())

    moe.Router.weigh = of_local


class _Collectives:
    """torch.distributed with another all-reduce."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, *args: Any, **options: Any) -> None:
        for _ in range(self.times):
            dist.all_reduce(*args, **options)


def replicas_apart() -> None:
    _fsdp_collectives.dist = _Collectives(0)


def replicas_twice() -> None:
    _fsdp_collectives.dist = _Collectives(2)


def mean_of_each_microbatch() -> None:
    run = TrainStep._forward_backward

    def mean(self: TrainStep, batch: Any, divisor: Tensor, **options: Any) -> Tensor:
        training = self.config.training
        count = training.global_batch_size // training.local_batch_size
        return run(self, batch, batch.num_valid * count, **options)

    TrainStep._forward_backward = mean


def gate_in_bf16() -> None:
    def multiply(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return F.linear(x.bfloat16(), weight.bfloat16()).float()

    moe.linear_in_fp32 = multiply


def averaged_norm_of_experts() -> None:
    clip = train_step.clip_gradients

    def average(parameters: Any, *, max_norm: float, **options: Any) -> Tensor:
        parameters = [*parameters]
        square = clip([p for p in parameters if p.ndim < 3], max_norm=0.0, **options) ** 2
        own = [p.grad for p in parameters if p.ndim == 3]
        square += sum(g.to_local().square().sum() for g in own)
        norm = square.sqrt()
        dist.all_reduce(norm)
        norm /= dist.get_world_size()
        for parameter in parameters:
            parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    train_step.clip_gradients = average


def muon_of_shards() -> None:
    muon.cuts_of = lambda parameter: []


def lost_partial_sum() -> None:
    planted.lose_partial_sums()


_DRILL = "scripts/planted.py"
BUGS: dict[str, SilentBug] = {
    "loss gradient": SilentBug(_DRILL, "the loss's gradient is kept, not summed, over tp", "dense", "TP 2", kept_loss_gradient, ("output gradient", "norm")),
    "gathered keys": SilentBug(_DRILL, "gradients of gathered keys are averaged", "documents", "CP 2", averaged_keys, ("output gradient", "layers.1.attention.wv")),
    "microbatches": SilentBug(_DRILL, "gradients are divided by the number of microbatches", "dense", "PP 2", scaled_by_microbatches, ("gradient", "output.weight")),
    "way back": SilentBug(_DRILL, "results of experts go back in another order", "experts", "EP 2", wrong_way_back, ("output", "layers.0.moe")),
    "FSDP's factor": SilentBug(_DRILL, "gradients are halved where FSDP reduces them", "dense", "FSDP 2", halved_by_fsdp, ("gradient", "output.weight")),
    "clipping": SilentBug(_DRILL, "each pipeline stage clips by its own norm", "dense", "PP 2", norm_of_one_stage, ("gradient norm", "")),
    "divisor": SilentBug(_DRILL, "each rank takes its own tokens for an equal share of all", "dense", "FSDP 2", own_tokens_for_all, ("loss", "")),
    "router's gradient": SilentBug("torchtitan#4054, torchtitan#2416", "the router's gradient is not summed over tp", "experts", "TP 2", planted.unreduced_router, ("gradient", "layers.1.moe.router.gate.weight")),
    "doubled experts": SilentBug("pytorch#160285, Megatron-LM#5956", "gradients of experts are doubled", "experts", "EP 2", planted.doubled_experts, ("gradient", "layers.1.moe.experts.w1")),
    "norm without experts": SilentBug("Megatron-LM#5916", "the gradient norm leaves experts out", "experts", "EP 2", planted.norm_without_experts, ("gradient norm", "")),
    "bias of one rank": SilentBug("drill of experts", "routing biases move by one rank's loads", "biases", "EP 2", planted.bias_of_one_rank, ("update", "layers.1.moe.bias"), step=2),
    "neighbour's results": SilentBug("torchtitan#3604", "tokens get the results of their neighbours", "experts", "EP 2", planted.wrong_tokens, ("output", "layers.0.moe")),
    "norm under SP": SilentBug("Megatron-LM#1446", "the last norm's gradient is not summed over tp", "dense", "TP 2", unsummed_norm, ("gradient", "norm.weight")),
    "averaged norms": SilentBug("gpt-neox#1259", "norms' gradients are averaged over tp, not summed", "dense", "TP 2", averaged_norms, ("gradient", "norm.weight")),
    "replicated keys": SilentBug("bigcode Megatron-LM#37", "gradients of replicated keys and values are not summed over tp", "dense", "TP 4", unsummed_keys_and_values, ("gradient", "layers.1.attention.wv.weight")),
    "partial sums": SilentBug("drill of layouts", "row-wise layers lose their sum over tp", "dense", "TP 2", lost_partial_sum, ("output", "layers.0.attention.wo")),
    "positions": SilentBug("Megatron-LM#560", "each rank counts positions from 0", "dense", "CP 2", positions_from_zero, ("output", "layers.0.attention.inner_attention")),
    "window": SilentBug("accelerate#4177", "context parallelism ignores windows", "windows", "CP 2", planted.ignore_windows, ("output", "layers.0.attention.inner_attention")),
    "documents": SilentBug("trl#6843", "packed documents see each other under cp", "documents", "CP 2, ring", leaking_documents, ("output", "layers.0.attention.inner_attention")),
    "ring's backward": SilentBug("TransformerEngine#1557", "the backward pass of the ring is wrong for other ranks' keys", "dense", "CP 2, ring", wrong_softmax_in_ring, ("output gradient", "layers.1.attention.wv")),
    "wiped gradients": SilentBug("Automodel#3530", "a pipeline keeps the last micro-batch's gradient only", "dense", "PP 2", wiped_between_microbatches, ("gradient", "output.weight")),
    "tied embeddings": SilentBug("Megatron-LM#844, piper#13", "a tied weight gets the gradient of one end", "tied", "FSDP 2", embedding_of_one_end, ("gradient", "tok_embeddings.weight")),
    "scores of local experts": SilentBug("transformers#48687", "the router gets the gradient of local experts only", "experts", "EP 2", router_of_local_experts, ("output gradient", "layers.1.moe.router")),
    "replicas apart": SilentBug("verl#7493", "gradients are not summed over replicas", "dense", "DDP 2", replicas_apart, ("gradient", "output.weight")),
    "replicas twice": SilentBug("drill of layouts", "gradients are summed over replicas twice", "dense", "DDP 2", replicas_twice, ("gradient", "output.weight")),
    "mean of micro-batches": SilentBug("torchtune#1875, transformers#35203", "the loss is a mean of micro-batches' means", "dense", "FSDP 2", mean_of_each_microbatch, ("output gradient", "output")),
    "gate in bf16": SilentBug("torchtitan#2389", "the router's matrix computes in bf16", "experts", "EP 2", gate_in_bf16, ("output", "layers.0.moe.router.gate")),
    "averaged norm": SilentBug("DeepSpeed#8475, Automodel#3816", "ranks with different experts average their norms", "experts", "EP 2", averaged_norm_of_experts, ("gradient norm", "")),
    "Muon of shards": SilentBug("Megatron-LM#5961", "Muon orthogonalizes each shard of a matrix", "Muon", "FSDP 2", muon_of_shards, ("update", "layers.1.feed_forward.w2.weight")),
}  # fmt: skip


def table(names: Sequence[str], reference: Reference) -> str:
    """Return a row for each bug: what the comparison said, and what the loss curve showed."""
    lines = [
        "| bug | layout | `titan diff` | loss, step 1 | step 10 |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in names:
        about = BUGS[name]
        found, losses = found_with(name, reference)
        said = found.first
        first = found.differences[0] if found.differences else None
        if first is not None and first.step > 1:
            said = f"step {first.step}: {said}"
        row = f"| {about.what} ({about.source}) | {about.layout} | {said} | {_short(losses[1])} | {_short(losses[10])} |"
        right = first is not None and (first.kind, first.name, first.step) == (
            *about.first,
            about.step,
        )
        lines.append(row)
        print(row, "" if right else f"EXPECTED {about.first} in step {about.step}", flush=True)
    return "\n".join(lines)


def _short(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def main(words: Sequence[str]) -> int:
    """Print the table."""
    names = [name for name in BUGS if not words or any(word in name for word in words)]
    table(names, Reference(Pool((*MORE, "tests.support.silent_bugs"), quiet=True)))
    return 0


if __name__ == "__main__":
    from tests.support import silent_bugs  # by the name that ranks have it imported under

    sys.exit(silent_bugs.main(sys.argv[1:]))
