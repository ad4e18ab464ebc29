"""Options of flow matching. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titan.config.plug_ins import plug_ins

SHAPES = ("disc", "ring", "square", "frame", "triangle", "plus", "cross", "bars")
_TIMES = ("logit_normal", "uniform")


@dataclass(frozen=True)
class FlowOptions:
    """Options of flow matching.

    Attributes:
        source: "shapes", drawn for a demo by an entry point of the group `titan.pictures`; "pictures", PNG or NPY files of the folder `path` with their labels in
            labels.jsonl; "encoded", latents and encodings of text in .npy files below `path` (titan/contrib/flux/flow_data.py).
        path: folder of the data.
        size: height and width of a picture, or of its latents.
        channels: channels of a picture or of its latents.
        patch: height and width of a patch.
        context_len: positions of the context.
        classes: number of labels.
        time: distribution of times, "logit_normal" or "uniform".
        shift: more noise for larger pictures (arXiv:2403.03206, section 5.3.2).
        dropout: share of the samples that are trained on without their context, for classifier-free guidance.
        guidance: guidance strength that a model with guidance_embed gets.
        sample_steps: Euler steps of the pictures that are drawn at each validation.
        sample_guidance: guidance strength of these pictures.
        sample_rows: rows of these pictures; each has a column for each label.
    """

    source: str = "shapes"
    path: str = ""
    size: int = 16
    channels: int = 1
    patch: int = 4
    context_len: int = 4
    classes: int = len(SHAPES)
    time: str = "logit_normal"
    shift: float = 1.0
    dropout: float = 0.1
    guidance: float = 1.0
    sample_steps: int = 25
    sample_guidance: float = 3.0
    sample_rows: int = 4

    # No words: neither sources of [training] and [data], nor a tokenizer, nor logits.
    reads_text = False
    predicts_tokens = False
    # What a run may change when it resumes: of the data, the loss and the samples.
    may_change = (
        "source",
        "path",
        "time",
        "shift",
        "dropout",
        "sample_steps",
        "sample_guidance",
        "sample_rows",
    )

    @property
    def num_patches(self) -> int:
        """Return the number of patches of a picture."""
        return (self.size // self.patch) ** 2

    def shrink(self) -> dict[str, Any]:
        """Return the keys of a small job: sixteen patches, and four positions of context."""
        small = {"path": "", "size": 4 * self.patch, "context_len": 4}
        return {"task.options": small, "training.seq_len": 20}

    def missing(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the message of each package that this machine lacks."""
        if self.channels in (1, 3) and find_spec("PIL") is None:
            yield "task.options", "pictures need pillow: pip install 'titan-pretrain[vision]'"

    def problems(self, config: Any, sizes: Any) -> Iterator[tuple[str, str]]:
        """Yield the key and the message of each problem with a job of this task."""
        added = (entry.name for entry in plug_ins("titan.pictures") if entry.name != "captions")
        sources = (*added, "pictures", "encoded")
        for name, choices in {"source": sources, "time": _TIMES}.items():
            if (value := getattr(self, name)) not in choices:
                yield f"options.{name}", f'must be one of {", ".join(choices)}, got "{value}"'
        if self.shift <= 0:
            yield "options.shift", "must be above 0"
        if self.dropout > 1:
            yield "options.dropout", f"must be at most 1, got {self.dropout}"
        if self.size % self.patch:
            yield "options.size", f"{self.size} does not divide by the patch of {self.patch}"
        channels = self.channels * self.patch**2
        if channels != sizes.in_channels:
            message = f"{channels} channels in a patch of {self.patch} x {self.patch} x {self.channels}"
            yield "model.overrides.in_channels", f"{sizes.in_channels}; the task has {message}"
        length = self.context_len + self.num_patches
        for section in ("training", "validation"):
            if (value := getattr(config, section).seq_len) not in (None, length):
                what = f"{self.num_patches} patches + context_len {self.context_len} = {length}"
                yield f"{section}.seq_len", f"{value}; a sample has {what}: use {length}"
        yield from self._source_problems(sizes)
        parallel = config.parallelism
        if parallel.pipeline_parallel_degree > 1:
            reason = "its blocks need the time, which pipeline stages do not hand on; use 1, and FSDP"
            yield "parallelism.pipeline_parallel_degree", f"this model has no stages: {reason}"
        chunks = parallel.context_parallel_degree * (1 + parallel.splits_from_both_ends)
        for name, value in (("context_len", self.context_len), ("patches", self.num_patches)):
            if parallel.context_parallel_degree > 1 and value % chunks:
                message = f"{name} {value} must divide by {chunks} with context parallelism"
                yield "parallelism.context_parallel_degree", message

    def _source_problems(self, sizes: Any) -> Iterator[tuple[str, str]]:
        if self.source == "shapes":
            if self.channels not in (1, 3):
                yield (
                    "options.channels",
                    f"must be 1 (grey) or 3 (colours), got {self.channels}",
                )
            if self.classes > len(SHAPES):
                yield "options.classes", f"must be at most {len(SHAPES)}, got {self.classes}"
        elif self.path and self.source in (
            "pictures",
            "encoded",
        ):  # a run needs it, a simulation does not
            name = "labels.jsonl" if self.source == "pictures" else "**/latents.npy"
            if not any(Path(self.path).glob(name)):
                yield (
                    "options.path",
                    f'"{self.path}" is no folder with {name.removeprefix("**/")}',
                )
        widest = min(sizes.context_dim, sizes.pooled_dim)
        if self.source != "encoded" and self.classes > widest:
            yield "options.classes", f"{self.classes} labels do not fit into {widest} channels"
