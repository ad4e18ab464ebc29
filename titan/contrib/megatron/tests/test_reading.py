"""Folders of Megatron: what is read, and what is refused in one line."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.bombs import Bomb
from tests.support.runs import saved_tensors
from tests.test_untrusted import fifo, truncated
from titan.checkpoint import CheckpointError
from titan.config.load import load_config
from titan.contrib.megatron.convert import from_megatron
from titan.contrib.megatron.job import hf_config, sections

from . import folders
from .folders import (
    G,
    H,
    arguments,
    changed_index,
    schedule,
    weights,
    with_moments,
    write,
)


def converted(run: Path, output: Path, **options: Any) -> dict[str, Tensor]:
    """Return titan's tensors of a converted folder."""
    from_megatron(run, output, **options)
    (step,) = (output / "checkpoint").iterdir()
    return saved_tensors(step)


@pytest.mark.parametrize("form", ["chained", "newest", "wholes", "flat wholes", "flat shards"])
def test_forms_mean_the_same(tmp_path: Path, form: str) -> None:
    write(tmp_path / "run")
    tensors = with_moments(weights())
    if form == "chained":  # as experts and the rest have an optimizer each
        tensors = {
            re.sub(r"^optimizer", "chained_1.optimizer", name): x for name, x in tensors.items()
        }
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    whole = tensors.get(name, torch.empty(0))
    if form.startswith("flat"):
        # As Megatron-Core before 0.14 kept the distributed optimizer's state: a grid of shards, each flattened.
        layers, rows, columns = whole.shape
        grid = whole.view(layers, 1, rows, 2, columns // 2).transpose(2, 3)
        tensors[name] = grid.reshape(layers, 1, 2, -1)
    folder = write(tmp_path / "other", tensors, is_split="wholes" not in form)
    if form.startswith("flat"):
        shapes = {name: {"nd_reformulated_orig_global_shape": whole.shape}}
        changed_index(folder, lambda metadata: vars(metadata).update(mcore_data=shapes))
    if form == "newest":  # common.pt beside the tensors
        common = torch.load(folder / "common.pt", weights_only=False)
        folders.save(new := tmp_path / "new", tensors, **{"common_state/shard_0_1": [common]})
        (folder / "metadata.json").rename(new / "metadata.json")
        folder = new
    one = converted(tmp_path / "run", tmp_path / "out")
    other = converted(folder, tmp_path / "again")
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_a_tokenizer_cuts_the_padding(tmp_path: Path) -> None:
    write(tmp_path / "run", args=arguments(padded_vocab_size=folders.VOCAB))
    tensors = weights()
    tokenizer = tmp_path / "tokenizer.json"
    words = {f"w{number}": number for number in range(folders.VOCAB - 3)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer.write_text(json.dumps({"model": model}))
    found = converted(tmp_path / "run", tmp_path / "out", tokenizer=str(tokenizer))
    rows = tensors["output_layer.weight"][:-3]
    assert found["model.output.weight"].equal(rows)
    assert found["optimizer.output.weight.exp_avg"].equal(rows / 8)
    hashes = json.loads((tmp_path / "out" / "megatron.json").read_text())
    norm = "decoder.final_layernorm.weight"
    expected = [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in (rows, tensors[norm])]
    assert [hashes["titan"]["model.output.weight"], hashes["megatron"][norm]] == expected


MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "layernorm_epsilon": 1e-6,
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1],
    "rotary_scaling_factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_type": None,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
}
MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "none",
}
# Changes of the arguments, and fields of config.json.
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"model_type": "llama", "rms_norm_eps": 1e-5, "num_key_value_heads": G}),
    ({"group_query_attention": False}, {"num_key_value_heads": H}),
    ({"add_qkv_bias": True}, {"architectures": ["Qwen2ForCausalLM"]}),
    ({"qk_layernorm": True}, {"model_type": "qwen3"}),
    ({"untie_embeddings_and_output_weights": False}, {"tie_word_embeddings": True}),
    (
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    (MOE, {"model_type": "mixtral", "intermediate_size": 16, "num_local_experts": 4}),
    ({**MOE, "qk_layernorm": True}, {"model_type": "qwen3_moe", "norm_topk_prob": True}),
    (
        {**MOE, "qk_layernorm": True, "moe_router_pre_softmax": True},
        {"norm_topk_prob": False},
    ),
    (
        MLA,
        {
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    ({**MLA, "rotary_scaling_factor": 1.0}, {"rope_scaling": None}),
]


@pytest.mark.parametrize(("changes", "fields"), FIELDS)
def test_config_json_has_what_the_arguments_say(
    changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    found = hf_config(vars(arguments(**changes)), vocab_size=64)
    assert {key: found[key] for key in fields} == fields


# Changes of the arguments, and words of the refusal.
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"normalization": "LayerNorm"}, "normalization = LayerNorm"),
    ({"swiglu": False}, "swiglu = False"),
    ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
    ({"window_size": (128, 0)}, "window_size"),
    ({"optimizer": "muon"}, "optimizer muon"),
    ({"hidden_size": "64"}, "config.json"),
    ({"num_layers": 10**9}, "means 1,000,000,000 layers"),
    ({"kv_channels": 8}, "has shape"),
    ({"num_attention_heads": None}, "num_attention_heads is missing"),
    ({"num_query_groups": 0}, ""),
    ({"global_batch_size": 0}, "arguments of the run: ZeroDivisionError"),
    ({"clip_grad": None}, "arguments of the run: ValidationError"),
    ({"padded_vocab_size": 48}, "model.embed_tokens.weight has shape [40, 16]"),
    ({"qk_layernorm": True}, "q_layernorm.weight is missing, for model.layers.0.self_attn.q_"),
    ({"untie_embeddings_and_output_weights": False}, "no place for output_layer.weight"),
    ({"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size"),
    ({"apply_layernorm_1p": True}, "layernorm_zero_centered_gamma"),
    ({**MOE, "moe_router_num_groups": 2}, "moe_router_num_groups = 2"),
    ({**MOE, "moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
    ({**MOE, "moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
    ({**MOE, "moe_layer_freq": [0, 1]}, "moe_layer_freq"),
    ({**MLA, "moe_layer_freq": [1, 0]}, "moe_layer_freq"),
    ({**MLA, "rope_type": "rope"}, "rope_type = rope with mscale_all_dim"),
    ({**MLA, "moe_router_topk": 2}, "moe_router_topk = 2 with moe_router_group_topk = 2"),
    ({**MLA, "moe_router_num_groups": None, "moe_router_topk": 1}, "moe_router_topk = 1"),
    ({**MLA, "layernorm_epsilon": 1e-5}, "layernorm_epsilon"),
]


@pytest.mark.parametrize(("changes", "words"), OTHERS)
def test_arguments_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write(tmp_path / "run", args=arguments(**changes))
    assert words in refused(tmp_path / "run", tmp_path / "out")


# Changes of the arguments, of the schedule, and keys of the job.
JOBS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"lr_decay_style": "constant"}, {"decay_ratio": 0.0, "decay_type": "linear"}),
    ({}, {"max_lr": 2e-3}, {"lr": 2e-3, "min_lr_factor": 0.05, "name": "AdamW"}),
    ({"decoupled_weight_decay": False}, {}, {"name": "Adam", "beta2": 0.95, "eps": 1e-8}),
    ({"bf16": True}, {}, {"mixed_precision_param": "auto"}),
    ({"train_iters": None, "train_samples": 80}, {}, {"steps": 20, "global_batch_size": 4}),
    ({}, {}, {"warmup_steps": 2, "total_steps": 10, "min_lr_factor": 0.1, "lr": 1e-3}),
    (
        {"lr_wsd_decay_samples": 20, "lr_wsd_decay_style": "cosine"},
        {"lr_decay_style": "WSD"},
        {"decay_ratio": 0.5, "decay_type": "cosine"},
    ),
    (
        {"lr_wsd_decay_iters": 5, "lr_wsd_decay_style": "minus_sqrt"},
        {"lr_decay_style": "WSD"},
        {"decay_ratio": 0.5, "decay_type": "sqrt"},
    ),
]


@pytest.mark.parametrize(("changes", "of_schedule", "keys"), JOBS)
def test_the_job_has_the_keys(
    changes: dict[str, Any], of_schedule: dict[str, Any], keys: dict[str, Any]
) -> None:
    found = sections(vars(arguments(**changes)), schedule(**of_schedule))
    flat = {key: value for section in found.values() for key, value in section.items()}
    assert {key: flat[key] for key in keys} == pytest.approx(keys)


def test_older_names_and_skipped_steps(tmp_path: Path) -> None:
    args = arguments(norm_epsilon=1e-6, hidden_dropout=0.1, add_qkv_bias=False)
    vars(args).pop("layernorm_epsilon")
    optimizer = {"state": {"common_step": torch.tensor(2)}, "param_groups": [{"step": 3}]}
    state = {"optimizer": optimizer, "opt_param_scheduler": schedule(num_steps=8)}
    write(tmp_path / "run", args=args, common=state)
    out = tmp_path / "out"
    text = "\n".join(from_megatron(tmp_path / "run", out))
    differing = "hidden_dropout = 0.1, a schedule that is at sample 8"
    assert f"not as in Megatron's run: {differing}" in text
    assert "not read, since they are no tensors: rng_state (1)" in text
    assert re.search(r"read 45 of 45 tensors, and \d+ of \d+ arguments", text)
    config = load_config(out / "config.toml")
    assert config.model.sizes.norm_eps == 1e-6 and config.model.sizes.n_kv_heads == G
    assert config.checkpoint.exclude_from_loading == ["dataloader"]
    step = out / "checkpoint" / "step-3"
    assert saved_tensors(step)["optimizer.norm.weight.step"].item() == 2
    assert json.loads((step / "titan.json").read_text())["tokens"] == 12 * 32


def refused(run: Path, output: Path) -> str:
    """Return the one line of a refusal, after which nothing is left behind."""
    with pytest.raises(CheckpointError) as error:
        from_megatron(run, output)
    line = str(error.value)
    assert "\n" not in line and not list(output.parent.glob(".converting-*"))
    assert not (output / "checkpoint").exists()
    return line


def packed(file: Path) -> None:
    """Write an archive again, compressed."""
    with zipfile.ZipFile(file) as old:
        entries = {entry: old.read(entry) for entry in old.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in entries.items():
            new.writestr(name, data)


def move(metadata: Any, **changes: Any) -> None:
    """Change the place of a chunk."""
    infos = metadata.storage_data.items()
    (info,) = [info for index, info in infos if index.fqn == "output_layer.weight"]
    vars(info).update(changes)


def share(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        vars(info).update(offset=0, length=10**5)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda f: (f / ".metadata").unlink(), "no checkpoint of Megatron"),
    "half an index": (lambda f: truncated(f / ".metadata"), ".metadata: damaged"),
    "half of common.pt": (lambda f: truncated(f / "common.pt"), "common.pt: damaged"),
    "half of the tensors": (lambda f: truncated(f / "__0_0.distcp"), "reaches past the end"),
    "no common.pt": (lambda f: (f / "common.pt").unlink(), "common.pt: missing"),
    "compressed common.pt": (lambda f: packed(f / "common.pt"), "holds a compressed tensor"),
    "another backend": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "its format is zarr; titan reads torch_dist",
    ),
    "a legacy folder": (lambda f: (f / "mp_rank_00").mkdir(), "a legacy checkpoint"),
    "a path out of the folder": (
        lambda f: changed_index(f, lambda m: move(m, relative_path="../../x")),
        "outside of the checkpoint",
    ),
    "an offset that is a text": (
        lambda f: changed_index(f, lambda m: move(m, offset="x")),
        ".metadata: damaged",
    ),
    "a tensor with a hole": (
        lambda f: changed_index(
            f, lambda m: m.state_dict_metadata["output_layer.weight"].chunks.clear()
        ),
        "is not covered once by its chunks",
    ),
    "a pipe": (lambda f: fifo(f / "common.pt"), "common.pt: missing"),
    "steps of Adam that are no number": (
        lambda f: write(f.parent, common={"optimizer": {"step": "x"}}),
        "arguments of the run: ValueError",
    ),
    "a step that is no count": (
        lambda f: write(f.parent, common={"iteration": -5}),
        "-5 is no count",
    ),
    "shapes of flattened shards that do not fit": (
        lambda f: changed_index(
            f,
            lambda m: vars(m).update(
                mcore_data={
                    "output_layer.weight": {"nd_reformulated_orig_global_shape": (7, 3)}
                }
            ),
        ),
        "output_layer.weight cannot be read",
    ),
    "a weight that is no number": (
        lambda f: write(
            f.parent,
            with_moments(
                weights()
                | {"decoder.final_layernorm.weight": torch.full((folders.D,), torch.nan)}
            ),
        ),
        "model.norm.weight is not finite",
    ),
    "chunks that share bytes": (lambda f: changed_index(f, share), "more than the files"),
    "bytes that are no tensor": (
        lambda f: (f / "__0_0.distcp").write_bytes(b"x" * (f / "__0_0.distcp").stat().st_size),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders_are_refused(tmp_path: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(write(tmp_path / "run"))
    assert words in refused(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("file", [".metadata", "args", "a chunk"])
def test_nothing_in_a_folder_is_run(tmp_path: Path, file: str) -> None:
    trace = tmp_path / "trace"
    evil = Bomb(trace)
    folder = write(tmp_path / "run")
    if file == ".metadata":
        (folder / file).write_bytes(pickle.dumps(evil))
    elif file == "args":
        write(tmp_path / "run", args=arguments(evil=evil))
    else:
        stream = io.BytesIO()
        torch.save(evil, stream)
        data = stream.getvalue()

        def plant(metadata: Any) -> None:
            (folder / "evil.distcp").write_bytes(data.ljust(2**14, b"\0"))
            move(metadata, relative_path="evil.distcp", offset=0, length=len(data))

        changed_index(folder, plant)
    refused(tmp_path / "run", tmp_path / "out")
    assert not trace.exists()


def test_a_model_alone_begins_at_step_0(tmp_path: Path) -> None:
    write(tmp_path / "run", weights())
    assert "holds no moments" in refused(tmp_path / "run", tmp_path / "out")
    found = converted(tmp_path / "run", tmp_path / "weights", model_only=True)
    assert (tmp_path / "weights" / "checkpoint" / "step-0").is_dir()
    assert all(name.startswith("model.") for name in found)
