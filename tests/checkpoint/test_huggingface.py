"""Hugging Face folders both ways: tensors to the bit, transformers' logits, what a rank reads, and what is refused."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support import jobs
from tests.support.bombs import Bomb
from tests.support.commands import Shell
from tests.support.hf_folders import tensors_of
from tests.support.ranks import Pool, RankFailed
from tests.support.runs import logged_rows
from tests.support.steps import build_step
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer, run_to_end
from titan.checkpoint import SaveFailed
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import CheckpointGroup
from titan.checks.rules import check_to_run, resolve_layout
from titan.config.load import load_config
from titan.config.schema import CheckpointSection, JobConfig, TokenizerSection
from titan.huggingface import export
from titan.huggingface import load as huggingface
from titan.huggingface.export import Export, export_state, require_same_model, whole_of
from titan.huggingface.load import INDEX, HFModel, model_keys, open_folder, read_sizes
from titan.parallel import build_mesh

transformers = pytest.importorskip("transformers")

DEBUG = Path(__file__).parents[2] / "train_configs" / "debug_model.toml"
Degrees = dict[str, int]
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}


def save_source(folder: Path, *, name: str, tied: bool) -> Path:
    """A small model of transformers' own, several files, with a tokenizer's files."""
    sizes: dict[str, Any] = {
        "vocab_size": 301,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "max_position_embeddings": 16384,
    }
    torch.manual_seed(0)
    if name == "llama3":
        config = transformers.LlamaConfig(**sizes, rope_parameters=ROPE)
        model = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    for key, value in model.named_parameters():
        if "norm" in key:  # all ones otherwise, which would hide a norm that is not loaded
            torch.nn.init.uniform_(value, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    made = {}
    for name in ("llama3", "qwen3"):
        for tied in (True, False):
            folder = tmp_path_factory.mktemp(f"{name}-{'tied' if tied else 'untied'}")
            made[name, tied] = save_source(folder, name=name, tied=tied)
    return made


def logits(folder: Path) -> Tensor:
    """Of transformers, which must find every weight and no other."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model(TOKENS).logits


TOKENS = torch.arange(200).reshape(2, 100) % 300


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


# ---- under a layout --------------------------------------------------------------------------------


def job(
    source: Path, degrees: Degrees, *, folder: Path, model: Any = None, **checkpoint: Any
) -> JobConfig:
    return jobs.job(
        folder,
        model=model or model_keys(*read_sizes(open_folder(source)), source),
        training={"global_batch_size": 8},
        parallelism=jobs.degrees_of(degrees),
        checkpoint=checkpoint,
    )


class Counted:
    """safe_open, counting the bytes of each slice that is taken."""

    slices: list[int] = []  # noqa: RUF012
    real = safetensors.safe_open

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.file = Counted.real(*args, **kwargs)

    def __enter__(self) -> Counted:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def keys(self) -> list[str]:
        return self.file.keys()

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self.file.get_slice(name))


class CountedSlice:
    def __init__(self, stored: Any) -> None:
        self.stored = stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, where: Any) -> Tensor:
        tensor = self.stored[where]
        Counted.slices.append(tensor.nbytes)
        return tensor


def through_titan_job(
    keys: dict[str, Any] | None, source: Path, degrees: Degrees, folder: Path
) -> tuple[int, int, int]:
    """Load a Hugging Face folder, save and load a checkpoint, export; bytes read and held, and the largest slice.

    `keys` are those of [model], None for those of the folder.
    """
    config = job(source, degrees, folder=folder, model=keys)
    check_to_run(config, world_size=dist.get_world_size())
    layout = resolve_layout(config, dist.get_world_size())
    mesh = build_mesh("cpu", **layout.degrees)
    train_step = build_step(config, mesh)
    state = checkpoints.model_state(train_step.model_parts)
    local = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]

    model = HFModel.of(config.model.name, config.model.sizes)
    safetensors.safe_open, Counted.slices = Counted, []  # pyrefly: ignore[bad-assignment]
    huggingface.load(source, state, model=model, group=CheckpointGroup())
    safetensors.safe_open = Counted.real

    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=folder)
    step = manager.save(1, state, metadata={"step": 1, "tokens": 0})
    with torch.no_grad():
        for part in train_step.model_parts:
            for parameter in part.parameters():
                parameter.fill_(float("nan"))
    checkpoints.load(step, state)
    out = Export(model, torch.float32, file_bytes=60_000, seq_len=32)
    export_state(folder / "out", state, out, group=CheckpointGroup())
    return sum(Counted.slices), sum(t.nbytes for t in local), max(Counted.slices)


FSDP_TP, PP_FSDP = {"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}


@pytest.mark.parametrize(
    ("name", "tied", "degrees"),
    [
        ("llama3", True, FSDP_TP),
        ("llama3", False, FSDP_TP),
        ("qwen3", True, FSDP_TP),
        ("qwen3", False, FSDP_TP),
        ("llama3", False, PP_FSDP),
    ],
    ids=str,
)
def test_round_trip(
    name: str, tied: bool, degrees: Degrees, sources, pool: Pool, tmp_path: Path
) -> None:
    source = sources[name, tied]
    results = pool.run(4, through_titan_job, None, source, degrees, tmp_path)
    whole = tensors_of(source)
    assert_same(whole, tensors_of(tmp_path / "out"))
    assert torch.equal(logits(source), logits(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    model_bytes = sum(t.nbytes for t in whole.values())
    largest = max(t.nbytes for t in whole.values())
    for read, held, largest_slice in results:
        assert read == held <= model_bytes * 0.6  # its own part, once
        assert largest_slice <= largest * 151 / 301  # of an odd number of rows, the larger half


@pytest.mark.parametrize("newest", ["whole", "shards"])
def test_a_folder_saved_in_both_forms_is_read_as_transformers_reads_it(
    newest: str, sources, tmp_path: Path
) -> None:
    models = [
        transformers.LlamaForCausalLM.from_pretrained(sources["llama3", False])
        for _ in range(2)
    ]
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.mul_(1.5)
    sizes = ["60KB", "1GB"] if newest == "whole" else ["1GB", "60KB"]
    for model, size in zip(models, sizes, strict=True):
        model.save_pretrained(tmp_path, max_shard_size=size)
    # transformers removes the shards of the other form, but not its index. A copy may have all of them.
    for both in (False, True):
        if both:
            models[0].save_pretrained(tmp_path / "a", max_shard_size=sizes[0])
            for file in (tmp_path / "a").glob("*.safetensors"):
                shutil.copy(file, tmp_path)
        folder = open_folder(tmp_path)
        theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
            with safetensors.safe_open(folder.files[name], "pt") as stored:
                assert stored.get_tensor(name).equal(theirs[name])


# ---- training --------------------------------------------------------------------------------------


def train(config: JobConfig) -> None:
    check_to_run(config, world_size=dist.get_world_size())
    run_to_end(PoolTrainer(config))


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in logged_rows(run)]


def test_another_model_than_the_jobs(sources, pool: Pool, tmp_path: Path) -> None:
    hf = {"initial_load_in_hf": True, "initial_load_path": str(sources["llama3", True])}
    config = job(sources["llama3", False], {}, folder=tmp_path, **hf)
    with pytest.raises(RankFailed) as failure:
        pool.run(2, train, config)
    told = "config.json: tied_embeddings is True, the job's is False; set model.name"
    assert str(failure.value).count(f"CheckpointError: {sources['llama3', True]}/{told}") == 2


def _gather_with_warnings() -> tuple[list[str], bool]:
    """Messages of torch while this rank gathers weights of each cut, and whether all are whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(3)))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    both = distribute_tensor(expected[0], mesh, [Shard(0), Shard(0)])  # one cut after the other
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torch.distributed.tensor").addHandler(handler)
    found = [whole_of(tensor) for tensor in (*model.parameters(), both)]
    return said, all(map(torch.equal, found, [*expected, expected[0]]))


def test_weights_of_two_axes_are_gathered_without_a_warning(pool: Pool) -> None:
    assert pool.run(4, _gather_with_warnings) == [([], True)] * 4


# ---- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_command_there_and_back(name: str, sources, tmp_path: Path, shell: Shell) -> None:
    source, there, back = sources[name, True], tmp_path / "there", tmp_path / "back"
    with_tokenizer = Path(shutil.copytree(source, tmp_path / "source"))
    write_tokenizer(with_tokenizer)
    shell(f"convert from-hf {with_tokenizer} {there}")
    config = load_config(DEBUG, overlays=[there / "config.toml"])
    assert config.model.name == name and config.checkpoint.initial_load_path
    assert config.tokenizer == TokenizerSection(path=str(there / "tokenizer")), (
        "the job's own wins"
    )
    options = "--dtype bfloat16 --max-shard-size 30KB"
    printed = shell(f"convert to-hf {there}/checkpoint/step-0 {back} {options}").out
    assert "in bfloat16" in printed
    expected = {key: value.bfloat16() for key, value in tensors_of(source).items()}
    assert_same(tensors_of(back), expected)
    files = [load_file(file) for file in back.glob("*.safetensors")]
    assert all(len(f) == 1 or sum(t.nbytes for t in f.values()) <= 30_000 for f in files)
    index = json.loads((back / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (back, source))
    for key in (
        "architectures",
        "hidden_size",
        "head_dim",
        "tie_word_embeddings",
        "rms_norm_eps",
    ):
        assert ours[key] == theirs[key]
    assert (ours["bos_token_id"], ours["eos_token_id"]) == (1, 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    assert tokenizer.encode("a b") == [3, 4]
    again = tmp_path / "again"
    shell(f"convert to-hf {there} {again}")
    assert_same(tensors_of(again), tensors_of(source))
    assert torch.equal(logits(again), logits(source))


def write_tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# config.json of released weights, shortened.
PUBLISHED = json.loads((Path(__file__).parent / "published.json").read_text())


@pytest.mark.parametrize("name", ["1b", "3b", "8b", "70b", "405b"])
def test_shipped_jobs_name_folders_of_their_model(name: str, tmp_path: Path) -> None:
    section = load_config(DEBUG.with_name(f"llama3_{name}.toml")).model
    folder = huggingface.HFFolder(tmp_path, PUBLISHED[Path(section.hf_assets_path).name], {})
    assert read_sizes(folder) == (section.name, section.sizes)


@tabled("published, model, flavor, overrides")
def test_published_configs_are_our_flavors(
    published: str, model: str, flavor: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    name, _, derived = published.partition(", ")
    changes = {"head_dim": 64, "num_hidden_layers": 3} if derived else {}
    folder = huggingface.HFFolder(tmp_path, PUBLISHED[name] | changes, {})
    found, sizes = read_sizes(folder)
    keys = model_keys(found, sizes, tmp_path)
    assert (found, keys["flavor"], keys.get("overrides", {})) == (model, flavor, overrides)
    require_same_model(HFModel.of(found, sizes))
    hooks = huggingface.hooks_of(found)
    assert hooks is not None and hooks.read_config(hooks.hf_config(sizes)) == sizes


# ---- what is refused -------------------------------------------------------------------------------


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def change_tensor(folder: Path, name: str, value: Tensor | None) -> None:
    """Replace, add or (None) remove a tensor, in the index too."""
    index = json.loads((folder / INDEX).read_text())
    file = folder / index["weight_map"].setdefault(name, min(index["weight_map"].values()))
    held = load_file(file)
    held.pop(name, None)
    if value is None:
        del index["weight_map"][name]
    else:
        held[name] = value
    save_file(held, file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps(index))


def point_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = "../secret.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def only_pickles(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "executed")))


def all_in_fp8(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        small = {n: t.to(torch.float8_e4m3fn) for n, t in load_file(file).items()}
        save_file(small, file, metadata={"format": "pt"})


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "architecture": (
        lambda f: change_config(f, architectures=["GPT2LMHeadModel"]),
        "architecture GPT2LMHeadModel does not go with model_type llama",
    ),
    "activation": (
        lambda f: change_config(f, hidden_act="swish"),
        "hidden_act is 'swish'; titan's model has 'silu' and nothing else; "
        'model.name = "transformers" with model.hf_path runs it',
    ),
    "window": (
        lambda f: change_config(f, layer_types=["sliding_attention", "full_attention"]),
        "config.json: layer_types has sliding layers, and no window is set for them",
    ),
    "window that the class drops": (
        lambda f: change_config(
            f,
            architectures=["Qwen3ForCausalLM"],
            model_type="qwen3",
            layer_types=["sliding_attention"] * 2,
            sliding_window=16,
        ),
        "config.json: layer_types has sliding layers, and no window is set for them",
    ),
    "bias": (lambda f: change_config(f, attention_bias=True), "attention_bias is True"),
    "rope": (
        lambda f: change_config(f, rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        "rope_scaling is {'rope_type': 'yarn', 'factor': 4.0, 'rope_theta'",
    ),
    "no size": (
        lambda f: change_config(f, hidden_size=...),
        "config.json: means 7.99e+06 parameters",
    ),
    "odd size": (lambda f: change_config(f, hidden_size="64"), "hidden_size is '64', which"),
    "missing tensor": (
        lambda f: change_tensor(f, NORM, None),
        f"{INDEX}: tensor {NORM} is missing",
    ),
    "odd tensor": (
        lambda f: change_tensor(f, "model.extra.weight", torch.zeros(2)),
        ".safetensors: tensor model.extra.weight is not one of LlamaForCausalLM",
    ),
    "shape": (
        lambda f: change_tensor(f, Q, torch.zeros(64, 64)),
        f"tensor {Q} has shape [64, 64]; the sizes in config.json make it [128, 64]",
    ),
    "quantized": (
        lambda f: change_tensor(f, Q, torch.zeros(128, 64, dtype=torch.float8_e4m3fn)),
        f"tensor {Q} is F8_E4M3 (F8 is fp8), without a quantization that titan reads",
    ),
    "half as many bytes": (
        all_in_fp8,
        "tensor model.embed_tokens.weight is F8_E4M3 (F8 is fp8), without",
    ),
    "missing file": (lambda f: min(f.glob("*.safetensors")).unlink(), "missing, but"),
    "path in the index": (point_outside, "weight_map does not name safetensors files of this"),
    "pickles": (only_pickles, "pytorch_model.bin is a pickle, which can run any code"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_line_that_names_it(
    case: str, sources, tmp_path: Path, shell: Shell
) -> None:
    folder = Path(shutil.copytree(sources["llama3", False], tmp_path / "hf"))
    change, told = REFUSED[case]
    change(folder)
    error = shell.refuse(f"convert from-hf {folder} {tmp_path}/out")
    assert error.startswith(f"{folder}")
    assert told in error
    assert not (tmp_path / "out").exists()
    assert not (folder / "executed").exists()


def test_a_step_of_another_model(sources, tmp_path: Path, shell: Shell) -> None:
    there = tmp_path / "there"
    shell(f"convert from-hf {sources['llama3', True]} {there}")
    config = there / "config.toml"
    assert "[tokenizer]" not in config.read_text(), "the folder has none"
    config.write_text(config.read_text().replace("n_layers = 2", "n_layers = 3"))
    assert "step-0 lacks model." in shell.refuse(f"convert to-hf {there} {tmp_path}/out")
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_nothing_is_overwritten(sources, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    source = str(sources["llama3", False])
    assert "out is there already" in shell.refuse(f"convert from-hf {source} {tmp_path}/out")
    assert "there is no such folder" in shell.refuse(
        f"convert from-hf {source}-no {tmp_path}/new"
    )


def test_a_failed_export_leaves_what_was_there(
    sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    name, sizes = read_sizes(open_folder(sources["llama3", False]))
    model = HFModel.of(name, sizes)
    state = {f"model.{key}": torch.zeros(shape) for key, shape in model.shapes.items()}
    out, before = tmp_path / "out", Export(model, torch.float32)
    export_state(out, state, before, group=CheckpointGroup())
    expected = tensors_of(out)
    monkeypatch.setattr(export, "_write_file", full_disk)
    with pytest.raises(
        SaveFailed, match=r"out: the Hugging Face folder was not written.*No space"
    ):
        export_state(out, {k: v + 1 for k, v in state.items()}, before, group=CheckpointGroup())
    assert_same(tensors_of(out), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
