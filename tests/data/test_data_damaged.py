"""`titan prepare` on files that are cut, flipped, nested, packed to burst, or simply long: a line each, and bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import titan.data.writer as writer
from tests.support.commands import Shell, command, finished
from tests.support.tables import tabled
from titan.config import schema as s
from titan.data import DataError
from titan.data.cache import describe
from titan.data.reading import PIECE_CHARS, pieces
from titan.data.shards import TokenShards, read_index
from titan.data.sources import in_validation, open_documents

main = command("prepare")

ESCAPE = "\x1b]52;c;aGk=\x07"
WORDS = "The quick brown fox, it's 1234 jumps\n\nover the lazy dog.\n    return x\n"


def repeats() -> bytes:
    """Return a Parquet file of some kilobytes with a text of 30 MB: a dictionary holds each text once."""
    parquet.write_table(pa.table({"text": ["x" * 2**19] * 60}), file := pa.BufferOutputStream())
    return file.getvalue().to_pybytes()


def damage(folder: Path) -> dict[Path, str]:
    """Write the files; what the message about each says."""
    packed = gzip.compress(b'{"text": "fine"}\n' * 1000)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0xFF
    contents: dict[str, tuple[bytes, str]] = {
        "junk.jsonl.gz": (os.urandom(5000), ": cannot be read"),
        "cut.jsonl.gz": (packed[: len(packed) // 2], "cannot be read"),
        "flipped.jsonl.gz": (bytes(flipped), ""),
        "zeros.jsonl.gz": (gzip.compress(bytes(3 * 10**7), 1), "no text does"),
        "lines.jsonl.gz": (gzip.compress(b"\n" * 3 * 10**7, 1), "no text does"),
        "zeros.txt.gz": (gzip.compress(bytes(3 * 10**7), 1), "no text does"),
        "brackets.jsonl": (b"[" * 3 * 10**7, ":1: a long line, and not for its text"),
        "lists.jsonl": (
            b'{"text": [' + b"[]," * 5 * 10**6,
            ":1: a long line, and not for its text",
        ),
        "quotes.jsonl": (b'{"text": "' + b'\\"' * 10**7, ":1: not a line of JSON"),
        "deep.jsonl": (b"[" * 10**5 + b"]" * 10**5, ":1: not a line of JSON that can be read"),
        "endless.jsonl": (b"x" * 7 * 10**7, ":1: a line of more than 64 MiB"),
        "number.jsonl": (b'{"text": 1' + b"0" * 10**5 + b"}", ":1: 'text' is a number"),
        "keys.jsonl": (
            json.dumps({ESCAPE + str(n) * 99: 0 for n in range(9999)}).encode(),
            ":1: no text under 'text'",
        ),
        "latin.txt": (b"fine\n" * 10**5 + b"Stra\xdfe\n", ":100001: not UTF-8 at byte 500004"),
        "cut.txt": ("naïve".encode()[:3] * 2, ":1: not UTF-8 at byte 2"),
        "junk.parquet": (b"PAR1" + os.urandom(1000) + b"PAR1", "not a Parquet file"),
        "repeats.parquet": (repeats(), "which no text does"),
    }
    for name, (content, _) in contents.items():
        (folder / name).write_bytes(content)
    return {folder / name: message for name, (_, message) in contents.items()}


def test_damaged_files_are_one_line_each_in_bounded_memory(tmp_path: Path) -> None:
    expected = damage(tmp_path)
    code = (
        "import json, sys, time\n"
        "from titan.cli import main as titan\n"
        "main = lambda words: titan(['prepare', *words])\n"
        # Not ru_maxrss, which begins with that of the process that started this one.
        "used = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "for n, path in enumerate(sys.argv[1:]):\n"
        "    before = time.process_time()\n"
        "    rc = main(['--input', path, '--tokenizer', 'bytes', '--workers', '1', '--output', f'{path}.out'])\n"
        "    print(json.dumps([path, rc, time.process_time() - before, used() / 1024]))\n"
    )
    command = [sys.executable, "-c", code, *map(str, expected)]
    done = finished(command, timeout=300)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    lines = [x for x in done.stderr.splitlines() if not x.startswith("preparing")]
    assert len(answers) == len(lines) == len(expected), done.stderr
    for (path, rc, seconds, used_mb), line in zip(answers, lines, strict=True):
        assert rc == 2 and f"{path}" in line and expected[Path(path)] in line, line
        assert line.isprintable() and len(line) < 2100
        assert seconds < 10 and used_mb < 300, (path, seconds, used_mb)


def test_a_flipped_parquet_page_names_the_file(tmp_path: Path) -> None:
    table = pa.table({"text": [f"document {n} " * 20 for n in range(2000)]})
    parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, row_group_size=500)
    whole = (tmp_path / "a.parquet").read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 64] = bytes(64)
    (tmp_path / "a.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet, row group \d: cannot be read"):
        list(open_documents(s.ParquetSource(path=str(tmp_path))).read())


def test_a_null_is_no_document_in_every_format(tmp_path: Path, hub: Path) -> None:
    pytest.importorskip("datasets")
    rows = ["a", None, "", "b"]
    parquet.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    jsonl = "".join(json.dumps({"text": text}) + "\n" for text in rows)
    (tmp_path / "a.jsonl").write_text(jsonl)
    (tmp_path / "hub").mkdir(exist_ok=True)
    for file in hub.iterdir():
        file.unlink()
    (hub / "a.jsonl").write_text(jsonl)
    for source in (
        s.ParquetSource(path=str(tmp_path / "a.parquet")),
        s.JsonlSource(path=str(tmp_path / "a.jsonl")),
        s.HuggingFaceSource(path=str(hub)),
        s.HuggingFaceSource(path=str(hub), streaming=False),
    ):
        assert list(open_documents(source).read()) == ["a", "b"], source


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, shell: Shell) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for path in (tmp_path, tmp_path / "pipe.txt", "/dev/zero"):
        arguments = f"--input {path} --tokenizer bytes --output {tmp_path}/o"
        assert shell.refuse(f"prepare {arguments}").count("\n") == 1


# ---- long documents


def long_text(num_chars: int) -> str:
    text = "".join(f"{number} {WORDS}" for number in range(num_chars // len(WORDS) + 1))
    return text[:num_chars]


def test_pieces_depend_on_the_text_alone_and_lie_between_words() -> None:
    text = long_text(5 * PIECE_CHARS)
    whole = list(pieces([text]))
    assert "".join(whole) == text and max(map(len, whole)) <= PIECE_CHARS < len(whole[0]) + 100
    assert all(p[0] == " " or before[-1] == "\n" for before, p in pairwise(whole))
    for size in (1, 7777, 10**9):
        blocks = (text[n : n + size] for n in range(0, len(text), size))
        assert list(pieces(blocks)) == whole
    assert [len(p) for p in pieces(["x" * (PIECE_CHARS + 5)])] == [PIECE_CHARS, 5]
    assert list(pieces([""])) == []


@pytest.mark.parametrize("pattern", ["llama3", "gpt2"])
def test_pieces_have_the_tokens_of_the_whole(tmp_path: Path, pattern: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, trainers

    from titan.data.tokenizer import LLAMA3_PATTERN, HuggingFaceTokenizer

    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = (
        gpt2 if pattern == "gpt2" else pre_tokenizers.Sequence([split, spell])
    )
    text = long_text(3 * PIECE_CHARS)
    tokenizer.train_from_iterator([text], trainer=trainers.BpeTrainer(vocab_size=500))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = HuggingFaceTokenizer(tmp_path / "tokenizer.json").encode(text)
    assert ids == tokenizer.encode(text).ids


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Two short texts around a long one, which is held out with the first."""
    folder = tmp_path / "book"
    folder.mkdir()
    (folder / "a.txt").write_text("first")
    (folder / "b.txt").write_text(long_text(5 * PIECE_CHARS) + "ä")
    (folder / "c.txt").write_text("last")
    return folder


def prepare(book: Path, output: Path, *options: str) -> int:
    fixed = f"--tokenizer bytes --shard-tokens {2 * PIECE_CHARS} --workers 1".split()
    return main([*f"--input {book} --output {output}".split(), *fixed, *options])


def test_a_long_document_is_one_document_over_several_shards(
    book: Path, tmp_path: Path
) -> None:
    assert prepare(book, tmp_path / "out") == 0
    index = read_index(tmp_path / "out" / "index.json")
    shards = TokenShards(tmp_path / "out", split="train")
    tokens = shards.read(0, count=shards.num_tokens)
    texts = [(book / f"{name}.txt").read_text() for name in "abc"]
    assert tokens.tolist() == [t for text in texts for t in (256, *text.encode(), 257)]
    assert len(index.splits["train"]) > 2 and index.total("train", "documents") == 3
    assert index.total("train", "bytes") == sum(len(text.encode()) for text in texts)
    assert all(shard.tokens <= 2 * PIECE_CHARS for shard in index.splits["train"])


def test_a_long_document_is_held_out_by_its_whole_text(book: Path, tmp_path: Path) -> None:
    long = next(
        text
        for n in range(99)
        if in_validation(text := long_text(3 * PIECE_CHARS) + str(n), fraction=0.5)
    )
    short = next(str(n) for n in range(99) if not in_validation(str(n), fraction=0.5))
    for name, text in zip("abc", (short, long, short), strict=True):
        (book / f"{name}.txt").write_text(text)
    assert prepare(book, tmp_path / "out", "--validation-fraction", "0.5") == 0
    shards = TokenShards(tmp_path / "out", split="validation")
    tokens = shards.read(0, count=shards.num_tokens)
    assert tokens.tolist() == [256, *long.encode(), 257]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_broken_off_within_a_document_it_continues_to_the_same_bytes(
    book: Path, tmp_path: Path, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prepare(book, tmp_path / "whole") == 0
    real, encoded = writer.write_index, []

    def broken(*arguments) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "write_index", broken)
    folder = tmp_path / "broken"
    assert prepare(book, folder, "--workers", workers) == 75
    monkeypatch.undo()
    [shard] = read_index(folder / "progress.json").splits["train"]
    assert (shard.documents_read, shard.pieces_read > 0) == (1, True)
    encode = writer.encode_documents
    monkeypatch.setattr(
        writer, "encode_documents", lambda c, spec: encoded.extend(c) or encode(c, spec)
    )
    assert prepare(book, folder) == 0
    assert min(piece.place for piece in encoded) == (1, shard.pieces_read), "tokenized again"
    for file in sorted((tmp_path / "whole").glob("*.bin")):
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_memory_does_not_depend_on_the_size_of_a_document(tmp_path: Path) -> None:
    """20 MB in one piece took 700 MB."""
    (tmp_path / "small.txt").write_text("small")
    with (tmp_path / "large.txt").open("w") as opened:
        opened.writelines(WORDS for _ in range(20_000_000 // len(WORDS)))
    code = (
        "import sys; from titan.cli import main as titan\n"
        "main = lambda words: titan(['prepare', *words])\n"
        "for name in ('small', 'large'):\n"
        "    arguments = ['--tokenizer', 'bytes', '--workers', '1', '--output', name]\n"
        "    assert main(['--input', f'{name}.txt', *arguments]) == 0\n"
        "    print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path)
    small, large = (int(line) / 1024 for line in done.splitlines() if line.isdecimal())
    assert large < small + 100, (small, large)


# ---- shards, and what is said


@tabled("change, message")
def test_a_damaged_index_is_one_line(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    file = tmp_path / "index.json"
    good = {
        "key": "k",
        "tokenizer": "bytes",
        "fingerprint": "f",
        "vocab_size": 258,
        "bos_id": 256,
    }
    good |= {"eos_id": 257, "splits": {"train": [], "validation": []}}
    file.write_text(json.dumps(good))
    read_index(file)
    file.write_text(json.dumps(good | change))
    with pytest.raises(DataError, match=message) as raised:
        read_index(file)
    assert str(raised.value).isprintable()
    for junk in (b"\xff\xfe", b"[" * 10**6, b"{}", b""):
        file.write_bytes(junk)
        with pytest.raises(DataError, match=r"index\.json"):
            read_index(file)


def test_ids_outside_the_vocabulary_are_damage(book: Path, tmp_path: Path) -> None:
    assert prepare(book, tmp_path / "out") == 0
    file = tmp_path / "out" / "train-00000.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[100] = 999
    tokens.tofile(file)
    shards = TokenShards(tmp_path / "out", split="train")
    with pytest.raises(DataError, match="hold the id 999, but their vocabulary has 258"):
        shards.check(shards.read(0, count=200))


def test_it_says_how_long_it_will_take() -> None:
    done = writer.Progress(documents=3, num_bytes=25_000_000, tokens=7000)
    line = describe(done, 100_000_000, elapsed_s=10.0)
    assert line == "25% of 100 MB, 2.5 MB/s, 0:00:30 left; 3 documents, 7,000 tokens"
    assert describe(done, None, elapsed_s=10.0) == "3 documents, 7,000 tokens"
