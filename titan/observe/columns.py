"""Columns of a row of metrics: their names in metrics.jsonl, their curves, and their texts on the console.

A new column is a line in `COLUMNS`, a section in docs/evaluation.md, and a hook whose `columns`
returns its value. A hook of another package needs no line: its name has a group, such as
"mine/loss", and becomes a curve of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan.base.rows import Row


@dataclass(frozen=True)
class Column:
    """Presentation of a value.

    Attributes:
        curve: name in TensorBoard and Weights & Biases, with a group; empty: not drawn.
        text: formats the value for the console from its row; None: not printed. An empty text
            takes no space.
        order: on a narrow console the column of the highest order is left out first. Order 0
            stays.
        style: style of the text, as rich names it.
        always: whether every row has the column, null if its value is unknown.
    """

    curve: str = ""
    text: Callable[[Row], str] | None = None
    order: int = 0
    style: str = ""
    always: bool = True


def _mfu(row: Row) -> str:
    # Figures of different conventions are not comparable, so each line names its own. float32's peak is a fifteenth.
    peak = " of fp32" if row["mfu_dtype"] == "float32" else ""
    if row["mfu"] is None:
        return "mfu n/a"
    return f"mfu {row['mfu']:5.1%}{peak} {row['mfu_convention']}-attn"


def _memory(row: Row) -> str:
    kind = "rss" if row["memory_kind"] == "rss" else "gpu"
    return f"{kind} {fit(row['memory_gib'], 6, 2)} GiB"


def _imbalance(row: Row) -> str:
    # Tokens of the busiest expert-parallel rank, or of the busiest expert, over the mean.
    imbalance = row["expert_imbalance"]
    return "" if imbalance is None else f"moe {fit(imbalance, 5, 2)}x"


# First the columns of the console, from left to right, then all others.
COLUMNS: dict[str, Column] = {
    "step": Column(),
    "loss": Column("loss/train", lambda row: f"loss {fit(row['loss'], 7, 4)}", style="bold"),
    "grad_norm": Column(
        "optimizer/grad_norm", lambda row: f"gnorm {fit(row['grad_norm'], 6, 3)}", 3
    ),
    "lr": Column("optimizer/lr", lambda row: f"lr {row['lr']:.2e}", 5),
    "tokens_per_s": Column(
        "throughput/tokens_per_s", lambda row: f"{row['tokens_per_s']:>10,.0f} tok/s", 1
    ),
    "mfu": Column("throughput/mfu", _mfu, 4),
    "memory_gib": Column("memory/gib", _memory, 6),
    "data_wait_s": Column(
        "throughput/data_wait_s", lambda row: f"data {fit(row['data_wait_s'] * 1e3, 5, 1)}ms", 7
    ),
    "eta_s": Column(text=lambda row: f"eta {duration(row['eta_s']):>8}", order=2),
    "expert_imbalance": Column("experts/imbalance", _imbalance, 3),
    "tokens": Column("progress/tokens"),
    "step_s": Column("throughput/step_s"),
    "loss_mean": Column("loss/train_mean"),
    "memory_active_gib": Column("memory/active_gib"),
    "memory_kind": Column(),
    "tflops": Column("throughput/tflops"),
    "mfu_dtype": Column(),
    "mfu_convention": Column(),
    "utilization": Column("throughput/utilization"),
    "validation_s": Column("throughput/validation_s"),
    "checkpoint_s": Column("throughput/checkpoint_s"),
    "num_skipped": Column(),
    "num_rewinds": Column(),
    "loss_z": Column("loss/train_z"),
    "grad_norm_z": Column("optimizer/grad_norm_z"),
    "slowest_rank": Column(),
    "slowest_rank_s": Column("throughput/slowest_rank_s"),
    "median_rank_s": Column("throughput/median_rank_s"),
    "goodput": Column("throughput/goodput"),
    "mtp_loss": Column("loss/further_targets", always=False),  # with multi-token prediction
    "loss_scale": Column("optimizer/loss_scale", always=False),  # in float16
    # Only runs of replica groups have these.
    "replica_groups": Column("progress/replica_groups", always=False),
    "first_sample": Column(always=False),
    # Only rows of steps that validate have these. Readers find such rows by them.
    "validation_loss": Column("loss/validation", always=False),
    "bits_per_byte": Column("loss/validation_bits_per_byte", always=False),
}


def empty_row() -> Row:
    """Return a row without values."""
    return {name: None for name, column in COLUMNS.items() if column.always}


def curves(row: Row) -> dict[str, float]:
    """Return the points of a row by the names of their curves."""
    points = {
        column.curve: row[name]
        for name, column in COLUMNS.items()
        if column.curve and row.get(name) is not None
    }
    # A key with a group is a curve's name already.
    points |= {key: v for key, v in row.items() if "/" in key and isinstance(v, float | int)}
    figures = dict(row.get("experts") or {})
    # A group for each figure, with a curve for each layer.
    layers = figures.pop("layer", [])
    for figure, values in figures.items():
        named = zip(layers, values, strict=True)
        points |= {f"experts_{figure}/layers.{layer}": value for layer, value in named}
    return points


def duration(seconds: float) -> str:
    """Format seconds as 12:34, 1:02:03 or 4d 05:06."""
    days, rest = divmod(round(seconds), 86_400)
    hours, minutes, secs = rest // 3600, rest // 60 % 60, rest % 60
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def fit(value: float, width: int, decimals: int) -> str:
    """Format a number in a fixed width. A large number gets fewer decimals, or becomes a power of ten.

    Args:
        value: the number.
        width: number of characters.
        decimals: largest number of decimals.
    """
    texts = [f"{value:.{n}f}" for n in range(decimals, -1, -1)]
    fits = (text for text in texts if len(text) <= width)
    return next(fits, f"{value:.0e}").rjust(width)
