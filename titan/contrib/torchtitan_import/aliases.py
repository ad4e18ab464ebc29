"""Keys of TorchTitan v0.2.2's files that titan renames or does not use.

A renamed key moves to its new place, with a warning. A key that titan does not use is ignored, with a warning, unless its
value turns something on: then it is an error. The tables are applied to each file before files are merged, so that an overlay
may use a new name for a key that an older file calls by its old name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from titan.config.errors import Problem, SourceLocation, key_text
from titan.config.layer import ConfigLayer, LoadExtension, last
from titan.config.model import family
from titan.config.schema import ModelSection

# Old key and its new place.
RENAMED: dict[str, str] = {
    "model.tokenizer_path": "tokenizer.path",
    "fault_tolerance.group_size": "fault_tolerance.replica_groups",
    "fault_tolerance.min_replica_size": "fault_tolerance.min_replicas",
}

# Keys that titan does not use, with the value that turns nothing on. False and empty values turn nothing on either.
UNUSED: dict[str, Any] = {
    "activation_checkpoint.debug": False,
    "activation_checkpoint.determinism_check": "default",
    "activation_checkpoint.early_stop": False,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
    "activation_checkpoint.visualize_memory_budget_pareto": False,
    "checkpoint.enable_ft_dataloader_checkpoints": True,
    "checkpoint.initial_load_in_hf_quantized": False,
    "comm.mode": "default",
    "debug.deterministic_warn_only": False,
    "experimental.custom_args_module": "",
    "experimental.custom_import": "",
    "fault_tolerance.semi_sync_method": "",
    "job.custom_config_module": "",
    "memory_estimation": {},
    "model.print_after_conversion": False,
    "parallelism.expert_parallel_comm_backend": "standard",
    "parallelism.pipeline_parallel_expert_parallel_overlap": True,
    "quantize.grouped_mm.mx.recipe_name": "mxfp8",
    "training.gc_debug": False,
}
# Keys that change nothing here, whatever their value.
IGNORED = (
    "job.save_config_file",
    "training.dataloader.persistent_workers",
    "validation.dataloader",
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice",
    "fault_tolerance.process_group",
    "fault_tolerance.sync_steps",
    "fault_tolerance.should_quantize",
    "fault_tolerance.fragment_sync_delay",
    "fault_tolerance.fragment_update_alpha",
)
# Replacements for some of these keys.
_INSTEAD = {
    "fault_tolerance.semi_sync_method": "replica groups sum their gradients in every step. Over a slow link use HSDP in place of groups "
    "(parallelism.data_parallel_replicate_degree)",
    "job.custom_config_module": "register your parts through entry points (titan.models, titan.optimizers, titan.losses, titan.sources)",
    "memory_estimation": "use `titan check`, which estimates memory without a GPU",
    "parallelism.expert_parallel_comm_backend": 'use "standard", an all-to-all; DeepEP is not built',
}


# "8B_flex" and "debugmodel_varlen_attn" name the kernel of attention. Here the device decides on it (titan/parallel/documents.py).
_MASKED_FLAVOR = re.compile(r"(.+)_(?:flex|varlen)(?:_attn)?")


class TorchTitanFiles(LoadExtension):
    """Old names, unused keys and flavors of TorchTitan's files."""

    def rename(self, layer: ConfigLayer) -> tuple[list[str], list[Problem]]:
        """Apply the tables to a layer, in place.

        Args:
            layer: Content of one file.

        Returns:
            Warnings and problems.
        """
        warnings: list[str] = []
        problems: list[Problem] = []
        for old, new in RENAMED.items():
            table = layer.table_of(old)
            if last(old) not in table:
                continue
            location = layer.locations[old]
            # Within one file neither of the two wins.
            if other := layer.locations.get(new):
                message = f"is the old name of {new}, which {other} sets too; keep {new} only"
                problems.append(location.problem(message))
                layer.remove(old)
                continue
            layer.move(old, new, table[last(old)])
            warnings.append(f"{location}: {old} is now {new}")
        for key in (*IGNORED, *UNUSED):
            if last(key) not in layer.table_of(key):
                continue
            value, location = layer.remove(key), layer.locations[key]
            if key in IGNORED or _is_off(value) or UNUSED[key] == value:
                warnings.append(f"{location}: {key} is ignored: titan has no use for it")
                continue
            # Name each key of a section that turns something on.
            keys = [key]
            if isinstance(value, dict):
                keys = [
                    f"{key}.{key_text([k])}" for k, inner in value.items() if not _is_off(inner)
                ]
            message = f"titan has no such setting; {_INSTEAD.get(key, 'remove the key')}"
            problems += [layer.locations[k].problem(message) for k in keys]
        return warnings, problems

    def complete(self, data: dict[str, Any], locations: dict[str, SourceLocation]) -> list[str]:
        """Replace a masked flavor of TorchTitan by its plain flavor and data.document_mask.

        TorchTitan has some flavors twice, the second time with document masks.

        Args:
            data: The merged job, which is changed in place.
            locations: Places of its keys, for the warnings.

        Returns:
            Warnings.
        """
        model, masks = data.get("model"), data.get("data", {})
        if not isinstance(model, dict) or not isinstance(masks, dict):
            return []
        if not (match := _MASKED_FLAVOR.fullmatch(str(model.get("flavor")))):
            return []
        with suppress(KeyError):  # a family that does not exist is reported later
            known = family(model.get("name", ModelSection.model_fields["name"].default)).FLAVORS
            if model["flavor"] not in known and match[1] in known:
                data["data"] = {"document_mask": True} | masks
                where, name, model["flavor"] = (
                    locations["model.flavor"],
                    model["flavor"],
                    match[1],
                )
                return [f"{where}: {name} is {match[1]} with data.document_mask = true"]
        return []


def _is_off(value: Any) -> bool:
    # A section that is switched off turns nothing on, whatever its other keys say.
    """Return whether a value turns nothing on."""
    if isinstance(value, dict):
        return value.get("enable") is False or all(map(_is_off, value.values()))
    return not value
