"""Command `titan average STEP_DIR... --output OUT [--weights W,...]`.

It writes the mean of the weights of checkpoints of one model. The mean of checkpoints of one run,
or of runs from one start, is often a better model than each of them (arXiv:2203.05482). OUT is a
run folder with one step, for `titan generate`, `titan convert to-hf` and
`checkpoint.initial_load_path`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from titan.base.untrusted import InputError
from titan.checkpoint import CheckpointError
from titan.checkpoint.identity import require_one_tokenizer
from titan.checkpoint.manifest import list_steps
from titan.checkpoint.saved_model import find_saved
from titan.checkpoint.storage import Location, as_location, join, name_of
from titan.config.options import mistake, table_parser
from titan.config.render import to_toml
from titan.config.schema import CheckpointSection
from titan.config.toml import table_beside
from titan.data.tokenizer_files import FOLDER, read_asset, with_tokenizer, write_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def average(sources: Sequence[Location], output: Path, *, weights: Sequence[float] = ()) -> str:
    """Write the mean of the steps' weights, summed in float32 and stored with the dtype of the last step.

    Args:
        sources: steps, or run folders, which stand for their newest step.
        output: new run folder.
        weights: a positive number for each source; (): equal weights.

    Returns:
        A message.

    Raises:
        InputError: the number of weights is wrong, or a weight is not positive.
    """
    from titan.checkpoint import manager as checkpoints
    from titan.huggingface.conversion import check_new

    check_new(output)
    weights = list(weights) or [1.0] * len(sources)
    if len(weights) != len(sources):
        raise InputError(f"{len(weights)} weights for {len(sources)} checkpoints")
    if min(weights) <= 0:
        raise InputError("weights must be positive")
    found = [find_saved(source) for source in sources]
    # No key of the job is obeyed: it is copied, with its permissions, which no tool gives.
    steps, (config, folder, last) = [step for *_, step in found], found[-1]
    config = with_tokenizer(config, run=folder)
    require_one_tokenizer(steps)
    shapes = {
        k: v for k, v in checkpoints.stored_shapes(last).items() if k.startswith("model.")
    }
    saved = checkpoints.read_metadata(last, "step", "tokens")
    metadata = {key: saved[key] for key in ("format", "step", "tokens", "text") if key in saved}
    # The folder of a job may be elsewhere.
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"folder": "checkpoint"})}
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent, prefix=".averaging-") as temporary:
        state = {
            name: _mean(name, shape, dtype, steps, weights, file=Path(temporary) / name)
            for name, (shape, dtype) in shapes.items()
        }
        manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=output)
        facts = {"data": {}, "model_only": True, "config": to_toml(config)}
        written = manager.save(saved["step"], state, metadata=metadata | facts)
    (output / "config.toml").write_text(to_toml(config), encoding="utf-8")
    run = Path(str(last)).parents[1]
    if files := list((run / FOLDER).glob("[!.]*")):  # read_asset refuses links out of it
        write_files({f.name: read_asset(f) for f in files}, output / FOLDER)
    return f"{written}: the mean of {', '.join(name_of(step) for step in steps)}"


def _mean(
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    steps: Sequence[Location],
    weights: Sequence[float],
    *,
    file: Path,
) -> Tensor:
    """Return the mean of a tensor, in a file's memory. An integer tensor is the last step's."""
    import torch

    from titan.checkpoint.manager import load
    from titan.huggingface.conversion import mapped

    total = torch.zeros(shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
    for step, weight in zip(steps, weights, strict=True):
        state = {name: torch.empty_like(total)}
        load(step, state)
        if dtype.is_floating_point:
            total.add_(state[name], alpha=weight / sum(weights))
        else:
            total = state[name]
    kept = mapped(file, shape, dtype) if total.numel() else total
    return kept.copy_(total)


def main(argv: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    table = table_beside(__file__, "command.toml")
    parser = table_parser("average", table, location=as_location)
    args = parser.parse_args(argv)
    sources: list[Location] = args.sources
    if args.last is not None:
        sources = _newest(sources, args.last)
    try:
        weights = [float(weight) for weight in (args.weights or "").split(",") if weight]
    except ValueError:
        fault = f"expected numbers with commas, such as 1,2, got '{args.weights}'"
        raise mistake("--weights", fault) from None
    print(average(sources, args.output, weights=weights))
    return 0


def _newest(sources: Sequence[Location], count: int) -> list[Location]:
    [folder, *others] = sources
    if others:
        raise InputError("--last N takes one run folder")
    found = [
        (step, join(at, f"step-{step}"))
        for at in (folder, join(folder, "checkpoint"))
        for step in list_steps(at)
    ]
    if len(found) < count:
        raise CheckpointError(
            f"{folder} holds {len(found)} steps, and --last {count} wants {count}"
        )
    return [step for _, step in sorted(found, key=lambda item: item[0])[-count:]]
