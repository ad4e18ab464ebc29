"""Which files a path means, and what is a line: the same for text, prompts, tasks, labels and tables."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import subprocess
from pathlib import Path

import pyarrow
import pytest

from titan.base.untrusted import InputError, read_json, read_lines
from titan.config import schema as s
from titan.contrib.evaluation.examples import read_task
from titan.data import DataError, reading
from titan.data.files import find_files, walk
from titan.data.sources import open_documents, source_of_path

# Characters that `str.splitlines` takes for ends of lines, and no format of lines does.
NO_LINE_ENDS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
BOM = "\ufeff".encode()


def read(section: s.Section) -> list[str]:
    return ["".join(reading.pieces_of(document)) for document in open_documents(section).read()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as people have them: endings in capitals, links, hidden files, packed files, other things."""
    root, other = tmp_path / "data", tmp_path / "elsewhere"
    for name in ("data/sub", "data/.git", "data/.ipynb_checkpoints", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for name in (
        "a.txt",
        "B.TXT",
        "sub/c.Md",
        "._a.txt",
        ".git/x.txt",
        ".ipynb_checkpoints/y.txt",
    ):
        (root / name).write_text(name)
    (other / "far.txt").write_text("far")
    (root / "link").symlink_to(other)
    (other / "back").symlink_to(root)
    (root / "zz.txt").symlink_to(other / "far.txt")
    (root / "D.TXT.GZ").write_bytes(gzip.compress(b"packed"))
    for name in ("p.pdf", "q.bz2", "r.bz2", "s.csv", "noending"):
        (root / name).write_bytes(b"\xff")
    return root


def test_a_folder_gives_its_visible_files_of_any_case_and_behind_links(folder: Path) -> None:
    documents = open_documents(s.TextSource(path=str(folder)))
    texts = ["".join(reading.pieces_of(document)) for document in documents.read()]
    assert sorted(texts) == sorted(["a.txt", "B.TXT", "sub/c.Md", "far", "far", "packed"])
    assert documents.name == (
        "text (6 files, left out: 2 *.bz2, 1 without ending, 1 *.pdf, 1 *.csv)"
    )


def test_links_in_a_circle_end(folder: Path) -> None:
    names = [str(file.relative_to(folder)) for file in walk(folder)]
    assert len(names) == len(set(names)) == 11 and "link/far.txt" in names


def packed(content: bytes, name: str) -> bytes:
    """Return the content as a file of this name has it; Arrow packs Zstandard."""
    if name.lower().endswith(".zst"):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as file:
            file.write(content)
        return sink.getvalue().to_pybytes()
    return gzip.compress(content) if name.lower().endswith(".gz") else content


def test_zstandard_of_a_long_window_says_how_to_pack_it_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.zst"
    # From a pipe, of which zstd does not know the length.
    command = f"zstd -q --long=31 -1 -o {file}".split()
    subprocess.run(command, input=b"a few words\n" * 9, check=True)
    with pytest.raises(InputError, match=re.escape(f"zstd -d --long=31 {file}")):
        read(s.TextSource(path=str(file)))


def test_csv_of_another_separator(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id|text\n1|one, two\n")
    assert read(s.CsvSource(path=str(tmp_path / "a.csv"))) == ["one, two"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_with_a_mark_at_its_beginning_is_read(encoding: str, tmp_path: Path) -> None:
    """As Windows saves it, packed or not."""
    text = "".join(f"€{n} 中\n" for n in range(60_000))
    table = "text,n\n" + text.replace("\n", ",0\n")
    for name, content in (("a.txt.gz", text), ("a.csv", table)):
        (file := tmp_path / name).write_bytes(packed(content.encode(encoding), name))
        documents = open_documents(source_of_path(str(file), text_key="text")).read()
        whole = "".join(piece for x in documents for piece in reading.pieces_of(x))
        assert whole == (text if name == "a.txt.gz" else text.replace("\n", ""))


def test_a_long_file_is_several_documents(tmp_path: Path) -> None:
    text = "".join(f"line {n} of a book\n" for n in range(5000))
    (file := tmp_path / "book.txt").write_text(text)
    whole, cut = (s.TextSource(path=str(file), document_chars=n) for n in (0, 2000))
    documents = read(cut)
    assert "".join(documents) == text and max(map(len, documents)) <= 2000
    assert open_documents(whole).identity[1] == {} != open_documents(cut).identity[1]


def test_zstandard_in_frames_and_damaged(tmp_path: Path) -> None:
    """Several frames are one file, as `zstd` and datatrove append them. A cut file is refused, not taken for a short one."""
    lines = [json.dumps({"text": f"{n} " + os.urandom(9).hex()}) + "\n" for n in range(4000)]
    whole, half = "".join(lines).encode(), "".join(lines[:2000]).encode()
    frames = packed(half, ".zst") + packed(whole[len(half) :], ".zst")
    (file := tmp_path / "a.jsonl.zst").write_bytes(frames)
    section = source_of_path(str(file), text_key="text")
    assert read(section) == [json.loads(line)["text"] for line in lines]
    for content, message in [
        (frames[: len(frames) // 2], "cannot be read"),
        (b"no frame", "cannot be read"),
        (packed(bytes(3 * 10**7), ".zst"), "no text does"),
    ]:
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read(section)


@pytest.mark.parametrize(
    "name",
    ["A.JSONL", "c.ndjson", "d.Json", "e.jsonl.gz", "F.NDJSON.GZ", "g.jsonl.zst", "H.Json.ZST"],
)
def test_json_lines_are_known_by_each_ending(tmp_path: Path, name: str) -> None:
    content = b'{"text": "the quick"}\n'
    (tmp_path / name).write_bytes(packed(content, name))
    for path in (tmp_path, tmp_path / name, tmp_path / ("*" + Path(name).suffix)):
        section = source_of_path(str(path), text_key="text")
        assert isinstance(section, s.JsonlSource) and read(section) == ["the quick"]


def test_globs_below_a_folder_with_brackets_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "run [1]").mkdir()
    (tmp_path / "run [1]" / "a.txt").write_text("found")
    files, _ = find_files(str(tmp_path / "run [1]" / "*.txt"), endings=[".txt"])
    assert [file.read_text() for file in files] == ["found"]
    with pytest.raises(DataError, match="is an address; copy the data"):
        find_files("s3://bucket/x", endings=[".txt"])
    with pytest.raises(
        DataError, match="the path of the data is empty"
    ):  # an unset variable of a shell
        find_files("", endings=[".txt"])


def test_tables_equal_the_standard_library(tmp_path: Path) -> None:
    rows = [
        {"id": "1", "text": 'a "quoted", long\nvalue with\u2028 separators', "n": "3"},
        {"id": "2", "text": "x" * 300_000, "n": ""},
        {"id": "3", "text": "", "n": "4"},
        {"id": "4", "text": "tab\there", "n": "5"},
        *({"id": "5", "text": text, "n": "6"} for text in ("NA", "null", "007", "1e5", "true")),
    ]
    for name, delimiter in (("a.csv", ","), ("B.TSV", "\t"), ("c.csv", ";"), ("d.csv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["id", "text", "n"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    expected = [row["text"] for row in rows if row["text"]]
    assert read(s.CsvSource(path=str(tmp_path / "a.csv"))) == expected
    assert read(s.CsvSource(path=str(tmp_path))) == expected * 4
    assert isinstance(source_of_path(str(tmp_path / "B.TSV"), text_key="text"), s.CsvSource)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,n\nhello, world,3\n", "bad.csv:2: has 3 values, and the first row 2 names"),
        ("body,n\nhello,3\n", "bad.csv:2: no text under 'text'; its fields are body, n"),
        ('text\n"never closed\n', "bad.csv:2: cannot be read"),
        ("text\nStra\udcdfe\n", "bad.csv:2: not UTF-8 at byte 9"),
        ("text,n,text\na,1,b\n", "bad.csv:1: two columns have one name"),
        # pandas or pyarrow.csv read these as other text, without an error.
        ("id,text,n\n1,a\n", "bad.csv:2: has 2 values, and the first row 3 names"),
        ('text\n"a"b\n', "bad.csv:2: cannot be read"),
        ("id,text\n1,a\\,b\n", "bad.csv:2: has 3 values, and the first row 2 names"),
    ],
)
def test_broken_tables_name_the_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "bad.csv").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=message):
        read(s.CsvSource(path=str(tmp_path / "bad.csv")))


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    value = f"one{NO_LINE_ENDS}line"
    text = tmp_path / "x.txt"
    text.write_bytes(f"{value}\r\n \r\n{value}\n".encode())
    assert [*read_lines(text)] == [(1, value), (3, value)]
    # A task, whose rows may hold these characters as they are.
    task = tmp_path / "task.jsonl"
    row = {"context": value, "choices": [" a", " b"], "answer": 0}
    task.write_bytes(BOM + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    [example] = read_task(str(task)).examples
    assert example.context == value
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": value}, ensure_ascii=False))
    assert read(s.JsonlSource(path=str(tmp_path / "rows.jsonl"))) == [value]


def test_a_byte_order_mark_is_dropped_everywhere(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BOM + b"text " + BOM)
    assert read(s.TextSource(path=str(tmp_path / "a.txt"))) == ["text \ufeff"]
    (tmp_path / "a.json").write_bytes(BOM + b'{"a": 1}')
    assert read_json(tmp_path / "a.json", dict) == {"a": 1}
    (tmp_path / "a.jsonl").write_bytes(BOM + b'{"text": "x"}\n')
    assert read(s.JsonlSource(path=str(tmp_path / "a.jsonl"))) == ["x"]


@pytest.mark.parametrize("name", ["p.txt", "P.JSONL", "p.ndjson"])
def test_prompts_are_lines(tmp_path: Path, name: str) -> None:
    from titan.tools.answers import read_prompts

    class Prompts:
        of_text = staticmethod(str)

    values = [f"one{NO_LINE_ENDS}prompt", "and another"]
    lines = (
        values
        if name.endswith("txt")
        else [json.dumps({"prompt": value}, ensure_ascii=False) for value in values]
    )
    (tmp_path / name).write_bytes(BOM + f"{lines[0]}\r\n   \n{lines[1]}".encode())
    assert read_prompts(tmp_path / name, Prompts()) == values  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("name", ["text", "tools"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "a"}]
    columns = {"messages": [chat], "text": ["a"], "tools": ["[]"]}
    values = [arrow.array(value) for value in (*columns.values(), ["b"])]
    table = arrow.Table.from_arrays(values, names=[*columns, name])
    parquet.write_table(table, file := tmp_path / "a.parquet")
    section = s.ParquetSource(
        path=str(file), messages_key="messages" if name == "tools" else ""
    )
    with pytest.raises(DataError, match=r"a\.parquet: two columns have one name: messages, "):
        read(section)


@pytest.mark.parametrize("key", ["text", "messages"])
def test_values_of_a_dictionary_are_read_a_few_at_a_time(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet stores a repeated value once, so that a small file may hold gigabytes."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = "x" * 2**18
    value = text if key == "text" else [{"role": "assistant", "content": text}]
    file = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({key: [value] * 40}), file)
    assert file.stat().st_size < 2**17
    batches: list[int] = []
    following = reading.next_batch

    def watched(*args, **kwargs) -> object:
        values = following(*args, **kwargs)
        batches.append(len(json.dumps(values or [])))
        return values

    monkeypatch.setattr(reading, "next_batch", watched)
    section = s.ParquetSource(path=str(file), messages_key="" if key == "text" else key)
    assert len(read(section)) == 40
    assert max(batches) < 2 * reading._BATCH_BYTES
