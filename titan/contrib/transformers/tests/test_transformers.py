"""Models of transformers from a job file: layouts against transformers alone, folders, and what is refused."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.test_huggingface import DEBUG, through_titan_job
from tests.support.hf_families import LAYOUTS, PACKED, PROOFS, families, overrides_of, row_of
from tests.support.hf_folders import difference, save_twin, tensors_of
from tests.support.ranks import Pool
from tests.support.tables import table
from titan.checkpoint.manager import CheckpointManager
from titan.cli import main
from titan.config.load import load_config
from titan.config.render import to_toml
from titan.config.schema import CheckpointSection, JobConfig, ModelSection
from titan.contrib.transformers.attention import spec_of
from titan.contrib.transformers.errors import UnsupportedModelError
from titan.huggingface import convert
from titan.huggingface.export import Export
from titan.huggingface.hf_model import HFModel
from titan.models import RETIRED

# Fused matrices; norms over all heads, and experts; latent attention with experts; scaled embeddings, norms on both sides and windows; parallel
# attention and feed-forward with logits that are scaled; experts whose router has groups and a shared expert.
SIX = ("phi3", "olmoe", "deepseek_v3", "gemma3_text", "cohere2", "glm4_moe")


@pytest.mark.parametrize("kind", SIX)
def test_layouts_equal_transformers_alone(kind: str, pool: Pool) -> None:
    row = row_of(pool, kind, LAYOUTS)
    names = [name for name in LAYOUTS if name != "EP" or row["experts"]]
    assert {name: row[name] for name in names} == {name: row[name][:7] for name in names}, row
    assert all(float(row[name]) < 1e-5 for name in names)


def test_the_arms_of_transformers_own_table(pool: Pool) -> None:
    """transformers' FSDP2 with expert parallelism was held against one process in these (huggingface/transformers#48516)."""
    arms = {f"FSDP {4 // n}, EP {n}": {"dp_shard": 4, "ep": n} for n in (1, 2, 4)}
    row = row_of(pool, "qwen3_moe", arms)
    assert all(float(row[name]) < 1e-5 for name in arms), row


def test_a_checkpoint_of_experts_resumes_on_tensor_parallel_ranks(pool: Pool) -> None:
    """Two steps on FSDP2 with EP, and the third on TP+SP, against transformers' third step."""
    row = row_of(pool, "glm4_moe", {"resumed": PROOFS["resumed"]})
    assert float(row["resumed"]) < 1e-5, row


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_documents_do_not_see_each_other(kind: str, pool: Pool) -> None:
    """transformers alone makes the mask from the positions, for all layers and for those with a window."""
    row = row_of(pool, kind, PACKED)
    assert all(float(row[name]) < 1e-5 for name in PACKED), row


def section(**keys: Any) -> ModelSection:
    return ModelSection(name="transformers", **keys)


@pytest.mark.parametrize("kind", ["mistral", "phi3", "glm4_moe", "gemma3_text"])
def test_folders_there_and_back_bit_for_bit(kind: str, pool: Pool, tmp_path: Path) -> None:
    """Read on FSDP2 x TP, saved as a checkpoint, loaded, exported."""
    source, architecture = tmp_path / "source", families()[kind]
    save_twin(architecture, overrides_of(architecture), source)
    model = {"name": "transformers", "hf_path": str(source), "overrides": {}}
    degrees = {"dp_shard": 2, "tp": 2}
    results = pool.run(4, through_titan_job, model, source, degrees, tmp_path)
    assert difference(source, tmp_path / "out") == ""
    for read, held, _ in results:
        assert read == held  # its own part, once


def test_a_checkpoint_of_a_folder_outlives_the_folder(tmp_path: Path) -> None:
    """It goes there and back bit for bit, and the file beside it is a job of the model."""
    source, run, back, moved = (tmp_path / name for name in ("source", "run", "back", "moved"))
    fields = {"vocab_size": 300, "max_position_embeddings": 2**15}
    save_twin("MistralForCausalLM", overrides_of("MistralForCausalLM") | fields, source)
    assert convert.main(["from-hf", str(source), str(run)]) == 0
    source.rename(moved)
    sizes = load_config(DEBUG, overlays=[run / "config.toml"]).model.sizes
    assert sizes.num_params == sum(tensor.numel() for tensor in tensors_of(moved).values())
    assert convert.main(["to-hf", str(run), str(back)]) == 0
    assert difference(moved, back) == ""


@pytest.mark.parametrize("name", RETIRED)
def test_a_retired_family_names_the_class_in_its_place(name: str) -> None:
    _, [(key, message)] = ModelSection(name=name, flavor="7B").resolved
    [kind] = re.findall(r'architecture = "(\w+)"', message)
    assert key == "model.name" and "\n" not in message
    assert section(architecture=kind).sizes.num_params > 1e9


def test_flops_count_what_windows_leave() -> None:
    def sizes(**overrides: Any) -> Any:
        small = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
        small |= {"num_key_value_heads": 2, "head_dim": 16}
        return section(architecture="MistralForCausalLM", overrides=small | overrides).sizes

    short, whole = sizes(sliding_window=16), sizes(sliding_window=4096)
    per_key = 12 * 4 * 4 * 16  # layers, heads, channels
    assert whole.flops_per_token(64) - short.flops_per_token(64) == per_key * (64 - 16)
    # In 64 rows, 16 x 16 / 2 pairs are missing where the window begins.
    causal = per_key * (64 * 16 - 16 * 16 // 2) // 64
    assert short.attention_flops_per_token(64, causal=True) == causal
    assert short.flops_per_token(8, causal=True) == whole.flops_per_token(8, causal=True)


@pytest.mark.parametrize("kind", ["cwm", "emu3"])
def test_a_class_that_refuses_null_gets_its_token_ids(kind: str) -> None:
    """A job without a tokenizer, such as one with data of ids, exports a config.json that transformers reads."""
    architecture = families()[kind]
    keys = {"architecture": architecture, "overrides": overrides_of(architecture)}
    model = HFModel.of("transformers", section(**keys).sizes)
    content = Export(model, torch.float32).config()
    read = transformers.CONFIG_MAPPING[kind].from_dict(content)
    assert (read.bos_token_id, read.eos_token_id) == (1, 2)


def test_sizes_are_the_models() -> None:
    """With the numbers that transformers and the papers give."""
    llama = section(
        architecture="LlamaForCausalLM",
        overrides={
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ).sizes
    assert llama.num_params == 8_030_261_248
    assert (llama.n_heads, llama.n_kv_heads, llama.head_dim) == (32, 8, 128)
    from titan.models.llama3 import FLAVORS

    assert llama.flops_per_token(8192) == FLAVORS["8B"].flops_per_token(8192)
    mistral = section(architecture="MistralForCausalLM").sizes
    assert mistral.num_params == 7_241_732_096
    mixtral = section(architecture="MixtralForCausalLM").sizes
    assert mixtral.num_params == 46_702_792_704
    assert mixtral.num_active_params == 12_879_925_248


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    table(__file__, "mistakes"),
    ids=lambda value: str(value)[:40],
)
def test_mistakes(keys: dict[str, Any], key: str, words: str) -> None:
    _, problems = section(**keys).resolved
    [(found, message)] = problems
    assert found == key and words in message and "\n" not in message


def own_model(folder: Path, code: str) -> str:
    content = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "own.py").write_text(code)
    return str(folder)


def test_code_of_a_folder_runs_only_if_asked_for(tmp_path: Path) -> None:
    path = own_model(tmp_path, "import no_such_package")
    for trusts, words in ((False, "set model.trust_remote_code"), (True, "no_such_package")):
        _, [(key, message)] = section(hf_path=path, trust_remote_code=trusts).resolved
        assert key == "model.hf_path" and words in message and "\n" not in message


COMMANDS = """generate --checkpoint STEP
convert to-hf STEP STEP/out
evaluate STEP --tasks stdlib_cloze
audit RUN --step 1"""


@pytest.mark.parametrize("words", COMMANDS.splitlines())
def test_code_of_a_checkpoint_runs_only_if_the_command_line_says_so(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its titan.json and config.toml say."""
    path = own_model(tmp_path, "raise SystemExit('ran')")
    job = to_toml(JobConfig(model=section(hf_path=path, trust_remote_code=True)))
    facts = {"step": 1, "tokens": 0, "data": {}, "config": job}
    manager = CheckpointManager(CheckpointSection(), run_dir=tmp_path)
    step = manager.save(1, {"model.w": torch.zeros(1)}, metadata=facts)
    if "RUN" in words:
        (tmp_path / "config.toml").write_text(job)
        (tmp_path / "environment.json").write_text("{}")
    argv = words.replace("STEP", str(step)).replace("RUN", str(tmp_path)).split()
    assert main(argv) == 2
    assert "model.trust_remote_code: true is not obeyed" in capsys.readouterr().err
    assert main([*argv, "--trust-remote-code"]) == 1, "SystemExit"


def test_a_version_outside_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = sys.modules["titan.contrib.transformers.resolve"]
    monkeypatch.setattr(resolver, "OLDEST", (6, 0))
    _, [(_, message)] = section(architecture="Olmo2ForCausalLM").resolved
    assert transformers.__version__ in message and "6.0" in message


def test_a_model_larger_than_the_host_is_built() -> None:
    """One layer's experts of DeepSeek-V3 are 45 GB in fp32; no allocation asks the host for them."""
    asked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops.aten.empty.memory_format and math.prod(args[0]) > 2**30:
                asked.append(kwargs.get("device"))
                kwargs = {**kwargs, "device": "meta"}
            return func(*args, **(kwargs or {}))

    keys = {"architecture": "DeepseekV3ForCausalLM", "overrides": {"num_hidden_layers": 4}}
    with Watch():
        sizes = section(**keys).sizes
    # Of 256 experts with two matrices to 2048 channels, and one back.
    assert sizes.experts_of_blocks == (0, 0, 0, 256 * 3 * 7168 * 2048)
    assert {str(device) for device in asked} == {"meta"}


def test_masks_are_read_from_transformers_functions() -> None:
    from transformers import masking_utils as masks

    assert spec_of(masks.causal_mask_function) == (True, 0)
    assert spec_of(masks.bidirectional_mask_function) == (False, 0)
    for window in (1, 2, 7, 4096):
        assert spec_of(masks.sliding_window_causal_mask_function(window)) == (True, window)
    with pytest.raises(UnsupportedModelError, match="chunks"):
        spec_of(masks.chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.int64)))


def test_a_style_of_the_job_comes_first() -> None:
    name = "layers.*.mlp"
    job = section(architecture="LlamaForCausalLM", overrides={"num_hidden_layers": 1})
    with torch.device("meta"):
        from titan.contrib.transformers import build_model

        derived = build_model(job.sizes).tensor_plan
        given = build_model(job.model_copy(update={"plan": {name: "whole"}}).sizes)
    assert derived[name] == "gather_input" and given.tensor_plan[name] == "whole"
