"""Conversations: tokens and answers against transformers' chat templates, rows, layouts, and messages for bad input."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.commands import Shell
from tests.support.layouts import (
    BOUND,
    GLOBAL_BATCH,
    SEQUENCE,
    Layout,
    cp,
    differences,
    fsdp,
    pp,
    tp,
    train,
)
from tests.support.ranks import Pool
from tests.support.tables import table, tabled
from titan.cli import main as titan
from titan.config import schema as s
from titan.contrib.chat import ChatTemplate, limits
from titan.contrib.chat.messages import Conversation
from titan.data import DataError
from titan.data.packing import Batch, pack
from titan.data.samples import SampleOptions, build_samples
from titan.data.sources import open_documents, source_of_path
from titan.data.special_tokens import KIND_SHIFT, PREDICTED, START, SpecialTokens, without_kind
from titan.data.tokenizer import BOS, EOS, Tokenizer, build_tokenizer
from titan.losses.loss import IGNORED

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "BEGIN{{- message.content | trim + '<|im_end|>' }}END\n"
    "{{- '\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}\n"
)
PLAIN = CHATML.replace("BEGIN", "").replace("END", "")
MARKED = CHATML.replace("BEGIN", "{%- if message.role == 'assistant' %}{% generation %}")
MARKED = MARKED.replace(
    "END", "{% endgeneration %}{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}"
)
# As Llama 3's: a begin token, headers, and each text without the space around it.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'] + ']\n\n' + m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif %}"
)
WORDS = [
    "The",
    "cat",
    "sat",
    "on",
    "12",
    "mats,",
    "",
    "naïve",
    "日本",
    "don't",
    "know.",
    "\n",
    "",
]


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    random = np.random.default_rng(seed)

    def text() -> str:
        return " ".join(random.choice(WORDS, size=random.integers(1, 9)))

    found = []
    for _ in range(count):
        turns = [("user", "assistant")] * int(random.integers(1, 4))
        roles = [
            *(["system"] if random.random() < 0.3 else []),
            *(r for turn in turns for r in turn),
        ]
        found.append([{"role": role, "content": text()} for role in roles])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with ChatML's tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    texts = [m["content"] + " assistant\nuser" for c in conversations(50) for m in c]
    tokenizer.train_from_iterator(texts, trainer=trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS}
    (path / "tokenizer_config.json").write_text(
        json.dumps({**config, "eos_token": "<|im_end|>"})
    )
    return path


def opened(folder: Path, template: str) -> Tokenizer:
    tokenizer = build_tokenizer(s.TokenizerSection(path=str(folder)), hf_assets_path="")
    tokenizer.chat_template = template
    return tokenizer


def reference(folder: Path, template: str, messages: Any) -> tuple[list[int], list[int]]:
    """Return transformers' tokens, and 1 for each of an answer."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = template
    if "generation %}" in template:
        found = theirs.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        return list(found["input_ids"]), list(found["assistant_masks"])

    # What each answer adds to the prompt before it.
    def rendered(upto: int, prompt: bool) -> str:
        return theirs.apply_chat_template(
            messages[:upto], tokenize=False, add_generation_prompt=prompt
        )

    encoding = theirs(
        rendered(len(messages), False), add_special_tokens=False, return_offsets_mapping=True
    )
    mask = [0] * len(encoding["input_ids"])
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            begin, end = len(rendered(number, True)), len(rendered(number + 1, False))
            for place, (first, last) in enumerate(encoding["offset_mapping"]):
                mask[place] |= int(first < end and last > begin)
    return list(encoding["input_ids"]), mask


@pytest.mark.parametrize("template", [MARKED, PLAIN, LLAMA], ids=["marked", "plain", "llama"])
def test_tokens_and_answers_are_transformers(folder: Path, template: str) -> None:
    ours = ChatTemplate.of(opened(folder, template))
    for messages in conversations(30):
        tokens = ours.encode(messages, where="here")
        ids, mask = reference(folder, template, messages)
        assert without_kind(tokens).tolist() == ids
        assert (tokens >> KIND_SHIFT == PREDICTED).astype(int).tolist() == mask
        assert tokens[0] >> KIND_SHIFT == START and 0 < sum(mask) < len(mask)
        prompt = ours.prompt(messages[:-1], where="here")
        assert prompt == ids[: len(prompt)] and len(prompt) < len(ids)
    assert ours.end_ids == {ours.tokenizer.special_ids["<|im_end|>"]}


def written(file: Path, chats: list[Any]) -> Path:
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file


def samples_of(
    tokenizer: Tokenizer,
    source: s.Section,
    tmp_path: Path,
    seq_len: int = 64,
    document_mask: bool = True,
    num_lengths: int = 1,
) -> Any:
    data = s.DataSection(cache_folder=str(tmp_path / "cache"), document_mask=document_mask)
    options = SampleOptions(
        tokenizer=tokenizer,
        data=data,
        seq_len=seq_len,
        split="train",
        seed=1,
        num_lengths=num_lengths,
    )
    return build_samples([source], options=options)


def epoch(samples: Any) -> Batch:
    rows = samples.get(np.arange(samples.num_samples))
    return pack(
        rows, special_tokens=samples.special_tokens, reset_positions=True, document_mask=True
    )


def test_rows_hold_whole_conversations_and_predict_answers_alone(
    folder: Path, tmp_path: Path
) -> None:
    """Its eos token ends every message, and is no mark of a document here."""
    chats = [chat for chat in conversations(40) if len(reference(folder, PLAIN, chat)[0]) <= 90]
    expected = sorted(reference(folder, PLAIN, chat) for chat in chats)
    source = s.JsonlSource(
        path=str(written(tmp_path / "a.jsonl", chats)), messages_key="messages"
    )
    batch = epoch(samples_of(opened(folder, PLAIN), source, tmp_path, seq_len=89))
    assert batch.document_ids_BS is not None and batch.positions_BS is not None
    found = []
    for tokens, labels, ids, positions in zip(
        *(x.tolist() for x in (batch.tokens_BS, batch.labels_BS, batch.document_ids_BS)),
        batch.positions_BS.tolist(),
        strict=True,
    ):
        starts = [n for n, place in enumerate(positions) if place == 0]
        assert [ids[n] for n in starts] == [*range(len(starts))]
        for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            # The label of the last token would be of the next document, or is the last token of the row.
            inputs, mask = (
                tokens[begin:end],
                [0] + [int(x != IGNORED) for x in labels[begin:end]],
            )
            if any(mask):
                assert all(
                    x in (IGNORED, y)
                    for x, y in zip(labels[begin:end], inputs[1:], strict=False)
                )
                found.append((inputs, mask))
    assert len(found) == len(expected)
    # Rows end with padding, in the last document of those whose template writes no mark; a full row has its last token as a label only.
    for (ids, mask), (inputs, ours) in zip(expected, sorted(found), strict=True):
        size = min(len(ids), len(inputs))
        assert size >= len(ids) - 1 and inputs[:size] == ids[:size]
        assert ours[: len(mask)] == mask and not any(ours[len(mask) :])


def test_parquet_and_prepared_shards_are_the_same_samples(
    folder: Path, tmp_path: Path, shell: Shell
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chats = conversations(20)
    lines = written(tmp_path / "a.jsonl", chats)
    parquet.write_table(pyarrow.table({"messages": chats}), tmp_path / "a.parquet")
    (tmp_path / "chat.jinja").write_text(PLAIN)
    argv = f"--tokenizer {folder} --chat-template {tmp_path}/chat.jinja --workers 2"
    argv += f" --output {tmp_path}/shards --messages-key messages"
    shell(f"prepare --input {lines} {argv}")
    sources = [
        s.JsonlSource(path=str(lines), messages_key="messages"),
        s.ParquetSource(path=str(tmp_path / "a.parquet"), messages_key="messages"),
        s.ShardsSource(path=str(tmp_path / "shards")),
    ]
    [first, *others] = [
        epoch(samples_of(opened(folder, PLAIN), source, tmp_path, 256)) for source in sources
    ]
    for other in others:
        assert torch.equal(first.tokens_BS, other.tokens_BS)
        assert torch.equal(first.labels_BS, other.labels_BS)
    # What only the shards' own index knows is refused when they are opened.
    refused: list[tuple[dict[str, Any], str]] = [
        ({"num_lengths": 2}, r"shards.*one length; remove seq_len from \[\[phase\]\]"),
        ({"document_mask": False}, "shards.*set data.document_mask = true"),
    ]
    for wrong, message in refused:
        with pytest.raises(DataError, match=message):
            samples_of(opened(folder, PLAIN), sources[-1], tmp_path, **wrong)
    job = tmp_path / "job.toml"
    job.write_text(
        f'[tokenizer]\npath = "{folder}"\n[data]\ndocument_mask = true\n[[data.sources]]\ntype = "shards"\n'
        f'path = "{tmp_path / "shards"}"\n[training]\nseq_len = 64\n[model]\nflavor = "tiny"\n'
        "[[phase]]\nfrom_step = 5\nseq_len = 32\n"
    )
    assert "job.toml:7: data.sources[0].path: the shards in" in shell.refuse(f"check {job}")


def test_long_conversations_end_after_an_answer_or_are_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "mats"}]
    long = [{"role": "user", "content": "cat " * 200}, turn[1]]
    source = s.JsonlSource(
        path=str(written(tmp_path / "a.jsonl", [turn * 20, long, turn])),
        messages_key="messages",
    )
    tokenizer = opened(folder, PLAIN)
    one = len(ChatTemplate.of(tokenizer).encode(turn, where=""))
    with caplog.at_level(logging.WARNING):
        batch = epoch(samples_of(tokenizer, source, tmp_path, seq_len=4 * one))
    assert "2 of 3 conversations have more than" in caplog.text
    assert "1 end after an earlier answer, and 1," in caplog.text
    end = tokenizer.special_ids["<|im_end|>"]
    # Four whole answers of the first one, and that of the last one.
    assert int((batch.labels_BS == end).sum()) == 5
    with pytest.raises(DataError, match="no conversation has an answer that ends within"):
        samples_of(tokenizer, source, tmp_path, seq_len=one // 2)


def chat_batch(layout: Layout, step: int) -> Batch:
    """Bytes of conversations, packed, as a global batch of the layouts' sizes."""
    tokenizer = build_tokenizer(s.TokenizerSection(), hf_assets_path="")
    tokenizer.chat_template = LLAMA.replace("<|im_end|>", EOS)
    template, rows = ChatTemplate.of(tokenizer), []
    for seed in range(GLOBAL_BATCH):
        row = np.full(SEQUENCE + 1, IGNORED, dtype=np.int64)
        chats = conversations(6, seed=100 * step + seed)
        tokens = np.concatenate([template.encode(chat[-2:], where="") for chat in chats])
        row[: SEQUENCE - seed] = tokens[: SEQUENCE - seed]
        rows.append(row)
    marks = SpecialTokens.of(tokenizer)
    return pack(np.stack(rows), special_tokens=marks, reset_positions=False, document_mask=True)


@pytest.mark.slow
def test_four_layouts_equal_one_process(pool: Pool) -> None:
    batch = chat_batch(Layout("one process"), 0)
    valid = (batch.labels_BS != IGNORED).sum(1)
    assert valid.min() != valid.max() and batch.document_ids_BS is not None
    one, *others = [
        Layout(name, degrees, blocks=2, batch=chat_batch)
        for name, degrees in (
            ("one process", ()),
            ("FSDP2", fsdp(2)),
            ("TP+SP", tp(2)),
            ("CP", cp(2)),
            ("PP", pp(2)),
        )
    ]
    [alone] = pool.run(1, train, one)
    for layout in others:
        found = differences(pool.run(layout.ranks, train, layout), alone)
        assert max(found.values()) < BOUND, (layout.name, found)


USER, ANSWER = {"role": "user", "content": "cat"}, {"role": "assistant", "content": "mats"}
BAD = table(__file__, "bad")


@pytest.mark.parametrize("message", BAD)
def test_bad_conversations_are_named_by_file_and_line(
    folder: Path, tmp_path: Path, message: str, shell: Shell
) -> None:
    file = written(tmp_path / "a.jsonl", [[USER, ANSWER], BAD[message]])
    template = (
        "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    )
    (tmp_path / "chat.jinja").write_text(template + PLAIN)
    job = tmp_path / "job.toml"
    job.write_text(
        f'[tokenizer]\npath = "{folder}"\nchat_template = "{tmp_path / "chat.jinja"}"\n[data]\ndocument_mask = true\n'
        f'[training]\ndataset = "conversations"\ndataset_path = "{file}"\n[model]\nflavor = "tiny"\n'
    )
    error = shell.refuse(f"check {job}")
    assert f"{file}:2: {message}" in error and f"{job}:8" in error
    argv = f"--tokenizer {folder} --chat-template {tmp_path}/chat.jinja".split()
    argv += [
        *f"--output {tmp_path}/shards --messages-key messages --workers".split(),
        "2" if "refuses" in message else "1",
    ]
    assert f"{file}:2: {message}" in shell.refuse(f"prepare --input {file}", *argv)


def test_a_missing_or_unfit_template_says_what_to_set(
    folder: Path, tmp_path: Path, shell: Shell
) -> None:
    with pytest.raises(
        DataError, match=r"tokenizer.json has no chat template.* set tokenizer.chat_template"
    ):
        ChatTemplate.of(opened(folder, ""))
    with pytest.raises(DataError, match="not valid Jinja"):
        ChatTemplate.of(opened(folder, "{% if %}"))
    # It writes thoughts only where an answer is the last message.
    changing = PLAIN.replace(
        "message.content |", "('' if loop.last else 'old ') + message.content |"
    )
    with pytest.raises(DataError, match=r"here: .* changes it later; write \{% generation %\}"):
        ChatTemplate.of(opened(folder, changing)).encode(
            [USER, ANSWER, USER, ANSWER], where="here"
        )
    with pytest.raises(DataError, match=r"refuses the messages: .*unsafe"):
        hostile = ChatTemplate.of(opened(folder, "{{ messages.__class__.__mro__ }}"))
        hostile.prompt([USER], where="here")
    job = tmp_path / "job.toml"
    file = written(tmp_path / "a.jsonl", [[USER, ANSWER]])
    job.write_text(f'[training]\ndataset = "conversations"\ndataset_path = "{file}"\n')
    error = shell.refuse(f"check {job}")
    assert (
        "data.document_mask: conversations share sequences; set document_mask = true" in error
    )
    assert "the embedded tokenizer has no chat template" in error


@tabled("template, why")
def test_a_template_of_a_stranger_takes_little(
    template: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    monkeypatch.setattr(limits, "MEMORY_MIB", 99)
    with pytest.raises(DataError, match=rf"chat template.*{why}") as caught:
        ChatTemplate.of(opened(folder, template)).prompt([USER], where="chat.jsonl:3")
    assert "tokenizer.json" in str(caught.value)


TOOLS = (
    "{{ messages[0].content | tojson(ensure_ascii=true) }}{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ messages[0] | tojson(indent=2) }}{{ messages[0] | tojson(false, 2) }}{{ messages[0] | tojson }}{{ pad_token }}{{ unk_token }}{{ image_token }}{{ sep_token }}"
)


def test_a_template_writes_what_transformers_writes(folder: Path, tmp_path: Path) -> None:
    """Arguments of tojson, and every special token that has a name."""
    transformers = pytest.importorskip("transformers")
    names = {
        "eos_token": EOS,
        "bos_token": None,
        "pad_token": {"__type": "AddedToken", "content": "<|im_end|>"},
    }
    names |= {"unk_token": BOS, "extra_special_tokens": {"image_token": "<|im_start|>"}}
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    template = TOOLS + "{{ bos_token }}{{ eos_token }}"
    message = [{"role": "user", "content": "naïve", "b": {"z": 1, "a": [1, 2]}}]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(message, chat_template=template, tokenize=False)
    tokenizer = build_tokenizer(s.TokenizerSection(path=str(tmp_path)), hf_assets_path="")
    chat = ChatTemplate(template, tokenizer)
    assert chat.render(message, where="x", add_generation_prompt=True) == expected
    assert "<|im_end|><|begin_of_text|><|im_start|>" in expected
    # A worker process has them, too.
    again = pickle.loads(pickle.dumps(chat))
    assert again.render(message, where="x", add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    "use", ["x", "x | trim", "x.split('T')[0]", "x | reverse", "x | length"]
)
def test_marked_text_that_is_used_later_is_transformers_or_refused(
    folder: Path, use: str
) -> None:
    """A name that is set between the marks stays there."""
    marked = "{% generation %}{% set y = 'y' %}{{ messages[0].content }}{% endgeneration %}"
    template = "{% set x %}" + marked + "{% endset %}{{ " + use + " }}{{ y }}"
    ours, chat = (
        ChatTemplate.of(opened(folder, template)),
        [{"role": "assistant", "content": " one Two "}],
    )
    expected = reference(folder, template, chat)[0]
    assert ours.prompt(chat, where="here") == expected
    if use == "x":
        assert without_kind(ours.encode(chat, where="here")).tolist() == expected
        return
    with pytest.raises(DataError, match="here: the chat template changes or cuts the text of"):
        ours.encode(chat, where="here")


@pytest.mark.parametrize("in_files", [True, False], ids=["files", "list"])
def test_conversations_with_tools_take_the_template_of_that_name(
    folder: Path, tmp_path: Path, in_files: bool
) -> None:
    import transformers

    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tool_use = "\n{% set n = tools | length %} {{ n }} tools" + PLAIN + "\n \n"
    theirs.chat_template = {"default": "\n  " + PLAIN + "  \n", "tool_use": tool_use}
    theirs.save_pretrained(tmp_path, save_jinja_files=in_files)
    theirs = theirs.from_pretrained(tmp_path)
    section = s.TokenizerSection(path=str(tmp_path))
    ours = ChatTemplate.of(build_tokenizer(section, hf_assets_path=""))
    for tools in (None, [], OFFERED):
        expected = theirs.apply_chat_template([USER, ANSWER], tools=tools, tokenize=False)
        found = ours.render({"messages": [USER, ANSWER], "tools": tools}, where="here")
        assert found == expected and ("tools" in found) == (tools is not None)


@tabled("more")
def test_no_text_of_a_message_becomes_a_special_token(
    folder: Path, more: dict[str, Any]
) -> None:
    chat = ChatTemplate.of(opened(folder, PLAIN))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}]
    for use in (chat.encode, chat.prompt):
        with pytest.raises(DataError, match=r"message 2 spells the special token <\|im_end\|>"):
            use(messages, where="x")


# ---- what rows carry beside roles and texts --------------------------------------------------------------------------

RICH = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{% if shout %}!{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OFFERED = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]
ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ROWS: dict[str, dict[str, Any]] = table(__file__, "rows")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_become_what_transformers_makes_of_them(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """Together in one file, whose Parquet columns have the fields of all rows."""
    import transformers

    theirs: Any = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = RICH
    rows = [
        row
        for row in ROWS.values()
        if kind == "jsonl" or isinstance(row.get("tools", []), list | None)
    ]
    # A column has one type.
    rows = [
        row for row in rows if kind == "jsonl" or isinstance(row["messages"][0]["content"], str)
    ]
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        columns = dict.fromkeys(name for row in rows for name in row)
        table = pyarrow.Table.from_pylist([{**columns, **row} for row in rows])
        parquet.write_table(table, file)
    section = source_of_path(str(file), text_key="text", messages_key="messages")
    ours = ChatTemplate.of(opened(folder, RICH))
    found = []
    for document in open_documents(section).read():
        assert isinstance(document, Conversation)
        found.append(ours.render(json.loads("".join(document.read())), where="here"))
    for row, text in zip(rows, found, strict=True):
        tools = row.get("tools")
        expected = theirs.apply_chat_template(
            row["messages"],
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            documents=row.get("documents"),
            tokenize=False,
            **row.get("chat_template_kwargs", {}),
        )
        assert text == expected


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
@pytest.mark.parametrize(
    "field", [{"weight": 0}, {"train": False}, {"weight": 1, "train": False}]
)
def test_answers_of_no_weight_are_context(
    field: dict[str, Any], template: str, folder: Path
) -> None:
    chat = [
        ASK,
        {**SAY, "content": "bad", **field},
        ASK,
        {**SAY, "content": "good", "weight": 1},
    ]
    ours = ChatTemplate.of(opened(folder, template))
    plain = [{k: v for k, v in m.items() if k in ("role", "content")} for m in chat]
    tokens, before = ours.encode(chat, where="here"), ours.encode(plain, where="here")
    assert without_kind(tokens).tolist() == without_kind(before).tolist()
    learnt = ours.tokenizer.decode(
        without_kind(tokens[tokens >> KIND_SHIFT == PREDICTED]).tolist()
    )
    assert "good" in learnt and "bad" not in learnt
    everything = [{**m, "weight": 0} for m in plain]
    assert not (ours.encode(everything, where="here") >> KIND_SHIFT == PREDICTED).any()
    with pytest.raises(DataError, match=r'here: an answer has 0\.5 as "weight" or "train"'):
        ours.encode([ASK, {**SAY, "weight": 0.5}], where="here")


def test_parts_that_a_template_does_not_take_are_refused(folder: Path) -> None:
    parts = [{**ASK, "content": [{"type": "text", "text": "a"}]}, SAY]
    template = PLAIN.replace("message.content | trim", "message.content | string")
    with pytest.raises(DataError, match="message 1 is a list of parts"):
        ChatTemplate.of(opened(folder, template)).encode(parts, where="here")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_keys_that_nothing_reads_are_counted(
    kind: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By prepare, with any number of workers, and by check and a run. A column of Parquet is there in all rows."""
    row = {"messages": [{**ASK, "name": "ann"}, SAY], "tools": OFFERED, "source": "web"}
    rows: list[dict[str, Any]] = [*[row] * 7, {"messages": [ASK, SAY]}]
    file, template = tmp_path / f"rows.{kind}", tmp_path / "chat.jinja"
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template.write_text(PLAIN)
    columns = "source, tools in 7" if kind == "jsonl" else "source in 8 of 8 rows; tools in 7"
    line = f"not read: name in 7 of 16 messages; {columns} of 8 rows"
    words = f"prepare --input {file} --tokenizer {folder} --validation-fraction 0.4".split()
    words += f"--messages-key messages --chat-template {template}".split()
    indexes = []
    for workers in "12":
        output = tmp_path / workers
        assert titan([*words, "--output", str(output), "--workers", workers]) == 0
        indexes.append((output / "index.json").read_bytes())
    assert indexes[0] == indexes[1]
    assert capfd.readouterr().out.count(line) == 2
    (tmp_path / "job.toml").write_text(
        f'[[data.sources]]\ntype = "{kind}"\npath = "{file}"\nmessages_key = "messages"\n'
    )
    job = f"check {tmp_path}/job.toml --tokenizer.path={folder} --model.flavor=tiny".split()
    job += ["--data.document_mask=true", f"--tokenizer.chat_template={template}"]
    job += [
        f"--data.cache_folder={tmp_path / 'cache'}",
        f"--job.dump_folder={tmp_path / 'run'}",
    ]
    assert titan(job) == 0
    assert f"data.sources[0].path: {line}" in capfd.readouterr().err
