"""Tokenizers of each kind, and the command that trains and inspects them."""

from __future__ import annotations

import base64
import json
import pickle
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import Shell, command
from tests.support.tables import table, tabled
from titan.base.untrusted import InputError
from titan.config.schema import JobConfig, TokenizerSection
from titan.data import DataError
from titan.data.reading import pieces
from titan.data.tokenizer import BOS, EOS, Tokenizer, _pieces, build_tokenizer, bytes_tokenizer
from titan.data.tokenizer_files import keep_tokenizer, tokenizer_files, with_tokenizer

main = command("tokenizer")


def built(section: TokenizerSection) -> Tokenizer:
    return build_tokenizer(section, hf_assets_path="")


def opened(path: Path, **settings: Any) -> Tokenizer:
    return built(TokenizerSection(path=str(path), **settings))


TRICKY = "naïve 日本語 \U0001f600 <|end_of_text|> don't 12345\r\n\t  x = 1\n\n"


def write_rank_file(path: Path, *, count: int = 128_000) -> Path:
    """256 bytes, then the merges th, he, the, in, and as many tokens that no text has as make the ranks Llama 3's."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"the", b"in"]
    tokens += [b"\xff\xfe" + number.to_bytes(3, "big") for number in range(count - len(tokens))]
    lines = [
        base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(tokens)
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "text.txt").write_text("the thing in the other, there and then; " * 50 + TRICKY)
    arguments = (
        f"train --input {folder}/text.txt --vocab-size 300 --output {folder}/out".split()
    )
    assert main(arguments) == 0
    return folder / "out"


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids), "text became a special token"
    assert tokenizer.encode("") == []
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == ids, "a worker process differs"


def test_bytes_are_their_own_ids() -> None:
    tokenizer = built(TokenizerSection())
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert tokenizer.encode(TRICKY) == list(TRICKY.encode())
    assert tokenizer.byte_lengths.tolist() == [1] * 256 + [0, 0]
    check_round_trip(tokenizer, TRICKY)


def test_rank_file(tmp_path: Path) -> None:
    write_rank_file(tmp_path / "tokenizer.model")
    tokenizer = opened(tmp_path)
    assert tokenizer.kind == "tiktoken"
    assert tokenizer.vocab_size == 128_000 + 256
    assert tokenizer.encode("the then in") == [258, 32, 258, ord("n"), 32, 259]
    specials = tokenizer.special_ids
    assert len(specials) == 256
    # The places in Llama 3's vocabulary, which begins its special tokens at 128000.
    assert {
        name: specials[name] - 128_000
        for name in (BOS, EOS, "<|start_header_id|>", "<|eot_id|>")
    } == {
        BOS: 0,
        EOS: 1,
        "<|start_header_id|>": 6,
        "<|eot_id|>": 9,
    }
    check_round_trip(tokenizer, TRICKY)


def test_long_text_is_cut_within_limits_and_stays_fast(tmp_path: Path) -> None:
    tokenizer = opened(write_rank_file(tmp_path / "ranks"), name="tiktoken")
    text = "word " * 100_000 + "x" * 60_000 + " " * 30_000 + "the end"
    pieces = list(_pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 400_000
    assert max(len(run) for piece in pieces for run in piece.split()) <= 25_000
    begin = time.process_time()
    check_round_trip(tokenizer, "x" * 500_000)
    assert time.process_time() - begin < 10


def test_broken_rank_files_are_told(tmp_path: Path) -> None:
    ranks = write_rank_file(tmp_path / "tokenizer.model")
    ranks.write_bytes(ranks.read_bytes() + b"YWJjZA== 400000\n")
    with pytest.raises(DataError, match="without gaps"):
        opened(tmp_path)


@pytest.mark.parametrize("count", [260, 50_256, 200_000])
def test_rank_files_of_other_models_need_their_pattern(count: int, tmp_path: Path) -> None:
    file = write_rank_file(tmp_path / "x.tiktoken", count=count)
    section = TokenizerSection(name="tiktoken", path=str(file))
    with pytest.raises(DataError, match=f"its {count:,} ranks are not Llama 3's 128,000"):
        built(section)
    said = {"pattern": r"\d|\D+", "special_tokens": ["<|endoftext|>"]}
    section = section.model_copy(update=said | {"eos_token": "<|endoftext|>"})
    tokenizer = built(section)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (
        None,
        count,
        count + 1,
    )
    assert tokenizer.encode("the 12") == [258, 32, ord("1"), ord("2")]
    with pytest.raises(DataError, match=r"tokenizer\.pattern cannot be used"):
        built(section.model_copy(update={"pattern": "("}))
    with pytest.raises(DataError, match=r'tokenizer\.eos_token = "<x>" is no token of'):
        built(section.model_copy(update={"eos_token": "<x>"}))


def test_trained_tokenizer(trained: Path) -> None:
    tokenizer = build_tokenizer(TokenizerSection(), hf_assets_path=str(trained))
    assert (tokenizer.kind, tokenizer.vocab_size) == ("huggingface", 300)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.special_ids == {BOS: 0, EOS: 1}
    assert len(tokenizer.encode(" the thing")) < len(" the thing") / 2
    check_round_trip(tokenizer, TRICKY)
    other = bytes_tokenizer()
    assert tokenizer.fingerprint != other.fingerprint


def test_special_ids_come_from_the_files_beside_a_tokenizer_json(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text((trained / "tokenizer.json").read_text())

    def ids() -> tuple[int | None, int | None]:
        tokenizer = opened(tmp_path)
        return tokenizer.bos_id, tokenizer.eos_id

    assert ids() == (None, None)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 0, "eos_token_id": [1, 5]})
    )
    assert ids() == (0, 1)
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": BOS}})
    )
    assert ids() == (0, 0)


def test_a_missing_extra_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'titan-pretrain\[huggingface\]'"):
        opened(trained)


def test_inspect(shell: Shell, trained: Path) -> None:
    shown = shell("tokenizer inspect bytes --text", "hé\n").out
    assert (
        "258 ids" in shown and "bytes a token   1.00" in shown and "104, 195, 169, 10" in shown
    )
    assert "300 ids" in shell(f"tokenizer inspect {trained}").out


def test_train_does_not_overwrite_a_tokenizer(trained: Path, shell: Shell) -> None:
    before = (trained / "tokenizer.json").read_bytes()
    arguments = f"train --input stdlib --vocab-size 400 --output {trained}"
    assert "tokenizer.json' exists" in shell.refuse(f"tokenizer {arguments}")
    assert (trained / "tokenizer.json").read_bytes() == before


def test_byte_lengths_of_sentencepiece_style_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<unk>": 0, "<0x0A>": 1, "▁hi": 2, "é": 3}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = opened(tmp_path)
    assert tokenizer.byte_lengths.dtype == np.int64
    assert tokenizer.byte_lengths.tolist()[1:] == [1, 3, 2]


@pytest.mark.parametrize(
    "style", ["Metaspace first", "Metaspace always", "Prepend", "ByteLevel"]
)
def test_long_text_has_the_ids_of_the_whole(tmp_path: Path, style: str) -> None:
    """The reference is the library, which encodes the text at once."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    pre, normal = tokenizers.pre_tokenizers, tokenizers.normalizers
    if style == "Prepend":
        parts = [normal.Prepend("▁"), normal.Replace(" ", "▁")]
        library.normalizer = normal.Sequence(parts)
        library.pre_tokenizer = pre.Split("▁", "merged_with_next")
    elif style == "ByteLevel":
        library.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    else:
        library.pre_tokenizer = pre.Metaspace(prepend_scheme=style.split()[1])
    words = [f"word{n * n % 977}" for n in range(40_000)]
    text = "".join(word + ("\n" if n % 11 == 10 else " ") for n, word in enumerate(words))
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"])
    library.train_from_iterator([text[:20_000]], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    ours = opened(tmp_path)
    whole = library.encode(text).ids
    assert len([*pieces([text])]) > 2
    assert ours.encode(text) == whole
    # A document that is read in pieces, which are encoded one by one.
    first, *others = pieces([text])
    assert [*ours.encode(first), *(i for p in others for i in ours.encode_rest(p))] == whole


def word_tokenizer(folder: Path, **config: object) -> Tokenizer:
    """One that splits at spaces and drops them."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return opened(folder)


def test_a_tokenizer_that_drops_spaces_counts_no_bytes(trained: Path, tmp_path: Path) -> None:
    assert bytes_tokenizer().keeps_bytes
    assert opened(trained).keeps_bytes
    assert opened(write_rank_file(tmp_path / "ranks"), name="tiktoken").keeps_bytes
    assert not word_tokenizer(tmp_path).keeps_bytes


def test_special_tokens_that_only_the_config_names(tmp_path: Path) -> None:
    added = {
        "3": {"content": "<x>", "special": False},
        "2": {"content": "<|end|>", "special": True},
    }
    tokenizer = word_tokenizer(tmp_path, added_tokens_decoder=added, eos_token="<|end|>")
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (2, None, 4)
    assert tokenizer.special_ids == {"<|end|>": 2}
    assert tokenizer.token_bytes(2) == b"" and tokenizer.decode([0, 2, 1]) == "a b"
    assert 2 not in tokenizer.encode("a <|end|> b") and 3 in tokenizer.encode("a <x> b")


@tabled("number, token, why")
def test_tokens_beside_that_disagree_are_refused(
    number: str, token: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=re.escape(why)):
        word_tokenizer(tmp_path, added_tokens_decoder={number: token})


FLAGS: list[dict[str, Any]] = table(__file__, "flags")


@pytest.mark.parametrize(
    "where", ["added_tokens_decoder", "both", "added_tokens.json", "named"]
)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_tokens_beside_have_the_librarys_ids(
    where: str, flags: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    """The reference is transformers' tokenizer of the same folder."""
    import transformers

    shutil.copy(trained / "tokenizer.json", tmp_path)
    base = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
    }
    number = opened(tmp_path).vocab_size
    tokens = {str(number): {**base, **flags, "content": "<a>"}}
    tokens[str(number + 1)] = {**base, "special": True, "content": "<|end|>"}
    if where == "added_tokens.json":
        table = {token["content"]: int(n) for n, token in tokens.items()}
        (tmp_path / where).write_text(json.dumps(table))
    elif where == "named":
        config["additional_special_tokens"] = ["<a>"]
    else:
        config["added_tokens_decoder"] = tokens
    if where == "both":  # tokenizer.json has them with other flags
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        for n, token in tokens.items():
            content["added_tokens"].append(
                {**base, "special": True, "id": int(n), "content": token["content"]}
            )
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = opened(tmp_path)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.vocab_size, ours.eos_id) == (len(theirs), theirs.eos_token_id)
    for text in ("the <a> thing<|end|>", "x  <a>  <|end|>  y", "<a><a>", "plain"):
        assert ours.encode_rendered(text)[0] == theirs(text, add_special_tokens=False).input_ids
        theirs.split_special_tokens = True
        plain = theirs(text.replace("<|end|>", ""), add_special_tokens=False).input_ids
        theirs.split_special_tokens = False
        assert ours.encode(text.replace("<|end|>", "")) == plain


def resaved(folder: Path, target: Path, **changes: Any) -> Tokenizer:
    content = json.loads((folder / "tokenizer.json").read_text())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if key == "model" else value
    target.mkdir()
    (target / "tokenizer.json").write_text(json.dumps(content))
    shutil.copy(folder / "tokenizer_config.json", target)
    return opened(target)


def test_one_tokenizer_has_one_fingerprint_in_any_file(trained: Path, tmp_path: Path) -> None:
    ours = opened(trained)
    merges = json.loads((trained / "tokenizer.json").read_text())["model"]["merges"]
    same: list[dict[str, Any]] = [
        {},
        {"model": {"merges": [" ".join(merge) for merge in merges]}},
        {"post_processor": None},
        {
            "truncation": {
                "direction": "Right",
                "max_length": 8,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        },
    ]
    other: list[dict[str, Any]] = [
        {"model": {"merges": merges[::-1]}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Lowercase"}},
    ]
    for number, changes in enumerate(same):
        assert (
            resaved(trained, tmp_path / f"same{number}", **changes).fingerprint
            == ours.fingerprint
        )
    for number, changes in enumerate(other):
        assert (
            resaved(trained, tmp_path / f"{number}", **changes).fingerprint != ours.fingerprint
        )


def test_keys_of_files_beside_that_nothing_reads_are_named(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    templates = [{"name": name, "template": "x"} for name in ("default", "tool_use", "rag")]
    config |= {
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "chat_template": templates,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ends = {"eos_token_id": [1], "suppress_tokens": [3], "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    first, second = opened(tmp_path).unread
    assert first.endswith(
        "tokenizer_config.json: not read: split_special_tokens, chat_template rag"
    )
    assert second.endswith("generation_config.json: not read: suppress_tokens, temperature")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"\xff", b"[" * 10**5, b"{", b""])
def test_damaged_files_of_a_tokenizer_are_told(
    tmp_path: Path, name: str, content: bytes
) -> None:
    word_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name.replace(".", r"\.")) as raised:
        opened(tmp_path)
    assert len(str(raised.value)) < 2100
    if name == "tokenizer.json":
        return
    for odd in ({"eos_token_id": 10**30}, {"eos_token_id": -1}, {"eos_token_id": True}):
        (tmp_path / name).write_text(json.dumps(odd))
        assert opened(tmp_path).eos_id is None
    for wrong in ({"eos_token": ["x"]}, [1]):
        (tmp_path / name).write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=name.replace(".", r"\.")):
            opened(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "ranks.txt", "original/tokenizer.model", ""]
)
def test_the_copy_in_the_run_folder_is_the_same_tokenizer(
    name: str, trained: Path, tmp_path: Path
) -> None:
    """Whether the job names a file, a link or a folder, and whatever lies beside it."""
    source, run = tmp_path / "source", tmp_path / "run"
    (source / "original").mkdir(parents=True)
    if name:
        (source / "tokenizer.json").symlink_to(trained / "tokenizer.json")
        (source / "config.json").write_text('{"eos_token_id": 5}')
    write_rank_file(
        source / (name if name not in ("", "tokenizer.json") else "tokenizer.model")
    )
    (source / "notes.txt").write_text("not the tokenizer's")
    section = TokenizerSection(path=str(source / name))
    used = built(section)
    for _ in range(2):
        keep_tokenizer(used, run)
        # Without the source, as on another machine.
        config = with_tokenizer(JobConfig(tokenizer=section), run=run)
        assert Path(config.tokenizer.path).is_relative_to(run)
        copy = built(config.tokenizer)
        assert (copy.kind, copy.fingerprint) == (used.kind, used.fingerprint)
    kept = {file.name for file in (run / "tokenizer").iterdir()}
    assert "notes.txt" not in kept and ("config.json" in kept) == (used.kind == "huggingface")


def test_the_copy_follows_the_jobs_tokenizer(trained: Path, tmp_path: Path) -> None:
    other = opened(trained)
    section = TokenizerSection(path=str(write_rank_file(tmp_path / "tokenizer.model").parent))
    keep_tokenizer(other, run := tmp_path / "run")
    file = run / "tokenizer" / "tokenizer.json"
    before = file.stat().st_mtime_ns
    keep_tokenizer(other, run)
    assert file.stat().st_mtime_ns == before, "written again"
    ranks = built(section)
    keep_tokenizer(ranks, run)
    kept = built(with_tokenizer(JobConfig(tokenizer=section), run=run).tokenizer)
    assert kept.fingerprint == ranks.fingerprint
    # One that is built in has no file, and a job that resumes with its own copy keeps it.
    keep_tokenizer(bytes_tokenizer(), tmp_path / "bytes")
    assert not (tmp_path / "bytes").exists()
    config = JobConfig(tokenizer=TokenizerSection(name="bytes"))
    assert with_tokenizer(config, run=run) is config
    keep_tokenizer(kept, run)
    assert [file.name for file in tokenizer_files(str(run / "tokenizer"))] == [
        "tokenizer.model"
    ]


def test_a_pattern_with_too_many_ways_is_named(trained: Path, tmp_path: Path) -> None:
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = resaved(trained, tmp_path / "slow", pre_tokenizer=split)
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(DataError, match=r"tokenizer .*slow/tokenizer.json: its pattern"):
            encode("a" * 64 + "b")
