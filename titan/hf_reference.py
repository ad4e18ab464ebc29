"""Build any model that transformers has on the meta device, count it, and say in words what sets it apart.

titan/check_hf.py is the caller. On meta, tensors have shapes and no memory, so models of any size are built whole, and
their forward pass runs without computing anything. FlopCounterMode counts its products.

config.json may come from anybody. Python code that comes with a model (`auto_map`) is never run, nothing is downloaded,
and whatever transformers raises becomes one line.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan.untrusted import InputError, printable

Model: TypeAlias = Any
"""A PreTrainedModel of transformers."""

# Limits on a stranger's numbers and lists: a loop over a billion layers takes for ever, even on meta.
_COUNTED = re.compile(r"(layers?|blocks?|experts?|heads|depth|stages)$")
_MAX_COUNT, _MAX_NUMBER = 4096, 2**40
# transformers would fetch code, kernels or weights for these, or needs packages for them.
_ACTIVE = re.compile(
    r"auto_map|_?(attn|experts)_implementation.*|quantization_config|.*pretrained.*"
)
_SECONDS = 120
# The auto classes to try for a config that names no class.
_TASKS = ("ForCausalLM", "ForImageTextToText", "ForSeq2SeqLM", "")
_TOWER = re.compile(r"vision|visual|image|audio|speech|multi_modal")
# What no family of titan has, and where it shows in `_lines`. A group becomes a part of the message.
_SIGNS = {
    "an encoder beside the decoder": r"^is_encoder_decoder True",
    "inputs other than text (multi-modal)": r"^sub \w*(?:vision|image|audio)",
    "state-space or other recurrent layers": r"^tensor .*(?:A_log|conv1d|time_decay|mlstm|rg_lru|\.conv\.)|"
    r"^layer_types (?:mamba|linear_att|conv|recurrent)",
    "sliding-window attention": r"^(?:layer_types|attention_layers) .*(?:sliding|chunked|local)|^sliding_window \d",
    "attention sinks": r"^tensor .*sinks$",
    "biases": r"^biased (\w+)",
    "learned positions": r"^tensor .*(?:wpe|embed_pos|position_emb)",
    "LayerNorm in place of RMSNorm": r"^class (?!.*(?:RMS|T5)LayerNorm).*LayerNorm",
    "the activation": r"^\w*(?:act|activation|activation_function) (?!silu|swish)([a-z]\w*)",
    "rotary scaling": r"^rope_type (?!default|llama3)(\w+)",
    "layers without rotation": r"^no_rope_layers 0",
    "rotation of a part of each head": r"^partial_rotary_factor (?!1$|1\.0$)",
    "norms in other places": r"^tensor .*(?:post_feedforward|post_mlp|pre_feedforward|query_layernorm|post_\w*_norm)",
    "one matrix for several projections": r"^tensor (?!.*expert).*(?:qkv|query_key_value|c_attn|gate_up_proj)",
    "attention beside the feed-forward layer": r"^(?:use_parallel_residual|parallel_attn) True",
    "soft-capped logits": r"softcap",
    "scaling by": r"^(\w+_multiplier|\w*logits?_scal(?:e|ing)|scale_(?:emb|depth)) (?!1$|1\.0$|False)",
}


def check_values(file: Path, hf: dict[str, Any]) -> None:
    """Raise InputError for a number, list or text that no model has."""
    for key, value in _flat(hf):
        is_long = isinstance(value, list | str)
        size = len(value) if is_long else value
        is_count = is_long or _COUNTED.search(key)
        low, high = (0, _MAX_COUNT) if is_count else (-_MAX_NUMBER, _MAX_NUMBER)
        if isinstance(size, int | float) and not low <= size <= high:
            what = f"has {size:,} elements" if is_long else f"is {size:.6g}"
            raise InputError(f"{file}: {printable(key, 80)} {what}, which no model has")


def _flat(value: Any, key: str = "config") -> Iterator[tuple[str, Any]]:
    """Yield the values of tables and lists at any depth, each with its nearest key."""
    yield key, value
    inner = ((key, item) for item in value) if isinstance(value, list) else ()
    for name, item in value.items() if isinstance(value, dict) else inner:
        yield from _flat(item, str(name))


def build(file: Path, hf: dict[str, Any]) -> Model:
    """Return the model of a config.json on meta. Raises InputError."""
    names, kind = hf.get("architectures"), str(hf.get("model_type"))
    name = str(names[0]) if isinstance(names, list) and names else "None"
    if not find_spec("transformers"):
        what = f"{printable(name, 80)} cannot be built without 'transformers'"
        raise InputError(f"{file}: {what}; install it with: pip install transformers")
    with _contained(file):
        import transformers

        # transformers has many names that are no models.
        model_class: Any = getattr(transformers, name, None)
        is_model = isinstance(model_class, type) and issubclass(
            model_class, transformers.PreTrainedModel
        )
        if is_model and "model_type" not in hf:
            kind = getattr(model_class.config_class, "model_type", "")
        if kind not in transformers.CONFIG_MAPPING:
            code = "; Python code that comes with it is never run" if "auto_map" in hf else ""
            have = f"is none of transformers {transformers.__version__}{code}"
            raise InputError(f"model_type {printable(kind, 80)} of {printable(name, 80)} {have}")
        passive = json.loads(json.dumps(hf), object_hook=_passive)
        config = transformers.CONFIG_MAPPING[kind].from_dict(passive)
        # In this form of experts, shapes do not depend on where tokens go.
        config._experts_implementation = "batched_mm"
        with torch.device("meta"):
            if is_model and isinstance(config, model_class.config_class or ()):
                return model_class._from_config(config).eval()
            # config.json names no class, or one of another package.
            auto = (getattr(transformers, f"AutoModel{task}") for task in _TASKS)
            return (
                next(a for a in auto if type(config) in a._model_mapping).from_config(config).eval()
            )


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


def features(model: Model) -> Iterator[str]:
    """Yield in words what the config and the tensors of a model show that no family of titan has."""
    lines = "\n".join(_lines(model))
    for what, sign in _SIGNS.items():
        pattern = re.compile(sign, re.MULTILINE)
        if found := {match[pattern.groups] for match in pattern.finditer(lines)}:
            yield f"{what} {', '.join(sorted(found)[:6])}" if pattern.groups else what


def _lines(model: Model) -> Iterator[str]:
    """Yield keys with their values, classes and tensors of a model's part for text, a line each."""
    config, text = model.config, model.config.get_text_config()
    values = {key: value for key, value in vars(text).items() if value is not None}
    if values.get("layer_types"):  # these say which layers have the window
        values.pop("sliding_window", None)
    values |= {"is_encoder_decoder": config.is_encoder_decoder, "sub": [*config.sub_configs]}
    yield from (f"{key} {value}" for key, value in _flat(values))
    parts = [(n, m) for n, m in model.named_modules() if not _TOWER.search(n)]
    yield from (f"class {type(module).__name__}" for _, module in parts)
    for name, module in parts:
        dims = {key: p.dim() for key, p in module.named_parameters(recurse=False)}
        yield from (f"tensor {name}.{key}" for key in dims)
        if "bias" in dims and dims.get("weight") == 2:
            yield f"biased {name.split('.')[-1]}"


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


def _passive(table: dict[str, Any]) -> Any:
    """Return a table of config.json without what transformers would act on."""
    if "__float__" in table:  # as transformers 5 writes infinity
        return float(table["__float__"])
    return {key: value for key, value in table.items() if not _ACTIVE.fullmatch(key)}


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
