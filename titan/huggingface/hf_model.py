"""Model of titan in the terms of a Hugging Face folder: names, shapes and files of its tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan.checkpoint import CheckpointError
from titan.checkpoint.state import model_state
from titan.config.model import family
from titan.data import require
from titan.data.unread import file_line

INDEX = "model.safetensors.index.json"
OF_DIFFUSERS = "diffusion_pytorch_"  # comes before the names of its files
# Experts as transformers 5 has them in memory, and saves them with save_original_format=False: in one tensor (E, 2 I, D) gate over up.
FUSED = ".experts.gate_up_proj"


def differences(sizes: Any, other: Any) -> dict[str, Any]:
    """Return the fields, with their values in `sizes`, in which two models differ.

    Fields about initialization and balancing do not count, and those of YaRN only with it.
    """
    ignored = ("init_std", "_coeff", "rope_mscale")[: 2 + (not sizes.rope_factor)]
    return {
        f.name: value
        for f in dataclasses.fields(sizes)
        if f.init
        and not f.name.endswith(ignored)
        and getattr(other, f.name, None) != (value := getattr(sizes, f.name))
    }


# What a family's huggingface.py may leave out.
_LEFT_OUT: dict[str, Any] = {
    "SPELLINGS": (),
    "differences": differences,
    "hf_buffer": lambda name, sizes: None,
    "hf_copies": lambda sizes: {},
    "hf_files": lambda sizes: {},
    "hf_part": lambda name: None,
    "hf_unread": None,
    "hf_unused": lambda config, sizes: (),
}


class DiskTensor(NamedTuple):
    """A tensor on disk, and what it contains: a parameter, one expert's part of a parameter, or several parameters.

    Several parameters in `HFModel.parts` alternate by channel. Other parameters are concatenated (`joined_dim`).

    Attributes:
        ours: our names of the parameters.
        expert: number of the expert, or None for the whole parameter.
        shape: shape on disk.
    """

    ours: tuple[str, ...]
    expert: int | None
    shape: torch.Size


@dataclass(frozen=True)
class HFModel:
    """A model of titan, and the names that transformers gives its tensors.

    Attributes:
        name: name of the family.
        sizes: sizes of the model.
        hooks: the family's huggingface.py, with the defaults of what it leaves out.
        names: our names to the names on disk, in the model's order, without buffers that are not on disk. A parameter that is
            stacked by expert is many tensors on disk, and {} stands for the expert's number.
        parts: parameters that are a part of one tensor on disk, with the first of their channels there, and the stride to the
            next channel.
        shapes: shapes by our names.
        buffers: dtypes of state that is not trained, by our names. A tied output layer is not among them.
        copies: additional tensors in a folder, each a copy of one of our tensors.
    """

    name: str
    sizes: Any
    hooks: Any
    names: dict[str, str]
    parts: dict[str, tuple[int, int]]
    shapes: dict[str, torch.Size]
    buffers: dict[str, torch.dtype]
    copies: dict[str, str] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(name: str, sizes: Any) -> HFModel:
        """Return the model of a family with these sizes.

        Raises:
            CheckpointError: the family has no Hugging Face form.
            DataError: safetensors is not installed.
        """
        require("safetensors", purpose="reading and writing Hugging Face folders")
        hooks = hooks_of(name)
        if hooks is None:
            raise CheckpointError(
                f'model family "{name}" has no Hugging Face form: its package has no huggingface.py'
            )
        with torch.device("meta"):
            model = family(name).build_model(sizes)
        state = {key.removeprefix("model."): t for key, t in model_state([model]).items()}
        parameters = {ours for ours, _ in model.named_parameters()}
        buffers = {ours: t.dtype for ours, t in state.items() if ours not in parameters}
        hf_name = hooks.hf_name_of(sizes)
        names = {
            ours: hooks.hf_buffer(ours, sizes) if ours in buffers else hf_name(ours)
            for ours in state
        }
        names = {ours: theirs for ours, theirs in names.items() if theirs}
        parts = {ours: part for ours in names if (part := hooks.hf_part(ours))}
        return HFModel(
            name,
            sizes,
            hooks,
            names,
            parts,
            {ours: t.shape for ours, t in state.items()},
            buffers,
        )

    def with_copies(self) -> HFModel:
        """Return the model as it is exported, with the copies of embeddings that readers of its MTP modules expect."""
        return dataclasses.replace(self, copies=self.hooks.hf_copies(self.sizes))

    def spelled_as(self, files: Collection[str]) -> HFModel:
        """Return the model with the names of a folder's tensors, if they have another prefix from the family's SPELLINGS."""
        names = self.names
        for ours, theirs in self.hooks.SPELLINGS:
            if not any(name.startswith(ours) for name in files):
                names = {
                    n: re.sub(f"^{re.escape(ours)}", theirs, name) for n, name in names.items()
                }
        if any(name.endswith(FUSED) for name in files):
            of_one = r"\.\{\}\.(?:gate|up|(down))_proj\.weight$"
            names = {
                n: re.sub(of_one, lambda m: f".{m[1] or 'gate_up'}_proj", name)
                for n, name in names.items()
            }
        return dataclasses.replace(self, names=names)

    @property
    def architecture(self) -> str:
        """Return the name of the model's class in transformers."""
        config = self.hooks.hf_config(self.sizes)
        return config.get("_class_name") or config["architectures"][0]

    @property
    def off_disk(self) -> list[str]:
        """Return our names of the floating-point buffers that a folder does not contain.

        Integer buffers count the events of a run, and are not part of a model.
        """
        return [
            ours
            for ours, dtype in self.buffers.items()
            if dtype.is_floating_point and ours not in self.names
        ]

    @cached_property
    def on_disk(self) -> dict[str, DiskTensor]:
        """Return the tensors on disk by their names, in the model's order."""
        tensors: dict[str, DiskTensor] = {}
        for ours, theirs in self.names.items():
            shape = self.shapes[ours]
            before = tensors.get(theirs)
            if part := self.parts.get(ours):
                shape = torch.Size((shape[0], *shape[2:], shape[1] * part[1]))
            elif before is not None:
                sizes, dim = [*shape], joined_dim(theirs)
                sizes[dim] += before.shape[dim]
                shape = torch.Size(sizes)
            elif "{}" in theirs:
                for expert in range(shape[0]):
                    tensors[theirs.format(expert)] = DiskTensor((ours,), expert, shape[1:])
                continue
            names = (*before.ours, ours) if before else (ours,)
            tensors[theirs] = DiskTensor(names, None, shape)
        return tensors | {
            n: DiskTensor((o,), None, self.shapes[o]) for n, o in self.copies.items()
        }

    def joined(self, ours: Sequence[str], tensors: Sequence[Tensor]) -> Tensor:
        """Join our tensors into their tensor on disk."""
        if ours[0] in self.parts:
            return torch.stack([t.mT if t.ndim == 3 else t for t in tensors], -1).flatten(-2)
        return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim=-1)

    def origin(self, ours: str) -> list[int]:
        """Return where a parameter begins in its tensor on disk, along each dimension."""
        theirs = self.names[ours]
        tensor = None if ours in self.parts else self.on_disk.get(theirs)
        found = [0] * len(self.shapes[ours])
        for name in tensor.ours[: tensor.ours.index(ours)] if tensor else ():
            found[joined_dim(theirs)] += self.shapes[name][joined_dim(theirs)]
        return found


def joined_dim(theirs: str) -> int:
    """Return the dimension along which several parameters are one tensor on disk: the columns, or the rows of fused experts."""
    return -2 if theirs.endswith(FUSED) else -1


def hooks_of(name: str) -> Any:
    """Return the names of a family's huggingface.py, or None if it has no complete one (docs/architecture.md)."""
    package = family(name)
    # A family of another package may be one file.
    name = f"{package.__name__}.huggingface" if hasattr(package, "__path__") else ""
    given = vars(import_module(name)) if name and find_spec(name) else {}
    if "read_config" not in given:
        return None
    names = {"hf_name_of": lambda _: given["hf_name"], **_LEFT_OUT, **given}
    return SimpleNamespace(**names)


def unread_keys(file: Path, config: dict[str, Any], hooks: Any, sizes: Any) -> list[str]:
    """Return a warning about keys of a config.json that no model of titan has, or an empty list."""

    def unknown(config: dict[str, Any], known: dict[str, Any], at: str = "") -> Iterator[str]:
        for key, value in config.items():
            if isinstance(value, dict) and isinstance(known.get(key), dict):
                yield from unknown(value, known[key], f"{at}{key}.")
            elif value and key not in known:
                yield at + key

    if hooks.hf_unread:
        return file_line(file, hooks.hf_unread(config, sizes))
    # An export has all keys that the family reads.
    return file_line(file, unknown(config, hooks.hf_config(sizes)))
