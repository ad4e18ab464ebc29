"""Model zoo, installed as `titan.models`: one folder for each family.

docs/architecture.md lists the contents of a folder.
"""

from __future__ import annotations

_CLASSES = {
    "gemma3": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
RETIRED = {
    name: f'titan no longer has "{name}", which transformers\' own class replaces: write name = "transformers", with hf_path = a '
    f'folder or a config.json, or with architecture = "{kind}" and overrides of its config (docs/models.md)'
    for name, kind in _CLASSES.items()
}
"""Advice for each family that titan no longer has, by its name."""
