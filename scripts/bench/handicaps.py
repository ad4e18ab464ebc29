"""Does `titan compare` price a recipe right? `python scripts/bench/handicaps.py`

A small Llama learns the bytes of the Python library, as it is and with five known handicaps. Short runs with five seeds give the price of
each, as `titan compare` computes it. Long runs with five other seeds tell the truth: how many more steps the handicapped recipe took until
it had the loss of the plain one. Then the plain recipe is compared with itself, from other initial weights: differences that are found
there are false. All runs of a part train at once, as one model with a dimension for runs; one thread, a few minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from titan.contrib.scaling import paired
from titan.models.llama3 import FLAVORS, build_model
from titan.parallel import initialize

HANDICAPS = {
    "dropped": "every tenth gradient is dropped",
    "rate": "half the learning rate",
    "noise": "noise on each update, three learning rates large",
    "labels": "a tenth of the targets are random bytes",
    "batch": "half of each batch has no gradient",
}
SHORT, LONG, SAME, EVERY = 200, 600, 100, 5  # steps, and steps of a row
BATCH, LENGTH, RATE, WARM_UP = 8, 32, 4e-3, 20
SIZES = dataclasses.replace(
    FLAVORS["tiny"], dim=32, n_layers=1, ffn_dim=96, vocab_size=256, n_heads=2, n_kv_heads=1
)


class Run(NamedTuple):
    """A run: its handicap or "plain", the seed of its samples, and that of its weights."""

    kind: str
    seed: int
    weights: int


def text() -> Tensor:
    """Return the library's source."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(runs: Sequence[Run], steps: int, data: Tensor) -> list[list[float]]:
    """Return the losses of each run. R: runs, B: batch, S: sequence."""
    model = build_model(SIZES)
    stacked: dict[str, list[Tensor]] = {}
    for run in runs:
        initialize(model, seed=run.weights, std_of=model.init_std)
        for name, parameter in model.named_parameters():
            stacked.setdefault(name, []).append(parameter.detach().clone())
    weights = {n: torch.stack(each).requires_grad_() for n, each in stacked.items()}
    first, second = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    samples = {run.seed: torch.Generator().manual_seed(run.seed) for run in runs}
    extra = torch.Generator().manual_seed(1)
    is_of = {kind: torch.tensor([run.kind == kind for run in runs]) for kind in HANDICAPS}

    def losses_of(
        parameters: dict[str, Tensor], tokens_BS: Tensor, targets_2BS: Tensor
    ) -> Tensor:
        log_probs = functional_call(model, parameters, (tokens_BS,)).log_softmax(-1)
        both = [-log_probs.gather(-1, t[..., None]).flatten() for t in targets_2BS]
        return torch.stack(both)

    kept, begin = [], time.monotonic()
    for step in range(steps):
        chosen = {
            seed: torch.randint(len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
            for seed, generator in samples.items()
        }
        begins = torch.stack([chosen[run.seed] for run in runs])
        tokens_RBS = data[begins + torch.arange(LENGTH + 1)]
        right = tokens_RBS[..., 1:]
        is_wrong = torch.rand(right.shape, generator=extra) < 0.1
        is_wrong &= is_of["labels"][:, None, None]
        wrong = torch.randint(256, right.shape, generator=extra)
        targets = torch.stack([right, torch.where(is_wrong, wrong, right)], dim=1)
        found = vmap(losses_of)(weights, tokens_RBS[..., :-1], targets)  # R x 2 x (B S)
        kept.append(found[:, 0].mean(1).tolist())
        half = BATCH // 2 * LENGTH
        trained = found[:, 1]
        loss = torch.where(is_of["batch"], trained[:, :half].mean(1), trained.mean(1))
        gradients = torch.autograd.grad(loss.sum(), [*weights.values()])
        update(weights, gradients, first, second, step, is_of, extra)
        if step % 50 == 49:
            print(
                f"{len(runs)} runs, step {step + 1}: {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    return [list(each) for each in zip(*kept, strict=True)]


@torch.no_grad()
def update(
    weights: dict[str, Tensor],
    gradients: Sequence[Tensor],
    first: dict[str, Tensor],
    second: dict[str, Tensor],
    step: int,
    is_of: dict[str, Tensor],
    extra: torch.Generator,
) -> None:
    """Apply AdamW without decay, with a clipped norm, to each run."""
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    rate = RATE * min(1, (step + 1) / WARM_UP) * torch.where(is_of["rate"], 0.5, 1.0)
    counts = ~(is_of["dropped"] & (step % 10 == 9))
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        shape = (-1, *[1] * (weight.dim() - 1))
        gradient = gradient / norms.clamp(min=1).view(shape)
        use = counts.float().view(shape)
        first[name].lerp_(gradient, 0.1 * use)
        second[name].lerp_(gradient.square(), 0.05 * use)
        root = (second[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
        by = first[name] / (1 - 0.9 ** (step + 1)) / root
        weight.sub_(by * use * rate.view(shape))
        if (noisy := is_of["noise"].nonzero().flatten()).numel():
            noise = torch.randn(weight[noisy].shape, generator=extra)
            weight[noisy] += noise * 3 * rate[noisy].view(shape)


def curve(losses: Sequence[float]) -> paired.Curve:
    """Return rows as a run has them: tokens, and the mean loss since the row before."""
    ends = range(EVERY, len(losses) + 1, EVERY)
    means = [fmean(losses[end - EVERY : end]) for end in ends]
    return [end * BATCH * LENGTH for end in ends], means


def more_steps(plain: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the factor in steps until the last quarter of other runs has the mean loss of the plain ones' short runs."""
    level = fmean(paired.final(curve(losses[:SHORT])) for losses in plain)
    for steps in range(SHORT // 2, LONG + 1, EVERY):
        if fmean(paired.final(curve(losses[:steps])) for losses in other) <= level:
            return steps / SHORT
    return math.inf


def price(
    plain: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> tuple[paired.Estimate, ...]:
    """Return the gap, the slope, and the logarithm of the factor in tokens, as `titan compare` computes them."""
    a, b = ([curve(losses) for losses in runs] for runs in (plain, other))
    gap = paired.mean_of([paired.final(y) - paired.final(x) for x, y in zip(a, b, strict=True)])
    nats = paired.slope_of([*a, *b])
    return gap, nats, paired.price(gap, nats)


def main() -> None:
    """Train, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--keep", type=Path, help="folder of losses, which are not computed again"
    )
    keep = parser.parse_args().keep
    torch.set_num_threads(1)
    data = text()

    def trained(name: str, runs: Sequence[Run], steps: int) -> dict[Run, list[float]]:
        file = keep / f"{name}.json" if keep else None
        if file and file.exists():
            losses = json.loads(file.read_text())
        else:
            losses = train(runs, steps, data)
            if file:
                file.write_text(json.dumps(losses))
        return dict(zip(runs, losses, strict=True))

    kinds = ["plain", *HANDICAPS]
    short = trained("short", [Run(k, s, s) for k in kinds for s in range(5)], SHORT)
    pairs = [(s, 5000 * other) for s in range(1000, 1060) for other in (0, 1)]
    same = trained("same", [Run("plain", s, s + more) for s, more in pairs], SAME)
    long = trained("long", [Run(k, s, s) for k in kinds for s in range(100, 105)], LONG)

    def of(kind: str, runs: dict[Run, list[float]]) -> list[list[float]]:
        return [losses for run, losses in runs.items() if run.kind == kind]

    print("| handicap | gap, nats | slope | more tokens | truth |\n|---|--:|--:|--:|--:|")
    for kind, about in HANDICAPS.items():
        gap, nats, more = price(of("plain", short), of(kind, short))
        truth = more_steps(of("plain", long), of(kind, long)) - 1
        low, value, high = (100 * math.expm1(x) for x in (more.low, more.value, more.high))
        gaps = f"{gap.value:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})"
        print(
            f"| {about} | {gaps} | {nats.value:.2f} | {value:+.0f}% ({low:+.0f} to {high:+.0f}) | {truth:+.0%} |"
        )
    gaps = []
    for n in range(20):
        seeds = range(1000 + 3 * n, 1003 + 3 * n)
        sides = ([same[Run("plain", s, s + more)] for s in seeds] for more in (0, 5000))
        gaps.append(price(*sides)[0])
    found = sum(gap.low * gap.high > 0 for gap in gaps)
    print(f"the recipe with itself, three seeds: {found} of 20 claim a difference")


if __name__ == "__main__":
    main()
