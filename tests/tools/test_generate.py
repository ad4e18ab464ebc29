"""The command: a question, a file of prompts, a conversation; of a run and of the folder that it exports."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import Shell
from tests.support.jobs import job
from tests.support.trainers import Trainer, run_to_end
from titan.cli import main as titan
from titan.config.errors import ConfigError
from titan.data import DataError
from titan.data.tokenizer import EOS
from titan.step import train_step
from titan.tools import answers, generate

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q: ' + m.content + '\\nA:' }}"
    "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
CHATS = [
    [
        {"role": "user", "content": f"Say {word}."},
        {"role": "assistant", "content": f"{word} {word}"},
    ]
    for word in ("cat", "dog", "sun", "sea")
]
GREEDY = ["--temperature", "0", "--max-new-tokens", "12", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was tuned on four conversations until it knows them, and exported."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS)
    )
    pytest.importorskip("tokenizers")
    argv = f"--input {folder}/chat.jsonl --text-key text --vocab-size 300".split()
    texts = folder / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": m["content"]}) + "\n" for chat in CHATS for m in chat)
    )
    argv[1] = str(texts)
    assert titan(["tokenizer", "train", *argv, "--output", str(folder / "tokenizer")]) == 0
    config = job(
        folder / "run",
        model={"flavor": "tiny", "overrides": {"n_layers": 2, "vocab_size": 300}},
        tokenizer={
            "path": str(folder / "tokenizer"),
            "chat_template": str(folder / "chat.jinja"),
        },
        data={
            "document_mask": True,
            "reset_positions": True,
            "cache_folder": str(folder / "c"),
        },
        training={
            "dataset": "conversations",
            "dataset_path": str(folder / "chat.jsonl"),
            "seq_len": 48,
            "steps": 60,
        },
        optimizer={"lr": 0.01},
        checkpoint={"enable": True, "interval": 60, "last_save_in_hf": True},
    )
    trainer = Trainer(config)
    run_to_end(trainer)
    (folder / "chat.jinja").unlink()  # a run and an export have their own
    return folder / "run"


def exported(run: Path) -> Path:
    folder = run.parent / "exported"
    if not folder.exists():
        assert titan(["convert", "to-hf", str(run), str(folder)]) == 0
    return folder


def test_it_answers_a_question_from_the_run_and_from_its_export(
    run: Path, shell: Shell
) -> None:
    folder, step = exported(run), run / "checkpoint" / "step-60"
    for where in (folder, step):  # the run ended with such a folder, too
        assert (where / "chat_template.jinja").read_text() == TEMPLATE
    for where in (run, folder, step):
        argv = [*f"--checkpoint {where} --chat --prompt".split(), "Say sun.", *GREEDY]
        assert shell("generate", *argv).out.strip() == "sun sun"


def test_transformers_says_the_same(run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = exported(run)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHATS[3][:1], return_tensors="pt", return_dict=True)
    tokens = model.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    said = tokenizer.decode(tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert said.strip() == "sea sea" and tokenizer.eos_token == EOS


def test_a_file_of_prompts_is_answered_in_its_order(
    run: Path, tmp_path: Path, shell: Shell
) -> None:
    rows: list[Any] = [{"messages": chat[:1]} for chat in CHATS]
    rows += [{"prompt": "Q: Say dog.\nA:"}, {"messages": [*CHATS[0], CHATS[1][0]]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for size in ("1", "4"):
        argv = [*f"--checkpoint {run} --prompts {file} --batch-size".split(), size, *GREEDY]
        printed = shell("generate", *argv)
        found.append([json.loads(line) for line in printed.out.splitlines()])
    assert found[0] == found[1]
    assert [{k: v for k, v in line.items() if k != "completion"} for line in found[0]] == rows
    said = [line["completion"].strip() for line in found[0]]
    assert said[:4] == [chat[1]["content"] for chat in CHATS]
    text = tmp_path / "prompts.txt"
    text.write_text("Say\n\nsun\n")
    lines = [
        json.loads(line)
        for line in shell(
            f"generate --checkpoint {run} --prompts {text}", *GREEDY
        ).out.splitlines()
    ]
    assert [line["prompt"] for line in lines] == ["Say", "sun"]
    file.write_text('{"messages": [{"content": "a"}]}\n')
    assert f"{file}:1: message 1 has no role" in shell.refuse(
        f"generate --checkpoint {run} --prompts {file}"
    )


def test_a_conversation_goes_on(
    run: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"Say cat.\nSay {EOS}\nSay sea.\n\nSay dog.\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    said = shell(f"generate --checkpoint {run} --interactive", *GREEDY)
    assert said.out.splitlines()[0].strip() == "cat cat" and len(said.out.splitlines()) == 2
    assert f"standard input: message 3 spells the special token {EOS}" in said.err


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_no_memory_is_taken_for_what_a_stranger_claims(
    kind: str,
    run: Path,
    tmp_path: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sizes in config.toml or config.json may be any; those of the weights are on disk."""
    where = shutil.copytree(run if kind == "run" else exported(run), tmp_path / "copy")
    file = where / ("config.toml" if kind == "run" else "config.json")
    key, value = (
        ("n_layers = 2", "n_layers = 3")
        if kind == "run"
        else ('hidden_layers": 2', 'hidden_layers": 3')
    )
    file.write_text(file.read_text().replace(key, value))
    monkeypatch.setattr(answers, "materialize", lambda *_, **__: pytest.fail("took memory"))
    monkeypatch.setattr(train_step, "materialize", answers.materialize)
    for command in (["generate", "--prompt=a"], ["evaluate", "--tasks=stdlib_choice"]):
        assert "layers.2" in shell.refuse(f"{command[0]} {where}", *command[1:])


@pytest.mark.slow  # two processes that import torch
def test_processes_share_the_model(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [*f"generate --checkpoint {run} --prompt".split(), "Q: Say dog.\nA:", *GREEDY]
    said = []
    for processes in ("1", "2"):
        assert titan([*argv, "--nproc", processes]) == 0
        said.append(capfd.readouterr().out)
    assert said[0] == said[1]


def test_without_a_template_it_says_what_to_set(run: Path, shell: Shell) -> None:
    folder = run.parent / "tokenizer"
    argv = f"--checkpoint {run} --tokenizer {folder} --interactive"
    error = shell.refuse(f"generate {argv}")
    assert f"tokenizer {folder / 'tokenizer.json'} has no chat template" in error


def test_one_process_holds_a_conversation(shell: Shell) -> None:
    error = shell.refuse("generate --checkpoint unused --interactive --nproc 2")
    assert "--interactive: one process answers: leave out --nproc" in error


def test_weights_on_an_accelerator_are_in_16_bits_and_no_gpu_is_touched_before(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher and each rank would else have a context on GPU 0."""
    loaded: list[Any] = []

    def load(*_: Any, **options: Any) -> None:
        loaded.append((options["device"].type, options["dtype"]))
        raise DataError("enough")

    monkeypatch.setattr(answers, "load_model", load)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("allocates"))
    for device in ("cuda:1", "cpu"):
        with pytest.raises(DataError, match="enough"):
            generate.main(["--checkpoint", str(run), "--device", device])
    assert loaded == [("cuda", "bfloat16"), ("cpu", "float32")]
    with pytest.raises(ConfigError, match="--device: cannot use cuda:2: this machine has 2"):
        generate.main(f"--checkpoint {run} --device cuda:2".split())
