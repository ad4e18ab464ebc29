"""First row of a certificate: titan on one process against the program that the model comes from, such as transformers.

The other rows compare titan with titan. A model that titan reads wrongly would be wrong in the same way on every layout.

titan's weights are saved as the package's folder, and the package loads them into its own class, built from the words of the job. Both
compute the same documents: titan packed into sequences, the package each document alone. Gradients are saved and compared as folders
are, so that they have the package's names and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan.checkpoint import CheckpointError
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.model_folders import model_folders
from titan.checkpoint.state import model_state
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.layout import resolve_layout
from titan.config.plug_ins import load_plug_ins
from titan.config.schema import JobConfig, LossSection
from titan.config.schema_run import MoESection
from titan.losses.loss import IGNORED
from titan.numerics.certify.shrink import changed
from titan.numerics.certify.steps import CPU, LEAST, ratios
from titan.parallel import build_mesh, initialize
from titan.step.resolved import resolve_job
from titan.step.train_step import TrainStep, build_train_step

WHAT = ("logits", "losses", "gradients")
_BOUND = 1e-5  # a gradient beyond it is named


class Source(Protocol):
    """The package that models come from. A package of yours registers one under `titan.extensions` as certify.NAME.

    Attributes:
        package: its name, which names the row.
    """

    package: str

    def lacks(self, config: JobConfig) -> str:
        """Return why the package has no model of a job, or ""."""
        ...

    def read_differently(self, config: JobConfig) -> str:
        """Return in what titan's model differs from what the package makes of the same words, or ""."""
        ...

    def load(self, config: JobConfig, folder: Path) -> nn.Module:
        """Return the package's model in float32, built from the words of a job, with the weights of a folder.

        Raises:
            ValueError: tensors are missing, left over or of another shape.
        """
        ...

    def logits(self, model: nn.Module, tokens_S: Tensor) -> Tensor:
        """Return the logits of one document, (S, V)."""
        ...

    def loss(self, model: nn.Module, tokens_S: Tensor) -> Tensor:
        """Return the model's own loss of one document."""
        ...

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model's parameters as a folder."""
        ...

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """Return all tensors of a folder by their names."""
        ...


def source_of(config: JobConfig) -> tuple[Source | None, str]:
    """Return the package that a job's model comes from, or None and the reason."""
    sources: list[Source] = [kind() for kind in load_plug_ins("titan.extensions", of="certify")]
    reasons = {source.lacks(config): source for source in sources}
    found = reasons.pop("", None)
    return found, "" if found else next(
        iter(reasons), "no installed part knows where it comes from"
    )


def words(config: JobConfig) -> tuple[JobConfig, str]:
    """Return a small job as its source computes it, and what is left out.

    These are the plain cross entropy of the logits, and documents that do not see each other.

    Args:
        config: the small job, on one process.
    """
    keys: dict[str, Any] = {
        "loss": LossSection(chunk_output=False).model_dump(),
        "moe": MoESection().model_dump(),
        **{"compile.enable": False, "phase": [], "model.converters": [], "model.freeze": []},
        **{"training.local_batch_size": 2, "training.global_batch_size": 2},
    }
    left_out = []
    if config.model.sizes.num_mtp_modules:
        keys["model.overrides"] = {"num_mtp_modules": 0}
        left_out.append("without multi-token prediction")
    apart = {**keys, "data.document_mask": True, "data.reset_positions": True}
    try:
        check_to_run(small := changed(config, apart), world_size=1)
    except ConfigError as error:
        off = {**keys, "data.document_mask": False, "data.reset_positions": False}
        small = changed(config, off)
        left_out.append(f"without documents: {error.problems[0].message}")
    return small, "; ".join(left_out)


def compare_with_source(config: JobConfig) -> dict[str, Any]:
    """Compare a small job with its source, in one process.

    Args:
        config: the job of `words`.

    Returns:
        The relative differences by `WHAT`; the verdict if they do not decide it, and a reason.
    """
    try:
        differences, reason = _differences(config)
        return {"verdict": "", "reason": reason, "differences": differences}
    except CheckpointError as error:
        return {"verdict": "unknown", "reason": str(error), "differences": {}}
    except ValueError as error:
        return {"verdict": "differs", "reason": str(error), "differences": {}}


def _differences(config: JobConfig) -> tuple[dict[str, float], str]:
    """Return the relative differences by `WHAT`, and the tensor whose gradient differs most if it differs.

    Raises:
        CheckpointError: the model has no form of the package.
        ValueError: the package's model has other tensors.
    """
    source, _ = source_of(config)
    assert source is not None
    mesh = build_mesh("cpu", **resolve_layout(config, dist.get_world_size()).degrees)
    step = build_train_step(
        resolve_job(config, resolve_layout(config, 1), device="cpu"), device=CPU, mesh=mesh
    )
    [model] = step.model_parts
    model.eval()  # without dropout
    initialize(model, seed=config.debug.seed, std_of=_std)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _save(step, folder / "weights", model_state([model]))
        theirs = source.load(config, folder / "weights").eval()
        found = _outputs(step, source, theirs, list(_batches(step)))
        gradients = {
            f"model.{name}": torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        _save(step, folder / "ours", {**model_state([model]), **gradients})
        for parameter in theirs.parameters():
            zeros = torch.zeros_like(parameter)
            parameter.data = zeros if parameter.grad is None else parameter.grad
        source.save(theirs, folder / "theirs")
        # A folder has buffers, too, such as biases of routers, which have no gradients.
        expected, ours = (source.tensors(folder / name) for name in ("theirs", "ours"))
        trained = {name: value for name, value in expected.items() if name in ours}
        result = [{"gradients": {name: ours[name] for name in trained}}]
        each = ratios(result, {"gradients": trained}, "gradients", LEAST)
        lost = expected.keys() ^ ours.keys()
        if lost:
            raise ValueError(f"gradients without a namesake: {', '.join(sorted(lost)[:3])}")
    name = max(each, key=lambda name: each[name])
    return {**found, "gradients": each[name]}, name if each[name] > _BOUND else ""


def _std(name: str) -> float:
    # Neither ones nor zeros, which would hide a missing norm or bias.
    return 0.3 if "norm" in name or name.endswith("bias") else 0.08


def _save(step: TrainStep, folder: Path, state: dict[str, Any]) -> None:
    folders = model_folders()
    folders.save(folder, state, folders.describe(step.config, None), group=CheckpointGroup())


def _batches(step: TrainStep) -> Iterator[Any]:
    """Yield batches: one long document and several short ones, and one of so few tokens that some experts get none."""
    task, training = step.task, step.config.training
    rows_BT = np.random.default_rng(1000 * step.config.debug.seed).integers(
        2, task.sizes.vocab_size, (2, training.seq_len + 1)
    )
    rows_BT[1, 11::23] = 1  # ends of documents
    yield task.batch_of_rows(rows_BT)
    yield task.batch_of_rows(rows_BT[:1, :3])


def _outputs(
    step: TrainStep, source: Source, theirs: nn.Module, batches: list[Any]
) -> dict[str, float]:
    """Return the differences of logits and losses. Both models then have their gradients."""
    [model] = step.model_parts
    away, size, ours_sum, theirs_sum, extra = 0.0, 0.0, 0.0, 0.0, 0.0
    for batch in batches:
        local = step.to_local(batch)
        logits_BSV = model(local.input, **local.inputs)
        loss = step.loss_sum(logits_BSV, local.targets)
        loss.backward()
        ours_sum += loss.item()
        for b, s, tokens_S, labels_S in documents(batch):
            expected_SV = source.logits(theirs, tokens_S)
            their_loss = F.cross_entropy(
                expected_SV.float(), labels_S, reduction="sum", ignore_index=IGNORED
            )
            their_loss.backward()
            theirs_sum += their_loss.item()
            part_SV = logits_BSV[b, s].detach()
            away += (part_SV - expected_SV).detach().square().sum().item()
            size += expected_SV.detach().square().sum().item()
            extra = max(extra, _extra(source, theirs, tokens_S, expected_SV))
    losses = max(abs(ours_sum - theirs_sum) / theirs_sum, extra)
    return {"logits": math.sqrt(away / size), "losses": losses}


def _extra(source: Source, theirs: nn.Module, tokens_S: Tensor, logits_SV: Tensor) -> float:
    """Return what a class's own loss adds to the cross entropy of its logits, relative to it."""
    if len(tokens_S) < 2:
        return 0.0
    with torch.no_grad():
        own = source.loss(theirs, tokens_S).item()
        plain = F.cross_entropy(logits_SV[:-1].float(), tokens_S[1:]).item()
    return abs(own - plain) / plain


def documents(batch: Any) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield each document of a batch: its sequence, its place there, its tokens and its labels."""
    for b, (tokens_S, labels_S) in enumerate(
        zip(batch.tokens_BS, batch.labels_BS, strict=True)
    ):
        ids_S = (
            torch.zeros_like(tokens_S)
            if batch.document_ids_BS is None
            else batch.document_ids_BS[b]
        )
        start = 0
        for length in ids_S.unique_consecutive(return_counts=True)[1].tolist():
            place = slice(start, start + length)
            yield b, place, tokens_S[place], labels_S[place]
            start += length
