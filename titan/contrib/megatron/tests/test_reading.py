"""Folders of Megatron: what is read, and what is refused in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.runs import saved_tensors
from titan.checkpoint import CheckpointError
from titan.config.load import load_config
from titan.contrib.megatron.convert import from_megatron
from titan.contrib.megatron.job import hf_config, sections

from . import folders
from .folders import (
    G,
    H,
    K,
    an_enum_of_megatron,
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


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_each_tensor_is_in_its_place(tmp_path: Path) -> None:
    write(tmp_path / "run")
    found = converted(tmp_path / "run", tmp_path / "out")
    given = with_moments(weights())
    for prefix, ours in (
        ("", "model.{}"),
        ("optimizer.state.exp_avg.", "optimizer.{}.exp_avg"),
    ):
        qkv = given[f"{prefix}decoder.layers.self_attention.linear_qkv.weight"][1]
        # Of each group: its two queries, one key, one value, K rows each.
        rows = {"wq": [], "wk": [], "wv": []}
        for group in range(G):
            first = group * (H // G + 2) * K
            rows["wq"].append(qkv[first : first + 2 * K])
            rows["wk"].append(qkv[first + 2 * K : first + 3 * K])
            rows["wv"].append(qkv[first + 3 * K : first + 4 * K])
        for name, parts in rows.items():
            key = ours.format(f"layers.1.attention.{name}.weight")
            assert torch.equal(found[key], torch.cat(parts)), key
        both = given[f"{prefix}decoder.layers.mlp.linear_fc1.weight"][0]
        assert both[: folders.F].equal(found[ours.format("layers.0.feed_forward.w1.weight")])
        assert both[folders.F :].equal(found[ours.format("layers.0.feed_forward.w3.weight")])
        norm = given[f"{prefix}decoder.layers.mlp.linear_fc1.layer_norm_weight"][1]
        assert norm.equal(found[ours.format("layers.1.ffn_norm.weight")])
    assert found["optimizer.norm.weight.step"].item() == 3


@pytest.mark.parametrize("form", ["single", "chained", "newest", "masters"])
def test_forms_mean_the_same(tmp_path: Path, form: str) -> None:
    write(tmp_path / "run")
    tensors = with_moments(weights(is_single=form == "single"))
    if form == "chained":  # as experts and the rest have an optimizer each
        tensors = {
            re.sub(r"^optimizer", "chained_1.optimizer", name): x for name, x in tensors.items()
        }
    if form == "masters":
        whole = {f"optimizer.state.fp32_param.{name}": x for name, x in weights().items()}
        short = {n: x if n.startswith("optim") else x.bfloat16() for n, x in tensors.items()}
        tensors = short | whole
    folder = write(tmp_path / "other", tensors)
    if form == "newest":  # common.pt beside the tensors
        with an_enum_of_megatron():
            common = torch.load(folder / "common.pt", weights_only=False)
            new = tmp_path / "new"
            folders.save(new, tensors, **{"common_state/shard_0_1": [common]})
        (folder / "metadata.json").rename(new / "metadata.json")
        folder = new
    one = converted(tmp_path / "run", tmp_path / "out")
    assert same(one, converted(folder, tmp_path / "again"))


def test_flattened_shards_are_put_together(tmp_path: Path) -> None:
    # As Megatron-Core before 0.14 kept the distributed optimizer's state: a grid of shards, each flattened.
    tensors = with_moments(weights())
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    whole = tensors[name]
    layers, rows, columns = whole.shape
    grid = whole.view(layers, 1, rows, 2, columns // 2).transpose(2, 3)
    tensors[name] = grid.reshape(layers, 1, 2, -1)
    folder = write(tmp_path / "run", tensors)
    shapes = {name: {"nd_reformulated_orig_global_shape": whole.shape}}
    changed_index(folder, lambda metadata: vars(metadata).update(mcore_data=shapes))
    write(tmp_path / "plain")
    one = converted(tmp_path / "run", tmp_path / "out")
    assert same(one, converted(tmp_path / "plain", tmp_path / "again"))


def test_the_job_has_what_the_arguments_say(tmp_path: Path) -> None:
    args = arguments(train_iters=None, train_samples=80, hidden_dropout=0.1, add_qkv_bias=False)
    state = schedule(lr_decay_style="WSD", lr_decay_steps=80)
    args.lr_wsd_decay_iters, args.lr_wsd_decay_style = 5, "minus_sqrt"
    write(tmp_path / "run", args=args, common={"opt_param_scheduler": state})
    messages = from_megatron(tmp_path / "run", tmp_path / "out", job=tmp_path / "job.toml")
    config = load_config(tmp_path / "job.toml")
    assert (config.training.steps, config.training.global_batch_size) == (20, 4)
    scheduler = config.lr_scheduler
    assert (scheduler.warmup_steps, scheduler.total_steps) == (2, 20)
    assert (scheduler.decay_ratio, scheduler.decay_type) == (0.25, "sqrt")
    assert scheduler.min_lr_factor == pytest.approx(0.1)
    assert (config.optimizer.name, config.optimizer.lr) == ("AdamW", 1e-3)
    assert config.model.sizes.n_kv_heads == G and config.model.sizes.head_dim == K
    assert (tmp_path / "out" / "config.toml").read_text() == (tmp_path / "job.toml").read_text()
    text = "\n".join(messages)
    assert "not as in Megatron's run: hidden_dropout = 0.1" in text
    assert "not read, since they are no tensors: rng_state (1)" in text
    assert re.search(r"read 45 of 45 tensors, and \d+ of \d+ arguments", text)


def test_a_tokenizer_cuts_the_padding(tmp_path: Path) -> None:
    write(tmp_path / "run", args=arguments(padded_vocab_size=folders.VOCAB))
    tensors = weights()
    tokenizer = tmp_path / "tokenizer.json"
    write_tokenizer(tokenizer, size=folders.VOCAB - 3)
    found = converted(tmp_path / "run", tmp_path / "out", tokenizer=str(tokenizer))
    rows = tensors["output_layer.weight"][:-3]
    assert found["model.output.weight"].equal(rows)
    assert found["optimizer.output.weight.exp_avg"].equal(rows / 8)


def test_hashes_are_those_of_a_second_conversion(tmp_path: Path) -> None:
    write(tmp_path / "run")
    for name in ("one", "two"):
        from_megatron(tmp_path / "run", tmp_path / name)
    one, two = (
        json.loads((tmp_path / n / "megatron.json").read_text()) for n in ("one", "two")
    )
    assert one["megatron"] == two["megatron"] and one["titan"] == two["titan"]


def write_tokenizer(file: Path, *, size: int) -> None:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(file))


ARGUMENTS = {
    "normalization": ("LayerNorm", "normalization = LayerNorm"),
    "swiglu": (False, "swiglu = False"),
    "position_embedding_type": ("learned_absolute", "position_embedding_type"),
    "window_size": ((128, 0), "window_size"),
    "optimizer": ("muon", "optimizer muon"),
    "hidden_size": ("64", "config.json"),
    "num_layers": (10**9, "means 1,000,000,000 layers"),
    "kv_channels": (8, "has shape"),
    "num_attention_heads": (None, "num_attention_heads is missing"),
    "num_query_groups": (0, ""),
    "global_batch_size": (0, "arguments of the run: ZeroDivisionError"),
    "padded_vocab_size": (48, "model.embed_tokens.weight has shape [40, 16]"),
    "qk_layernorm": (
        True,
        "q_layernorm.weight is missing, for model.layers.0.self_attn.q_norm",
    ),
    "untie_embeddings_and_output_weights": (False, "no place for output_layer.weight"),
}


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


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({**MOE, "moe_router_num_groups": 2}, "moe_router_num_groups = 2"),
    ({**MOE, "moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
    ({**MOE, "moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
    ({**MOE, "moe_layer_freq": [0, 1]}, "moe_layer_freq"),
    ({**MLA, "moe_layer_freq": [1, 0]}, "moe_layer_freq"),
    ({**MLA, "rope_type": "rope"}, "rope_type = rope with mscale_all_dim"),
    ({**MLA, "moe_router_topk": 2}, "moe_router_topk = 2 with moe_router_group_topk = 2"),
    ({**MLA, "moe_router_num_groups": None, "moe_router_topk": 1}, "moe_router_topk = 1"),
    ({**MLA, "layernorm_epsilon": 1e-5}, "layernorm_epsilon"),
    ({"moe_mlp_glu_interleave_size": 32}, "moe_mlp_glu_interleave_size"),
    ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
]


@pytest.mark.parametrize(("changes", "words"), OTHERS)
def test_models_that_titan_has_not_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(words)):
        hf_config(vars(arguments(**changes)), vocab_size=64)


# Changes of the arguments, of the schedule, and keys of the job.
JOBS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"lr_decay_style": "constant"}, {"decay_ratio": 0.0, "decay_type": "linear"}),
    ({}, {"max_lr": 2e-3}, {"lr": 2e-3, "min_lr_factor": 0.05, "name": "AdamW"}),
    ({"decoupled_weight_decay": False}, {}, {"name": "Adam", "beta2": 0.95, "eps": 1e-8}),
    ({"bf16": True}, {}, {"mixed_precision_param": "auto"}),
    (
        {
            "lr_wsd_decay_samples": 20,
            "lr_wsd_decay_style": "cosine",
        },
        {"lr_decay_style": "WSD"},
        {"decay_ratio": 0.5, "decay_type": "cosine"},
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
    args = arguments(norm_epsilon=1e-6)
    vars(args).pop("layernorm_epsilon")
    optimizer = {"state": {"common_step": torch.tensor(2)}, "param_groups": [{"step": 3}]}
    state = {"optimizer": optimizer, "opt_param_scheduler": schedule(num_steps=8)}
    write(tmp_path / "run", args=args, common=state)
    messages = from_megatron(tmp_path / "run", tmp_path / "out")
    assert any("a schedule that is at sample 8" in message for message in messages)
    config = load_config(tmp_path / "out" / "config.toml")
    assert config.model.sizes.norm_eps == 1e-6
    assert config.checkpoint.exclude_from_loading == ["dataloader"]
    found = saved_tensors(tmp_path / "out" / "checkpoint" / "step-3")
    assert found["optimizer.norm.weight.step"].item() == 2
    titan_json = json.loads(
        (tmp_path / "out" / "checkpoint" / "step-3" / "titan.json").read_text()
    )
    assert titan_json["tokens"] == 12 * 32


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_refused_by_name(tmp_path: Path, name: str) -> None:
    value, words = ARGUMENTS[name]
    write(tmp_path / "run", args=arguments(**{name: value}))
    line = refused(tmp_path / "run", tmp_path / "out")
    assert words in line


def refused(run: Path, output: Path) -> str:
    """Return the one line of a refusal, after which nothing is left behind."""
    with pytest.raises(CheckpointError) as error:
        from_megatron(run, output)
    line = str(error.value)
    assert "\n" not in line and not list(output.parent.glob(".converting-*"))
    assert not (output / "checkpoint").exists()
    return line


class Touch:
    """Object whose unpickling writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.file}",)


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


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


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda f: (f / ".metadata").unlink(), "no checkpoint of Megatron"),
    "half an index": (lambda f: cut_in_half(f / ".metadata"), ".metadata: damaged"),
    "half of common.pt": (lambda f: cut_in_half(f / "common.pt"), "common.pt: damaged"),
    "half of the tensors": (lambda f: cut_in_half(f / "__0_0.distcp"), "reaches past the end"),
    "no tensors": (lambda f: (f / "__0_0.distcp").unlink(), "which"),
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
    "a pipe": (lambda f: pipe(f / "common.pt"), "common.pt: missing"),
    "steps of Adam that are no number": (
        lambda f: write(f.parent, common={"optimizer": {"step": "x"}}),
        "arguments of the run: ValueError",
    ),
    "a step that is no count": (
        lambda f: write(f.parent, common={"iteration": -5}),
        "-5 is no count",
    ),
    "a rate that is none": (
        lambda f: write(f.parent, args=arguments(clip_grad=None)),
        "arguments of the run: ValidationError",
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


@pytest.mark.parametrize("file", [".metadata", "common.pt", "args", "a chunk"])
def test_nothing_in_a_folder_is_run(tmp_path: Path, file: str) -> None:
    trace = tmp_path / "trace"
    evil = Touch(trace)
    folder = write(tmp_path / "run")
    if file == ".metadata":
        (folder / file).write_bytes(pickle.dumps(evil))
    elif file == "common.pt":
        torch.save(evil, folder / file)
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


def test_moments_by_bucket_are_refused_with_what_to_run(tmp_path: Path) -> None:
    tensors = weights()
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_float32.bucket_idx_0.exp_avg"
    write(tmp_path / "run", tensors | {key: torch.zeros(8)})
    line = refused(tmp_path / "run", tmp_path / "out")
    assert "--dist-ckpt-optim-fully-reshardable" in line and "--model-only" in line
    from_megatron(tmp_path / "run", tmp_path / "weights", model_only=True)


def test_a_model_alone_begins_at_step_0(tmp_path: Path) -> None:
    write(tmp_path / "run", weights())
    assert "holds no moments" in refused(tmp_path / "run", tmp_path / "out")
    found = converted(tmp_path / "run", tmp_path / "weights", model_only=True)
    assert (tmp_path / "weights" / "checkpoint" / "step-0").is_dir()
    assert all(name.startswith("model.") for name in found)
