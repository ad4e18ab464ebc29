"""Sections about the model and its task. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .base import TOKENIZER_FILE, Permission, ReadWith, Section, StrList

_OF_TRANSFORMERS = ReadWith("name", ("transformers",))
_CODE = Permission("code", option="--trust-remote-code")


class ModelSection(Section):
    """Which model to train, and its size."""

    name: str = "llama3"
    """The model family: a folder in models/, or the name of an entry point `titan.models`."""
    flavor: str = "debugmodel"
    """A named size of the family, such as "8B"."""
    overrides: dict[str, int | float | bool | str | list[Any] | dict[str, Any]] = {}
    """Fields of the flavor's config to change, such as {n_layers = 4}."""
    hf_path: Annotated[str, _OF_TRANSFORMERS] = ""
    """For name = "transformers": a folder of Hugging Face, or a config.json, that says which model it is."""
    architecture: Annotated[str, _OF_TRANSFORMERS] = ""
    """For name = "transformers", in place of hf_path: a class, such as "Qwen3ForCausalLM". `overrides` are fields of its config."""
    plan: Annotated[dict[str, str], _OF_TRANSFORMERS] = {}
    """For name = "transformers": tensor-parallel styles of modules by pattern (docs/parallelism.md), before the derived ones."""
    trust_remote_code: Annotated[bool, _OF_TRANSFORMERS, _CODE] = False
    """For name = "transformers": run the Python code in the folder of hf_path."""
    hf_assets_path: Annotated[str, TOKENIZER_FILE] = ""
    """Folder with the tokenizer (tokenizer.json or tokenizer.model) and, for conversion from and to
    Hugging Face, safetensors and config.json."""
    attention_backend: Literal["auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"] = "auto"
    """Kernels of attention on a GPU. "auto": torch's order, which is cuDNN, FlashAttention-2, the
    memory-efficient kernel, plain operations on Hopper and Blackwell, and the same without cuDNN first
    elsewhere. Another name: that kernel, and the kernels after it in this order if it does not support a
    case. "fa3" and "fa4" are FlashAttention-3 and -4, which must be installed."""
    freeze: StrList = []
    """Patterns of names of parameters that are not trained, such as ["tok_embeddings.*", "layers.[0-3].*"].
    They get no gradients, no optimizer state and no decay. docs/checkpoints.md: how to begin from weights."""
    converters: StrList = []
    """Low-precision conversion of linear layers: "quantize.linear.float8" (or "float8") or
    "quantize.linear.mx". The section of the same name has its settings."""


class TaskSection(Section):
    """Task of the model, if it is not the usual task of its family."""

    name: str = ""
    """Empty: the task of the model's family, which is next-token prediction unless the family has
    another. "next_token", or the name of an entry point `titan.tasks`."""
    options: dict[str, int | float | bool | str] = {}
    """Options of the task, such as {image_size = 32}."""
