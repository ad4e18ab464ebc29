"""`titan check --hf`: verdicts against titan's own loader and transformers' logits, and hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_huggingface_experts import MODELS, SIZES
from tests.support.commands import Shell
from titan import cli
from titan.base.untrusted import printable
from titan.checkpoint import manager as checkpoints
from titan.checkpoint.commit import CheckpointGroup
from titan.config.load import load_config
from titan.config.model import family
from titan.config.schema import ModelSection
from titan.huggingface import check_hf
from titan.huggingface import load as huggingface
from titan.huggingface.load import HFModel, check_folder
from titan.parallel import materialize

transformers = pytest.importorskip("transformers")

PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "checkpoint" / "published.json").read_text()
)

# ---- verdicts --------------------------------------------------------------------------------------

TINY = {**SIZES, "vocab_size": 301}
GROUPED = TINY | {"num_key_value_heads": 2}
LOCAL = GROUPED | {"sliding_window": 8}  # shorter than the test's sequences
BASES = {
    "Llama": TINY,
    "Qwen3": GROUPED | {"head_dim": 32},
    "Mistral": LOCAL,
    "Gemma3": LOCAL | {"head_dim": 32, "sliding_window_pattern": 2},
} | {name: TINY | changes for name, changes in MODELS.items()}
LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
YARN: Any = BASES["DeepseekV3"]["rope_parameters"]
# What may stand in a config.json, and whether titan's model can be that. Where it can, the logits must be equal.
CHANGES: list[tuple[str, dict[str, Any], bool]] = [
    *((name, {}, True) for name in BASES),
    ("Llama", {"tie_word_embeddings": True}, True),
    ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}, True),
    ("Llama", {"sliding_window": 8}, True),  # a key of other models, which means nothing here
    ("Llama", {"rope_parameters": LLAMA_ROPE}, True),
    (
        "Llama",
        {"rope_parameters": LLAMA_ROPE | {"original_max_position_embeddings": 64}},
        False,
    ),
    ("Llama", {"mlp_bias": True}, False),
    ("Llama", {"model_type": "internlm3"}, False),
    ("Mistral", {"sliding_window": None}, True),
    ("Mistral", {"hidden_act": "gelu"}, True),  # transformers computes it
    ("Gemma3", {"rope_parameters": GEMMA_ROPE, "query_pre_attn_scalar": 24}, True),
    ("Gemma3", {"rope_parameters": GEMMA_ROPE | {"full_attention": LLAMA_ROPE}}, True),
    ("Gemma3", {"use_bidirectional_attention": True}, False),
    ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, True),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, False),
    ("Qwen3Moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}, True),
    ("Qwen3Moe", {"head_dim": ...}, True),  # missing, so derived
    ("Qwen3Moe", {"mlp_only_layers": [0]}, False),
    ("Qwen3Moe", {"decoder_sparse_step": 2}, False),
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
    architecture = getattr(transformers, f"{kind}ForCausalLM")
    model = architecture(architecture.config_class(**values)).eval()
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
    code = cli.main(["convert", "from-hf", str(config.parent), str(tmp_path / "out")])
    assert code == (0 if loads else 2)
    assert cli.main(f"check --hf {config.parent}".split()) == code
    if not loads:
        return
    by_files = check_hf.describe(config.parent)
    assert by_files["loads"] is True
    # The printed keys mean this model, whose logits are transformers'.
    keys = by_files["family"]
    sizes = ModelSection.model_validate(keys).sizes
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


# ---- the command -----------------------------------------------------------------------------------


def write(file: Path, hf: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(hf if isinstance(hf, str) else json.dumps(hf))
    return file


def facts_of(shell: Shell, *argv: object) -> dict[str, Any]:
    return json.loads(shell("check", *map(str, argv), "--json").out)


def test_the_snippet_is_a_job_of_the_same_size(tmp_path: Path, shell: Shell) -> None:
    changes = {"num_hidden_layers": 3, "rope_scaling": None}
    file = write(tmp_path / "config.json", PUBLISHED["Llama-3.2-1B"] | changes)
    page = shell(f"check --hf {file}").out.splitlines()
    start = next(n for n, line in enumerate(page) if line.endswith("[model]"))
    snippet = page[
        start : next(n for n in range(start, len(page)) if page[n].startswith("loads"))
    ]
    assert "flavor" in snippet[2] and "n_layers = 3" in snippet[3]
    job = write(tmp_path / "job.toml", "\n".join(line.strip() for line in snippet))
    facts = facts_of(shell, "--hf", file)
    assert facts["parameters"] == facts_of(shell, job)["model"]["parameters"]
    assert facts["loads"] is None


def test_the_page_in_the_docs(tmp_path: Path, monkeypatch, shell: Shell) -> None:
    write(tmp_path / "Llama-3.2-1B" / "config.json", PUBLISHED["Llama-3.2-1B"])
    monkeypatch.chdir(tmp_path)
    said = shell("check --hf Llama-3.2-1B").out
    docs = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    assert f"```text\n{said}```" in docs


def test_a_job_names_keys_that_nothing_reads(tmp_path: Path, capsys) -> None:
    """The keys are those of the folder that describes the model, and of the folder with its first weights."""
    hf = transformers.Phi3Config(**GROUPED, pad_token_id=0).to_dict() | {"logit_scale": 0.5}
    model, start = (write(tmp_path / name / "config.json", hf).parent for name in "ab")
    keys = {"name": "transformers", "hf_path": str(model)}
    words = [f"--model.{key}={value}" for key, value in keys.items()]
    words += ["--checkpoint.initial_load_in_hf=true", f"--checkpoint.initial_load_path={start}"]
    cli.main([*f"check {write(tmp_path / 'job.toml', '')} --world-size=1".split(), *words])
    assert capsys.readouterr().err.count(", logit_scale\n") == 2


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_job_that_continues_a_folder(name: str, tmp_path: Path, shell: Shell) -> None:
    model, job = random_model(name, {}), tmp_path / "job.toml"
    model.save_pretrained(tmp_path)
    words = f"init {job} --hf {tmp_path}"
    assert "its tokenizer are missing" in shell.refuse(words)
    shell(f"tokenizer train --input {__file__} --output {tmp_path} --vocab-size=301")
    shell(words)
    config, theirs = load_config(job), model.config
    sizes, start = config.model.sizes, config.checkpoint
    assert sizes.num_params == model.num_parameters() and sizes.vocab_size == theirs.vocab_size
    assert sizes.n_kv_heads == theirs.num_key_value_heads
    assert start.initial_load_in_hf and start.last_save_in_hf
    assert start.initial_load_path == config.tokenizer.path == str(tmp_path)


def test_weights_that_differ_are_named(tmp_path: Path, shell: Shell) -> None:
    model = random_model("Llama", {})
    model.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", hf | {"intermediate_size": hf["intermediate_size"] + 1})
    facts = facts_of(shell, "--hf", tmp_path)
    assert facts["loads"] is False and facts["family"]["name"] == "llama3"
    assert len(facts["problems"]) == 3 * hf["num_hidden_layers"]
    said = shell(f"check --hf {tmp_path}").out
    assert (
        "loads       no" in said and "mlp.gate_proj.weight has shape" in said and "more" in said
    )


LLAMA = PUBLISHED["Llama-3.2-1B"]
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
HOSTILE: list[Any] = [
    "",
    "not JSON",
    "[]",
    "3",
    '"text"',
    "{",
    "[" * 100_000,
    '{"a":' * 5000,
    {},
    {"model_type": 5},
    {"model_type": None, "architectures": 7},
    {"architectures": [[]]},
    {
        "model_type": "no_such",
        "architectures": ["Trainer"],
        "auto_map": {"AutoConfig": "evil.Evil"},
    },
    *(LLAMA | {"num_hidden_layers": n} for n in (10**30, 10**9, -1, 1e30)),
    *(LLAMA | {"hidden_size": n} for n in (-64, 10**30, "64", [64], None)),
    LLAMA | {"num_attention_heads": 0},
    LLAMA | {"vocab_size": 2**41},
    GPT2,
    GPT2 | {"architectures": ["\x1b[31mgpt2\u202e"]},
    GPT2 | {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
    {"model_type": "mixtral", "num_local_experts": 10**9},
]


@pytest.mark.parametrize("hf", HOSTILE, ids=range(len(HOSTILE)))
def test_broken_files_are_one_line(hf: Any, tmp_path: Path, shell: Shell) -> None:
    file = write(tmp_path / "config.json", hf)
    write(
        tmp_path / "evil.py", f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n"
    )
    said = shell(f"check --hf {tmp_path}", code=2)
    assert said.err.count("\n") == 1 and str(file) in said.err and not said.out
    assert printable(said.err[:-1]) == said.err[:-1] and len(said.err) < 600
    assert not (tmp_path / "executed").exists()
