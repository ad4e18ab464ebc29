"""transformers itself, for the first row of a certificate: its own class with its own attention, built from the words of a job.

The words of a job of this family are a folder or a class, and overrides. Those of titan's own families are the config.json that titan
writes of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan.config.schema import JobConfig
from titan.huggingface.hf_model import hooks_of

from .config import TransformersConfig
from .resolve import _config_json, _import, _their_name

_NOT_OF_THE_MODEL = ("architectures", "dtype", "transformers_version", "quantization_config")


class Transformers:
    """transformers as the source of a job's model (titan.numerics.certify.source.Source)."""

    package = "transformers"

    def lacks(self, config: JobConfig) -> str:
        """Return why transformers has no model of a job, or ""."""
        hooks, sizes = hooks_of(config.model.name), config.model.sizes
        if isinstance(sizes, TransformersConfig):
            if sizes.source.code:
                return "the model is Python code of its folder"
            return dict(sizes.refuses).get("last_save_in_hf", "")
        if hooks is None or config.task.name not in ("", "next_token"):
            return f"transformers has no {config.model.name}"
        return ""

    def read_differently(self, config: JobConfig) -> str:
        """Return the fields of titan's config that differ from what transformers makes of the same words, or ""."""
        sizes = config.model.sizes
        if not isinstance(sizes, TransformersConfig):
            return ""
        ours = json.loads(sizes.source.hf)
        theirs = json.loads(json.dumps(config_of(config).to_dict(), default=str))
        names = [k for k in theirs if k not in _NOT_OF_THE_MODEL and ours.get(k) != theirs[k]]
        return "; ".join(
            f"{k} is {ours.get(k)}, and {theirs[k]} in transformers" for k in names
        )

    def load(self, config: JobConfig, folder: Path) -> nn.Module:
        """Return transformers' model with the weights of a folder.

        Raises:
            ValueError: tensors are missing, left over or of another shape.
        """
        transformers = _import()
        theirs = config_of(config, folder)
        theirs._experts_implementation = "eager"
        name = (theirs.architectures or [""])[0]
        kind: Any = getattr(transformers, name, None) or transformers.AutoModelForCausalLM
        model, told = kind.from_pretrained(
            folder,
            config=theirs,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        wrong = {what: sorted(map(str, names))[:3] for what, names in told.items() if names}
        if wrong:
            raise ValueError("; ".join(f"{k}: {', '.join(v)}" for k, v in wrong.items()))
        return model

    def logits(self, model: nn.Module, tokens_S: Tensor) -> Tensor:
        """Return the logits of one document, (S, V)."""
        return model(input_ids=tokens_S[None], use_cache=False).logits[0]

    def loss(self, model: nn.Module, tokens_S: Tensor) -> Tensor:
        """Return the class's own loss of one document."""
        return model(input_ids=tokens_S[None], labels=tokens_S[None], use_cache=False).loss

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model's parameters as a folder."""
        hf: Any = model
        hf.save_pretrained(folder)

    def tensors(self, folder: Path) -> dict[str, Tensor]:
        """Return all tensors of a folder by their names."""
        from safetensors.torch import load_file

        found: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            found |= load_file(file)
        return found


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
    return kind.from_dict({**given, **changes})
