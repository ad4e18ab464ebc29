"""Compare kernels by class with published profiles, and single kernels with published times: errors that a total may hide.

scripts/sim_accuracy.py puts `section` on its page. `python scripts/published_classes.py` prints it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from titan.checks.rules import check_to_run
from titan.config.load import load_config
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Kernel, Launch, Transfer
from titan.sim.simulate import Simulation, simulate

JOBS = Path(__file__).parents[1] / "train_configs" / "published"


_SWIGLU = {"aten::silu", "aten::silu_backward"}
_REDUCTIONS = ("norm", "softmax", "sum", "amax", "logsumexp", "mean")


def by_kind(event: Launch | Transfer) -> str:
    """Return the kind of a kernel or transfer, with grouped products apart."""
    if isinstance(event, Transfer):
        return event.kind
    return "grouped products" if event.kernel.name == "aten::_grouped_mm" else event.kernel.kind


def as_tts(event: Launch | Transfer) -> str:
    """Return the class of a kernel in the profile TTS. Its rows moved by symmetric memory, as no collective or gather did."""
    if isinstance(event, Transfer):
        return "nccl, and rows over NVLink"
    kernel = event.kernel
    if kernel.kind == "matmul":
        return "matmul (dense and grouped)"
    if kernel.kind == "attention":
        return "attention (flex)"
    if kernel.kind == "attention_backward":
        return "attention_backward (flex)"
    if kernel.name in _SWIGLU:
        return "swiglu"
    if kernel.name == "aten::cat":
        return "cat"
    if any(word in kernel.name for word in _REDUCTIONS):
        return "reduce, norm, softmax"
    return "rows (index)" if kernel.kind == "gather" else "elementwise"


def as_q14(event: Launch | Transfer) -> str:
    """Return the class of a kernel in the profile Q14."""
    if isinstance(event, Transfer):
        return "nccl"
    kind = event.kernel.kind
    if kind in ("attention", "attention_backward"):
        return "attention, both ways"
    if kind in ("matmul", "copy"):
        return {"matmul": "matmul", "copy": "copy, cat, split"}[kind]
    return "elementwise, optimizer"


class Profiled(NamedTuple):
    """A published profile of one rank. ms, counts: by class of kernels. tokens_per_s: of one GPU, without the profiler.

    class_of: the class of a kernel. note: a sentence below the table.
    """

    job: str
    gpus: int
    profile: str
    source: str
    tokens_per_s: float
    ms: dict[str, float]
    counts: Mapping[str, int] = MappingProxyType({})
    class_of: Callable[[Launch | Transfer], str] = by_kind
    note: str = ""


PROFILED = [
    Profiled(
        "N3434",
        32,
        "h100-sxm",
        "torchtitan issue 3434, comment of 25 June 2026: forced balance, no overlap, 80 GB cards, RoCE",
        7_670,
        {"all_to_all": 773.85, "grouped products": 285.87, "all_gather": 87.32, "reduce_scatter": 68.59},
        # A grouped product is two launches, of which the first sets up the second.
        {"all_to_all": 130, "grouped products": 572, "all_gather": 57, "reduce_scatter": 37},
        note="Nothing was set with these rows. FSDP's transfers run beside kernels, which slow them down.",
    ),
    Profiled(
        "TTS-eager-minimal-b16",
        8,
        "h100-96g-500w",
        "a published profile of TorchTitan, June 2026, 5,639 ms; the power of the cards is not stated",
        12_540,
        {"matmul (dense and grouped)": 2544.8, "attention (flex)": 116.5, "attention_backward (flex)": 200.5, "elementwise": 621.9, "cat": 180.5, "reduce, norm, softmax": 180.4, "swiglu": 179.2},
        class_of=as_tts,
        note="Its rows moved by symmetric memory (1,268.8 ms), and it scores them otherwise. Attention is FlexAttention's there, and the "
        "memory-efficient kernel's here. So products alone compare, and the sum of all that is neither product, attention nor row. "
        "The grouped products' time to start a tile was set with it (titan/sim/price/cost.py).",
    ),
    Profiled(
        "Q14-none",
        8,
        "b200",
        "a published profile of TorchTitan, May 2026; attention in FlashAttention-2, torch built from source",
        7_254,
        {"matmul": 1240, "attention, both ways": 520, "elementwise, optimizer": 320, "copy, cat, split": 250, "nccl": 522},
        class_of=as_q14,
        note="The level of b200's products, flash2's rates and `eager_tb_per_s` were set with it.",
    ),
]  # fmt: skip


def classes(
    simulation: Simulation, class_of: Callable[[Launch | Transfer], str] = by_kind
) -> tuple[dict[str, float], dict[str, int]]:
    """Return milliseconds and launches of rank 0's kernels and transfers by class."""
    ms, counts = defaultdict[str, float](float), Counter[str]()
    for _, start, end, event in simulation.timeline.ranks[0].intervals:
        name = class_of(event)
        ms[name] += (end - start) * 1e3
        counts[name] += event.kernel.num_launches if isinstance(event, Launch) else 1
    return ms, counts


def simulated(run: Profiled) -> Simulation:
    """Return the simulation of a profiled job."""
    config = load_config(JOBS / f"{run.job}.toml")
    check_to_run(config, world_size=run.gpus)
    return simulate(config, world_size=run.gpus, profile=load_profile(run.profile))


class Alone(NamedTuple):
    """A published time of one kernel."""

    what: str
    profile: str
    kernel: Kernel
    ms: float


def _attention(
    heads: int, groups: int, sizes: tuple[int, int], length: int, kind: str
) -> Kernel:
    qk, v = sizes
    shapes = ((2, heads, length, qk), (2, groups, length, qk), (2, groups, length, v))
    kernel = "attention" if kind == "forward" else "attention_backward"
    return Kernel("aten::attention", kernel, shapes, "bfloat16", causal=True)


def _grouped(groups: int, m: int, k: int, n: int) -> Kernel:
    moved = 2 * groups * (m * k + k * n), 2 * groups * m * n
    shapes = ((groups, m, k), (groups, k, n))
    name, flops = "aten::_grouped_mm", 2 * groups * m * k * n
    return Kernel(name, "matmul", shapes, "bfloat16", flops, *moved, num_launches=2)


# NVIDIA/cudnn-frontend, benchmark/attention_training/results/{dsv3,llama3.1}/h200 of 28 September 2026: cuDNN 9.27, causal, batch 2.
_DEEPSEEK = {4096: (2.248, 7.293), 8192: (8.588, 28.563), 16384: (35.826, 114.721)}
_LLAMA = {4096: (0.893, 2.779), 8192: (3.357, 10.448), 16384: (13.888, 40.803)}
ALONE = [
    *(
        Alone(f"attention of {who}, {length:,} tokens, {kind}", "h200-sxm", _attention(*heads, sizes, length, kind), ms)
        for who, heads, sizes, table in (
            ("DeepSeek-V3 (keys 192, values 128)", (128, 128), (192, 128), _DEEPSEEK),
            ("Llama 3.1", (64, 8), (128, 128), _LLAMA),
        )
        for length, both in table.items()
        for kind, ms in zip(("forward", "backward"), both, strict=True)
    ),
    Alone("grouped product, 128 x (1 x 7,168 x 2,048), pytorch 156203", "h200-sxm", _grouped(128, 1, 7168, 2048), 4.146),
]  # fmt: skip
# cublasLt's grouped kernel on an H100 (pytorch 185530), than which torch's is faster up to 2,048 (182631).
AT_MOST = {(512, 64): 0.094, (512, 128): 0.163, (1024, 64): 0.295, (1024, 128): 0.565, (2048, 64): 1.940}  # fmt: skip


def section() -> list[str]:
    """Return the section of the accuracy page."""
    lines = [
        "## By kernel class",
        "",
        "A total can hide errors that cancel. Published profiles by class, rank 0, ms of kernels in a step.",
        "",
    ]
    for run in PROFILED:
        simulation = simulated(run)
        ms, counts = classes(simulation, run.class_of)
        speed = simulation.tokens_per_s_per_gpu
        others = sorted(set(ms) - set(run.ms), key=lambda name: -ms[name])
        lines += [
            f"**{run.job}** on {run.gpus} {run.profile} ({run.source}):",
            "",
            "| class | kernels published | simulated | ms published | simulated | error |",
            "|---|--:|--:|--:|--:|--:|",
            *(
                f"| {name} | {run.counts.get(name, '')} | {counts[name]} | {published:,.1f} | {ms[name]:,.1f} | {ms[name] / published - 1:+.0%} |"
                for name, published in run.ms.items()
            ),
            *(f"| {name} | | {counts[name]} | | {ms[name]:,.1f} | |" for name in others),
            f"| tokens/s/GPU | | | {run.tokens_per_s:,.0f} | {speed:,.0f} | {speed / run.tokens_per_s - 1:+.1%} |",
            "",
            run.note,
            "",
        ]
    priced = [
        (row, Cost(load_profile(row.profile)).kernel_s(row.kernel) * 1e3) for row in ALONE
    ]
    h100 = Cost(load_profile("h100-sxm"))
    return [
        *lines,
        "Single kernels:",
        "",
        "| kernel | profile | ms published | priced | error |",
        "|---|---|--:|--:|--:|",
        *(
            f"| {row.what} | {row.profile} | {row.ms:,.3f} | {ms:,.3f} | {ms / row.ms - 1:+.0%} |"
            for row, ms in priced
        ),
        *(
            f"| grouped product, {groups} x {size:,}³, less than cublasLt's of pytorch 185530 | h100-sxm | < {most:.3f} "
            f"| {h100.kernel_s(_grouped(groups, size, size, size)) * 1e3:.3f} | |"
            for (size, groups), most in AT_MOST.items()
        ),
        "",
        "The product with one row in each of 128 groups took 4.7 times the time of reading its weights, and no source says why.",
        "KempnerForge's profile of 13B on 24 H200 counts its collectives twice, and torchtitan issue 1558's traces are not public.",
        "",
    ]


if __name__ == "__main__":
    print("\n".join(section()))
