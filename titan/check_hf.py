"""Describe the model of any transformers config.json, and say whether titan can train it: `titan check --hf CONFIG`.

A model of one of titan's families is described from config.json alone, with the formulas that `titan check` uses for a
job. For any other, titan/hf_reference.py has transformers build its class without memory, and counts that.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from titan.config.errors import ConfigError, Problem
from titan.config.layout import resolve_layout
from titan.config.model import model_config
from titan.config.schema import JobConfig
from titan.config.toml import format_value
from titan.observe.estimate import estimate_memory
from titan.untrusted import MAX_VALUES, InputError, printable, read_json

_GIB = 2**30
# A run's default precision: fp32 parameters, gradients, and AdamW's two moments.
_STATE_BYTES = 4 + 4 + 8
_SHOWN = 5
_UNKNOWN = "nothing, but no family of titan was compared with this class"
# The longest sequence under the names that model types give it, and what to take without one.
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length")
_SEQ_LEN = 4096


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
    names, missing, tensors = hf.get("architectures"), [], (False, "", [reason])
    architecture = names[0] if isinstance(names, list) and names else str(hf.get("model_type"))
    if sizes is None:
        model = hf_reference.build(file, hf)
        seq_len = seq_len or _default_seq_len(vars(model.config.get_text_config()))
        facts, architecture = hf_reference.counts(file, model, seq_len), type(model).__name__
        missing = [*hf_reference.features(model)]
    else:
        seq_len = seq_len or _default_seq_len(hf)
        facts, tensors = _counts(sizes, seq_len), _compare(file, hf, keys["name"], sizes)
    memory_gib = _memory(facts["parameters"], keys, seq_len, world_size)
    facts |= {"world_size": world_size, "memory_gib": memory_gib, "family": keys or None}
    facts |= dict(zip(("loads", "compared_with", "problems"), tensors, strict=True))
    return {"config": str(file), "architecture": architecture, **facts, "missing": missing}


def main(options: Namespace) -> int:
    """Run `titan check --hf`. Return the exit code."""
    try:
        facts = describe(options.hf, seq_len=options.seq_len, world_size=options.world_size)
    except InputError as error:
        if not options.json:
            raise
        problem = Problem(str(options.hf), 0, "", str(error))
        print(json.dumps({"problems": [asdict(problem)]}, indent=2))
        return 2
    print(json.dumps(facts, indent=2) if options.json else page(facts))
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
    bf16, fp32 = memory["bfloat16"], memory["float32"]
    yield "weights", f"{bf16:,.2f} GiB in bfloat16, {fp32:,.2f} GiB in float32"
    state = "GiB of fp32 parameters, gradients and AdamW moments"
    yield "training", f"{memory['training_state']:,.2f} {state}"
    if ranks > 1:
        share = memory["training_state_per_rank"]
        yield "", f"{share:,.2f} GiB of it on each of {ranks:,} ranks (FSDP)"
    if estimate := memory["estimate_per_rank"]:
        rest = (f"{estimate[key]:,.2f} {key}" for key in ("activations", "logits", "unsharded"))
        total = f"{estimate['total']:,.2f} GiB on each rank in all, by formula"
        yield "", f"{total}: also {', '.join(rest)}"
        yield "", "(a sequence on each rank; [activation_checkpoint] as a job has it by default)"
    else:
        yield "", "activations are not included"


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
    if not keys:
        yield "missing", "in titan, as far as config and tensors show:"
        yield from [("", f"    {line}") for line in facts["missing"] or [_UNKNOWN]]


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
    lengths = (config.get(key) for key in _LONGEST)
    return min(next((n for n in lengths if isinstance(n, int) and n > 0), _SEQ_LEN), _SEQ_LEN)


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


def _compare(
    file: Path, hf: dict[str, Any], name: str, sizes: Any
) -> tuple[bool | None, str, list[str]]:
    """Compare our tensors with those of the files beside config.json or, without any, of transformers' class.

    Return whether the weights would load, None if nothing could be compared; with what; and a line for each that differs.
    """
    folder = file.parent
    has_weights = file.name == CONFIG and (is_there(folder / INDEX) or is_there(folder / SINGLE))
    try:
        if sizes.n_layers * max(1, getattr(sizes, "num_experts", 0)) > MAX_VALUES:
            raise InputError("these are too many tensors to compare")
        if has_weights:
            opened = open_folder(folder)
            require_weights_for(sizes, opened)
            problems = [*tensor_problems(opened, HFModel.of(name, sizes))]
            return not problems, f"the {len(opened.files):,} tensors here", problems
        theirs = hf_reference.on_disk(file, hf_reference.build(file, hf))
    except CheckpointError as error:
        return False, "", [str(error)]
    except InputError as error:  # transformers is not installed, or older than the model
        return None, "", [str(error)]
    model = HFModel.of(name, sizes)
    ours = {tensor: list(part.shape) for tensor, part in model.on_disk.items()}
    if sizes.tied_embeddings:
        theirs.pop(model.hooks.hf_name("output.weight"), None)
    problems = [
        f"tensor {key} is {theirs.get(key, 'missing')} in transformers, {ours.get(key, 'missing')} in titan"
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    ]
    return not problems, f"the {len(theirs):,} tensors of transformers' class", problems
