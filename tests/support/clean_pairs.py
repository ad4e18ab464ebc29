"""Pairs of a right layout and one process, which `titan diff` must find equal.

python -m tests.support.clean_pairs              all of them; prints a row for each
python -m tests.support.clean_pairs bfloat16     those whose names hold a word
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from tests.support.ranks import Pool
from tests.support.silent_bugs import train
from titan.numerics.certify.ranks import MORE
from titan.numerics.diff.compare import Comparison, compare
from titan.numerics.recorded import RecordedStep

STEPS = 3
_SMALL = (
    "train_configs/debug_model.toml", "--training.dataset=synthetic", "--training.seq_len=64",
    "--training.global_batch_size=8", "--training.local_batch_size=2", f"--training.steps={STEPS}",
)  # fmt: skip
MODELS: dict[str, tuple[str, ...]] = {
    "dense": (*_SMALL, "--model.overrides.n_layers=4"),
    "experts": (
        *_SMALL,
        "--model.name=qwen3",
        "--model.flavor=tiny_moe",
        "--model.overrides.n_layers=2",
    ),
    "windows, sinks": (*_SMALL, "--model.name=gpt_oss"),
    "MTP": (
        *_SMALL,
        "--model.name=deepseek_v3",
        "--model.overrides.n_layers=2",
        "--model.overrides.num_mtp_modules=1",
    ),
}
_8BIT = (
    "--training.mixed_precision_param=bfloat16",
    "--quantize.linear.float8.emulate=true",
    "--model.converters=['float8']",
)
PRECISIONS: dict[str, tuple[str, ...]] = {
    "float32": ("--training.mixed_precision_param=float32",),
    "bfloat16": ("--training.mixed_precision_param=bfloat16",),
    "float8 rowwise": (*_8BIT, "--quantize.linear.float8.recipe_name=rowwise"),
    "float8 tensorwise": (*_8BIT, "--quantize.linear.float8.recipe_name=tensorwise"),
}
_P = "--parallelism."
_TP, _CP = f"{_P}tensor_parallel_degree=2", f"{_P}context_parallel_degree=2"
_PP, _EP = f"{_P}pipeline_parallel_degree=2", f"{_P}expert_parallel_degree=2"
_ROTATE, _SCHEDULE = f"{_P}context_parallel_rotate_method", f"{_P}pipeline_parallel_schedule"
_COMPILE = ("--compile.enable=true", "--compile.backend=aot_eager")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "TP": (2, (_TP,)),
    "CP all-gather": (2, (_CP,)),
    "CP ring": (2, (_CP, f"{_ROTATE}=ring")),
    "CP Ulysses": (2, (_CP, f"{_ROTATE}=ulysses")),
    "PP 1F1B": (2, (_PP,)),
    "PP interleaved": (2, (_PP, f"{_SCHEDULE}=Interleaved1F1B", f"{_P}pipeline_parallel_layers_per_stage=1")),
    "PP zero bubble": (2, (_PP, f"{_SCHEDULE}=ZBVZeroBubble")),
    "FSDP": (2, ()),
    "DDP": (2, (f"{_P}data_parallel_replicate_degree=2",)),
    "HSDP": (4, (f"{_P}data_parallel_replicate_degree=2",)),
    "FSDP x TP": (4, (_TP,)),
    "TP x CP": (4, (_TP, _CP)),
    "PP x TP": (4, (_PP, _TP)),
    "EP": (2, (_EP,)),
    "EP x TP": (2, (_EP, _TP)),
    "accumulation": (1, ("--training.local_batch_size=1",)),
    "compiled": (1, _COMPILE),
    "compiled, FSDP": (2, _COMPILE),
    "compiled, TP": (2, (_TP, *_COMPILE)),
    "compiled, CP": (2, (_CP, *_COMPILE)),
}  # fmt: skip

_CPS, _PPS = (
    ("CP all-gather", "CP ring", "CP Ulysses"),
    ("PP 1F1B", "PP interleaved", "PP zero bubble"),
)
_MOES = ("EP", "EP x TP", "TP", "CP all-gather")
_LISTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("float32", "dense", ("TP", *_CPS, *_PPS, "FSDP", "DDP", "HSDP", "FSDP x TP", "TP x CP", "PP x TP", "accumulation")),
    ("float32", "experts", (*_MOES, "FSDP", "PP 1F1B")),
    ("float32", "windows, sinks", ("CP all-gather", "CP ring", "TP", "EP")),
    ("float32", "MTP", ("TP", "CP all-gather", "FSDP", "EP")),
    ("float32", "dense", ("compiled", "compiled, FSDP", "compiled, TP", "compiled, CP")),
    ("bfloat16", "dense", ("TP", *_CPS, *_PPS, "FSDP", "HSDP", "FSDP x TP", "TP x CP")),
    ("bfloat16", "experts", _MOES),
    ("bfloat16", "windows, sinks", ("CP ring", "EP")),
    ("bfloat16", "MTP", ("CP all-gather", "FSDP")),
    ("bfloat16", "dense", ("compiled, FSDP",)),
    ("float8 rowwise", "dense", ("TP", "CP all-gather", "PP 1F1B", "FSDP", "HSDP")),
    ("float8 tensorwise", "dense", ("TP", "CP all-gather", "PP 1F1B", "FSDP", "HSDP")),
)  # fmt: skip
PAIRS = [(precision, model, layout) for precision, model, names in _LISTS for layout in names]


class Pairs:
    """Comparisons of layouts with one process, which trains once for each precision and model."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.kept: dict[tuple[str, str], tuple[list[RecordedStep], list[RecordedStep]]] = {}

    def compare(self, precision: str, model: str, layout: str) -> Comparison:
        """Return what the comparison of a pair finds."""
        job = (*MODELS[model], *PRECISIONS[precision])
        if (precision, model) not in self.kept:
            plain, moved = (self._train(1, job, perturbed) for perturbed in (0, 1))
            self.kept[precision, model] = plain, moved
        world, keys = LAYOUTS[layout]
        plain, moved = self.kept[precision, model]
        return compare(plain, self._train(world, (*job, *keys), 0), moved)

    def _train(self, world: int, job: Sequence[str], perturbed: int) -> list[RecordedStep]:
        return self.pool.run(world, train, tuple(job), "", perturbed, STEPS, True)[0].recorded


def rows(words: Sequence[str]) -> Iterator[str]:
    """Yield a row for each pair whose name holds one of the words."""
    pairs = Pairs(Pool((*MORE, "tests.support.clean_pairs"), quiet=True))
    for pair in PAIRS:
        name = ", ".join(pair)
        if words and not any(word in name for word in words):
            continue
        found = pairs.compare(*pair)
        said = "equal" if not found.differences else f"**differs**: {found.differences[0]}"
        yield f"| {name} | {said} | {found.worst:.0%} | {found.compared} | {found.left_out} |"


if __name__ == "__main__":
    from tests.support import clean_pairs  # by the name that ranks have it imported under

    print(
        "| pair | verdict | largest share of the limit | tensors | in one run only |\n|---|---|---|---|---|"
    )
    for row in clean_pairs.rows(sys.argv[1:]):
        print(row, flush=True)
