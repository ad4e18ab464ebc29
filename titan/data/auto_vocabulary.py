"""`model.overrides.vocab_size = "auto"`: the size of the job's tokenizer, put into the job before its keys are checked.

So all commands, the run folder and its checkpoints see the number.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from titan.base.untrusted import InputError
from titan.config.errors import ConfigError, SourceLocation, SourceMap
from titan.config.layer import ConfigLayer, LoadExtension
from titan.config.schema import TokenizerSection


class AutoVocabulary(LoadExtension):
    """Replaces "auto" by the tokenizer's number of ids, rounded up to a multiple of 8."""

    def complete(self, data: dict[str, Any], locations: dict[str, SourceLocation]) -> list[str]:
        overrides = ConfigLayer(data, locations).table_of("model.overrides.vocab_size")
        if overrides.get("vocab_size") != "auto":
            return []
        from titan.data.tokenizer import build_tokenizer  # its libraries take a moment

        # The model is as the flavor says if the tokenizer is wrong, so that the rest can be checked.
        del overrides["vocab_size"]
        assets = str(data["model"].get("hf_assets_path", ""))
        try:
            section = TokenizerSection.model_validate(data.get("tokenizer", {}))
        except ValidationError:
            return []  # it is reported with the mistakes of the other keys
        try:
            size = build_tokenizer(section, hf_assets_path=assets).vocab_size
        except InputError as error:
            key = "tokenizer.path" if section.path else "model.hf_assets_path"
            problem = SourceMap(locations=locations).problem(key, str(error))
            raise ConfigError([problem]) from error
        # Tensor cores want sizes of matrices in multiples of 8.
        overrides["vocab_size"] = -(-size // 8) * 8
        return []
