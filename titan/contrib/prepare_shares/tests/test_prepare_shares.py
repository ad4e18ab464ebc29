"""`titan prepare --share`: shares write the bytes that one process writes, whatever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from tests.data.conftest import make_texts, write_jsonl
from tests.support.commands import command, finished
from tests.support.fineweb_edu import write_files
from titan.data import sources
from titan.data.reading import PIECE_CHARS
from titan.data.shards import write_index

main = command("prepare")
SCRIPT = Path(__file__).parents[4] / "examples/cluster/prepare.sbatch"
OPTIONS = ["--tokenizer", "bytes", "--shard-tokens", "5000", "--validation-fraction", "0.1"]
OPTIONS += ["--workers", "1"]


def prepare(output: Path, corpus: Path, *options: str) -> int:
    return main([*f"--input {corpus} --output {output}".split(), *OPTIONS, *options])


def share(output: Path, corpus: Path, number: int, of: int, *options: str) -> int:
    return prepare(output, corpus, "--share", str(number), str(of), *options)


def content_of(folder: Path) -> dict[str, bytes]:
    assert not (folder / "parts").exists()
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "lock"}


def jsonl(folder: Path) -> None:
    for number in range(7):
        write_jsonl(folder / f"{number}.jsonl", make_texts(60, seed=number))
    (folder / "3.jsonl").write_text("")


def zstandard(folder: Path) -> None:
    """As datatrove writes it, with nulls and empty texts."""
    for number in range(5):
        rows: list = [{"text": text, "id": "x"} for text in make_texts(60, seed=number)]
        rows[::7] = [{"text": ""}, {"text": None}] * 4 + [{"text": "last"}]
        with pyarrow.CompressedOutputStream(
            str(folder / f"{number}.jsonl.zst"), "zstd"
        ) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def parquet(folder: Path) -> None:
    write_files(folder, make_texts(400), files=2, group=10)


def long_text(folder: Path) -> None:
    """Documents of several pieces, of which each is longer than a shard, between short ones."""
    for number in range(6):
        words = " ".join(make_texts(PIECE_CHARS // 30 if number % 2 else 3, seed=number))
        (folder / f"{number}.txt").write_text(words)


@pytest.mark.parametrize("write", [jsonl, zstandard, parquet, long_text])
@pytest.mark.parametrize("shares", [1, 3, 9])
def test_shares_give_the_bytes_of_one_process(
    tmp_path: Path, write: Callable[[Path], None], shares: int
) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    write(corpus)
    assert prepare(tmp_path / "one", corpus) == 0
    folder = tmp_path / "shares"
    for number in [*range(shares, 1, -1), 1]:
        assert not (folder / "index.json").exists()
        assert share(folder, corpus, number, shares) == 0
    assert content_of(folder) == content_of(tmp_path / "one")
    # A task that comes late finds the folder complete, and so does the command.
    assert share(folder, corpus, 1, shares) == prepare(folder, corpus) == 0
    assert content_of(folder) == content_of(tmp_path / "one")


def test_row_groups_of_large_files_are_shared(tmp_path: Path) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    parquet(corpus)
    sizes = []
    for number in (1, 2, 3, 4):
        assert share(tmp_path / "out", corpus, number, 5) == 0
        done = json.loads((tmp_path / f"out/parts/{number}/done.json").read_text())
        sizes.append(done["tokens"])
    assert min(sizes) > 0.7 * max(sizes), "two files, five shares"


def test_conversations(tmp_path: Path) -> None:
    """Kinds of ids, from the template."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}")  # fmt: skip
    (corpus := tmp_path / "chat").mkdir()
    for number in range(4):
        rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": text}] for n, text in enumerate(make_texts(99, seed=number))]  # fmt: skip
        lines = [json.dumps({"messages": row, "tools": [], "id": 1}) + "\n" for row in rows]
        (corpus / f"{number}.jsonl").write_text("".join(lines))
    chat = f"--messages-key messages --chat-template {template}".split()
    assert prepare(tmp_path / "one", corpus, *chat) == 0
    for number in (1, 2):
        assert share(tmp_path / "two", corpus, number, 2, *chat) == 0
    assert content_of(tmp_path / "two") == content_of(tmp_path / "one")


def test_shares_take_over_what_one_process_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    jsonl(corpus)
    assert prepare(tmp_path / "one", corpus) == 0
    with monkeypatch.context() as broken:
        broken.setattr("titan.data.writer.encode_documents", interrupt_after(1))
        assert prepare(tmp_path / "both", corpus) == 75
    assert [*(tmp_path / "both").glob("*.bin")]
    for number in (1, 2):
        assert share(tmp_path / "both", corpus, number, 2) == 0
    assert content_of(tmp_path / "both") == content_of(tmp_path / "one")


def interrupt_after(chunks: int) -> Callable:
    """Return an `encode_documents` that is interrupted after some chunks."""
    from titan.data.writer import encode_documents

    done = []

    def encode(*arguments, **keywords):
        done.append(1)
        if len(done) > chunks:
            raise KeyboardInterrupt
        return encode_documents(*arguments, **keywords)

    return encode


def test_a_killed_share_starts_again(tmp_path: Path) -> None:
    write_files(corpus := tmp_path / "corpus", make_texts(10_000), files=2, group=200)
    large = ["--shard-tokens", "500000"]
    assert prepare(tmp_path / "one", corpus, *large) == 0
    folder = tmp_path / "shares"
    assert share(folder, corpus, 2, 2, *large) == 0
    kept = (folder / "parts/2/done.json").stat().st_mtime_ns
    words = [*f"--input {corpus} --output {folder}".split(), *OPTIONS, *large]
    words += ["--share", "1", "2"]
    # Slowly, so that it is under way when it is killed.
    code = (
        "import sys, time\n"
        "from titan.cli import main\n"
        "from titan.data import writer\n"
        "encode = writer.encode_documents\n"
        "writer.encode_documents = lambda chunk, spec: time.sleep(0.5) or encode(chunk, spec)\n"
        "main(['prepare', *sys.argv[1:]])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *words], start_new_session=True)
    tokens, deadline = folder / "parts/1/tokens.bin", time.monotonic() + 60
    while not (tokens.is_file() and tokens.stat().st_size):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "parts/1/done.json").exists() and not (folder / "index.json").exists()
    assert (folder / "parts/2/done.json").stat().st_mtime_ns == kept
    assert main(words) == 0
    assert content_of(folder) == content_of(tmp_path / "one")


def test_a_killed_join_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    jsonl(corpus)
    assert prepare(tmp_path / "one", corpus) == 0
    folder = tmp_path / "shares"
    assert share(folder, corpus, 2, 2) == 0

    def interrupt(file: Path, part: object) -> None:
        if file.name == "index.json":
            raise KeyboardInterrupt
        write_index(file, part)  # pyrefly: ignore[bad-argument-type]

    with monkeypatch.context() as broken:
        broken.setattr("titan.contrib.prepare_shares.shares.write_index", interrupt)
        assert share(folder, corpus, 1, 2) == 75
    assert [*folder.glob("train-*.bin")] and not (folder / "index.json").exists()
    assert prepare(folder, corpus) == 0
    assert content_of(folder) == content_of(tmp_path / "one")


def test_the_array_of_the_examples(tmp_path: Path) -> None:
    """The script as a shell runs it for each task, with other text."""
    (corpus := tmp_path / "corpus").mkdir()
    jsonl(corpus)
    assert prepare(tmp_path / "one", corpus) == 0
    text = SCRIPT.read_text()
    assert "--array=1-50 " in text and "\nSHARES=50\n" in text
    (titan := tmp_path / "titan").write_text(f'#!/bin/bash\nexec {sys.executable} -m titan.cli "$@"\n')  # fmt: skip
    titan.chmod(0o755)
    text = text.replace("*.jsonl.gz", "*.jsonl").replace("=50", "=3")
    text = text.replace("--tokenizer assets/llama3", " ".join(OPTIONS))
    said = []
    for number in (2, 3, 1):
        environment = os.environ | {
            "SLURM_ARRAY_TASK_ID": str(number),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
        }
        done = finished(["bash", "-c", text], env=environment, cwd=tmp_path)  # fmt: skip
        said.append(done.stdout)
    assert said[0] == "share 2 of 3 is done; left: 1,3\n" and "train: " in said[2]
    assert content_of(tmp_path / "shards") == content_of(tmp_path / "one")


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(200))
    folder = tmp_path / "out"

    def line(*options: str) -> str:
        assert prepare(folder, corpus, *options) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        return line

    assert "--share 5 4: shares are numbered from 1 to 4" in line("--share", "5", "4")
    for words in (["a", "b"], ["0", "2"], ["-1", "2"]):
        assert f"--share: expected a whole number of at least 1, got '{words[0]}'" in line("--share", *words)  # fmt: skip
    assert "--share: " in line("--share", "1")
    assert not folder.exists()
    assert share(folder, corpus, 2, 12) == share(folder, corpus, 1, 12) == 0
    assert "left: 3,4,5,6,7,8,9,10,11,12\n" in capsys.readouterr().out
    # The command that joins names the missing shares.
    lacks = f"'{folder}' lacks shares 3,4,5,6,7,8,9,10,11,12 of 12: run the command with --share 3 12"
    assert lacks in line()
    assert "other options" in line("--no-bos", "--share", "3", "12")
    assert "other options" in line("--no-bos")
    assert "is of 12 shares, not 4; delete" in line("--share", "3", "4")
    # A text that has changed since.
    before = corpus.read_bytes()
    stat = corpus.stat()
    corpus.write_bytes(before + b'{"text": "more"}\n')
    assert "other text" in line("--share", "3", "12")
    corpus.write_bytes(before)
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # Parts of another text, or damaged, are not joined.
    other = write_jsonl(tmp_path / "b.jsonl", make_texts(50))
    assert share(tmp_path / "other", other, 1, 12) == 0
    for number in range(3, 12):
        assert share(folder, corpus, number, 12) == 0
    stranger = (tmp_path / "other/parts/1").rename(folder / "parts/12")
    assert "other text" in line()
    for file in stranger.iterdir():
        file.unlink()
    tokens = folder / "parts/1/tokens.bin"
    tokens.write_bytes((whole := tokens.read_bytes())[:-1])
    assert f"{tokens} has {len(whole) - 1} bytes, done.json says {len(whole)}" in line("--share", "12", "12")  # fmt: skip
    tokens.write_bytes(whole)
    assert prepare(folder, corpus) == prepare(tmp_path / "one", corpus) == 0
    assert content_of(folder) == content_of(tmp_path / "one")


def test_a_row_that_is_unusable_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(9))
    with corpus.open("a") as file:
        file.write('{"no": 1}\n')
    assert share(tmp_path / "out", corpus, 1, 2) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert f"{corpus}:10: no text under 'text'" in line


def test_text_that_is_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(2))
    stream = sources.Documents(name="c4 (en)", identity=[], read=lambda: iter(["text"]))
    monkeypatch.setattr("titan.tools.prepare.open_documents", lambda _: stream)
    assert share(tmp_path / "out", corpus, 1, 2) == 2
    assert "c4 (en) is read as one stream, which has no shares" in capsys.readouterr().err


def test_files_of_others_in_the_folder_of_parts_stay(tmp_path: Path) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    jsonl(corpus)
    for name, options in (("one", []), ("shares", ["--share", "1", "1"])):
        (parts := tmp_path / name / "parts").mkdir(parents=True)
        (parts / "notes.txt").write_text("mine")
        for _ in range(2):
            assert prepare(tmp_path / name, corpus, *options) == 0
        assert [file.name for file in parts.iterdir()] == ["notes.txt"]
