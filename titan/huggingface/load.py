"""Loading of weights from a Hugging Face folder: config.json and safetensors, as `transformers` writes them.

`load` fills a model on any layout. Rank 0 checks the folder by the headers of its files: the model, its tensors, and their
shapes. Then each rank maps the files that contain parts of its shards, and copies these slices. No rank ever has more of the
model than its own part and one slice of one tensor, and ranks send each other nothing. Pickles (.bin, .pth) are never opened.
docs/huggingface.md describes all this for users.

DCP's HuggingFaceStorageReader is not used: it opens every file of the folder without a bound on the header, and it checks
neither the index, nor links, nor that weights are finite. Its writer writes shards that rank 0 then reads and writes again.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from titan.base.untrusted import (
    MAX_VALUES,
    is_plain_name,
    is_there,
    open_regular,
    printable,
    read_json,
    root_of,
)
from titan.checkpoint import CheckpointError
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.tensors import StateDict
from titan.config.model import families, family
from titan.config.schema import ModelSection
from titan.config.toml import format_value
from titan.data import require
from titan.parallel.torch_compat import compute_local_shape_and_global_offset

from .hf_model import (
    FUSED,
    INDEX,
    OF_DIFFUSERS,
    HFModel,
    differences,
    hooks_of,
    unread_keys,
)
from .quantized import (
    Form,
    Where,
    read_part,
    scales_name,
    stored_as,
    values_name,
)

CONFIG, SINGLE = "config.json", "model.safetensors"
_ROWS = 4096  # rows of a tensor that are compared at once
_MAX_HEADER = 16 * 2**20
# Old versions of transformers stored this tensor. Every version computes it.
_DERIVED = ".rotary_emb.inv_freq"


@dataclass(frozen=True)
class HFFolder:
    """Folder that transformers could load.

    Attributes:
        path: path of the folder.
        config: contents of config.json.
        files: file of each tensor, by its name.
    """

    path: Path
    config: dict[str, Any]
    files: dict[str, Path]


def open_folder(path: Path) -> HFFolder:
    """Read config.json and the index of a folder.

    Raises:
        CheckpointError: a file is missing or unusable. The message names the file.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder")
    if not (path / CONFIG).exists():
        raise CheckpointError(f"{path / CONFIG}: missing; it says which model a folder holds")
    config = read_json(path / CONFIG, dict[str, Any], limit=2**20, within=root_of(path))
    listing = _listing(path)
    if listing.name.endswith(INDEX) and is_there(listing):
        files = read_json(listing, dict[str, Any], within=root_of(path)).get("weight_map")
        if not isinstance(files, dict) or not all(
            # No path out of the folder.
            is_plain_name(name) and name.endswith(".safetensors")
            for name in files.values()
        ):
            raise CheckpointError(
                f"{listing}: its weight_map does not name safetensors files of this folder"
            )
        for name in sorted(set(files.values())):
            if not (path / name).is_file():
                raise CheckpointError(f"{path / name}: missing, but {listing.name} names it")
        return HFFolder(path, config, {tensor: path / name for tensor, name in files.items()})
    if listing.is_file():
        return HFFolder(path, config, dict.fromkeys(_headers(listing), listing))
    pickles = [p.name for p in sorted(path.iterdir()) if p.suffix in (".bin", ".pth", ".pt")]
    reason = f"neither {INDEX} nor {SINGLE} is here"
    if pickles:
        reason += (
            f". {pickles[0]} is a pickle, which can run any code when it is loaded, and is not opened: save the "
            "model as safetensors (transformers: save_pretrained)"
        )
    raise CheckpointError(f"{path}: {reason}")


def _listing(path: Path) -> Path:
    """Return the file that names a folder's tensors: the single file of weights, or the index of several files.

    A folder that was saved twice may have both. Then diffusers takes the index, and transformers the single file.
    """
    names = (OF_DIFFUSERS + INDEX, OF_DIFFUSERS + SINGLE, SINGLE, INDEX)
    return next((path / name for name in names if is_there(path / name)), path / SINGLE)


def read_sizes(folder: HFFolder, *, mtp: bool = False, of: str = "") -> tuple[str, Any]:
    """Find our family and sizes for a folder.

    Args:
        folder: the folder.
        mtp: include the multi-token prediction modules that config.json names. Folders often lack their weights.
        of: the family to read it as, if it can be any model. Another family comes first otherwise.

    Returns:
        The name of the family, and the sizes.

    Raises:
        CheckpointError: no family can be that model.
    """
    by_family = {name: hooks for name in families() if (hooks := hooks_of(name))}
    known = {kind: (name, h) for name, h in by_family.items() for kind in h.ARCHITECTURES}
    by_type = {hooks.ARCHITECTURES[kind]: kind for kind, (_, hooks) in known.items()}
    config = folder.config
    # config.json may name the type and not the architecture.
    listed = config.get("architectures") or config.get("_class_name")
    listed = listed or [by_type.get(str(config.get("model_type")))]
    architecture = listed[0] if isinstance(listed, list) and len(listed) == 1 else listed
    is_known = isinstance(architecture, str) and architecture in known
    general = next((n for n, hooks in by_family.items() if not hooks.ARCHITECTURES), "")
    try:
        if general and (of == general or (not is_known and "model_type" in config)):
            return general, by_family[general].read_config(config)
        if not is_known:
            kind = printable(str(architecture), 80)
            raise ValueError(f"architecture {kind} is none of {', '.join(known)}")
        name, hooks = known[architecture]
        # transformers selects the config's class, and so its defaults, by the type.
        if config.get("model_type") not in (None, type_ := hooks.ARCHITECTURES[architecture]):
            kind = printable(str(config["model_type"]), 80)
            raise ValueError(
                f"model_type {kind} does not go with {architecture}, whose is {type_}"
            )
        sizes = hooks.read_config(config)
        drops = not mtp and sizes.num_mtp_modules
        return name, dataclasses.replace(sizes, num_mtp_modules=0) if drops else sizes
    # The values may be of any type and size, so a family's code may raise any of these errors.
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{folder.path / CONFIG}: {printable(str(error), 600)}"
        ) from error


def require_weights_for(sizes: Any, folder: HFFolder) -> None:
    """Check that the files are large enough for a model of these sizes.

    This comes before the model is built, because a billion layers take for ever even on the meta device.

    Raises:
        CheckpointError: the files are too small.
    """
    if (layers := sizes.n_layers) > len(folder.files):
        raise CheckpointError(
            f"{folder.path / CONFIG}: means {layers:,} layers, for {len(folder.files)} tensors"
        )
    held = sum(file.stat().st_size for file in {*folder.files.values()})
    # The smallest weight takes half a byte, in MXFP4.
    if not 0 < sizes.num_params <= 2 * held:
        raise CheckpointError(
            f"{folder.path / CONFIG}: means {sizes.num_params:.3g} parameters, which the {held:,} bytes "
            "of the weights cannot hold"
        )


def check_folder(path: Path, model: HFModel) -> HFFolder:
    """Return the folder, after a check that it contains exactly this model.

    Raises:
        CheckpointError: the folder has another model. The message names the differences.
    """
    folder = open_folder(path)
    name, sizes = read_sizes(folder, of=model.name)
    others = model.hooks.differences(sizes, model.sizes)
    others.pop("num_mtp_modules", None)  # the check of tensors finds missing modules
    if name != model.name or others:
        what = f"the model is {name}, the job's is {model.name}"
        if name == model.name:
            what = ", ".join(
                f"{key} is {value}, the job's is {getattr(model.sizes, key, 'another')}"
                for key, value in others.items()
            )
        keys = model_keys(name, sizes, path)
        fix = ", ".join(f"model.{key} = {format_value(value)}" for key, value in keys.items())
        raise CheckpointError(f"{path / CONFIG}: {what}; set {fix}")
    # Report at most five, since a folder of another model differs in every tensor.
    if problems := list(tensor_problems(folder, model.spelled_as(folder.files))):
        rest = f"\n{len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError("\n".join(problems[:5]) + rest)
    return folder


def load(path: Path, state: StateDict, *, model: HFModel, group: CheckpointGroup) -> list[str]:
    """Fill the tensors "model.<parameter>" of `state`, in their own precision. All ranks call this together.

    Args:
        path: the folder.
        state: tensors to fill, by name.
        model: the model, with its names on disk.
        group: the ranks' group.

    Returns:
        Messages about tensors of the folder that the model lacks.

    Raises:
        CheckpointError: the folder has another model, or a weight that is not finite. All ranks raise it.
    """
    # Only rank 0 reads the headers. Its result, a folder or an error, goes to all ranks, so that they continue or fail together.
    folder: HFFolder | CheckpointError | None = None
    try:
        folder = check_folder(path, model) if group.rank == 0 else None
    except CheckpointError as error:
        folder = error
    folder = group.gather(folder)[0]
    if not isinstance(folder, HFFolder):
        raise folder or AssertionError("rank 0 found neither a folder nor a fault")
    bad = fill(folder, {key.removeprefix("model."): t for key, t in state.items()}, model=model)
    # No rank raises alone, since the other ranks would wait for it in the next collective.
    if problems := [problem for of_rank in group.gather(bad) for problem in of_rank]:
        raise CheckpointError(problems[0])
    return left_out_messages(folder, model)


def fill(folder: HFFolder, tensors: Mapping[str, Tensor], *, model: HFModel) -> list[str]:
    """Copy this rank's part of tensors from a folder.

    Args:
        folder: the folder.
        tensors: tensors to fill, by our names.
        model: the model, with its names on disk.

    Returns:
        A message for each tensor that is not finite.
    """
    from safetensors import safe_open

    by_file: dict[Path, list[_Piece]] = defaultdict(list)
    model = model.spelled_as(folder.files)
    for ours, tensor in tensors.items():
        for piece in _pieces(model, ours, tensor) if ours in model.names else ():
            by_file[folder.files[values_name(piece.name, folder.files)]].append(piece)
    bad: list[str] = []
    # Go file by file, so that the pages of a mapped file can be dropped when its tensors are copied.
    for file, pieces in by_file.items():
        with ExitStack() as stack:
            scales = {scales_name(piece.name, folder.files) for piece in pieces} - {""}
            stored = {
                f: stack.enter_context(safe_open(f, framework="pt"))
                for f in {file, *(folder.files[scale] for scale in scales)}
            }

            def slice_of(name: str, where: Where, stored: Any = stored) -> Tensor:
                return stored[folder.files[name]].get_slice(name)[where]

            for piece in pieces:
                values = read_part(
                    slice_of, piece.name, piece.where, piece.part, names=folder.files
                )
                # copy_ casts to the parameter's precision, and moves to its device.
                piece.target.copy_(values)
                bad += [] if values.isfinite().all() else [not_finite(file, piece.name)]
    return bad


def not_finite(file: Path, name: str) -> str:
    """Return the error message for a tensor with a weight that is not finite."""
    return f"{file}: tensor {name} holds a weight that is not a number, or infinite"


def model_keys(name: str, sizes: Any, path: Path) -> dict[str, Any]:
    """Return the keys of [model] that mean the sizes in `path`: the nearest flavor and overrides, or the path itself."""
    if not (flavors := family(name).FLAVORS):
        return {"name": name, "hf_path": str(path)}
    # The flavor with the fewest differences makes the shortest config.
    flavor = min(flavors, key=lambda key: len(differences(sizes, flavors[key])))
    overrides = differences(sizes, flavors[flavor])
    # head_dim follows from dim and n_heads if it is dim / n_heads. Otherwise it needs an override.
    is_given = any(f.name == "head_dim" and f.init for f in dataclasses.fields(sizes))
    if overrides and is_given and sizes.head_dim * sizes.n_heads != sizes.dim:
        overrides["head_dim"] = sizes.head_dim
    keys = {"name": name, "flavor": flavor} | ({"overrides": overrides} if overrides else {})
    # A config with these keys must load as the same sizes.
    assert not differences(sizes, ModelSection.model_validate(keys).sizes)
    return keys


class _Piece(NamedTuple):
    """A slice of a tensor on disk, and the tensor that it fills.

    Attributes:
        name: name of the tensor on disk.
        where: slice that this rank takes. With `part`, the slice is of our tensor.
        target: this rank's part of our tensor.
        part: the entry of `HFModel.parts`, if our tensor is only a part of the tensor on disk.
    """

    name: str
    where: Where
    target: Tensor
    part: tuple[int, int] | None = None


def _pieces(model: HFModel, ours: str, tensor: Tensor) -> Iterator[_Piece]:
    """Yield the pieces that fill this rank's part of a tensor."""
    theirs = model.names[ours]
    where = tuple(slice(0, n) for n in tensor.shape)
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        where = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        tensor = tensor.to_local()
    if not tensor.numel():  # with more ranks than rows, some ranks have nothing
        return
    if "{}" not in theirs:
        moved = zip(where, model.origin(ours), strict=True)
        where = tuple(slice(w.start + o, w.stop + o) for w, o in moved)
        yield _Piece(theirs, where, tensor, model.parts.get(ours))
        return
    for expert, part in enumerate(tensor, where[0].start):
        yield _Piece(theirs.format(expert), where[1:], part)


def tensor_problems(folder: HFFolder, model: HFModel) -> Iterator[str]:
    """Yield a message for each wrong tensor of a folder, with the tensor's file."""
    wanted: dict[str, Form] = {}
    for name, tensor in model.on_disk.items():
        wanted |= stored_as(name, list(tensor.shape), folder.files)
    source, missing = _listing(folder.path), wanted.keys() - folder.files.keys()
    if missing and any(name.endswith(FUSED) for name in folder.files):
        yield f"{source}: its experts are fused ({FUSED}), as transformers 5 has them in memory; save it again by save_pretrained"
    for name in missing:
        yield f"{source}: tensor {name} is missing"
    name_of = model.hooks.hf_name_of(model.sizes)
    tied = {name_of("output.weight")} if model.sizes.tied_embeddings else set()
    skipped = tuple(left_out(folder, model))
    # Folders of tied models may still contain the output layer.
    for name in folder.files.keys() - wanted.keys() - tied:
        if not name.endswith(_DERIVED) and not name.startswith(skipped):
            yield f"{folder.files[name]}: tensor {printable(name, 100)} is not one of {model.architecture}"
    embedding = model.names.get("tok_embeddings.weight", "")
    for name in tied & folder.files.keys():
        if embedding in folder.files and not _are_equal(folder, name, embedding):
            yield (
                f"{folder.files[name]}: tensor {name} differs from {embedding}, and tie_word_embeddings in {CONFIG} is true; set it to "
                "false, or leave the tensor out"
            )
    # Check one file at a time, with all tensors that the index assigns to it.
    for file in sorted(set(folder.files.values())):
        headers = _headers(file)
        for name in (n for n in wanted if folder.files.get(n) == file):
            if name not in headers:
                yield f"{file}: tensor {name} is missing, but {source.name} says it is here"
                continue
            shape, dtype = headers[name]
            expected, dtypes = wanted[name]
            if shape != expected:
                yield f"{file}: tensor {name} has shape {shape}; the sizes in config.json make it {expected}"
            elif dtype not in dtypes:
                yield f"{file}: tensor {name} is {dtype} (F8 is fp8), without a quantization that titan reads; convert it to bfloat16 first"


def _are_equal(folder: HFFolder, one: str, other: str) -> bool:
    """Return whether two tensors of a folder have the same values. A few rows are read at a time."""
    from safetensors import safe_open

    with safe_open(folder.files[one], "pt") as a, safe_open(folder.files[other], "pt") as b:
        x, y = a.get_slice(one), b.get_slice(other)
        starts = range(0, x.get_shape()[0], _ROWS)
        return x.get_shape() == y.get_shape() and all(
            x[n : n + _ROWS].float().equal(y[n : n + _ROWS].float()) for n in starts
        )


def left_out_messages(folder: HFFolder, model: HFModel) -> list[str]:
    """Return a message for each layer that is left out, and for keys of config.json that nothing read."""
    reasons = left_out(folder, model)
    lines = [f"left out {prefix}* of {folder.path}: {why}" for prefix, why in reasons.items()]
    return lines + unread_keys(folder.path / CONFIG, folder.config, model.hooks, model.sizes)


def left_out(folder: HFFolder, model: HFModel) -> dict[str, str]:
    """Return the prefixes of layers that the folder has and the model lacks, each with the reason.

    They are multi-token prediction layers (DeepSeek-V3's layer 61) if the model has none, copies of embeddings, and the
    layers that the family's `hf_unused` names.
    """
    extra, first = folder.config.get("num_nextn_predict_layers"), model.sizes.num_blocks
    extra = extra if isinstance(extra, int) else 0
    reasons = {
        f"model.layers.{number}.": "it predicts further tokens"
        for number in range(first, model.sizes.n_layers + min(extra, 100))
    }
    reasons |= {
        name: f"it is a copy of {ours}"
        for name, ours in model.hooks.hf_copies(model.sizes).items()
    }
    reasons |= dict.fromkeys(
        model.hooks.hf_unused(folder.config, model.sizes),
        "the model's output does not depend on it",
    )
    return {p: why for p, why in reasons.items() if any(n.startswith(p) for n in folder.files)}


def _headers(file: Path) -> dict[str, tuple[list[int], str]]:
    """Return shape and dtype of each tensor in a safetensors file."""
    safetensors = require("safetensors", purpose=f"reading {file}")
    try:
        with open_regular(file, within=root_of(file.parent)) as stream:
            # Bound the header's length and number of values, since it is parsed in memory.
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER:
                raise CheckpointError(f"{file}: has a header of {size:,} bytes")
            marks = stream.read(size).count(b",")
        if marks > MAX_VALUES:
            raise CheckpointError(f"{file}: its header holds more than {MAX_VALUES:,} values")
        with safetensors.safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            return {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
    except CheckpointError:
        raise
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        why = printable(getattr(error, "strerror", None) or str(error), 200)
        raise CheckpointError(f"{file}: not a whole safetensors file: {why}") from error
