"""config.json in the spellings that people have: the logits of transformers, or one line that refuses.

Each case is a folder of random weights that transformers saves, with a config.json that differs in a few keys. transformers
and titan read that folder. The slow lane crosses all families with all changes.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from titan.checkpoint import CheckpointError
from titan.checkpoint.commit import CheckpointGroup
from titan.checkpoint.state import model_state
from titan.config.model import family
from titan.huggingface import load as huggingface
from titan.huggingface.hf_model import HFModel
from titan.parallel import materialize

Table = dict[str, Any]
ABSENT = "..."
# sizes: of the Llama; families: the architecture, its type, and its smallest config.json; changes: keys of a change, `ABSENT` for one that
# is left out (each table of rope in each place and spelling, among others); default: what a family's folders are known to come with, for the
# default lane. Rows of scores have other scales of attention where fp32 rotations would differ by 1e-4 in the logits.
KNOWN = json.loads((Path(__file__).parent / "config_variants.json").read_text())
SIZES: Table = KNOWN["sizes"]
FAMILIES: dict[str, tuple[str, str, Table]] = KNOWN["families"]
CHANGES: dict[str, Table] = KNOWN["changes"]


def logits(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor | str, torch.Tensor | str]:
    """Return transformers' logits and titan's for a folder. A text is the reason of the one that refuses it.

    In fp64, since rounding in fp32 is up to 2e-5 for some of these random models.
    """
    transformers = pytest.importorskip("transformers")
    config = json.loads((folder / "config.json").read_text())
    auto = transformers.AutoModelForCausalLM
    try:
        model = auto.from_config(transformers.AutoConfig.from_pretrained(folder)).float()
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            is_scale = weight.ndim == 1 and "norm" in name
            weight.data = (
                torch.rand_like(weight) * 0.5 + 0.5
                if is_scale
                else torch.randn_like(weight) * 0.15
            )
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        theirs = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            expected = theirs.eval().double()(tokens).logits
    except Exception as error:  # its checks raise many kinds
        expected = f"{type(error).__name__}: {error}"
    try:
        name, sizes = huggingface.read_sizes(huggingface.open_folder(folder))
        with torch.device("meta"):
            ours = family(name).build_model(sizes).eval()
        materialize(ours, device="cpu")
        model = HFModel.of(name, sizes)
        huggingface.load(folder, model_state([ours]), model=model, group=CheckpointGroup())
    except CheckpointError as error:
        return expected, str(error)
    with torch.no_grad():
        return expected, ours.double()(tokens)


def compare(name: str, change: str, folder: Path) -> bool:
    """Return whether titan takes a folder, and with transformers' logits. False: one line refuses it."""
    architecture, model_type, sizes = FAMILIES[name]
    header = {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
    config = {k: v for k, v in {**header, **sizes, **CHANGES[change]}.items() if v != ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(64, (2, 60), generator=torch.Generator().manual_seed(1))
    expected, found = logits(folder, tokens)
    if isinstance(found, str):
        assert "\n" not in found and str(folder) in found
        return False
    # Where transformers refuses its own folder, there is no right answer.
    if not isinstance(expected, str):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize(
    ("name", "change"), [(n, c) for n, of in KNOWN["default"].items() for c in of]
)
def test_logits_equal_transformers_or_are_refused(
    name: str, change: str, tmp_path: Path
) -> None:
    compare(name, change, tmp_path)


def test_a_tied_folder_with_another_output_layer_is_refused(tmp_path: Path) -> None:
    """transformers takes the tensor that is there, whatever the key says."""
    safetensors = pytest.importorskip("safetensors.torch")
    assert compare("llama", "tied False", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    _, sizes = huggingface.read_sizes(huggingface.open_folder(tmp_path))
    message = (
        "tensor lm_head.weight differs from model.embed_tokens.weight, and tie_word_embeddings"
    )
    with pytest.raises(CheckpointError, match=message):
        huggingface.check_folder(tmp_path, HFModel.of("llama3", sizes))
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    huggingface.check_folder(tmp_path, HFModel.of("llama3", sizes))


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "hidden_size"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "8", [8], None])
def test_a_value_that_no_model_has_is_refused_in_a_line(
    tmp_path: Path, key: str, value: object
) -> None:
    header = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(header | SIZES | {key: value}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    try:
        huggingface.read_sizes(huggingface.open_folder(tmp_path))
        assert value is None and key != "hidden_size"  # null: the default
    except CheckpointError as error:
        assert "\n" not in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_all_changes(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    wrong, taken = [], 0
    for change in CHANGES:
        for file in tmp_path.iterdir():
            file.unlink()
        try:
            taken += compare(name, change, tmp_path)
        except AssertionError as error:
            wrong.append(f"{change}: {str(error).splitlines()[0]}")
    assert not wrong
    # Not all are refused.
    assert taken > 40
