"""Folders with modules of multi-token prediction, as DeepSeek-V3 was released."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_huggingface import TOKENS, assert_same, logits
from tests.support.commands import Shell
from tests.support.hf_folders import tensors_of
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.state import model_state
from titan.config.model import family
from titan.huggingface.export import Export, export_state
from titan.huggingface.load import HFModel, load, open_folder, read_sizes
from titan.parallel import initialize

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3"])
def test_there_and_back(name: str, tmp_path: Path, shell: Shell) -> None:
    source, there, back = (tmp_path / folder for folder in ("source", "there", "back"))
    plain, without = tmp_path / "plain", tmp_path / "without"
    flavor = family(name).FLAVORS["tiny"]
    sizes = dataclasses.replace(flavor, n_layers=2, num_mtp_modules=2)
    ours = family(name).build_model(sizes)
    initialize(ours, seed=0, std_of=lambda key: None if "norm" in key else 0.1)
    for key, buffer in ours.named_buffers():
        if key.endswith("moe.bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    state, model = model_state([ours]), HFModel.of(name, sizes).with_copies()
    export_state(source, state, Export(model, torch.float32), group=CheckpointGroup())
    # The names of the release, and copies of the embeddings for DeepSeek.
    stored = tensors_of(source)
    last = {key.removeprefix("model.layers.3."): t for key, t in stored.items() if ".3." in key}
    assert {f"{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} < {*last}
    wo = state["model.layers.3.block.attention.wo.weight"]
    assert torch.equal(last["self_attn.o_proj.weight"], wo)
    if name == "deepseek_v3":
        assert torch.equal(last["embed_tokens.weight"], stored["model.embed_tokens.weight"])
        assert torch.equal(last["shared_head.head.weight"], stored["lm_head.weight"])
        assert "mlp.gate.e_score_correction_bias" in last
    # With the modules, and without.
    shell(f"convert from-hf {source} {there} --mtp")
    assert "num_mtp_modules = 2" in (there / "config.toml").read_text()
    shell(f"convert to-hf {there} {back}")
    assert_same(tensors_of(back), stored)
    assert "left out model.layers.2.*" in shell(f"convert from-hf {source} {without}").out
    shell(f"convert to-hf {without} {plain}")
    assert tensors_of(plain).keys() == {
        k for k in stored if not k.startswith(("model.layers.2", "model.layers.3"))
    }
    # transformers reads a folder with them, and sees the same model.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits(plain))
        torch.testing.assert_close(ours(TOKENS), logits(plain), rtol=1e-5, atol=1e-5)
    # A job takes as many modules as it has.
    of_folder = read_sizes(open_folder(source), mtp=True)[1]
    assert (of_folder.num_mtp_modules, of_folder.n_layers) == (2, 2)
    one = HFModel.of(name, dataclasses.replace(of_folder, num_mtp_modules=1))
    held = {
        k: torch.zeros_like(t) for k, t in state.items() if not k.startswith("model.layers.3")
    }
    messages = load(source, held, model=one, group=CheckpointGroup())
    parameters = {f"model.{key}" for key, _ in ours.named_parameters()} & held.keys()
    assert all(torch.equal(held[key], state[key]) for key in parameters)
    assert sum("further tokens" in line for line in messages) == 1
    assert sum("a copy of" in line for line in messages) == 2 * (name == "deepseek_v3")
