"""Small causal language models of `transformers` on titan's layouts, compared with transformers alone.

The reference is transformers' own model with its own attention, masks and experts, in one process. A layout takes a few steps of AdamW on
gloo ranks. Its losses, each gradient of the first step and each updated weight are compared with the reference's. Two proofs more: steps that
a checkpoint of another layout begins, and a Hugging Face folder there and back.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.support.hf_folders import difference, save_twin, through_titan, twin_of
from tests.support.hf_sizes import VOCABULARY, drawn, families, overrides_of
from tests.support.layouts import whole_gradients
from tests.support.ranks import Pool, RankFailed
from titan.checkpoint import CheckpointError
from titan.checkpoint import manager as checkpoints
from titan.checks.layout_rules import resolve_layout
from titan.config.schema import CheckpointSection, JobConfig, LRSchedulerSection
from titan.contrib.transformers import build_model
from titan.contrib.transformers.certify import EarliestOfEqual
from titan.contrib.transformers.config import TransformersConfig
from titan.data.packing import Batch
from titan.optim.schedule import learning_rate_factor
from titan.parallel import build_mesh, initialize, materialize
from titan.parallel.init_weights import canonical_name
from titan.parallel.mesh import axis_rank, axis_size
from titan.step.resolved import resolve_job
from titan.step.train_step import StepReport, TrainStep, build_train_step

# A ReLU, or a router between two experts, flips where rounding decides, and then a gradient differs by more than rounding. That depends on the
# numbers, and a fault does not: a difference is looked for again with other weights and tokens.
DRAWS = 3
# Values of a job's keys, by section.
Keys = dict[str, dict[str, Any]]
STEPS, BATCH, SEQUENCE, BOUND = 3, 4, 32, 1e-5
LAYOUTS: dict[str, dict[str, int]] = {
    "FSDP2": {"dp_shard": 2},
    "TP+SP": {"tp": 2},
    "CP": {"cp": 2},
    "PP": {"pp": 2},
    "EP": {"dp_shard": 2, "ep": 2},
    "FSDP2 x TP": {"dp_shard": 2, "tp": 2},
}
# Two steps on FSDP2, with EP if there are experts, and the third from a checkpoint on TP+SP, or on CP; a folder of transformers' own, read,
# saved as a checkpoint, loaded and exported on FSDP2 x TP, or on FSDP2.
PROOFS: dict[str, dict[str, int]] = {
    "resumed": {"dp_shard": 2},
    "exported": {"dp_shard": 2, "tp": 2},
}
# Of two documents in each sequence, without attention between them, at positions that begin anew.
PACKED: dict[str, dict[str, int]] = {
    "CP, documents": {"cp": 2},
    "PP, documents": {"pp": 2},
    "TP+SP, documents": {"tp": 2},
}


def num_ranks(degrees: dict[str, int]) -> int:
    """Return the number of ranks of a layout. Expert parallelism shares the ranks of the others."""
    return math.prod(degree for axis, degree in degrees.items() if axis != "ep")


@cache
def _folder_of(architecture: str, fields: str) -> Path:
    """Return a folder with a config.json."""
    folder = Path(mkdtemp())
    kind = getattr(transformers, architecture).config_class
    kind(**json.loads(fields), architectures=[architecture]).save_pretrained(folder)
    return folder


def job_of(
    architecture: str,
    degrees: dict[str, int],
    fields: dict[str, Any],
    *,
    packed: bool = False,
    source: Path | None = None,
    more: Keys | None = None,
) -> Any:
    """Return a small job.

    Args:
        architecture: class of the model.
        degrees: size of each axis above 1.
        fields: of its config.
        packed: whether sequences hold documents.
        source: folder of a model. None: a model of `fields`.
        more: keys by section, which replace those of the small job.
    """
    get = degrees.get
    if source is None and None in fields.values():  # TOML has no null, and config.json has
        source = _folder_of(architecture, json.dumps(fields))
    model: dict[str, Any] = {"hf_path": str(source)}
    if source is None:
        model = {"architecture": architecture, "overrides": fields}
    sections: dict[str, Any] = {
        "training": {
            "steps": STEPS,
            "seq_len": SEQUENCE,
            "local_batch_size": BATCH // get("dp_shard", 1),
            "mixed_precision_param": "float32",
            "max_norm": 0,
        },
        "data": {"document_mask": packed, "reset_positions": packed},
        "lr_scheduler": {"warmup_steps": 0},
        "optimizer": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0},
        "activation_checkpoint": {"mode": "none"},
        "loss": {"chunk_output": False},
        "model": {"name": "transformers", **model},
        "parallelism": {
            "pipeline_parallel_degree": get("pp", 1),
            "data_parallel_shard_degree": get("dp_shard", 1),
            "tensor_parallel_degree": get("tp", 1),
            "context_parallel_degree": get("cp", 1),
            "expert_parallel_degree": get("ep", 1),
        },
    }
    for name, keys in (more or {}).items():
        sections[name] = {**sections.get(name, {}), **keys}
    job = JobConfig.model_validate(sections)
    sizes = job.model.known_sizes
    # transformers has no loss of the indexer.
    if isinstance(sizes, TransformersConfig) and sizes.index_width:
        job = JobConfig.model_validate({"sparse_attention": {"loss_coeff": 0.0}, **sections})
    return job


def std_of(name: str) -> float:
    return 0.3 if "norm" in name or name.endswith("bias") else 0.08


def rows(step: int, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(step + 100 * draw)
    return torch.randint(3, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def documents() -> tuple[Tensor, Tensor]:
    """Return document ids and positions, (BATCH, SEQUENCE) each."""
    cuts = torch.tensor([5, 16, 20, 31])[:, None]
    places = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    return (places >= cuts).long(), torch.where(places >= cuts, places - cuts, places)


@contextmanager
def _in_digits_of_titan() -> Iterator[None]:
    """Replace the chunks of Kimi Delta Attention in transformers by its step-by-step function, and choose the earliest of equal keys.

    Its chunks lose a digit: a gradient differs by 1e-5 from that of steps in fp64, and titan's by 7e-7.
    """
    with EarliestOfEqual(), pytest.MonkeyPatch.context() as patch:
        for kind in ("bailing_hybrid", "kimi_linear"):
            file = sys.modules.get(f"transformers.models.{kind}.modeling_{kind}")
            if file is not None:
                steps = file.recurrent_kimi_delta_attention
                patch.setattr(file, "chunk_kimi_delta_attention", steps)
        yield


def part_of(model: Any, name: str, tensors: dict[str, Any]) -> Any:
    """Return the tensor of one of our parameters, which may be a half of theirs."""
    their_name = model.hf_name(name)
    if their_name in tensors:
        return tensors[their_name]
    parent, _, leaf = their_name.rpartition(".")
    tensor = tensors[f"{parent}.gate_up_proj"]
    return tensor if tensor is None else tensor.chunk(2, 1)[leaf == "up_proj"]


def twin_with(model: Any) -> Any:
    """Return transformers' model with the weights of ours, whole and on the CPU."""
    twin = twin_of(json.loads(model.config.source.hf))
    twin.set_attn_implementation("eager")
    theirs = dict(twin.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part_of(model, name, theirs).copy_(parameter)
    return twin


@_in_digits_of_titan()
def reference(model: Any, *, packed: bool = False, draw: int = 0) -> dict[str, Any]:
    """Return losses, gradients and weights of transformers alone, by our names.

    Args:
        model: our model, whole and on the CPU, with weights.
    """
    twin = twin_with(model).train()
    theirs = dict(twin.named_parameters())
    part = partial(part_of, model)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(
        twin.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.0, betas=(0.9, 0.95)
    )
    losses, norms, gradients = [], [], {}
    # Its recurrences and convolutions in torch know no documents, and MiniMax M3's indexer compares places with positions.
    crosses_documents = any(
        isinstance(module, torch.nn.Conv1d) or type(module).__name__ == "MiniMaxM3VLIndexer"
        for module in twin.modules()
    )
    for step in range(1, STEPS + 1):
        batch = rows(step, draw)
        # From positions that begin anew, transformers itself tells where documents begin.
        positions = {"position_ids": documents()[1]} if packed else {}
        if packed and crosses_documents:
            logits = document_logits(twin, batch[:, :-1])
        else:
            logits = twin(input_ids=batch[:, :-1], use_cache=False, **positions).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        if step == 1:
            found = {n: p.grad for n, p in theirs.items()}
            gradients = {n: g.clone() for n in names if (g := part(n, found)) is not None}
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * lr_factor(step)
        found = [p.grad for p in theirs.values() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(found).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {n: part(n, theirs).detach().clone() for n in names}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def document_logits(twin: Any, tokens_BS: Tensor) -> Tensor:
    """Return the logits of transformers' model, which is called with each document alone."""
    ids_BS, logits = documents()[0], []
    for tokens_S, ids_S in zip(tokens_BS, ids_BS, strict=True):
        parts = tokens_S.split(ids_S.unique_consecutive(return_counts=True)[1].tolist())
        alone = [twin(input_ids=part[None], use_cache=False).logits[0] for part in parts]
        logits.append(torch.cat(alone))
    return torch.stack(logits)


def lr_factor(step: int) -> float:
    return learning_rate_factor(
        step, section=LRSchedulerSection(warmup_steps=0), total_steps=STEPS, phases=()
    )


def build_step(config: JobConfig, degrees: dict[str, int]) -> TrainStep:
    """Return the training step of a job on this rank."""
    mesh = build_mesh("cpu", **{k: v for k, v in degrees.items() if k != "ep"})
    job = resolve_job(config, resolve_layout(config, mesh.size()), device="cpu")
    return build_train_step(job, device=torch.device("cpu"), mesh=mesh)


def train(
    architecture: str,
    degrees: dict[str, int],
    fields: dict[str, Any],
    *,
    packed: bool = False,
    draw: int = 0,
    more: Keys | None = None,
    steps: Sequence[int] = range(1, STEPS + 1),
    folder: Path | None = None,
) -> dict[str, Any]:
    """Train on this rank, and return what `reference` does.

    Args:
        architecture: class of the model.
        degrees: the layout.
        fields: fields that make the model small.
        packed: two documents in each sequence.
        draw: number of the weights and tokens.
        more: keys by section, which replace those of the small job.
        steps: numbers of the steps. Others than 1 begin with the folder's checkpoint of the step before.
        folder: where the last step is saved. None: it is not.
    """
    step = build_step(job_of(architecture, degrees, fields, packed=packed, more=more), degrees)
    parts, optimizer = step.model_parts, step.optimizer
    for part in parts:
        initialize(part, seed=draw, std_of=std_of)
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=folder or Path())
    if steps[0] > 1:
        before = Path(manager.folder) / f"step-{steps[0] - 1}"
        checkpoints.load(before, checkpoints.model_state(parts))
        checkpoints.load(before, checkpoints.empty_optimizer_state(before, parts, optimizer))
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        if not gradients:
            gradients.update(whole_gradients(step))

    optimizer.register_step_pre_hook(keep)
    reports = [train_a_step(step, number, draw=draw, packed=packed) for number in steps]
    if folder and steps[-1] < STEPS:
        state = checkpoints.model_state(parts) | checkpoints.optimizer_state(parts, optimizer)
        manager.save(steps[-1], state, metadata={"step": steps[-1], "tokens": 0})
    found = {"gradients": gradients, "weights": whole_weights(step)}
    found |= {"losses": [report.loss.item() for report in reports]}
    found |= {"norms": [report.grad_norm.item() for report in reports]}
    return found | {"kept": [layer.name for layer in step.float8 if layer.kept]}


def train_a_step(
    step: TrainStep, number: int, *, draw: int = 0, packed: bool = False
) -> StepReport:
    """Train on this rank's part of a step's tokens."""
    count, rank = axis_size(step.mesh, "dp_shard"), axis_rank(step.mesh, "dp_shard")
    batch = rows(number, draw)
    ids, positions = documents() if packed else (None, None)
    whole = Batch(
        tokens_BS=batch[:, :-1],
        labels_BS=batch[:, 1:],
        document_ids_BS=ids,
        positions_BS=positions,
    ).map(lambda _, tensor: tensor.chunk(count)[rank])
    return step.train([whole], step=number)


def whole_weights(step: TrainStep) -> dict[str, Tensor]:
    """Return the whole weights of this rank's model parts."""
    return {
        canonical_name(n): getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for part in step.model_parts
        for n, p in part.named_parameters()
    }


def resume(
    architecture: str, fields: dict[str, Any], sizes: Any, *, draw: int, folder: Path
) -> dict[str, Any]:
    """Return loss and weights of the third step on a layout, from the checkpoint of two steps on another.

    The weights follow from the checkpoint's moments and the step's gradient.
    """
    first = {"dp_shard": 2, "ep": 2} if sizes.num_experts else {"dp_shard": 2}
    second = {"cp": 2} if "tensor_parallel_degree" in dict(sizes.refuses) else {"tp": 2}
    folder = folder / f"resumed-{draw}"
    train(architecture, first, fields, draw=draw, steps=(1, 2), folder=folder)
    found = train(architecture, second, fields, draw=draw, steps=(3,), folder=folder)
    return {**found, "gradients": {}}


def _refused(prove: Callable[[], str]) -> str:
    """Return what a proof says, or the message that refuses it."""
    try:
        return prove()
    except CheckpointError as error:
        return f"refused: {' '.join(str(error).split())[:250]}"


def export(architecture: str, folder: Path, fields: dict[str, Any]) -> str:
    """Return "equal" if a folder of transformers' own comes back bit for bit, or in what it differs."""
    is_first, source = dist.get_rank() == 0, folder / "source"
    if is_first:
        save_twin(architecture, fields, source)
    dist.barrier()
    degrees = {"dp_shard": 2, "tp": 2}
    sizes = job_of(architecture, degrees, {}, source=source).model.sizes
    if reason := dict(sizes.refuses).get("last_save_in_hf"):
        return f"refused: {reason}"
    if "tensor_parallel_degree" in dict(sizes.refuses):
        degrees = {"dp_shard": 4}
    step = build_step(job_of(architecture, degrees, {}, source=source), degrees)
    out = through_titan(step, source, folder)
    told = [difference(source, out) if is_first else ""]
    dist.broadcast_object_list(told)
    return f"DIFFERS {told[0]}" if told[0] else "equal"


def is_equal(result: str) -> bool:
    """Return whether a result says that a layout computes what transformers does."""
    return result[:1].isdigit() or result == "equal"


@contextmanager
def patched(plant: Callable[[pytest.MonkeyPatch], None] | None) -> Iterator[None]:
    """Run a block with a planted fault, or without one."""
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        yield


MARK = "<row>"


class LayoutFailed(RuntimeError):
    """A layout failed on a rank. The message has the results so far, between two marks."""


def row_of(
    pool: Pool,
    kind: str,
    layouts: dict[str, dict[str, int]],
    *,
    verbose: bool = False,
    more: dict[str, Keys] | None = None,
    plant: Callable[[pytest.MonkeyPatch], None] | None = None,
    variant: int = 0,
) -> dict[str, Any]:
    """Return the result of each layout of a family, as text: the largest difference, or why there is none.

    Args:
        pool: ranks.
        kind: model type.
        layouts: degrees by name. Sequences hold two documents on a layout whose name has the word "documents".
        verbose: name each tensor that differs.
        more: keys of the job, by layout.
        plant: plants a fault in each rank, after the reference.
        variant: of the sizes. A pipeline runs with untied embeddings.
    """
    row: dict[str, Any] = {}
    is_tied = variant and overrides_of(families()[kind], variant).get("tie_word_embeddings")

    def run_of(axes: dict[str, int]) -> tuple[int, bool]:
        return num_ranks(axes), bool(is_tied and "pp" in axes)

    for world, untied in sorted({run_of(axes) for axes in layouts.values()}):
        left = {name: axes for name, axes in layouts.items() if run_of(axes) == (world, untied)}
        while left:
            chosen = {kind: families()[kind]}
            try:
                with TemporaryDirectory() as folder:
                    place = Path(folder)
                    [rows, *_] = pool.run(
                        world, run_rank, chosen, left, verbose, place, more, plant, variant
                    )
                row |= rows[kind]
                break
            except RankFailed as error:
                parts = str(error).split(MARK)
                # Of the rank that came furthest.
                rows = [json.loads(part) for part in parts[1::2]]
                row |= (  # pyrefly: ignore[unsupported-operation]
                    max(rows, key=len) if rows else {"error": " ".join(parts[0].split())[-200:]}
                )
                left = {name: axes for name, axes in left.items() if rows and name not in row}
    return row


def compare(found: dict[str, Any], true: dict[str, Any]) -> dict[str, float]:
    """Return the relative difference of the losses, the gradient norms and each tensor that this rank has."""
    differences = {
        what: max(abs(a - b) / abs(b) for a, b in zip(found[what], true[what], strict=True))
        for what in ("losses", "norms")
    }
    for what in ("gradients", "weights"):
        scale = max(t.norm().item() / t.numel() ** 0.5 for t in true[what].values())
        for name, tensor in found[what].items():
            if name not in true[what]:
                differences[f"{what}: {name} is not in the reference"] = float(
                    tensor.norm() > 0
                )
                continue
            other = true[what][name]
            size = max(other.norm().item(), 1e-3 * scale * other.numel() ** 0.5)
            differences[f"{what}: {name}"] = (tensor - other).norm().item() / size
    return differences


def verdict(found: dict[str, float], *, draw: int, verbose: bool) -> str:
    """Return the largest difference of all ranks, or DIFFERS and where it is."""
    value, worst = max((v, k) for k, v in found.items())
    text = f"{value:.1e}" + f", draw {draw + 1}" * (draw > 0)
    if value > BOUND:
        text = f"DIFFERS {value:.1e} {worst}"
        wrong = [f"{k} {v:.1e}" for k, v in found.items() if v > BOUND]
        text += "\n      ".join(["", *wrong]) if verbose else ""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return max(everyone, key=lambda text: (not text[:1].isdigit(), text))


def run_rank(
    kinds: dict[str, str],
    layouts: dict[str, dict[str, int]],
    verbose: bool,
    folder: Path,
    more: dict[str, Keys] | None = None,
    plant: Callable[[pytest.MonkeyPatch], None] | None = None,
    variant: int = 0,
) -> dict[str, Any]:
    """Run families on layouts of this many ranks, as `row_of` says. Return results by family and layout."""
    results: dict[str, Any] = {}
    for kind, architecture in kinds.items():
        row = results[kind] = {}
        try:
            fields = overrides_of(architecture, variant)
            if variant:
                row["draws"] = 1 + drawn(architecture, variant)[1]
                if all("pp" in axes for axes in layouts.values()):
                    fields |= dict.fromkeys(fields.keys() & {"tie_word_embeddings"}, False)
            sizes, problems = job_of(architecture, {}, fields).model.resolved
            if problems:
                row["refused"] = problems[0][1]
                continue
            if "exported" in layouts:
                row["exported"] = _refused(partial(export, architecture, folder, fields))
                layouts = {name: axes for name, axes in layouts.items() if name != "exported"}
            if not layouts:
                continue
            with torch.device("meta"):
                model = build_model(sizes)
            materialize(model, device="cpu")
            row["parameters"] = sizes.num_params
            row["experts"] = sizes.num_experts
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"
            continue

        @cache
        def truth(draw: int, packed: bool, model: Any = model) -> dict[str, Any]:
            initialize(model, seed=draw, std_of=std_of)
            return reference(model, packed=packed, draw=draw)

        try:
            for packed in {"documents" in name for name in layouts}:
                truth(0, packed)
        except Exception as error:
            row["reference"] = f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"
            continue
        for name, degrees in layouts.items():
            if "ep" in degrees and not sizes.num_experts:
                continue
            refused = dict(sizes.refuses)
            names = {"tp": "tensor_parallel_degree", "cp": "context_parallel_degree"}
            names["pp"] = "pipeline_parallel_degree"
            reason = next((refused[names[d]] for d in degrees if names.get(d) in refused), "")
            if reason and name not in PROOFS:
                row[name] = f"refused: {reason}"
                continue
            try:
                for draw in range(1 if plant else DRAWS):
                    if name == "resumed":
                        found = resume(architecture, fields, sizes, draw=draw, folder=folder)
                        whole = truth(draw, False)
                        true = whole | {name: whole[name][-1:] for name in ("losses", "norms")}
                    else:
                        packed, keys = "documents" in name, (more or {}).get(name)
                        true, options = truth(draw, packed), {"packed": packed, "draw": draw}
                        with patched(plant):
                            found = train(architecture, degrees, fields, more=keys, **options)
                    row[name] = verdict(compare(found, true), draw=draw, verbose=verbose)
                    if is_equal(row[name]):
                        break
            except Exception as error:
                # Other ranks may wait for this one: the pool ends them.
                row[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:250]}"
                if verbose:
                    traceback.print_exc()
                raise LayoutFailed(f"{MARK}{json.dumps(row)}{MARK}") from None
    return results
