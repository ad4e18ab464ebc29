"""Describe the model of any transformers config.json, and say whether titan can train it: `titan check --hf CONFIG`.

A model of one of titan's families is described from config.json alone, with the formulas that `titan check` uses for a
job. For any other, titan/hf_reference.py has transformers build its class without memory, and counts that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from titan import hf_reference
from titan.checkpoint import CheckpointError
from titan.checkpoint.huggingface import (
    CONFIG,
    INDEX,
    SINGLE,
    HFFolder,
    HFModel,
    is_there,
    model_keys,
    open_folder,
    read_sizes,
    require_weights_for,
    root_of,
    tensor_problems,
)
from titan.config.errors import ConfigError
from titan.config.layout import resolve_layout
from titan.config.model import families, family, model_config
from titan.config.schema import JobConfig
from titan.config.toml import format_value
from titan.observe.estimate import estimate_memory
from titan.untrusted import MAX_VALUES, InputError, printable, read_json

_GIB = 2**30
# A run's default precision: fp32 parameters, gradients, and AdamW's two moments.
_STATE_BYTES = 4 + 4 + 8
_SHOWN = 5
# The longest sequence under the names that model types give it, and what to take without one.
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_SEQ_LEN = 4096


class Tensors(NamedTuple):
    """Say whether the weights would load. loads: None if nothing could be compared. problems: a line for each tensor."""

    loads: bool | None
    compared_with: str
    problems: list[str]


def describe(path: Path, *, seq_len: int | None = None, world_size: int = 1) -> dict[str, Any]:
    """Return what `titan check --hf --json` prints. Raises InputError for a file that describes no model.

    Args:
        path: a config.json, or the folder that has one.
        seq_len: tokens in a sequence; None: the model's longest, at most 4,096.
        world_size: ranks that share the training state under FSDP.
    """
    file = path / CONFIG if path.is_dir() else path
    hf = read_json(file, dict[str, Any], limit=2**20, within=root_of(file.parent))
    hf_reference.check_values(file, hf)
    keys, sizes, reason = _family(file, hf)
    names, missing = hf.get("architectures"), []
    architecture = names[0] if isinstance(names, list) and names else str(hf.get("model_type"))
    if sizes is None:
        model = hf_reference.build(file, hf)
        seq_len = seq_len or _default_seq_len(vars(model.config.get_text_config()))
        facts, architecture = hf_reference.counts(file, model, seq_len), type(model).__name__
        missing = [*hf_reference.features(model), *_nearest(hf_reference.on_disk(file, model))]
        tensors = Tensors(False, "", [reason])
    else:
        seq_len = seq_len or _default_seq_len(hf)
        facts, tensors = _counts(sizes, seq_len), _compare(file, hf, keys["name"], sizes)
    return {
        "config": str(file),
        "architecture": architecture,
        **facts,
        "world_size": world_size,
        "memory_gib": _memory(facts["parameters"], keys, seq_len, world_size),
        "family": keys or None,
        **tensors._asdict(),
        "missing": missing,
    }


def main(path: Path, *, seq_len: int | None, world_size: int, as_json: bool) -> int:
    """Run `titan check --hf`. Return the exit code."""
    try:
        facts = describe(path, seq_len=seq_len, world_size=world_size)
    except (InputError, ConfigError) as error:
        if not as_json:
            raise
        problem = {"file": str(path), "line": 0, "key": "", "message": str(error)}
        print(json.dumps({"problems": [problem]}, indent=2))
        return 2
    print(json.dumps(facts, indent=2) if as_json else page(facts))
    return 0


def page(facts: dict[str, Any]) -> str:
    """Return the facts for people."""
    total, active, ends = (facts[f"{kind}parameters"] for kind in ("", "active_", "embedding_"))
    experts = f", {active:,} of them active for a token" if active not in (None, total) else ""
    rows = [
        ("model", f"{facts['architecture']}, {facts['config']}"),
        ("parameters", f"{total:,}{experts}"),
        ("", f"{ends:,} in embeddings and output layer, {total - ends:,} in all else"),
        ("flops", f"not counted: {facts['flops_problem']}"),
    ]
    if flops := facts["flops_per_token"]:
        what = f"for each token of a training step, in sequences of {facts['seq_len']:,}"
        rows[-1] = ("flops", f"{flops / 1e9:,.3f} GFLOP {what}")
        rows.append(("", "forward and backward pass; attention counts all S x S, as MFU does"))
    rows += [*_memory_rows(facts), *_family_rows(facts)]
    return "\n".join(printable(f"{name:<12}{text}", 400).rstrip() for name, text in rows)


def _memory_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory, ranks = facts["memory_gib"], facts["world_size"]
    yield (
        "weights",
        f"{memory['bfloat16']:,.2f} GiB in bfloat16, {memory['float32']:,.2f} GiB in float32",
    )
    state = "GiB of fp32 parameters, gradients and AdamW moments"
    yield "training", f"{memory['training_state']:,.2f} {state}"
    if ranks > 1:
        yield (
            "",
            f"{memory['training_state_per_rank']:,.2f} GiB of it on each of {ranks:,} ranks (FSDP)",
        )
    if not (estimate := memory["estimate_per_rank"]):
        yield "", "activations are not included"
        return
    others = ", ".join(
        f"{estimate[key]:,.2f} {key}" for key in ("activations", "logits", "unsharded")
    )
    yield "", f"{estimate['total']:,.2f} GiB on each rank in all, by formula: also {others}"
    yield "", "(a sequence on each rank; [activation_checkpoint] as a job has it by default)"


def _family_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    keys, problems = facts["family"], facts["problems"]
    if keys:
        yield "family", f"{keys['name']}. In a job file:"
        lines = ["[model]", *(f"{key} = {format_value(value)}" for key, value in keys.items())]
        yield from [("", f"    {line}") for line in lines]
    else:
        yield "family", "none of titan's"
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    if facts["loads"]:
        yield "loads", f"yes: all names and shapes are those of {facts['compared_with']}"
    else:
        yield "loads", "not compared" if facts["loads"] is None else "no"
    yield from [("", line) for line in [*problems[:_SHOWN], *more]]
    if facts["missing"]:
        yield "missing", "in titan, as far as config and tensors show:"
        yield from [("", f"    {line}") for line in facts["missing"]]


# ---- a model of titan's families -------------------------------------------------------------------


def _family(file: Path, hf: dict[str, Any]) -> tuple[dict[str, Any], Any, str]:
    """Return the keys of [model] and the sizes. Without a family: nothing, None, and the reason."""
    try:
        name, sizes = read_sizes(HFFolder(file.parent, hf, {}))
        return model_keys(name, sizes), sizes, ""
    except CheckpointError as error:
        return {}, None, str(error).removeprefix(f"{file.parent / CONFIG}: ")
    except ConfigError as error:
        return {}, None, "; ".join(f"{p.key}: {p.message}" for p in error.problems)


def _counts(sizes: Any, seq_len: int) -> dict[str, Any]:
    return {
        "parameters": sizes.num_params,
        "active_parameters": getattr(sizes, "num_active_params", sizes.num_params),
        "embedding_parameters": sizes.num_embedding_params * (1 if sizes.tied_embeddings else 2),
        "seq_len": seq_len,
        "flops_per_token": sizes.flops_per_token(seq_len),
        "flops_problem": "",
    }


def _default_seq_len(config: dict[str, Any]) -> int:
    lengths = [config[key] for key in _LONGEST if isinstance(config.get(key), int)]
    return min(_SEQ_LEN, *(n for n in lengths[:1] if n > 0), _SEQ_LEN)


def _memory(parameters: int, keys: dict[str, Any], seq_len: int, ranks: int) -> dict[str, Any]:
    """Return GiB of the weights and of training them, and the estimate of `titan check` where there is one."""
    estimate = None
    if keys:
        training = {"seq_len": seq_len, "local_batch_size": 1}
        job = JobConfig.model_validate({"model": keys, "training": training})
        estimate = estimate_memory(job, model_config(job.model), resolve_layout(job, ranks))
    return {
        "bfloat16": 2 * parameters / _GIB,
        "float32": 4 * parameters / _GIB,
        "training_state": _STATE_BYTES * parameters / _GIB,
        "training_state_per_rank": _STATE_BYTES * parameters / ranks / _GIB,
        "estimate_per_rank": estimate,
    }


def _compare(file: Path, hf: dict[str, Any], name: str, sizes: Any) -> Tensors:
    """Compare our tensors with those of the files beside config.json or, without any, of transformers' class."""
    folder = file.parent
    has_weights = file.name == CONFIG and (is_there(folder / INDEX) or is_there(folder / SINGLE))
    if not has_weights and not find_spec("transformers"):
        why = "no weights are here, and transformers is not installed"
        return Tensors(None, "", [f"{why} (pip install 'titan-pretrain[huggingface]')"])
    if sizes.n_layers * max(1, getattr(sizes, "num_experts", 0)) > MAX_VALUES:
        return Tensors(None, "", ["too many tensors"])
    try:
        if has_weights:
            opened = open_folder(folder)
            require_weights_for(sizes, opened)
            problems = [*tensor_problems(opened, HFModel.of(name, sizes))]
            return Tensors(not problems, f"the {len(opened.files):,} tensors here", problems)
        theirs = hf_reference.on_disk(file, hf_reference.build(file, hf))
    except CheckpointError as error:
        return Tensors(False, "", [str(error)])
    except InputError as error:  # a package is missing, or too old for the model
        return Tensors(None, "", [str(error)])
    model = HFModel.of(name, sizes)
    ours = {tensor: list(part.shape) for tensor, part in model.on_disk.items()}
    if sizes.tied_embeddings:
        theirs.pop(model.hooks.hf_name("output.weight"), None)
    problems = [
        f"tensor {tensor} is {theirs.get(tensor, 'missing')} in transformers, {ours.get(tensor, 'missing')} in titan"
        for tensor in {**ours, **theirs}
        if ours.get(tensor) != theirs.get(tensor)
    ]
    return Tensors(not problems, f"the {len(theirs):,} tensors of transformers' class", problems)


def _nearest(theirs: dict[str, list[int]]) -> Iterator[str]:
    """Yield in which tensors a foreign model differs from the family whose names are most like its own."""
    wanted, known = _patterns(theirs), {}
    for name in families():
        with suppress(CheckpointError):  # a package's family without Hugging Face names
            smallest = next(iter(family(name).FLAVORS.values()))
            known[name] = _patterns(HFModel.of(name, smallest).on_disk)
    name = min(known, key=lambda name: len(wanted ^ known[name]))
    if 2 * len(wanted & known[name]) < len(wanted):
        yield f"such names of tensors: {_some(wanted)}"
        return
    if wanted == known[name]:
        yield f"a test against transformers: tensors are named as {name}'s, but the code may differ"
    for what, names in (
        ("beyond", wanted - known[name]),
        ("without some of", known[name] - wanted),
    ):
        if names:
            yield f"tensors {what} {name}'s: {_some(names)}"


def _patterns(names: Iterable[str]) -> set[str]:
    """Return names of the tensors of text models with * for the numbers of layers and experts, without the output layer."""
    texts = (name.removeprefix("language_model.") for name in names)
    texts = (text for text in texts if not hf_reference.TOWER.search(text))
    return {re.sub(r"\.\d+(?=\.)", ".*", text) for text in texts} - {"lm_head.weight"}


def _some(names: set[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(sorted(names)[:_SHOWN])}{rest}"
