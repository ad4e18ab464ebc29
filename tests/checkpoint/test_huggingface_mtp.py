"""Folders with modules of multi-token prediction, as DeepSeek-V3 was released."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_huggingface import TOKENS, assert_same, logits, tensors
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.export import Export, export_state
from titan.checkpoint.huggingface import (
    HFModel,
    left_out_messages,
    load,
    model_keys,
    open_folder,
    read_sizes,
)
from titan.checkpoint.state import model_state
from titan.config.model import family
from titan.parallel import initialize
from titan.tools import convert

transformers = pytest.importorskip("transformers")


def exported(name: str, folder: Path) -> dict[str, Any]:
    """Write a model of two blocks and two modules to a folder; return its state."""
    package = family(name)
    sizes = dataclasses.replace(package.FLAVORS["tiny"], n_layers=2, num_mtp_modules=2)
    model = package.build_model(sizes)
    initialize(model, seed=0, std_of=lambda key: None if "norm" in key else 0.1)
    for key, buffer in model.named_buffers():
        if key.endswith("moe.bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    state = model_state([model])
    export = Export(HFModel.of(name, sizes).with_copies(), torch.float32, seq_len=32)
    export_state(folder, state, export, group=CheckpointGroup())
    return state


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3"])
def test_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    state = exported(name, source)
    stored = tensors(source)
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 2
    weights = {key.removeprefix("model.layers.3."): t for key, t in stored.items() if ".3." in key}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < {
        *weights
    }
    assert torch.equal(
        weights["self_attn.o_proj.weight"], state["model.layers.3.block.attention.wo.weight"]
    )
    if name == "deepseek_v3":
        assert torch.equal(weights["embed_tokens.weight"], stored["model.embed_tokens.weight"])
        assert torch.equal(weights["shared_head.head.weight"], stored["lm_head.weight"])
        assert "mlp.gate.e_score_correction_bias" in weights
    # With its modules, and back to the same folder; without them, as transformers reads it.
    assert convert.main(["from-hf", str(source), str(tmp_path / "with"), "--mtp"]) == 0
    assert "num_mtp_modules = 2" in (tmp_path / "with" / "config.toml").read_text()
    assert convert.main(["to-hf", str(tmp_path / "with"), str(tmp_path / "back")]) == 0
    assert_same(tensors(tmp_path / "back"), stored)
    capsys.readouterr()
    assert convert.main(["from-hf", str(source), str(tmp_path / "without")]) == 0
    assert "left out model.layers.2.*" in capsys.readouterr().out
    assert convert.main(["to-hf", str(tmp_path / "without"), str(tmp_path / "plain")]) == 0
    plain = {
        key: t for key, t in stored.items() if ".layers.2" not in key and ".layers.3" not in key
    }
    assert_same(tensors(tmp_path / "plain"), plain)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(tmp_path / "plain"))
        ours = family(name).build_model(read_sizes(open_folder(source), mtp=True)[1])
        ours.load_state_dict({k.removeprefix("model."): t for k, t in state.items()}, strict=False)
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_job_takes_the_modules_that_it_has(tmp_path: Path) -> None:
    state = exported("deepseek_v3", tmp_path / "source")
    folder = open_folder(tmp_path / "source")
    name, sizes = read_sizes(folder, mtp=True)
    assert model_keys(name, sizes)["overrides"]["num_mtp_modules"] == 2
    one = HFModel.of(name, dataclasses.replace(sizes, num_mtp_modules=1))
    held = {key: torch.zeros_like(t) for key, t in state.items() if ".layers.3." not in key}
    messages = load(folder.path, held, model=one, group=CheckpointGroup())
    assert all(torch.equal(tensor, state[key]) for key, tensor in held.items() if "model." in key)
    assert messages == left_out_messages(folder, one)
    assert any("layers.3." in line and "further tokens" in line for line in messages)
    assert any("layers.2.embed_tokens" in line and "copy" in line for line in messages)
