"""Way `titan convert from-megatron DIR OUT`, in one process and without Megatron.

    OUT/checkpoint/step-N    weights and moments of Adam, as any checkpoint of titan
    OUT/config.toml          a job that continues after step N
    OUT/megatron.json        SHA-256 of each tensor of both checkpoints, and the arguments that were read

Names go by transformers': Megatron's tensors, names.py, transformers' names, huggingface/hf_model.py, titan's parameters.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from titan.base.untrusted import printable
from titan.checkpoint import CheckpointError
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.identity import tokenizer_facts
from titan.checkpoint.tensors import some
from titan.config.schema import CheckpointSection, JobConfig
from titan.data.tokenizer import tokenizer_named
from titan.data.tokenizer_files import FOLDER, read_asset, tokenizer_files, write_files
from titan.huggingface.conversion import check_new, mapped, toml_of
from titan.huggingface.hf_model import HFModel
from titan.huggingface.load import HFFolder, model_keys, read_sizes, require_weights_for

from .job import TABLES, balance, differing_arguments, hf_config, sections
from .names import EMBEDDINGS, part_of, places
from .reading import MegatronFolder, digest, open_folder

REPORT = "megatron.json"
# Weights in full precision are part of the optimizer's state.
_WEIGHTS = ("optimizer.state.fp32_param.", "optimizer.state.param.", "")
_MOMENTS = ("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
_STATE = re.compile(r"^optimizer\.state\.\w+\.")


class RunArguments(UserDict[str, Any]):
    """Arguments of Megatron's run.

    Attributes:
        read: those that were asked for.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({TABLES["former"].get(key, key): x for key, x in values.items()})
        self.read: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        self.read[key] = super().__getitem__(key)
        return self.read[key]


@dataclass(frozen=True)
class MegatronJob:
    """Job and model that a checkpoint of Megatron becomes.

    Attributes:
        config: config.json of the model.
        name: family of the model.
        sizes: sizes of the model.
        coefficients: coefficients of its losses beside the main loss.
        sections: sections of the job, without the model.
        step: steps that are done.
        tokens: tokens that were read.
        padding: rows of the embeddings that are left out.
        differing: settings of Megatron that the job does not have.
        adam_steps: steps of Adam; None: the moments are left out.
    """

    config: dict[str, Any]
    name: str
    sizes: Any
    coefficients: dict[str, float]
    sections: dict[str, dict[str, Any]]
    step: int
    tokens: int
    padding: int
    differing: list[str]
    adam_steps: float | None


def from_megatron(
    source: Path,
    output: Path,
    *,
    tokenizer: str = "",
    model_only: bool = False,
) -> list[str]:
    """Convert a checkpoint of Megatron. Return messages.

    Args:
        source: a folder iter_N, or a run's folder, which stands for its newest checkpoint.
        output: new run folder.
        tokenizer: path of the tokenizer, which says how many rows of the embeddings are no padding.
        model_only: leave the moments out, and begin with step 0.

    Raises:
        CheckpointError: the checkpoint cannot be read, or titan has no such model.
    """
    check_new(output)
    folder = open_folder(source)
    opened = tokenizer_named(tokenizer) if tokenizer else None
    assets = {file.name: read_asset(file) for file in tokenizer_files(tokenizer)}
    arguments = RunArguments(folder.arguments)
    vocab_size = opened.vocab_size if opened else None
    plan = _plan(folder, arguments, vocab_size, model_only=model_only)
    if not model_only:
        _require_moments(folder)
    model = HFModel.of(plan.name, plan.sizes)
    metadata = {
        "format": 1,
        "step": plan.step,
        "tokens": plan.tokens,
        "data": {},
        "model_only": model_only,
        "text": {"tokenizer": tokenizer_facts(opened)} if opened else {},
    }
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output.parent, prefix=".converting-") as temporary:
        state = dict(_state(folder, plan, model, Path(temporary)))
        _require_all_read(folder, model_only=model_only)
        hashes = {name: digest(tensor) for name, tensor in state.items()}
        path = Path(str(manager.save(plan.step, state, metadata=metadata)))
    if assets:
        write_files(assets, output / FOLDER)
    flavor, text = _job_of(output, plan, path, has_tokenizer=bool(assets))
    job = output / "config.toml"  # belongs to the checkpoint
    job.write_text(text)
    report = {"megatron": folder.hashes, "titan": hashes, "arguments": arguments.read}
    (output / REPORT).write_text(json.dumps(report, indent=1, default=repr))
    return [
        f"{path}: {plan.name} {flavor}, {plan.sizes.num_params:,} parameters, step {plan.step}",
        *_messages(folder, arguments, plan),
        f"SHA-256 of each tensor: {output / REPORT}",
        f"continue: titan train {job} --training.dataset=... (its own dataset is Python's library)",
    ]


def _plan(
    folder: MegatronFolder, arguments: RunArguments, vocab_size: int | None, *, model_only: bool
) -> MegatronJob:
    """Return what a checkpoint becomes, from its arguments.

    Raises:
        CheckpointError: titan has no such model, or arguments are missing or of other types.
    """
    try:
        padded = arguments.get("padded_vocab_size") or arguments["vocab_size"]
        rows = vocab_size or padded
        config = hf_config(arguments, vocab_size=rows)
        opened = HFFolder(folder.path, config, folder.files)
        name, sizes = read_sizes(opened, mtp=True)
        require_weights_for(sizes, opened)
        known = {field.name for field in dataclasses.fields(sizes)}
        wanted = balance(arguments)
        losses = {key: x for key, x in wanted.items() if key in known}
        sizes = dataclasses.replace(sizes, **losses)
        job, step, tokens, adam_steps = {}, 0, 0, None
        differing = [*differing_arguments(arguments, TABLES["lost"])]
        differing += [
            key for key in wanted.keys() - known if wanted[key] and key != "mtp_coeff"
        ]
        if not model_only:
            schedule = folder.common["opt_param_scheduler"]
            job = sections(arguments, schedule)
            JobConfig.model_validate(job)  # its values may be of any type
            step = _whole(folder.common["iteration"])
            samples = _whole(arguments["consumed_train_samples"])
            tokens = samples * job["training"]["seq_len"]
            adam_steps = _adam_steps(folder.common)
            differing += _of_schedule(schedule, job, step)
        return MegatronJob(
            config, name, sizes, losses, job, step, tokens, padded - rows, differing, adam_steps
        )
    except CheckpointError:
        raise
    # The values may be of any type.
    except Exception as error:
        why = printable(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(f"{folder.path}: arguments of the run: {why}") from error


def _whole(value: Any) -> int:
    """Return a number of steps or samples."""
    if not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _of_schedule(
    schedule: dict[str, Any], job: dict[str, dict[str, Any]], step: int
) -> list[str]:
    """Return in what the learning rates of the next steps differ from Megatron's."""
    found = []
    if step < (warmup := job["lr_scheduler"]["warmup_steps"]):
        found.append(f"warm-up to step {warmup}, a step ahead")
    if schedule["num_steps"] != step * job["training"]["global_batch_size"]:
        found.append(f"a schedule that is at sample {schedule['num_steps']}")
    return found


def _require_moments(folder: MegatronFolder) -> None:
    """Check that the moments are stored by parameter.

    Raises:
        CheckpointError: they are stored otherwise, or there are none.
    """
    if any("optimizer.distributed." in name for name in (*folder.entries, *folder.others)):
        raise CheckpointError(
            f"{folder.path}: moments are stored by bucket (dp_reshardable), not by parameter. In Megatron, load it and save it with "
            "--dist-ckpt-optim-fully-reshardable; or convert the weights alone with --model-only"
        )
    if not any(name.startswith(_MOMENTS[0]) for name in folder.entries):
        raise CheckpointError(
            f"{folder.path}: holds no moments of Adam; convert with --model-only"
        )


def _adam_steps(common: dict[str, Any]) -> float:
    """Return the steps of Adam, which are fewer than those of the run if some were skipped, as in float16."""
    leaves, _ = tree_flatten_with_path(common.get("optimizer", {}))
    found = {str(path[-1]): value for path, value in leaves}
    return float(found.get("['common_step']", found.get("['step']", common["iteration"])))


def _tensor(
    folder: MegatronFolder, config: dict[str, Any], theirs: str, prefixes: tuple[str, ...]
) -> Tensor:
    """Return a tensor of Megatron by transformers' name.

    Args:
        folder: Megatron's checkpoint.
        config: config.json of the model.
        theirs: transformers' name. {} stands for the number of an expert, and the result stacks all.
        prefixes: kinds of state, such as "optimizer.state.exp_avg.". The first that is there is read.

    Raises:
        CheckpointError: it is missing.
    """
    found = [*places(theirs, num_layers=config["num_hidden_layers"])]
    for prefix in prefixes:
        for place in found:
            is_stack = "{}" in place.name
            numbers = range(config["num_experts"]) if is_stack else (0,)
            names = [f"{prefix}{place.name}".replace("{}", str(n)) for n in numbers]
            if not all(name in folder.entries for name in names):
                continue
            tensors = [folder.read(name) for name in names]
            part = part_of(
                torch.stack(tensors) if is_stack else tensors[0],
                place.part,
                num_heads=config["num_attention_heads"],
                num_groups=config["num_key_value_heads"],
            )
            return part[: config["vocab_size"]] if theirs in EMBEDDINGS else part
    wanted = prefixes[-1] + found[-1].name if found else "a place"
    raise CheckpointError(f"{folder.path}: {wanted} is missing, for {theirs}")


def _state(
    folder: MegatronFolder, plan: MegatronJob, model: HFModel, temporary: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield titan's tensors by their names in a checkpoint. Each is in the memory of a file, so that it may be written out."""
    for ours, shape in model.shapes.items():
        is_buffer = ours in model.buffers
        kinds = {f"model.{ours}": _WEIGHTS}
        if plan.adam_steps is not None and not is_buffer:
            kinds |= {f"optimizer.{ours}.{m.split('.')[2]}": (m,) for m in _MOMENTS}
            yield f"optimizer.{ours}.step", torch.tensor(plan.adam_steps)
        for number, (key, prefixes) in enumerate(kinds.items()):
            if ours not in model.names:  # transformers has no such tensor
                yield key, torch.zeros(shape, dtype=model.buffers[ours])
                continue
            theirs = model.names[ours]
            whole = _tensor(folder, plan.config, theirs, prefixes)
            expected = shape if "{}" in theirs else model.on_disk[theirs].shape
            if whole.shape != expected:
                raise CheckpointError(
                    f"{folder.path}: {theirs} has shape {[*whole.shape]}; the arguments make it {[*expected]}"
                )
            # A tensor of a folder may join several of ours.
            part = whole
            for dim, first in enumerate(model.origin(ours)):
                part = part.narrow(dim, first, shape[dim])
            if not part.isfinite().all():
                raise CheckpointError(f"{folder.path}: {theirs} is not finite")
            tensor = mapped(temporary / f"{ours}.{number}", shape, part.dtype)
            yield key, tensor.copy_(part)


def _require_all_read(folder: MegatronFolder, *, model_only: bool) -> None:
    """Check that no tensor of the checkpoint was left out.

    Raises:
        CheckpointError: the model has no place for some.
    """
    # Beside weights in full precision, those of the model are left out.
    read = {_STATE.sub("", name) for name in folder.hashes}
    extra = {_STATE.sub("", name) for name in folder.entries} - read
    if model_only:
        extra = {name for name in extra if not name.startswith("optimizer.")}
    if extra:
        raise CheckpointError(
            f"{folder.path}: the model has no place for {some(sorted(extra))}"
        )


def _job_of(
    output: Path, plan: MegatronJob, step: Path, *, has_tokenizer: bool
) -> tuple[str, str]:
    """Return the model's flavor and the job that continues. Write config.json if the family reads it."""
    keys = model_keys(plan.name, plan.sizes, described := (output / "model.json").absolute())
    if "hf_path" in keys:
        described.write_text(json.dumps(plan.config, indent=2))
    else:
        keys["overrides"] = keys.get("overrides", {}) | plan.coefficients
    loading: dict[str, Any] = {"initial_load_path": str(step.absolute())}
    if plan.step:
        # Megatron's order of samples is another, so the data starts from its first sample.
        loading |= {"initial_load_model_only": False, "exclude_from_loading": ["dataloader"]}
    tokenizer = {"name": "auto", "path": str((output / FOLDER).absolute())}
    sections = {
        "model": keys,
        "tokenizer": tokenizer if has_tokenizer else {},
        **plan.sections,
        "checkpoint": loading,
    }
    text = "# The job of a checkpoint of Megatron.\n" + toml_of(sections)
    return keys.get("flavor", ""), text


def _messages(
    folder: MegatronFolder, arguments: RunArguments, plan: MegatronJob
) -> Iterator[str]:
    """Yield messages about what was not read."""
    tensors = f"{len(folder.hashes)} of {len(folder.entries)} tensors"
    yield f"read {tensors}, and {len(arguments.read)} of {len(arguments)} arguments"
    if plan.padding > 0:
        yield (
            f"left out {plan.padding} rows of padding of the embeddings; Megatron's softmax counts them, so its loss is a little higher"
        )
    if folder.others:
        kinds = Counter(name.partition("/")[0].rpartition(".")[2] for name in folder.others)
        what = ", ".join(f"{printable(kind, 40)} ({n})" for kind, n in sorted(kinds.items()))
        yield f"not read, since they are no tensors: {what}"
    if plan.differing:
        yield f"not as in Megatron's run: {', '.join(plan.differing)}"
