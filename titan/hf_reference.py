"""Build any model that transformers has on the meta device, count it, and say in words what sets it apart.

titan/check_hf.py is the caller. On meta, tensors have shapes and no memory, so models of any size are built whole, and
their forward pass runs without computing anything. FlopCounterMode counts its products.

config.json may come from anybody. Python code that comes with a model (`auto_map`) is never run, nothing is downloaded,
and whatever transformers raises becomes one line.
"""

from __future__ import annotations

import logging
import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan.data import require
from titan.untrusted import InputError, printable

Model: TypeAlias = Any
"""A PreTrainedModel of transformers."""

# Limits on numbers of a stranger's file: a loop over a billion layers takes for ever, even on meta.
_COUNTED = re.compile(r"(layers?|blocks?|experts?|heads|depth|stages)$")
_MAX_COUNT, _MAX_NUMBER, _MAX_LENGTH = 10_000, 2**40, 10_000
# transformers would fetch code, kernels or weights for these, or needs packages for them.
_ACTIVE = re.compile(
    r"auto_map|_?(attn|experts)_implementation.*|quantization_config|.*pretrained.*"
)
_SECONDS = 180
_TASKS = (
    "ForCausalLM",
    "ForImageTextToText",
    "ForSeq2SeqLM",
    "",
)  # the class of a config that names none
# What names of tensors and config keys say about a model that none of titan's families is.
_RECURRENT = re.compile(
    r"A_log|conv1d|time_decay|mlstm|rg_lru|\.conv\.|mamba|linear_attention|recurrent"
)
TOWER = re.compile(r"vision|visual|image|audio|speech|multi_modal")
_SCALED = re.compile(r".*_multiplier|.*logits?_scal(e|ing)|scale_(emb|depth)")


def check_values(file: Path, value: Any, key: str = "config") -> None:
    """Raise InputError for a number, list or text that no model has."""
    if isinstance(value, dict):
        for name, item in value.items():
            check_values(file, item, name)
        return
    problem = None
    if isinstance(value, int | float) and not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        problem = f"{value:.3g}"
    elif isinstance(value, int) and _COUNTED.search(key) and not 0 <= value <= _MAX_COUNT:
        problem = f"{value:,}"
    elif isinstance(value, list | str) and len(value) > _MAX_LENGTH:
        problem = f"{len(value):,} elements long"
    if problem:
        raise InputError(f"{file}: {printable(key, 80)} is {problem}, which no model has")
    if isinstance(value, list):
        for item in value:
            check_values(file, item, key)


def build(file: Path, hf: dict[str, Any]) -> Model:
    """Return the model of a config.json on meta. Raises InputError; DataError where transformers is missing."""
    names, kind = hf.get("architectures"), str(hf.get("model_type"))
    name = str(names[0]) if isinstance(names, list) and names else "None"
    require("transformers", purpose=f"describing {printable(name, 80)}")
    with _contained(file):
        import transformers

        model_class = getattr(transformers, name, None)
        is_model = isinstance(model_class, type) and issubclass(model_class, nn.Module)
        if is_model and "model_type" not in hf:
            kind = model_class.config_class.model_type
        if kind not in transformers.CONFIG_MAPPING:
            code = "; Python code that comes with it is never run" if "auto_map" in hf else ""
            have = f"is none of transformers {transformers.__version__}{code}"
            raise InputError(f"model_type {printable(kind, 80)} of {printable(name, 80)} {have}")
        config_class = transformers.CONFIG_MAPPING[kind]
        # transformers 5 writes Infinity as a table.
        decode = getattr(config_class, "_decode_special_floats", _passive)
        config = config_class.from_dict(decode(_passive(hf)))
        # In this form of experts, shapes do not depend on where tokens go.
        config._experts_implementation = "batched_mm"
        if not is_model or not isinstance(config, model_class.config_class or ()):
            # config.json names no class, or one of another package.
            auto = (getattr(transformers, f"AutoModel{task}") for task in _TASKS)
            model_class = next(a for a in auto if type(config) in a._model_mapping)
        build = getattr(model_class, "_from_config", None) or model_class.from_config
        with torch.device("meta"):
            return build(config).eval()


def on_disk(file: Path, model: Model) -> dict[str, list[int]]:
    """Return the names and shapes of the tensors that transformers would save."""
    with _contained(file):
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(model, model.state_dict())
        return {name: list(tensor.shape) for name, tensor in tensors.items()}


def counts(file: Path, model: Model, seq_len: int) -> dict[str, Any]:
    """Return parameters, active and in embeddings, and the operations of a training step for each token.

    The backward pass takes twice the products of the forward pass. Tied parameters count once.
    """
    parameters = {id(p): p.numel() for p in model.parameters()}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    ends = {id(p) for m in [*tables, model.get_output_embeddings()] if m for p in m.parameters()}
    total = sum(parameters.values())
    flops, active, problem = None, None, "its encoder and its decoder have sequences of their own"
    try:
        with _contained(file):
            if not model.config.is_encoder_decoder:
                flops, of_module = _forward_flops(model, seq_len)
                idle, needless = _idle(model, of_module)
                flops, active, problem = flops / seq_len - needless, total - idle, ""
    except InputError as error:
        problem = str(error).removeprefix(f"{file}: ")
    return {
        "parameters": total,
        "active_parameters": active,
        "embedding_parameters": sum(n for key, n in parameters.items() if key in ends),
        "seq_len": seq_len,
        "flops_per_token": flops and round(3 * flops),
        "flops_problem": problem,
    }


def features(model: Model) -> list[str]:
    """Return in words what the config and the tensors of a model show that no family of titan has."""
    config, text = model.config, model.config.get_text_config()
    values = {key: value for key, value in vars(text).items() if value is not None}
    dims = {name: p.dim() for name, p in model.named_parameters() if not TOWER.search(name)}
    kinds = {
        type(module).__name__ for name, module in model.named_modules() if not TOWER.search(name)
    }
    layers = [
        str(kind) for key in ("layer_types", "attention_layers") for kind in values.get(key) or ()
    ]
    slides = re.search("sliding|chunked|local", " ".join(layers))
    # Models whose layers have no types have one window for all of them.
    slides = slides or (
        not layers
        and text.__dict__.get("sliding_window")
        and values.get("use_sliding_window", True)
    )
    texts = {key: value for key, value in values.items() if isinstance(value, str)}
    act = [
        v
        for k, v in texts.items()
        if re.search("act$|activation", k) and v not in ("silu", "swish")
    ]
    rope = values.get("rope_parameters") or {}
    ropes = [table for table in (rope, *rope.values()) if isinstance(table, dict)]
    biased = [n[: -len(".bias")] for n in dims if n.endswith(".bias")]
    biased = {n.split(".")[-1] for n in biased if dims.get(f"{n}.weight") == 2}
    found = {
        "an encoder beside the decoder": config.is_encoder_decoder,
        "inputs other than text (multi-modal)": any(map(TOWER.search, config.sub_configs)),
        "state-space or other recurrent layers": any(map(_RECURRENT.search, [*dims, *layers])),
        "sliding-window attention": slides,
        "attention sinks": any(name.endswith("sinks") for name in dims),
        "biases": biased,
        "learned positions": {n for n in dims if re.search(r"wpe|embed_pos|position_emb", n)},
        "LayerNorm in place of RMSNorm": any(
            re.search("(?<!RMS)(?<!T5)LayerNorm", k) for k in kinds
        ),
        "the activation": act[:1],
        "rotary scaling": {str(r.get("rope_type", "default")) for r in ropes}
        - {"default", "llama3"},
        "rotation of a part of each head": any(
            r.get("partial_rotary_factor", 1) != 1 for r in ropes
        ),
        "soft-capped logits": any("softcap" in key for key in values),
        "scaling by": {
            key for key, v in values.items() if _SCALED.fullmatch(key) and v not in (1, False)
        },
    }
    return [
        what
        if isinstance(value, bool | re.Match | int)
        else f"{what} {', '.join(sorted(value)[:6])}"
        for what, value in found.items()
        if value
    ]


# ---- counting --------------------------------------------------------------------------------------


class _Shapes(TorchDispatchMode):
    """Run code on meta that looks at values: all of them are ones, so no mask hides anything. Count operations."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


def _forward_flops(model: Model, seq_len: int) -> tuple[float, dict[str, float]]:
    """Return the products of a forward pass over a sequence, and those of each module for one token.

    Some recurrent layers loop over tokens in Python, which takes minutes. Their products are a polynomial of degree two in
    the length, of which three short sequences give all coefficients.
    """
    (a, ops_a, of_module), (b, ops_b, _) = _run(model, 8), _run(model, 16)
    if ops_a != ops_b:
        c, ops_c, _ = _run(model, 64)
        # As many operations for each token: no loop over chunks, which would begin another way.
        if ops_c - ops_b == 6 * (ops_b - ops_a):
            slope = (b - a) / 8
            bend = ((c - b) / 48 - slope) / 56
            total = a + slope * (seq_len - 8) + bend * (seq_len - 8) * (seq_len - 16)
            return total, {name: flops / 8 for name, flops in of_module.items()}
    total, _, of_module = _run(model, seq_len)
    return total, {name: flops / seq_len for name, flops in of_module.items()}


def _run(model: Model, seq_len: int) -> tuple[int, int, dict[str, int]]:
    """Return products and operations of a forward pass on meta, and the products of each module."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The one form of attention that is made of products, which the counter sees on any device.
    with torch.no_grad(), torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        tokens = torch.zeros(1, seq_len, dtype=torch.long)
        with _Shapes() as shapes, FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, use_cache=False)
    modules = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return counter.get_total_flops(), shapes.num_operations, modules


def _idle(model: Model, flops_of: dict[str, float]) -> tuple[int, float]:
    """Return the parameters of experts that a token does not go to, and products with them that are computed all the same.

    Products show how many experts a token goes to. Some classes compute all experts and multiply most results by 0.
    """
    idle, needless, root = 0.0, 0.0, type(model).__name__
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False)]
        matrices = sum(p.numel() for p in own if p.dim() > 1)
        if not matrices or "expert" not in f"{name} {type(module).__name__}".lower():
            continue
        used = needed = min(flops_of.get(f"{root}.{name}", 0) / (2 * matrices), 1)
        if own[0].dim() == 3 and isinstance(top_k, int):
            needed = min(used, top_k / len(own[0]))
        needless += 2 * matrices * (used - needed)
        idle += sum(p.numel() for p in own) * (1 - needed)
    return round(idle), needless


# ---- transformers' code ----------------------------------------------------------------------------


def _passive(value: Any) -> Any:
    """Return a part of config.json without what transformers would act on."""
    if isinstance(value, list):
        return [_passive(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _passive(item) for key, item in value.items() if not _ACTIVE.fullmatch(key)}


@contextmanager
def _contained(file: Path) -> Iterator[None]:
    """Run transformers' code quietly, offline, for a limited time. Whatever it raises becomes an InputError."""
    import huggingface_hub.constants as hub

    def stop(*_: Any) -> None:
        raise TimeoutError(f"this takes more than {_SECONDS} s")

    before, offline = signal.signal(signal.SIGALRM, stop), hub.HF_HUB_OFFLINE
    signal.alarm(_SECONDS)
    logging.disable(logging.ERROR)
    hub.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    except Exception as error:  # any of hundreds of classes may raise anything
        why = printable(" ".join(str(error).split()), 200)
        raise InputError(f"{file}: transformers says {type(error).__name__}: {why}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        logging.disable(logging.NOTSET)
        hub.HF_HUB_OFFLINE = offline
