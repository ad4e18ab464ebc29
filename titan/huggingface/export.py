"""Export of a model as a Hugging Face folder that `transformers` loads: safetensors, index, config.json, tokenizer.

    OUT/.saving-NAME/    is being written, and becomes OUT/NAME by one rename. If OUT/NAME exists, as a checkpoint's
                         step-N does, the files move into it, config.json last: without it the folder is incomplete

This works on any layout. The tensors are dealt into files in the model's order, and a file contains only tensors that the same
ranks have (the ranks of a pipeline stage). These ranks gather the tensors one after another. They take turns at keeping a file,
and the keeper writes its file in the background. So a rank has at most two files of the model in host memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from titan.checkpoint import CheckpointError, SaveFailed
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.storage import LocalStorage
from titan.checkpoint.tensors import StateDict
from titan.config.phases import longest_sequence
from titan.config.schema import JobConfig
from titan.data.conversations import conversations
from titan.data.special_tokens import begin_ids
from titan.data.tokenizer import CHAT_TEMPLATE, Tokenizer
from titan.data.tokenizer_files import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    read_asset,
    tokenizer_files,
    tokenizer_path,
)

from .hf_model import INDEX, OF_DIFFUSERS
from .load import CONFIG, HFModel

_NAMES = ("bos_token", "eos_token")
DEFAULT_FILE_BYTES = 5_000_000_000
Fetch = Callable[[Sequence[str], bool], StateDict]


@dataclass(frozen=True)
class Export:
    """Settings of an export: the model, its precision, the size of files, and the tokenizer.

    Attributes:
        model: the model, with its names on disk.
        dtype: precision of the weights on disk.
        file_bytes: most bytes of a file.
        bos_id: the tokenizer's begin token.
        ends: ids that end an answer.
        seq_len: longest sequence that the model was trained on.
        assets: files of the tokenizer to copy.
        begin: token that the copied tokenizer is to put before texts, "" for no token. None keeps its own behaviour.
        names: bos_token and eos_token as the job names them.
        chat_template: Jinja text that turns conversations into text.
    """

    model: HFModel
    dtype: torch.dtype
    file_bytes: int = DEFAULT_FILE_BYTES
    bos_id: int | None = None
    ends: list[int] = field(default_factory=list)
    seq_len: int = 0
    assets: list[Path] = field(default_factory=list)
    begin: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    chat_template: str = ""

    @staticmethod
    def of(
        config: JobConfig,
        *,
        tokenizer: Tokenizer | None,
        dtype: torch.dtype,
        file_bytes: int = DEFAULT_FILE_BYTES,
    ) -> Export:
        """Return the export of a job's model.

        Args:
            config: the job.
            tokenizer: the job's tokenizer, or None to leave it out.
            dtype: precision of the weights on disk.
            file_bytes: most bytes of a file.

        Raises:
            CheckpointError: the model has no Hugging Face form.
            DataError: safetensors is not installed.
        """
        model = HFModel.of(config.model.name, config.model.sizes)
        require_same_model(model)
        return Export(
            model.with_copies(),
            dtype,
            file_bytes,
            bos_id=tokenizer.bos_id if tokenizer else None,
            ends=_answer_ends(tokenizer) if tokenizer else [],
            seq_len=longest_sequence(config),
            assets=tokenizer_files(tokenizer_path(config)) if tokenizer else [],
            begin=_begin(config, tokenizer) if tokenizer else None,
            names={n: text for n in _NAMES if (text := getattr(config.tokenizer, n))},
            chat_template=tokenizer.chat_template if tokenizer else "",
        )

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        config = self.model.hooks.hf_config(self.model.sizes)
        if "max_position_embeddings" not in config:  # no text model
            return config
        # Without a tokenizer, those of the model's own config.json: some config classes refuse null.
        ids = {"bos_token_id": self.bos_id, "eos_token_id": self.eos_token_id}
        ids = {key: config.get(key) if value is None else value for key, value in ids.items()}
        # The model was trained on positions up to seq_len, so they are valid even beyond the family's default.
        length = config["max_position_embeddings"]
        if not self.model.sizes.fixes_positions:
            length = max(length, self.seq_len)
        return {
            **config,
            **ids,
            "max_position_embeddings": length,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """Return the ids that end an answer, as transformers writes them."""
        return self.ends if len(self.ends) > 1 else next(iter(self.ends), None)

    def dtype_of(self, ours: str) -> torch.dtype:
        """Return the precision of a tensor on disk. Buffers keep theirs, since a routing bias is a sum of small steps."""
        return self.model.buffers.get(ours, self.dtype)

    def num_bytes(self, theirs: str) -> int:
        """Return the bytes of a tensor in a file, by its name on disk."""
        tensor = self.model.on_disk[theirs]
        return tensor.shape.numel() * self.dtype_of(tensor.ours[0]).itemsize

    def read(
        self,
        names: Sequence[str],
        keep: bool,
        *,
        whole: Callable[[str, torch.dtype], Tensor],
    ) -> StateDict:
        """Return tensors in host memory by their names on disk.

        Args:
            names: names on disk.
            keep: False returns nothing, but still asks for every tensor, since other ranks need this rank's part of it.
            whole: returns one of our tensors, which may be many tensors on disk, in a precision.
        """
        kept: StateDict = {}
        for ours, theirs in groupby(names, key=lambda name: self.model.on_disk[name].ours):
            tensors = [whole(name, self.dtype_of(name)) for name in ours]
            tensor = self.model.joined(ours, tensors) if keep else tensors[0]
            for name in theirs if keep else ():
                expert = self.model.on_disk[name].expert
                # Copy, since a view would keep all experts in memory, and a file takes no tensor twice.
                part = tensor if expert is None else tensor[expert]
                is_alone = expert is None and name not in self.model.copies
                kept[name] = part.to("cpu", copy=not is_alone)
        return kept


def _answer_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end an answer, the chat template's own first."""
    if tokenizer.chat_template:
        return conversations().answer_ends(tokenizer)
    return sorted(tokenizer.end_ids)


def _begin(config: JobConfig, tokenizer: Tokenizer) -> str | None:
    """Return the token that the job puts before texts, "" for no token, or None if the tokenizer's own behaviour is the same."""
    begins = bool(begin_ids(tokenizer, add_bos=config.data.add_bos))
    if begins == bool(tokenizer.begin_ids) and not config.tokenizer.bos_token:
        return None
    return tokenizer.token_texts.get("bos_token") if begins else ""


def require_same_model(model: HFModel) -> None:
    """Check that transformers makes the same model from the config.json that is written.

    Raises:
        CheckpointError: it would make another model. The message names the sizes that differ.
    """
    read = model.hooks.read_config(model.hooks.hf_config(model.sizes))
    if others := model.hooks.differences(read, model.sizes):
        what = ", ".join(f"{key} = {getattr(model.sizes, key)}" for key in others)
        fix = ", ".join(f"{key} = {value}" for key, value in others.items())
        raise CheckpointError(
            f"{model.architecture} of transformers has no {what}; it has {fix}"
        )


def no_routing_bias(model: HFModel) -> str:
    """Return why a model with a routing bias cannot be exported, and what to do instead."""
    return (
        f"{model.architecture} of transformers has no routing bias; to export the model, train with "
        "model.overrides.load_balance_coeff = 0, and balance by global_balance_coeff"
    )


def lost_buffers(model: HFModel, buffers: Mapping[str, Tensor]) -> list[str]:
    """Return a message for each of the `off_disk` buffers whose values a folder would lose."""
    return [
        f"{ours} is not zero: {no_routing_bias(model)}"
        for ours, tensor in buffers.items()
        if tensor.any()
    ]


def whole_of(tensor: DTensor) -> Tensor:
    """Gather a tensor as `full_tensor` does, but axis by axis.

    If two axes cut one dimension, torch gathers twice, too, but each rank warns that it cannot do it at once.
    """
    # Undo the last cut first. FSDP cuts after tensor parallelism, although its axis is the first: a strided shard.
    cuts = [type(placement).__name__ == "_StridedShard" for placement in tensor.placements]
    for axis in sorted(range(len(cuts)), key=lambda axis: (not cuts[axis], -axis)):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def export_state(
    folder: Path, state: StateDict, export: Export, *, group: CheckpointGroup
) -> None:
    """Write the weights "model.<parameter>" of a running job as a folder. All ranks call this together.

    Raises:
        SaveFailed: the folder could not be written. All ranks raise it.
    """

    def whole(ours: str, dtype: torch.dtype) -> Tensor:
        # Cast first, so that the gathered tensor is no larger than on disk.
        tensor = state[f"model.{ours}"].to(dtype)
        return whole_of(tensor) if isinstance(tensor, DTensor) else tensor

    names = {ours: f"model.{ours}" for ours in export.model.off_disk}
    buffers = {ours: state[name] for ours, name in names.items() if name in state}
    for lost in chain(*group.gather(lost_buffers(export.model, buffers))):
        raise SaveFailed(f"{folder}: {lost}")
    # Ranks that have a part of each tensor. With a pipeline, these are the ranks of its stage.
    held = group.gather([f"model.{name}" in state for name in export.model.names])
    ranks_of = {
        name: [rank for rank, of_rank in enumerate(held) if of_rank[number]]
        for number, name in enumerate(export.model.names)
    }
    write_folder(
        folder, export, fetch=partial(export.read, whole=whole), ranks_of=ranks_of, group=group
    )


def write_folder(
    folder: Path,
    export: Export,
    *,
    fetch: Fetch,
    ranks_of: dict[str, list[int]],
    group: CheckpointGroup,
) -> None:
    """Write a folder, or add the files to an existing folder.

    Args:
        folder: the folder.
        export: settings of the export.
        fetch: fetch(names, keep) is called on all ranks that have these tensors of the folder. With `keep`, it returns the
            whole tensors in host memory.
        ranks_of: ranks that have each of our tensors, or a part of it.
        group: the ranks' group.

    Raises:
        SaveFailed: the folder could not be written. All ranks raise it.
    """
    # The folder is beside the final folder, so that the rename stays on one file system.
    temporary = folder.with_name(f".saving-{folder.name}")
    files = plan_files(export, ranks_of)
    file_names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def commit() -> None:
        _write_texts(temporary, export, dict(zip(file_names, files, strict=True)))
        if not folder.exists():
            return LocalStorage().rename(temporary, folder)
        # Without config.json the folder is incomplete, until all other files are in place.
        (folder / CONFIG).unlink(missing_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == CONFIG):
            LocalStorage().rename(file, folder / file.name)

    try:
        group.run_on_main(begin)
        writes: list[Future[None]] = []
        # One thread writes a file while the ranks gather the next file.
        with ThreadPoolExecutor(1) as background:
            for number, names in enumerate(files):
                holders = ranks_of[export.model.on_disk[names[0]].ours[0]]
                if group.rank not in holders:
                    continue
                # All holders take part in gathering. They take turns as keepers, so that several write at the same time.
                keep = group.rank == holders[number % len(holders)]
                wait(writes if keep else [])  # at most one file is still being written
                kept = fetch(names, keep)
                if keep:
                    writes.append(
                        background.submit(_write_file, temporary / file_names[number], kept)
                    )
        # A write's error surfaces here, on all ranks.
        group.run_on_all(lambda: [write.result() for write in writes])
        group.run_on_main(commit)
    except SaveFailed as error:
        raise SaveFailed(
            f"{folder}: the Hugging Face folder was not written: {error}"
        ) from error
    finally:
        if group.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # after a success it has another name


def plan_files(export: Export, ranks_of: dict[str, list[int]]) -> list[list[str]]:
    """Deal the model's tensors into files: each file has tensors of one set of ranks, and at most `file_bytes`.

    Args:
        export: settings of the export.
        ranks_of: ranks that have each of our tensors, or a part of it.

    Returns:
        For each file, the names of its tensors on disk, in the model's order.
    """
    files: list[list[str]] = []
    holders, size = None, 0
    # A tensor larger than `file_bytes` gets a file to itself.
    for name, tensor in export.model.on_disk.items():
        full = size + export.num_bytes(name) > export.file_bytes
        of_tensor = ranks_of[tensor.ours[0]]
        if full or of_tensor != holders:
            files.append([])
            holders, size = of_tensor, 0
        files[-1].append(name)
        size += export.num_bytes(name)
    return files


def _write_file(file: Path, tensors: StateDict) -> None:
    from safetensors.torch import save_file

    # transformers requires the name of the framework that wrote a file.
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _write_texts(folder: Path, export: Export, files: dict[str, list[str]]) -> None:
    """Write the index, config.json and the tokenizer's files."""
    model = export.model
    index = {
        "metadata": {"total_size": sum(map(export.num_bytes, model.on_disk))},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    config = export.config()
    texts = {OF_DIFFUSERS * ("_class_name" in config) + INDEX: index, CONFIG: config}
    texts |= model.hooks.hf_files(model.sizes)
    assets = {asset.name: read_asset(asset) for asset in export.assets}
    if export.ends:
        begin = {} if export.bos_id is None else {"bos_token_id": export.bos_id}
        _merge(assets, GENERATION_CONFIG, begin | {"eos_token_id": export.eos_token_id})
    if library := assets.get("tokenizer.json"):
        if export.names:
            named = {"tokenizer_class": "PreTrainedTokenizerFast"} | export.names
            _merge(assets, TOKENIZER_CONFIG, named)
        if export.begin is not None:
            assets["tokenizer.json"] = _begun(library, export.begin)
    if export.chat_template:  # its file may be elsewhere
        assets[CHAT_TEMPLATE] = export.chat_template.encode()
    for name, data in ({name: _json(text) for name, text in texts.items()} | assets).items():
        LocalStorage().write(folder / name, data)
    LocalStorage().fsync_folder(folder)


def _merge(files: dict[str, bytes], name: str, values: dict[str, Any]) -> None:
    """Add values to a JSON file, which may be new."""
    files[name] = _json(json.loads(files.get(name, b"{}")) | values)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _begun(content: bytes, begin: str) -> bytes:
    """Return a tokenizer.json that puts the token `begin`, or no token for "", before texts."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(content.decode())
    texts = [f"{begin} ${part}".strip() for part in "AB"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=texts[0],
        pair=" ".join(texts),
        special_tokens=[(begin, tokenizer.token_to_id(begin))] if begin else [],
    )
    return tokenizer.to_str(pretty=True).encode()
