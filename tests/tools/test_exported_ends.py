"""What an exported folder tells transformers: which token begins a text, and which ones end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell
from tests.support.jobs import job
from tests.support.scripted import SHAPES, build_tokenizer, write_folder
from tests.support.tables import tabled
from tests.support.trainers import Trainer, run_to_end
from titan.checkpoint.saved_model import find_checkpoint, open_run_tokenizer
from titan.cli import main as titan
from titan.config.render import to_toml
from titan.data.special_tokens import begin_ids
from titan.tools.answers import open_tokenizer

transformers = pytest.importorskip("transformers")


def write_tokenizer(folder: Path, family: str, **files: Any) -> Any:
    folder.mkdir()
    tokenizer = build_tokenizer(SHAPES[family])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer


def exported(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Return the folder that a run of a step writes at its end, and that of the command."""
    config = job(
        folder / "run",
        model={"flavor": "tiny", "overrides": {"n_layers": 1, "vocab_size": 400}},
        data={"cache_folder": str(folder / "cache")} | changes.pop("data", {}),
        training={"steps": 1},
        checkpoint={"enable": True, "last_save_in_hf": True},
        **changes,
    )
    trainer = Trainer(config)
    run_to_end(trainer)
    assert titan(["convert", "to-hf", str(folder / "run"), str(folder / "hf")]) == 0
    return folder / "run" / "checkpoint" / "step-1", folder / "hf"


def test_every_token_that_ends_an_answer_is_exported(tmp_path: Path) -> None:
    """The template's end is not the tokenizer's eos, and the base model's file has a third one."""
    names = {"eos_token": "<|endoftext|>", "bos_token": None, "add_bos_token": False}
    base = {"eos_token_id": [4], "temperature": 0.6, "do_sample": True}
    files = {"tokenizer_config": names, "generation_config": base}
    tokenizer = write_tokenizer(tmp_path / "tok", "qwen3", **files)
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"), 4]
    (tmp_path / "chat.jinja").write_text(SHAPES["qwen3"].template)
    template = {"path": str(tmp_path / "tok"), "chat_template": str(tmp_path / "chat.jinja")}
    for folder in exported(tmp_path, tokenizer=template):
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert generation.eos_token_id[0] == ends[0] and {*generation.eos_token_id} == {*ends}
        assert generation.temperature == 0.6
        assert (
            transformers.AutoConfig.from_pretrained(folder).eos_token_id
            == generation.eos_token_id
        )


@tabled("family, data, section, begins")
def test_texts_begin_in_the_export_as_in_the_run(
    family: str, data: dict[str, Any], section: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    shape = SHAPES[family]
    names = {"bos_token": shape.bos, "eos_token": shape.eos, **shape.names}
    write_tokenizer(tmp_path / "tok", family, tokenizer_config=names)
    tokenizer = {"path": str(tmp_path / "tok"), **section}
    _, folder = exported(tmp_path, data=data, tokenizer=tokenizer)
    config, _ = find_checkpoint(tmp_path / "run")
    ours = open_run_tokenizer(config)
    first = begin_ids(ours, add_bos=config.data.add_bos)
    used = open_tokenizer(config)
    assert used.begin_ids == first, "titan generate"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("the quick").input_ids == [*first, *ours.encode("the quick")]
    assert first == ([ours.id_of(shape.bos)] if begins else [])


def test_keys_name_the_tokens_of_a_tokenizer_that_does_not(
    tmp_path: Path, shell: Shell
) -> None:
    write_tokenizer(tmp_path / "tok", "gemma3")
    silent = job(
        model={"overrides": {"vocab_size": 400}}, tokenizer={"path": str(tmp_path / "tok")}
    )
    (tmp_path / "job.toml").write_text(to_toml(silent))
    said = shell(f"check {tmp_path}/job.toml")
    assert (
        "tokenizer.eos_token: " in said.out + said.err
        and "names no token that ends" in said.out + said.err
    )
    named = "--tokenizer.eos_token=<eos> --tokenizer.bos_token=<bos>"
    said = shell(f"check {tmp_path}/job.toml {named}")
    assert "names no token" not in said.out + said.err
    wrong = f"check {tmp_path}/job.toml --tokenizer.eos_token=<end>"
    assert 'tokenizer.eos_token = "<end>" is no token of' in shell.refuse(wrong)
    tokenizer = {"path": str(tmp_path / "tok"), "bos_token": "<bos>", "eos_token": "<eos>"}
    _, folder = exported(tmp_path, tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.bos_token, theirs.eos_token) == ("<bos>", "<eos>")
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert ends == theirs.eos_token_id


def test_a_folder_names_its_tokenizer_and_more_tokens_than_the_model_has(
    tmp_path: Path, shell: Shell
) -> None:
    write_folder(folder := tmp_path / "hf", SHAPES["llama3"], scripts={})
    page = shell(f"check --hf {folder}").out
    assert "    [tokenizer]\n" in page and f'    path = "{folder}"\n' in page
    assert "loads       yes" in page
    names = json.loads((folder / "tokenizer_config.json").read_text())
    names["added_tokens_decoder"] = {"336": {"content": "<|more|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    page = shell(f"check --hf {folder}").out
    assert "loads       no" in page
    assert "its tokenizer has 337 tokens, and the model 336" in page
    for argv in (["--chat", "--prompt", "a"], ["--prompt", "a"]):
        said = shell.refuse(f"generate --checkpoint {folder}", *argv)
        assert "the tokenizer has 337 tokens, but" in said and said.count("\n") == 1


def test_odd_numbers_of_sampling(tmp_path: Path, shell: Shell) -> None:
    write_folder(folder := tmp_path / "hf", SHAPES["llama3"], scripts={})
    argv = f"generate --checkpoint {folder} --prompt the --max-new-tokens 2"
    tiny = shell(f"{argv} --temperature 1e-40").out
    assert shell(f"{argv} --temperature 0").out == tiny
    assert "--seed: expected a whole number below 2^63" in shell.refuse(
        f"{argv} --seed {10**20}"
    )
