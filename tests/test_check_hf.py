"""`titan check --hf`: counts against real models of transformers, verdicts against titan's own loader, and hostile files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_huggingface_experts import MODELS, SIZES
from titan import check_hf, cli, hf_reference
from titan.checkpoint import CheckpointError, huggingface
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.huggingface import HFModel, check_folder, open_folder, read_sizes
from titan.config.model import family, model_config
from titan.config.schema import ModelSection
from titan.parallel import materialize

transformers = pytest.importorskip("transformers")

SEQ_LEN = 80  # more than a chunk of 64, and no multiple of it
PUBLISHED = json.loads((Path(__file__).parent / "checkpoint" / "published.json").read_text())
# Each class takes what it knows of these sizes.
SMALL: dict[str, Any] = {
    **{
        "vocab_size": 300,
        "hidden_size": 64,
        "d_model": 64,
        "num_hidden_layers": 2,
        "decoder_layers": 2,
    },
    **{"intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "moe_intermediate_size": 32},
    **{
        "num_attention_heads": 4,
        "decoder_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    **{"kv_lora_rank": 24, "q_lora_rank": 32, "v_head_dim": 16, "first_k_dense_replace": 1},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "n_group": 1, "topk_group": 1},
    **{"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_k": 2, "mamba_n_heads": 8, "mamba_d_head": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
# Dense models; experts; state spaces and other recurrences, alone and beside attention.
_MODEL_TYPES = """
    apertus arcee biogpt bitnet bloom cohere cohere2 cwm diffllama doge ernie4_5 exaone4 falcon gemma gemma2 gemma3_text glm
    glm4 gpt2 gpt_bigcode gpt_neox granite helium hunyuan_v1_dense jais2 llama minicpm3 ministral ministral3 mistral
    modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm
    starcoder2 vaultgemma xglm

    afmoe aria_text cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5_moe flex_olmo glm4_moe glm4_moe_lite gpt_oss
    granitemoe hunyuan_v1_moe minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe zaya

    bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 mamba mamba2 minimax nemotron_h qwen3_next recurrent_gemma rwkv
    xlstm
"""
MODEL_TYPES = _MODEL_TYPES.split()
# What some classes need beside SMALL.
CHANGED: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 16},
    "zaya": {"num_experts_per_tok": 1},
}
SLOW = {"rwkv", "xlstm", "nemotron_h", "granitemoehybrid", "minimax"}
OURS = {"llama", "qwen3", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3"}


def small(kind: Any, **changes: Any) -> Any:
    """Return a small config of a class, with a layer of each type."""
    default = kind()
    knows = vars(default).keys() | kind.attribute_map.keys()
    sizes = {
        k: v
        for k, v in SMALL.items()
        if k in knows and not isinstance(getattr(kind, k, None), property)
    }
    if layers := vars(default).get("layer_types"):
        kinds = [*dict.fromkeys(layers)] * 2
        sizes["num_hidden_layers"] = max(2, len(kinds) // 2)
        sizes["layer_types"] = kinds[: sizes["num_hidden_layers"]]
    if "kv_lora_rank" in sizes:
        sizes = {k: v for k, v in sizes.items() if k != "head_dim"} | {"num_key_value_heads": 4}
    return kind(**sizes | changes)


def products(model: Any) -> int:
    """Return what FlopCounterMode counts of a real forward pass, on a CPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.randint(3, 300, (1, SEQ_LEN))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODEL_TYPES],
)
def test_counts_are_those_of_a_real_model(model_type: str, tmp_path: Path) -> None:
    config = small(transformers.CONFIG_MAPPING[model_type], **CHANGED.get(model_type, {}))
    config._experts_implementation = "eager"  # loops over experts, as meta cannot
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    facts = check_hf.describe(tmp_path, seq_len=SEQ_LEN)
    assert facts["architecture"] == type(model).__name__
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["flops_per_token"] == round(3 * products(model) / SEQ_LEN)
    assert facts["embedding_parameters"] < facts["active_parameters"] <= facts["parameters"]
    assert facts["memory_gib"]["float32"] == 4 * facts["parameters"] / 2**30
    assert facts["loads"] == (model_type in OURS), facts["problems"]
    if model_type not in OURS:
        assert facts["family"] is None and facts["problems"]
        with pytest.raises(CheckpointError):
            read_sizes(open_folder(tmp_path))


def test_there_are_eighty_classes() -> None:
    assert len({type(transformers.CONFIG_MAPPING[name]()) for name in MODEL_TYPES}) >= 80


_FAST = ("Llama-3.2-1B", "Qwen3-0.6B", "Mixtral-8x7B", "DeepSeek-V2-Lite")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in _FAST else pytest.mark.slow) for n in PUBLISHED]
)
def test_formulas_and_classes_count_alike(name: str, tmp_path: Path) -> None:
    """Compare what config.json alone says of our families with transformers' classes at full size."""
    hf = PUBLISHED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(hf))
    facts = check_hf.describe(file, seq_len=4096)
    theirs = hf_reference.counts(file, hf_reference.build(file, hf), 4096)
    assert {key: facts[key] for key in theirs} == theirs
    assert facts["loads"] and not facts["problems"]


# ---- verdicts --------------------------------------------------------------------------------------

TINY = {**SIZES, "vocab_size": 301}
GROUPED = TINY | {"num_key_value_heads": 2}
BASES = {"Llama": TINY, "Qwen3": GROUPED | {"head_dim": 32}} | {
    name: TINY | changes for name, changes in MODELS.items()
}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = BASES["DeepseekV3"]["rope_parameters"]
# What may stand in a config.json, and whether titan's model can be that. Where it can, the logits must be equal.
CHANGES: list[tuple[str, dict[str, Any], bool]] = [
    *((name, {}, True) for name in BASES),
    ("Llama", {"tie_word_embeddings": True}, True),
    ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}, True),
    ("Llama", {"sliding_window": 8}, True),  # a key of other models, which means nothing here
    ("Llama", {"rope_parameters": LLAMA_ROPE}, True),
    ("Llama", {"rope_parameters": LLAMA_ROPE | {"original_max_position_embeddings": 64}}, False),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        False,
    ),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        False,
    ),
    ("Llama", {"attention_bias": True}, False),
    ("Llama", {"mlp_bias": True}, False),
    ("Llama", {"hidden_act": "gelu"}, False),
    ("Llama", {"model_type": "internlm3"}, False),
    ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, True),
    ("Qwen3", {"attention_bias": True}, False),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, False),
    ("Qwen3Moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}, True),
    ("Qwen3Moe", {"head_dim": ...}, True),  # missing, so derived
    ("Qwen3Moe", {"mlp_only_layers": [0]}, False),
    ("Qwen3Moe", {"decoder_sparse_step": 2}, False),
    ("Mixtral", {"sliding_window": 8}, False),
    ("Olmoe", {"clip_qkv": 0.5}, False),
    ("DeepseekV3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}, True),
    ("DeepseekV3", {"rope_interleave": False}, False),
    ("DeepseekV3", {"rope_parameters": YARN | {"truncate": False}}, False),
    ("DeepseekV3", {"rope_parameters": YARN | {"attention_factor": 0.7}}, False),
    ("DeepseekV2", {"routed_scaling_factor": 1.5}, True),
]


def random_model(name: str, changes: dict[str, Any]) -> Any:
    """Return a model of transformers in which every tensor matters."""
    kind = name.partition(",")[0]
    torch.manual_seed(0)
    values = {key: value for key, value in (BASES[name] | changes).items() if value is not ...}
    config = getattr(transformers, f"{kind}Config")(**values)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.uniform_(0.5, 1.5) if "norm" in key else tensor.normal_(std=0.2)
    return model


@pytest.mark.parametrize(("name", "changes", "loads"), CHANGES)
def test_verdicts_are_the_loaders(
    name: str, changes: dict[str, Any], loads: bool, tmp_path: Path
) -> None:
    model_type = changes.get("model_type")
    model = random_model(name, {k: v for k, v in changes.items() if k != "model_type"})
    model.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    hf = json.loads(config.read_text()) | ({"model_type": model_type} if model_type else {})
    config.write_text(json.dumps(hf))
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(hf))
    by_class, by_files = check_hf.describe(alone), check_hf.describe(tmp_path / "model")
    assert by_class["loads"] is by_files["loads"] is loads, by_class["problems"]
    code = cli.main(["convert", "from-hf", str(config.parent), str(tmp_path / "out")])
    assert code == (0 if loads else 2)
    if not loads:
        assert by_class["problems"] and by_class["family"] is None
        return
    # The printed keys mean this model, whose logits are transformers'.
    keys = by_files["family"]
    sizes = model_config(ModelSection.model_validate(keys))
    described = HFModel.of(keys["name"], sizes)
    check_folder(config.parent, described)
    with torch.device("meta"):
        ours = family(keys["name"]).build_model(sizes)
    assert by_files["parameters"] == sum(p.numel() for p in ours.parameters())
    materialize(ours, device="cpu")
    state = checkpoints.model_state([ours])
    huggingface.load(config.parent, state, model=described, group=CheckpointGroup())
    tokens = torch.arange(200).reshape(2, 100) % 300
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)


# ---- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        (
            "GPT2LMHeadModel",
            [
                "biases c_attn, c_fc, c_proj",
                "learned positions",
                "LayerNorm in place of RMSNorm",
                "the activation gelu_new",
                "one matrix for several projections",
            ],
        ),
        (
            "Gemma2ForCausalLM",
            [
                "sliding-window attention",
                "the activation gelu_pytorch_tanh",
                "norms in other places",
                "soft-capped logits",
            ],
        ),
        (
            "GptOssForCausalLM",
            [
                "sliding-window attention",
                "attention sinks",
                "biases k_proj, o_proj, q_proj, router, v_proj",
                "rotary scaling yarn",
            ],
        ),
        ("Qwen2ForCausalLM", ["biases k_proj, q_proj, v_proj"]),
        ("MistralForCausalLM", ["sliding-window attention"]),
        ("MambaForCausalLM", ["state-space or other recurrent layers", "biases dt_proj"]),
        ("FalconH1ForCausalLM", ["state-space or other recurrent layers"]),
        (
            "RwkvForCausalLM",
            ["state-space or other recurrent layers", "LayerNorm in place of RMSNorm"],
        ),
        (
            "Qwen3NextForCausalLM",
            [
                "state-space or other recurrent layers",
                "rotation of a part of each head",
                "one matrix for several projections",
            ],
        ),
        ("GraniteForCausalLM", ["scaling by attention_multiplier, embedding_multiplier"]),
        (
            "PhiForCausalLM",
            [
                "biases dense, fc1, fc2, k_proj, lm_head, q_proj",
                "LayerNorm in place of RMSNorm",
                "the activation gelu_new",
                "rotation of a part of each head",
            ],
        ),
        ("Olmo2ForCausalLM", ["norms in other places"]),
        (
            "Gemma3ForConditionalGeneration",
            [
                "inputs other than text (multi-modal)",
                "sliding-window attention",
                "the activation gelu_pytorch_tanh",
                "norms in other places",
            ],
        ),
        (
            "Llama4ForConditionalGeneration",
            [
                "inputs other than text (multi-modal)",
                "sliding-window attention",
                "layers without rotation",
            ],
        ),
        ("T5ForConditionalGeneration", ["an encoder beside the decoder"]),
        ("SmolLM3ForCausalLM", ["layers without rotation"]),
        (
            "FalconForCausalLM",
            [
                "LayerNorm in place of RMSNorm",
                "the activation gelu",
                "one matrix for several projections",
                "attention beside the feed-forward layer",
            ],
        ),
        ("HeliumForCausalLM", []),
    ],
)
def test_what_is_missing_in_words(architecture: str, words: list[str], tmp_path: Path) -> None:
    multipliers = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1}  # Granite's
    scaled = multipliers if architecture.startswith("Granite") else {}
    config_class = getattr(transformers, architecture).config_class
    config_class(architectures=[architecture], **scaled).save_pretrained(tmp_path)
    hf = json.loads((file := tmp_path / "config.json").read_text())
    model = hf_reference.build(file, hf)
    assert [*hf_reference.features(model)] == words


def test_experts_that_are_computed_without_need(tmp_path: Path) -> None:
    """Llama 4's class computes all experts for all tokens, and multiplies all results but one by 0."""
    config = small(transformers.Llama4TextConfig, num_experts_per_tok=1, num_local_experts=8)
    model = transformers.Llama4ForCausalLM(config).eval()
    config.save_pretrained(tmp_path)
    facts = check_hf.describe(tmp_path, seq_len=SEQ_LEN)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = experts * 7 // 8
    assert facts["active_parameters"] == facts["parameters"] - idle
    assert facts["flops_per_token"] == round(3 * products(model) / SEQ_LEN) - 6 * idle


# ---- the command -----------------------------------------------------------------------------------


def write(file: Path, hf: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(hf if isinstance(hf, str) else json.dumps(hf))
    return file


def facts_of(capsys, *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["check", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_snippet_is_a_job_with_the_same_figures(tmp_path: Path, capsys) -> None:
    changes = {"num_hidden_layers": 3, "rope_scaling": None}
    file = write(tmp_path / "config.json", PUBLISHED["Llama-3.2-1B"] | changes)
    argv = ["check", "--hf", str(file), "--world-size", "8", "--seq-len", "1024"]
    assert cli.main(argv) == 0
    page = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(page) if line.endswith("[model]"))
    snippet = page[start : next(n for n in range(start, len(page)) if page[n].startswith("loads"))]
    assert "flavor" in snippet[2] and "n_layers = 3" in snippet[3]
    rest = "\n[training]\nseq_len = 1024\nlocal_batch_size = 1\n"
    job = write(tmp_path / "job.toml", "\n".join(line.strip() for line in snippet) + rest)
    expected = facts_of(capsys, job, "--world-size", 8)
    facts = facts_of(capsys, *argv[1:])
    assert facts["parameters"] == expected["model"]["parameters"]
    assert facts["memory_gib"]["estimate_per_rank"] == expected["memory_gib"]
    shared = facts["memory_gib"]["training_state"] / 8
    assert facts["memory_gib"]["training_state_per_rank"] == shared
    parts = ("parameters", "gradients", "optimizer")
    assert sum(expected["memory_gib"][part] for part in parts) == pytest.approx(shared)


def test_the_page_in_the_docs(tmp_path: Path, monkeypatch, capsys) -> None:
    write(tmp_path / "Llama-3.2-1B" / "config.json", PUBLISHED["Llama-3.2-1B"])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "--hf", "Llama-3.2-1B", "--world-size", "8"]) == 0
    docs = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```" in docs


def test_without_transformers(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    ours = write(tmp_path / "ours" / "config.json", PUBLISHED["Qwen3-30B-A3B"])
    facts = facts_of(capsys, "--hf", ours)
    assert (facts["parameters"], facts["active_parameters"]) == (30_532_122_624, 3_353_032_704)
    assert facts["loads"] is None and "without 'transformers'" in facts["problems"][0]
    other = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    assert cli.main(["check", "--hf", str(write(tmp_path / "gpt2.json", other))]) == 2
    said = capsys.readouterr().err
    assert "GPT2LMHeadModel cannot be built without" in said and said.count("\n") == 1
    assert "pip install transformers" in said


def test_weights_that_differ_are_named(tmp_path: Path, capsys) -> None:
    model = random_model("Llama", {})
    model.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", hf | {"intermediate_size": hf["intermediate_size"] + 1})
    facts = facts_of(capsys, "--hf", tmp_path)
    assert facts["loads"] is False and facts["family"]["name"] == "llama3"
    assert len(facts["problems"]) == 3 * hf["num_hidden_layers"]
    assert cli.main(["check", "--hf", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "loads       no" in said and "mlp.gate_proj.weight has shape" in said and "more" in said


LLAMA = PUBLISHED["Llama-3.2-1B"]
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
HOSTILE: list[Any] = [
    *("", "not JSON", "[]", "3", '"text"', "{", "[" * 100_000, '{"a":' * 5000),
    *({}, {"model_type": 5}, {"model_type": None, "architectures": 7}, {"architectures": [[]]}),
    {
        "model_type": "no_such",
        "architectures": ["Trainer"],
        "auto_map": {"AutoConfig": "evil.Evil"},
    },
    *(LLAMA | {"num_hidden_layers": n} for n in (10**30, 10**9, -1, 1e30)),
    *(LLAMA | {"hidden_size": n} for n in (-64, 10**30, "64", [64], None)),
    *(LLAMA | {"num_attention_heads": 0}, LLAMA | {"vocab_size": 2**41}),
    *(GPT2 | {"n_layer": n} for n in (10**30, 10**6, -3, "many", [1])),
    *(GPT2 | {"n_embd": n} for n in (-768, 767, 2**39)),
    *(GPT2 | {"vocab_size": -1}, GPT2 | {"model_type": "\x1b[31mgpt2\u202e"}),
    {"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 500_000},
    {"model_type": "mixtral", "num_local_experts": 10**9},
    {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
    {"model_type": "bart", "encoder_layers": 10**8},
]


@pytest.mark.parametrize("hf", HOSTILE, ids=range(len(HOSTILE)))
def test_broken_files_are_one_line(hf: Any, tmp_path: Path, capsys) -> None:
    file = write(tmp_path / "config.json", hf)
    write(tmp_path / "evil.py", f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    assert cli.main(["check", "--hf", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and str(file) in said.err and not said.out
    assert hf_reference.printable(said.err[:-1]) == said.err[:-1] and len(said.err) < 600
    assert not (tmp_path / "executed").exists()


def test_code_of_a_model_is_never_run(tmp_path: Path, capsys) -> None:
    """A known type may come with Python code, kernels of the hub and quantizers, too. They are left out."""
    active = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    active |= {"attn_implementation": "owner/kernel", "_attn_implementation": "owner/kernel"}
    write(
        tmp_path / "config.json", GPT2 | active | {"quantization_config": {"quant_method": "awq"}}
    )
    write(tmp_path / "evil.py", f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n")
    assert facts_of(capsys, "--hf", tmp_path)["parameters"] == 124_439_808
    assert not (tmp_path / "executed").exists()


def test_mistakes_of_the_command_line(tmp_path: Path, capsys) -> None:
    file = write(tmp_path / "config.json", LLAMA)
    assert cli.main(["check", "--hf", str(file), "job.toml"]) == 2
    assert "with no job" in capsys.readouterr().err
    assert cli.main(["check", "--hf", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["check", "--hf", str(write(tmp_path / "x.json", "[]")), "--json"]) == 2
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert problem["file"].endswith("x.json") and "should be an object" in problem["message"]
