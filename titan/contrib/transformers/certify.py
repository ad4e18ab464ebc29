"""First row of a certificate: titan on one process against transformers itself. An entry point of `titan.extensions`, certify.NAME.

The other rows compare titan with titan. A model that titan reads wrongly would be wrong in the same way on every layout.

titan's weights are saved as a folder, and transformers loads them into its own class with its own attention and experts. The class is
built from the words of the job: a folder or a class, and overrides. Of titan's own families it is built from the config.json that titan
writes. Both compute the same documents: titan packed into sequences, transformers each document alone. titan's gradients are saved as
a folder, too, and loaded into transformers' class, so that they have its names and shapes.

A family that is no causal language model of transformers has a `Judge` of its own, under an entry point judge.NAME.

B batch, S sequence, T = S + 1, V vocabulary
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titan.checkpoint import CheckpointError
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.state import model_state
from titan.checks.layout_rules import resolve_layout
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.plug_ins import door, parts_of
from titan.config.schema import JobConfig, LossSection
from titan.config.task import task_module
from titan.huggingface import hf_folders
from titan.huggingface.hf_model import hooks_of
from titan.losses.loss import IGNORED
from titan.numerics.certify.command import CertifiedLayout, Certifier
from titan.numerics.certify.ranks import RankFailed
from titan.numerics.certify.shrink import changed
from titan.numerics.certify.steps import CPU, LEAST, named_parameters, ratios
from titan.parallel import build_mesh, initialize
from titan.step.resolved import resolve_job
from titan.step.train_step import TrainStep, build_train_step
from titan.tasks.base import Microbatch

from .config import TransformersConfig
from .resolve import _config_json, _import, _merged, _their_name

_BOUND = 1e-5  # in fp32, with other orders of sums, as in attention
_DRAWS, _ROUNDING = (
    5,
    0.1,
)  # a difference between the two may be a token that goes to another expert
_TERMS = ("sequence_balance", "global_balance", "router_z_loss")
_NOT_OF_THE_MODEL = ("architectures", "dtype", "transformers_version", "quantization_config")


@door("judge")
class Judge(Protocol):
    """Program that computes the same as a family of titan.

    Attributes:
        name: its name, in the first row of a certificate.
    """

    name: str

    def knows(self, config: JobConfig) -> bool:
        """Return whether it computes the model and the loss of a job."""
        ...

    def load(self, config: JobConfig, folder: Path) -> nn.Module:
        """Return its model with the weights of a folder that titan wrote, in fp32.

        Raises:
            ValueError: tensors are missing, left over or of another shape.
        """
        ...

    def compute(self, theirs: Any, batch: Any, local: Microbatch) -> tuple[Tensor, Tensor]:
        """Compute a batch with its model.

        Args:
            theirs: its model.
            batch: the batch.
            local: the batch as titan's model gets it.

        Returns:
            The outputs, in the order of titan's, and the sum of the losses.
        """
        ...


def certify(certifier: Certifier) -> CertifiedLayout | None:
    """Return the first row of a certificate, or None if no judge knows the job's kind of model."""
    config = certifier.config
    row = partial(CertifiedLayout, name=judge_of(config).name, mesh="one process")
    if (reason := _lacks(config)) is not None:
        return row(verdict="unknown", reason=reason) if reason else None
    if wrong := _differing_fields(config):
        return row(verdict="differs", reason=wrong)
    small, left_out = small_job(certifier)
    found: dict[str, Any] = {}
    verdict = ""
    for draw in range(1, _DRAWS + 1):
        drawn = changed(small, {"debug.seed": config.debug.seed + draw - 1})
        try:
            [found] = certifier.pool.run(1, compare, drawn)
        except RankFailed as error:
            return row(verdict="failed", reason=error.cause.line)
        largest = max(found["differences"].values(), default=0.0)
        verdict = found["verdict"] or ("equal" if largest <= _BOUND else "differs")
        if verdict != "differs" or not 0 < largest < _ROUNDING:
            break
    reasons = [found["reason"] if verdict != "equal" else "", left_out]
    return row(
        verdict=verdict,
        reason="; ".join(filter(None, reasons)),
        differences=found["differences"],
        draw=draw,
    )


def judge_of(config: JobConfig) -> Judge:
    """Return the program that a job's model comes from: transformers, unless another one knows it."""
    return next((judge for judge in parts_of(Judge) if judge.knows(config)), CausalJudge())


def _lacks(config: JobConfig) -> str | None:
    """Return why no program has the model of a job that it could have, "" if none has such a kind, and None if one has it."""
    judge = judge_of(config)
    if not isinstance(judge, CausalJudge):
        absent = find_spec(judge.name) is None
        return f"{judge.name} is not installed" if absent else None
    hooks, sizes = hooks_of(config.model.name), config.model.sizes
    if isinstance(sizes, TransformersConfig):
        code = "the model is Python code of its folder" if sizes.source.code else None
        return code or dict(sizes.refuses).get("last_save_in_hf")
    return None if hooks is not None and task_module(config) is None else ""


def _differing_fields(config: JobConfig) -> str:
    """Return the fields of titan's config that differ from what transformers makes of the same words, or ""."""
    sizes = config.model.sizes
    if not isinstance(sizes, TransformersConfig):
        return ""
    ours = json.loads(sizes.source.hf)
    theirs = json.loads(json.dumps(config_of(config).to_dict(), default=str))
    names = [k for k in theirs if k not in _NOT_OF_THE_MODEL and ours.get(k) != theirs[k]]
    return "; ".join(f"{k} is {ours.get(k)}, and {theirs[k]} in transformers" for k in names)


def config_of(config: JobConfig, folder: Path | None = None) -> Any:
    """Return the config that transformers makes of the words of a job.

    Args:
        config: the job.
        folder: folder with the config.json of a family of titan's own.
    """
    transformers, section = _import(), config.model
    if not isinstance(section.sizes, TransformersConfig):
        return transformers.AutoConfig.from_pretrained(folder)
    if section.architecture:
        kind = getattr(transformers, section.architecture).config_class
        given: dict[str, Any] = {"architectures": [section.architecture]}
    else:
        given = _config_json(Path(section.hf_path))
        kind = transformers.CONFIG_MAPPING[given["model_type"]]
    known = kind.from_dict(given)
    changes = {_their_name(key, known): value for key, value in section.overrides.items()}
    # A table changes the keys that it names (docs/huggingface.md).
    whole = _merged(known.to_dict(), changes, known)
    return kind.from_dict({**given, **{key: whole[key] for key in changes}})


def small_job(certifier: Certifier) -> tuple[JobConfig, str]:
    """Return the small job as transformers computes it, and what is left out.

    It has the cross entropy of the logits alone, in plain modules, and documents that do not see each other.
    """
    whole, sizes = certifier.config.model.sizes, certifier.small.model.sizes
    keys: dict[str, Any] = {
        **certifier._keys({}, alone=True),
        "loss": LossSection(chunk_output=False).model_dump(),
        **{"compile.enable": False, "phase": [], "model.converters": [], "model.freeze": []},
        **{"training.local_batch_size": 2, "training.global_batch_size": 2},
    }
    left_out, overrides = [], {}
    if isinstance(sizes, TransformersConfig) and sizes.index_width:
        keys |= {"sparse_attention.stages": ["joint"], "sparse_attention.loss_coeff": 0.0}
        left_out.append("without the indexer's loss, which transformers does not have")
    if not isinstance(sizes, TransformersConfig):
        if sizes.num_mtp_modules:
            overrides["num_mtp_modules"] = 0
            left_out.append("without multi-token prediction")
        # A model of experts alone has one width in config.json.
        if sizes.num_experts and whole.ffn_dim == whole.expert_dim:
            overrides["ffn_dim"] = sizes.expert_dim
        terms = [f"{term}_coeff" for term in _TERMS if getattr(sizes, f"{term}_coeff", 0.0)]
        if terms:
            overrides |= dict.fromkeys(terms, 0.0)
            left_out.append(f"without {', '.join(terms)}, which transformers does not have")
        keys["model.overrides"] = overrides
    flags = ("data.document_mask", "data.reset_positions")
    whole_text, documents = (
        changed(certifier.small, keys | dict.fromkeys(flags, value)) for value in (False, True)
    )
    if task_module(certifier.config) is not None:
        return whole_text, ""
    try:
        check_to_run(documents, world_size=1)
    except ConfigError as error:
        left_out.append(f"one document a sequence, since {error.problems[0].message}")
        return whole_text, "; ".join(left_out)
    return documents, "; ".join(left_out)


# ---- in one process ------------------------------------------------------------------------------


def compare(config: JobConfig) -> dict[str, Any]:
    """Compare a small job with transformers.

    Args:
        config: the job of `small_job`.

    Returns:
        The relative differences of logits, losses and gradients; the verdict if they do not decide it, and a reason.
    """
    found: dict[str, Any] = {"verdict": "", "differences": {}}
    try:
        found["differences"], found["reason"] = _differences(config)
    except CheckpointError as error:
        found |= {"verdict": "unknown", "reason": str(error)}
    except ValueError as error:
        found |= {"verdict": "differs", "reason": str(error)}
    return found


def _differences(config: JobConfig) -> tuple[dict[str, float], str]:
    """Return the relative differences, and the tensor whose gradient differs most.

    Raises:
        CheckpointError: the model has no form of transformers.
        ValueError: transformers' model has other tensors.
    """
    layout = resolve_layout(config, dist.get_world_size())
    job = resolve_job(config, layout, device="cpu")
    step = build_train_step(job, device=CPU, mesh=build_mesh("cpu", **layout.degrees))
    [model] = step.model_parts
    model.eval()  # without dropout
    # Neither ones nor zeros, which would hide a missing norm or bias.
    initialize(
        model,
        seed=config.debug.seed,
        std_of=lambda name: 0.3 if "norm" in name or name.endswith("bias") else 0.08,
    )
    _draw_biases(step)
    judge = judge_of(config)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _save(step, folder / "weights", {})
        theirs = judge.load(config, folder / "weights")
        found = _outputs(step, judge, theirs)
        named = ((f"model.{name}", p) for name, p in named_parameters(step))
        _save(step, folder / "gradients", _gradients(named))
        ours = dict(judge.load(config, folder / "gradients").named_parameters())
    expected = {"gradients": _gradients(theirs.named_parameters())}
    each = ratios([{"gradients": ours}], expected, "gradients", LEAST)
    name = max(each, key=lambda name: each[name])
    return {**found, "gradients": each[name]}, name


def _gradients(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


def _draw_biases(step: TrainStep) -> None:
    """Fill the buffers on disk that begin with zeros: biases of routers, which choose experts."""
    off_disk = hf_folders.describe(step.config, None).model.off_disk
    for name, buffer in step.model_parts[0].named_buffers():
        if name.endswith("bias") and name not in off_disk:
            buffer.normal_(std=0.1, generator=torch.Generator().manual_seed(len(buffer)))


def _save(step: TrainStep, folder: Path, changes: dict[str, Tensor]) -> None:
    state = {**model_state(step.model_parts), **changes}
    export = hf_folders.describe(step.config, None)
    hf_folders.save(folder, state, export, group=CheckpointGroup())


def _outputs(step: TrainStep, judge: Judge, theirs: Any) -> dict[str, float]:
    """Return the differences of outputs and losses. Both models then have their gradients."""
    [model] = step.model_parts
    away = size = ours_sum = theirs_sum = 0.0
    for batch in _batches(step):
        local = step.to_local(batch)
        output = model(local.input, **local.inputs)
        expected, their_loss = judge.compute(theirs, batch, local)
        loss = step.loss_sum(output, local.targets)
        (loss + their_loss).backward()
        ours_sum += loss.item()
        theirs_sum += their_loss.item()
        away += (output.view_as(expected) - expected).detach().square().sum().item()
        size += expected.detach().square().sum().item()
    losses = abs(ours_sum - theirs_sum) / theirs_sum
    return {"logits": math.sqrt(away / size), "losses": losses}


def _batches(step: TrainStep) -> Iterator[Any]:
    """Yield batches: one long document and several short ones, and one of so few tokens that some experts get none."""
    task: Any = step.task
    if task_module(step.config) is not None:
        yield from map(task.random_batch, (1, 2))
        return
    shape = 2, step.config.training.seq_len + 1
    random = np.random.default_rng(step.config.debug.seed)
    rows_BT = random.integers(2, task.sizes.vocab_size, shape)
    rows_BT[1, 11::23] = 1  # ends of documents
    yield task.batch_of_rows(rows_BT)
    yield task.batch_of_rows(rows_BT[:1, :3])


@torch.no_grad()
def _extra(theirs: Any, tokens_S: Tensor, logits_SV: Tensor) -> float:
    """Return the part of a class's own loss beside the cross entropy of its logits, relative to it."""
    if len(tokens_S) < 2:
        return 0.0
    with EarliestOfEqual():
        own = theirs(input_ids=tokens_S[None], labels=tokens_S[None], use_cache=False).loss
    plain = F.cross_entropy(logits_SV[:-1].float(), tokens_S[1:]).item()
    return abs(own.item() - plain) / plain


def _documents(batch: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tokens and the labels of each document of a batch."""
    ids_BS = batch.document_ids_BS
    for b, tokens_S in enumerate(batch.tokens_BS):
        ids_S = torch.zeros_like(tokens_S) if ids_BS is None else ids_BS[b]
        lengths = ids_S.unique_consecutive(return_counts=True)[1].tolist()
        yield from zip(tokens_S.split(lengths), batch.labels_BS[b].split(lengths), strict=True)


class EarliestOfEqual(TorchFunctionMode):
    """Choice of the earliest of equal values by `Tensor.topk`, which leaves open which it chooses. titan's indexers choose the earliest."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.topk:
            return func(*args, **(kwargs or {}))
        x, k = args
        values, order = x.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], order[..., :k]))


class CausalJudge:
    """Judge of causal language models."""

    name = "transformers"

    def knows(self, config: JobConfig) -> bool:
        return task_module(config) is None

    def load(self, config: JobConfig, folder: Path) -> nn.Module:
        transformers, theirs = _import(), config_of(config, folder)
        theirs._experts_implementation = "eager"
        name = (theirs.architectures or [""])[0]
        kind: Any = getattr(transformers, name, None) or transformers.AutoModelForCausalLM
        model, report = kind.from_pretrained(
            folder,
            config=theirs,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        wrong = {what: sorted(map(str, names))[:3] for what, names in report.items() if names}
        if wrong:
            raise ValueError("; ".join(f"{k}: {', '.join(v)}" for k, v in wrong.items()))
        return model.eval()

    def compute(self, theirs: Any, batch: Any, local: Microbatch) -> tuple[Tensor, Tensor]:
        expected, losses = [], []
        for tokens_S, labels_S in _documents(batch):
            with EarliestOfEqual():
                their_SV = theirs(input_ids=tokens_S[None], use_cache=False).logits[0].float()
            loss = F.cross_entropy(their_SV, labels_S, reduction="sum", ignore_index=IGNORED)
            more = _extra(theirs, tokens_S, their_SV.detach())
            losses.append(loss + more * loss.detach())
            expected.append(their_SV)
        return torch.cat(expected), torch.stack(losses).sum()
