"""Hugging Face folders of mixtures of experts: a tensor for each expert on disk, stacked here, the same folder from any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.test_huggingface import (
    PUBLISHED,
    TOKENS,
    Degrees,
    assert_same,
    job,
    logits,
    losses,
    train,
)
from tests.support.commands import Shell
from tests.support.hf_folders import tensors_of
from tests.support.ranks import Pool, RankFailed
from tests.support.steps import build_step
from tests.support.tables import table
from titan.checkpoint import CheckpointError, SaveFailed
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.manifest import find_damage
from titan.checks.rules import resolve_layout
from titan.config.model import family
from titan.config.schema import CheckpointSection, JobConfig
from titan.huggingface import load as huggingface
from titan.huggingface.export import Export, export_state, require_same_model
from titan.huggingface.load import HFFolder, HFModel, open_folder, read_sizes
from titan.models.deepseek_v3.config import FLAVORS
from titan.parallel import build_mesh, materialize

transformers = pytest.importorskip("transformers")
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.1,  # with 0.2, transformers' two kinds of attention differ by 4e-5
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
# By the name of transformers' classes: what differs from SIZES.
MODELS: dict[str, dict[str, Any]] = table(__file__, "models")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models of transformers' own, in several files."""
    made = {}
    for name, changes in MODELS.items():
        kind = name.partition(",")[0]
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "norm" in key:
                    value.uniform_(0.5, 1.5)
                # Zeros otherwise: all experts alike, and biases and sinks that could be anywhere.
                if key.endswith(("gate.weight", "router.weight", "bias", "sinks")):
                    value.normal_(std=0.2)
            for key, value in model.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    value.copy_(torch.linspace(-0.2, 0.2, len(value)).roll(3))
        made[name] = tmp_path_factory.mktemp("source")
        model.save_pretrained(made[name], max_shard_size="100KB")
    return made


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, sources, tmp_path: Path, shell: Shell) -> None:
    source, there, back = sources[name], tmp_path / "there", tmp_path / "back"
    stored = tensors_of(source)
    assert any(".experts." in key for key in stored)
    shell(f"convert from-hf {source} {there}")
    shell(f"convert to-hf {there} {back} --max-shard-size 100KB")
    assert_same(tensors_of(back), stored)
    expected = logits(source)
    assert torch.equal(logits(back), expected)
    family_name, sizes = read_sizes(open_folder(back))
    with torch.device("meta"):
        ours = family(family_name).build_model(sizes)
    materialize(ours, device="cpu")
    state = checkpoints.model_state([ours])
    huggingface.load(
        source, state, model=HFModel.of(family_name, sizes), group=CheckpointGroup()
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-5, atol=1e-5)


def through_ranks(source: Path, degrees: Degrees, ep: int, folder: Path) -> tuple[int, int]:
    """Load a folder and export it; elements of experts on this rank, and of all parameters."""
    config = with_ep(job(source, degrees, folder=folder), ep)
    layout = resolve_layout(config, dist.get_world_size())
    mesh = build_mesh("cpu", **layout.degrees)
    train_step = build_step(config, mesh)
    state: Any = checkpoints.model_state(train_step.model_parts)
    model = HFModel.of(config.model.name, config.model.sizes)
    huggingface.load(source, state, model=model, group=CheckpointGroup())
    out = Export(model, torch.float32, file_bytes=60_000, seq_len=32)
    export_state(folder / f"out-{ep}", state, out, group=CheckpointGroup())
    held = sum(p.to_local().numel() for key, p in state.items() if ".experts.w" in key)
    return held, sum(p.numel() for key, p in state.items() if ".experts.w" in key)


@pytest.mark.parametrize("name", ["DeepseekV3", "Qwen3Moe", "GptOss"])
def test_the_same_folder_from_every_degree(
    name: str, sources, pool: Pool, tmp_path: Path
) -> None:
    layouts = [({"dp_shard": 4}, 1), ({"dp_shard": 4}, 2), ({"dp_shard": 2, "tp": 2}, 4)]
    folders = []
    for degrees, ep in layouts:
        for held, whole in pool.run(4, through_ranks, sources[name], degrees, ep, tmp_path):
            assert held * 4 == whole
        files = sorted((tmp_path / f"out-{ep}").iterdir())
        folders.append({file.name: file.read_bytes() for file in files})
    assert folders[0] == folders[1] == folders[2]
    assert len(folders[0]) > 4
    assert_same(tensors_of(tmp_path / "out-1"), tensors_of(sources[name]))


@pytest.mark.parametrize("name", ["DeepseekV3", "Qwen3Moe"])
def test_fused_experts_are_the_same_weights(
    name: str, sources, pool: Pool, tmp_path: Path, shell: Shell
) -> None:
    """As transformers 5 has them in memory: one tensor of a block's experts, gate over up."""
    fused, there, back = (tmp_path / folder for folder in ("fused", "there", "back"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(sources[name])
    theirs.save_pretrained(fused, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in tensors_of(fused))
    pool.run(4, through_ranks, fused, {"dp_shard": 2, "tp": 2}, 2, tmp_path)
    shell(f"convert from-hf {fused} {there}")
    shell(f"convert to-hf {there} {back}")
    for folder in (tmp_path / "out-2", back):
        assert_same(tensors_of(folder), tensors_of(sources[name]))


def with_ep(config: JobConfig, ep: int, **overrides: Any) -> JobConfig:
    parallel = config.parallelism.model_copy(update={"expert_parallel_degree": ep})
    sizes = {**config.model.overrides, **overrides}
    model = config.model.model_copy(update={"overrides": sizes})
    return config.model_copy(update={"parallelism": parallel, "model": model})


def test_training_from_and_to_a_folder(
    sources, pool: Pool, tmp_path: Path, shell: Shell
) -> None:
    source, there = sources["DeepseekV3"], tmp_path / "there"
    shell(f"convert from-hf {source} {there}")
    step = str(there / "checkpoint" / "step-0")
    by_step = job(source, {}, folder=tmp_path / "a", initial_load_path=step)
    hf = {"initial_load_in_hf": True, "initial_load_path": str(source)}
    last = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "bfloat16"}
    by_folder = job(source, {}, folder=tmp_path / "b", **hf, **last)
    pool.run(1, train, by_step)
    pool.run(2, train, with_ep(by_folder, 2))
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-5)
    # TorchTitan's place; the checkpoint stays whole.
    saved = tmp_path / "b" / "checkpoint" / "step-2"
    assert find_damage(saved) == []
    before, after = tensors_of(source), tensors_of(saved)
    assert before.keys() == after.keys()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    moved = (after[bias] - before[bias]).abs()
    assert after[bias].dtype == torch.float32 and 1e-4 < moved.max() < 3e-3
    assert after["model.norm.weight"].dtype == torch.bfloat16
    model = HFModel.of("deepseek_v3", by_folder.model.sizes)
    plain = {ours: model.names[ours] for ours in model.names.keys() - model.buffers.keys()}
    names = {f"model.{ours}": name for ours, name in plain.items() if "{}" not in name}
    stored = {ours: torch.empty_like(after[name]) for ours, name in names.items()}
    checkpoints.load(saved, stored)
    assert all(stored[ours].equal(after[name]) for ours, name in names.items())
    # Refused before the first step, not after the last one.
    qwen = job(sources["Qwen3Moe"], {}, folder=tmp_path / "c", **last)
    with pytest.raises(
        RankFailed, match="Qwen3MoeForCausalLM of transformers has no routing bias"
    ):
        pool.run(1, train, with_ep(qwen, 1, load_balance_coeff=1e-3))


# ---- what is released ------------------------------------------------------------------------------


def describe(folder: Path, quantization: dict[str, Any]) -> None:
    """Write the index of a folder's files, and how its weights are quantized."""
    files = {n: f.name for f in folder.glob("*.safetensors") for n in load_file(f)}
    (folder / huggingface.INDEX).write_text(json.dumps({"weight_map": files}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def quantize(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Turn tensors into fp8 with a random factor for each block of 128 x 128; return what they stand for, in fp32."""
    expected = {}
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        for name in names:
            if name not in held:
                continue
            values = (held[name] * 50).to(torch.float8_e4m3fn)
            rows, columns = values.shape
            factors = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
            blocks = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected[name] = values.float() * blocks[:rows, :columns]
            held |= {name: values, f"{name}_scale_inv": factors}
        save_file(held, file, metadata={"format": "pt"})
    describe(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    return expected


def part_of(source: Path, ours: str, where: tuple[slice, ...]) -> Tensor:
    """Load a rank's part of a parameter, which may begin anywhere."""
    folder = open_folder(source)
    model = HFModel.of(*read_sizes(folder))
    part = torch.empty([s.stop - s.start for s in where])
    piece = huggingface._Piece(model.names[ours], where, part, model.parts.get(ours))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "_pieces", lambda *_: [piece])
        assert huggingface.fill(folder, {ours: part}, model=model) == []
    return part


def test_released_fp8_weights_and_their_extra_layer(tmp_path: Path, shell: Shell) -> None:
    source = tmp_path / "source"
    sizes = {"hidden_size": 192, "intermediate_size": 272, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **{**SIZES, **MODELS["DeepseekV3"], **sizes, "moe_intermediate_size": 144}
    )
    transformers.DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(source)
    names = [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.mlp.experts.5.gate_proj.weight",
        "model.layers.1.mlp.experts.6.down_proj.weight",
    ]
    expected = quantize(source, names)
    hf = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(hf | {"num_nextn_predict_layers": 1}))
    save_file({"model.layers.2.eh_proj.weight": torch.ones(2, 2)}, source / "mtp.safetensors")
    index = json.loads((source / huggingface.INDEX).read_text())
    # A folder with an index has no model.safetensors, which would come first.
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    files = dict.fromkeys(index["weight_map"], "model-1.safetensors")
    index["weight_map"] = files | {"model.layers.2.eh_proj.weight": "mtp.safetensors"}
    (source / huggingface.INDEX).write_text(json.dumps(index))

    printed = shell(f"convert from-hf {source} {tmp_path}/there").out
    assert "left out model.layers.2.*" in printed
    shell(f"convert to-hf {tmp_path}/there {tmp_path}/back --dtype bfloat16")
    back, whole = tensors_of(tmp_path / "back"), tensors_of(source)
    assert back.keys() == {k for k in whole if "layers.2" not in k and "scale_inv" not in k}
    for name, tensor in back.items():
        assert torch.equal(tensor, expected[name].bfloat16() if name in names else whole[name])
    where = (slice(100, 160), slice(150, 250))
    part = part_of(source, "layers.0.feed_forward.w2.weight", where)
    assert torch.equal(part, expected[names[0]][where])


def test_scales_of_another_shape_are_refused(sources, tmp_path: Path, shell: Shell) -> None:
    source = Path(shutil.copytree(sources["DeepseekV3"], tmp_path / "source"))
    name = "model.layers.1.mlp.experts.5.gate_proj.weight"
    quantize(source, [name])
    file = next(f for f in source.glob("*.safetensors") if name in load_file(f))
    save_file(load_file(file) | {f"{name}_scale_inv": torch.ones(2, 1)}, file)
    assert f"{name}_scale_inv has shape [2, 1]" in shell.refuse(
        f"convert from-hf {source} {tmp_path}/out"
    )


def pack(folder: Path) -> dict[str, Tensor]:
    """Put random MXFP4 in the place of a gpt-oss's experts; return what it stands for, number by number, in fp64."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-value for value in values], dtype=torch.float64)
    expected = {}
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        for name in [name for name in held if name.endswith("_proj") and ".experts." in name]:
            experts, inputs, outputs = held.pop(name).shape
            halves = torch.randint(16, (experts, outputs, inputs // 32, 32))
            scales = torch.randint(110, 131, (experts, outputs, inputs // 32))
            whole = table[halves] * 2.0 ** (scales - 127).double()[..., None]
            expected[name] = whole.flatten(-2).mT
            blocks = (halves[..., 0::2] + 16 * halves[..., 1::2]).to(torch.uint8)
            assert torch.equal(
                convert_moe_packed_tensors(blocks, scales.to(torch.uint8)).double(),
                expected[name],
            )
            held |= {f"{name}_blocks": blocks, f"{name}_scales": scales.to(torch.uint8)}
        save_file(held, file, metadata={"format": "pt"})
    describe(folder, PUBLISHED["gpt-oss-20b"]["quantization_config"])
    return expected


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A small gpt-oss in bf16 whose experts are MXFP4, as the published ones, and what these stand for."""
    torch.manual_seed(0)
    sizes = {**SIZES, **MODELS["GptOss"], "intermediate_size": 96, "num_hidden_layers": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    model.bfloat16().save_pretrained(tmp_path / "source", max_shard_size="100KB")
    return tmp_path / "source", pack(tmp_path / "source")


def test_published_mxfp4_weights(packed, tmp_path: Path, shell: Shell) -> None:
    source, expected = packed
    shell(f"convert from-hf {source} {tmp_path}/there")
    shell(f"convert to-hf {tmp_path}/there {tmp_path}/back")
    stored, back = tensors_of(source), tensors_of(tmp_path / "back")
    assert back.keys() == {n for n in stored if not n.endswith(("_blocks", "_scales"))} | {
        *expected
    }
    for name, tensor in back.items():
        whole = expected[name].bfloat16() if name in expected else stored[name]
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, whole), name
    names = HFModel.of(*read_sizes(open_folder(source))).names
    for ours, turn, where in (
        ("w1", slice(0, None, 2), (slice(1, 3), slice(5, 90), slice(33, 64))),
        ("w3", slice(1, None, 2), (slice(0, 1), slice(90, 96), slice(0, 7))),
        ("w2", slice(None), (slice(2, 4), slice(1, 60), slice(31, 65))),
    ):
        ours = f"layers.1.moe.experts.{ours}"
        part = part_of(source, ours, where)
        assert torch.equal(part.double(), expected[names[ours]][..., turn].mT[where])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "message"),
    [
        ("_scales", torch.uint8, (4, 192, 1), "has shape [4, 192, 1]"),
        ("_blocks", torch.int8, None, "is I8"),
        ("_scales", torch.uint8, None, "holds a weight that is not a number"),
    ],
)
def test_mxfp4_that_is_refused(
    name: str,
    dtype: torch.dtype,
    shape: Any,
    message: str,
    packed,
    tmp_path: Path,
    shell: Shell,
) -> None:
    source, _ = packed
    name = f"model.layers.1.mlp.experts.gate_up_proj{name}"
    file = next(f for f in source.glob("*.safetensors") if name in load_file(f))
    held = load_file(file)
    changed = torch.full(shape or held[name].shape, 255, dtype=torch.uint8)  # as a scale: NaN
    save_file(held | {name: changed.to(dtype)}, file)
    assert message in shell.refuse(f"convert from-hf {source} {tmp_path}/out")


def test_another_quantization_is_refused(packed, sources) -> None:
    for source, method, message in (
        (packed[0], "fp8", "titan reads mxfp4 in this family and no other"),
        (sources["Qwen3Moe"], "mxfp4", "titan reads fp8 in blocks of 128 x 128 and no other"),
    ):
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method, "weight_block_size": [128, 64]}
        with pytest.raises(CheckpointError, match=message):
            read_sizes(HFFolder(source, config, {}))


# ---- what has no form there ------------------------------------------------------------------------


def test_a_routing_bias_that_transformers_has_not(
    sources, tmp_path: Path, shell: Shell
) -> None:
    there, out = tmp_path / "there", tmp_path / "out"
    name, sizes = read_sizes(open_folder(sources["Qwen3Moe"]))
    model = HFModel.of(name, sizes)
    state = {
        f"model.{ours}": torch.zeros(shape, dtype=model.buffers.get(ours))
        for ours, shape in model.shapes.items()
    }
    state["model.layers.1.moe.bias"][3] = 1e-3
    message = (
        "layers.1.moe.bias is not zero: Qwen3MoeForCausalLM of transformers has no routing bias"
    )
    with pytest.raises(SaveFailed, match=message):
        export_state(out, state, Export(model, torch.float32), group=CheckpointGroup())
    shell(f"convert from-hf {sources['Qwen3Moe']} {there}")
    step = there / "checkpoint" / "step-0"
    metadata = json.loads((step / "titan.json").read_text())
    manager = checkpoints.CheckpointManager(CheckpointSection(), run_dir=there)
    manager.save(1, state, metadata=metadata | {"step": 1})
    assert message in shell.refuse(f"convert to-hf {there} {out}") and not out.exists()


def test_a_model_that_transformers_has_not() -> None:
    with pytest.raises(
        CheckpointError, match=r"has no group_top_k = 2; it has group_top_k = 1"
    ):
        sizes: Any = {**vars(FLAVORS["tiny"]), "score": "softmax", "normalize_weights": False}
        sizes = {
            key: value for key, value in sizes.items() if key not in ("n_kv_heads", "head_dim")
        }
        require_same_model(HFModel.of("deepseek_v3", type(FLAVORS["tiny"])(**sizes)))
