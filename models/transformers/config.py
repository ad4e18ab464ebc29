"""Description of a model of `transformers`: its config.json, and the sizes that the model itself has on meta.

Importing this file imports neither torch nor transformers. `resolve` imports both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..common.moe_config import MoEConfig
from .errors import UnsupportedModelError

OLDEST, NEWEST = (5, 20), (5, 99)
"""Versions of transformers whose interfaces for attention, masks and experts this family uses."""

# Fields by what they mean, each with the names that config classes give it.
NAMES: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn_dim": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab_size": ("vocab_size",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_k", "moe_topk", "experts_per_token"),
    "expert_dim": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "window": ("sliding_window",),
    "tied_embeddings": ("tie_word_embeddings",),
}

NOTES = {
    *(
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "architectures",
    ),
    *("id2label", "label2id", "problem_type", "return_dict", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "chunk_size_feed_forward"),
}
"""Fields that are of a file or of a call, and do not decide what a model computes."""


class Source(NamedTuple):
    """What a model is built from.

    Attributes:
        hf: content of config.json, with all defaults, as JSON.
        plan: styles of [model.plan], which take precedence over the derived ones.
        code: folder whose own Python code defines the model. Empty: transformers does.
    """

    hf: str
    plan: tuple[tuple[str, str], ...] = ()
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(MoEConfig):
    """Sizes of a model of transformers, read from the module on meta.

    Attributes:
        source: what the model is built from.
        first_modules: names of the modules before the blocks, the embedding first.
        final_modules: names of the modules after the blocks.
        params: number of parameters, of all blocks and ends.
        params_of_blocks: number of parameters of each block.
        experts_of_blocks: number of parameters of each block's routed experts.
        matmul_params: number of parameters in matmuls that act on one token, with the output layer.
        windows: window of each block, 0 for none.
        refuses: techniques that the model cannot have, each with the reason.
    """

    source: Source
    first_modules: tuple[str, ...]
    final_modules: tuple[str, ...]
    params: int
    params_of_blocks: tuple[int, ...]
    experts_of_blocks: tuple[int, ...]
    matmul_params: int
    windows: tuple[int, ...]
    refuses: tuple[tuple[str, str], ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields of config.json that decide what the model computes."""
        content = json.loads(self.source.hf)
        return {k: v for k, v in content.items() if k not in NOTES and not k.endswith("_token_id")}

    counts_loads: ClassVar[bool] = False  # of experts: transformers' routers do not tell

    @property
    def last_modules(self) -> tuple[str, ...]:
        """Return the names of the modules after the blocks."""
        return self.final_modules

    def window_of(self, layer: int) -> int:
        """Return the number of keys that a query of a layer sees, its own included. 0: all keys up to its own."""
        return self.windows[layer]

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a block has experts."""
        return self.experts_of_blocks[layer] > 0

    @property
    def num_expert_params(self) -> int:
        """Return the number of parameters of one expert."""
        return max(self.experts_of_blocks) // max(1, self.num_experts)

    @property
    def num_block_params(self) -> int:
        """Return the number of parameters of the last block."""
        return self.params_of_blocks[-1]

    def block_params(self, layer: int, *, active: bool = False) -> int:
        """Return the number of parameters of a block, or of those that act on one token."""
        experts = self.experts_of_blocks[layer] if active else 0
        unused = experts * (self.num_experts - self.top_k) // max(1, self.num_experts)
        return self.params_of_blocks[layer] - unused

    @property
    def num_params(self) -> int:
        """Return the number of parameters. Tied embeddings count once."""
        return self.params

    @property
    def num_active_params(self) -> int:
        """Return the number of parameters that act on one token."""
        layers = range(self.n_layers)
        return self.params - sum(
            self.block_params(n) - self.block_params(n, active=True) for n in layers
        )

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> int:
        """Return the floating-point operations of forward and backward for one token, of active parameters only.

        Args:
            seq_len: Tokens of a sequence.
            causal: Count only the pairs of queries and keys that a causal mask leaves.
        """
        return 6 * self.matmul_params + self.attention_flops_per_token(seq_len, causal=causal)


def resolve(section: Any) -> tuple[TransformersConfig | None, list[tuple[str, str]]]:
    """Return the sizes of a [model] section, or None, and the problems of the section by key.

    Args:
        section: the [model] section of a job.
    """
    try:
        plan = tuple(sorted(section.plan.items()))
        named = str(Path(section.hf_path).absolute()) if section.hf_path else ""
        overrides = tuple(section.overrides.items())
        found = _read(named, section.architecture, overrides, section.trust_remote_code)
        return describe(found._replace(plan=plan)), []
    except _WrongKeyError as error:
        return None, [*error.args]
    except UnsupportedModelError as error:
        key = "model.hf_path" if section.hf_path else "model.architecture"
        return None, [(key, str(error))]


class _WrongKeyError(ValueError):
    """Problems of the section: each a key and a message."""


@cache
def _read(path: str, architecture: str, overrides: tuple[Any, ...], trusted: bool) -> Source:
    """Return what a model is built from, without its plan."""
    if bool(path) == bool(architecture):
        raise _WrongKeyError(
            (
                "model.hf_path",
                'the family "transformers" needs model.hf_path (a folder, or a config.json) or model.architecture '
                '(a class, such as "Qwen3ForCausalLM"), one of them',
            )
        )
    transformers = _import()
    code = ""
    if path:
        content = _config_json(Path(path))
        kind = str(content.get("model_type", ""))
        if "auto_map" in content and kind not in transformers.CONFIG_MAPPING:
            if not trusted:
                raise UnsupportedModelError(
                    "its model is Python code in the folder, which could do anything: set model.trust_remote_code = true if you "
                    "have read it"
                )
            code = path if Path(path).is_dir() else str(Path(path).parent)
            config = transformers.AutoConfig.from_pretrained(code, trust_remote_code=True)
        elif kind not in transformers.CONFIG_MAPPING:
            near = get_close_matches(kind, [*transformers.CONFIG_MAPPING], n=1)
            hint = f"; did it mean {near[0]}?" if near else ""
            raise UnsupportedModelError(
                f'transformers {transformers.__version__} has no model_type "{kind}"{hint}'
            )
        else:
            config = _checked(lambda: transformers.CONFIG_MAPPING[kind].from_dict(content))
    else:
        kind = getattr(transformers, architecture, None)
        if kind is None or getattr(kind, "config_class", None) is None:
            names = [n for n in dir(transformers) if n.endswith("ForCausalLM")]
            near = get_close_matches(architecture, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"transformers {transformers.__version__} has no {architecture}{hint}"
            raise _WrongKeyError(("model.architecture", message))
        config = _checked(kind.config_class)
        config.architectures = [architecture]
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder with a decoder, and titan trains decoders alone"
        )
    overrides = tuple((_their_name(key, config), value) for key, value in overrides)
    if not hasattr(config, "num_hidden_layers"):
        raise UnsupportedModelError(
            f"{config.model_type} has several parts, such as a vision model, and titan trains text models"
        )
    for key, _ in overrides:
        if not hasattr(config, key) and not any(key in names for names in NAMES.values()):
            near = get_close_matches(key, [*config.to_dict()], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"the config of {config.model_type} has no such field{hint}"
            raise _WrongKeyError((f"model.overrides.{key}", message))
    # Through the class again, which derives fields from others, such as a kind for each layer.
    content = {**config.to_dict(), **dict(overrides)}
    number: Any = content.get(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    if number != config.num_hidden_layers:
        by_layer = {k: v for k, v in content.items() if _is_by_layer(v, config.num_hidden_layers)}
        # Without a value for a layer, the class makes the values anew.
        content |= {k: v[:number] if number <= len(v) else None for k, v in by_layer.items()}
    if not code:
        config = _checked(lambda: type(config).from_dict(content))
    content = config.to_dict()
    return Source(json.dumps(content, sort_keys=True, default=str), code=code)


def _their_name(key: str, config: Any) -> str:
    """Return the name of a field in a config class. titan's name for it, such as n_layers, is accepted, too."""
    if hasattr(config, key):
        return key
    return next((name for name in NAMES.get(key, ()) if hasattr(config, name)), key)


def _is_by_layer(value: Any, number: int) -> bool:
    """Return whether a field has a value for each of a number of layers."""
    return isinstance(value, list) and len(value) == number > 0


def _checked(build: Any) -> Any:
    """Return a config, or raise UnsupportedModelError if transformers refuses its values."""
    try:
        return build()
    except Exception as error:
        text = " ".join(str(error).split())
        raise UnsupportedModelError(f"transformers refuses the config: {text[:300]}") from error


def _config_json(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModelError(f"there is no {file}") from None
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{file} is not a table of fields")
    return content


def _import() -> Any:
    """Return the package transformers, of a version that this family knows."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise UnsupportedModelError(
            "transformers is not installed: pip install 'titan-pretrain[transformers]'"
        ) from None
    if not OLDEST <= tuple(int(part) for part in found.split(".")[:2]) <= NEWEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedModelError(
            f"transformers {found} is installed, and titan uses interfaces of {oldest} to {NEWEST[0]}.x: "
            "pip install 'titan-pretrain[transformers]'"
        )
    import torch

    from titan.parallel.float8 import quiet_torchao

    quiet_torchao(has_kernels=torch.cuda.is_available())  # transformers imports it
    import transformers

    return transformers


def resolve_config(content: dict[str, Any]) -> TransformersConfig:
    """Return the sizes of a config.json.

    Raises:
        UnsupportedModelError: titan cannot run the model.
    """
    transformers = _import()
    kind = str(content.get("model_type", ""))
    if kind not in transformers.CONFIG_MAPPING:
        raise UnsupportedModelError(
            f'transformers {transformers.__version__} has no model_type "{kind}"'
        )
    config = _checked(lambda: transformers.CONFIG_MAPPING[kind].from_dict(content))
    return describe(Source(json.dumps(config.to_dict(), sort_keys=True, default=str)))


@cache
def describe(source: Source) -> TransformersConfig:
    """Return the sizes of a model, which is built on meta.

    Raises:
        UnsupportedModelError: titan cannot run the model.
    """
    import torch

    from .model import TransformersModel

    with torch.device("meta"):
        model = TransformersModel(source)
    return model.config
