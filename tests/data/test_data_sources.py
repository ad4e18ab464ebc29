"""Each source reads its documents, in one order, and says what is wrong with its files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from titan.config import schema as s
from titan.config.schema import JobConfig
from titan.config.toml import tomllib
from titan.data import DataError
from titan.data.reading import read_row
from titan.data.sources import (
    TextStream,
    in_validation,
    open_documents,
    resolve_sources,
    source_of_path,
)


def read(section: s.Section) -> list[str]:
    documents = open_documents(section)
    first = [str(text) for text in documents.read()]
    assert [str(text) for text in documents.read()] == first, "a second reading differs"
    return first


def test_stdlib_is_python_source_without_its_tests() -> None:
    documents = open_documents(s.StdlibSource())
    texts = [str(text) for text in documents.read()]
    assert sum(map(len, texts)) > 3_000_000
    joined = "\n".join(texts)
    # From json/__init__.py.
    assert '"""JSON (JavaScript Object Notation) <https://json.org>' in joined
    assert "class ArgumentParser(" in joined
    assert open_documents(s.StdlibSource()).identity == documents.identity


def test_text_files_folder_and_glob(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in [
        ("b.txt", "two"),
        ("a.md", "one"),
        ("sub/c.txt", "three"),
        ("x.py", "no"),
        ("e.txt", ""),
    ]:
        (tmp_path / name).write_text(content)
    assert read(s.TextSource(path=str(tmp_path))) == ["one", "two", "three"]
    assert read(s.TextSource(path=str(tmp_path / "*.txt"))) == ["two"]
    assert read(s.TextSource(path=str(tmp_path / "b.txt"))) == ["two"]


def test_jsonl_plain_and_compressed(tmp_path: Path, corpus: Path, texts: list[str]) -> None:
    assert read(s.JsonlSource(path=str(corpus))) == texts
    packed = tmp_path / "packed"
    packed.mkdir()
    with gzip.open(packed / "a.jsonl.gz", "wt") as file:
        file.write('{"body": "one"}\n\n{"body": ""}\n{"body": "half \\ud83d a pair"}\n')
    assert read(s.JsonlSource(path=str(packed), text_key="body")) == [
        "one",
        "half \ufffd a pair",
    ]


def test_parquet(tmp_path: Path, texts: list[str]) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table({"id": range(400), "text": texts}), tmp_path / "a.parquet", row_group_size=70
    )
    assert read(s.ParquetSource(path=str(tmp_path))) == texts
    with pytest.raises(DataError, match="no column 'body'; its columns are id, text"):
        read(s.ParquetSource(path=str(tmp_path), text_key="body"))
    with pytest.raises(DataError, match=r"a\.parquet, row group 0: 'id' is a number, not text"):
        read(s.ParquetSource(path=str(tmp_path), text_key="id"))
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
        read(s.ParquetSource(path=str(tmp_path)))


def test_parquet_texts_may_be_binary(tmp_path: Path) -> None:
    """As Spark writes them, also within conversations."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chat = [
        {"role": b"user", "content": "na\u00efve".encode()},
        {"role": b"assistant", "content": b"b"},
    ]
    table = pa.table({"text": ["na\u00efve".encode(), None], "messages": [chat, chat]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(s.ParquetSource(path=str(tmp_path))) == ["na\u00efve"]
    source = s.ParquetSource(path=str(tmp_path), messages_key="messages")
    documents: Any = open_documents(source).read()
    [found, _] = (json.loads("".join(document.read())) for document in documents)
    assert found[0] == {"role": "user", "content": "na\u00efve"}
    parquet.write_table(pa.table({"text": [b"\xff"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row group 0: a column is binary, and no UTF-8 text"):
        read(s.ParquetSource(path=str(tmp_path)))


def test_a_folder_without_text_names_a_glob(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "data.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(
        DataError, match=r"has 2 \*\.py; name other files, or give a glob: "
    ) as error:
        read(s.TextSource(path=str(tmp_path)))
    glob = str(error.value).rpartition("glob: ")[2].strip("'")
    assert len(read(s.TextSource(path=glob))) == 2


def test_another_field_is_shown_as_lines_to_paste(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "7", "n": 1, "content": "a longer text"}\n')
    with pytest.raises(
        DataError, match="no text under 'text'; its fields are content, id, n"
    ) as e:
        open_documents(s.JsonlSource(path=str(rows))).try_first()
    pasted = tomllib.loads("\n".join(e.value.paste))
    [source] = JobConfig.model_validate(pasted).data.sources
    assert read(source) == ["a longer text"]
    # All of the first files are tried, not the first one alone.
    (tmp_path / "z.json").write_text("[\n1]")
    rows.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"z\.json:1: not a line of JSON"):
        open_documents(s.JsonlSource(path=str(tmp_path))).try_first()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"corpus\.jsonl:2: not a line of JSON"),
        (b'{"body": "x"}', r"corpus\.jsonl:2: no text under 'text'; its fields are body"),
        (b'["x"]', r"corpus\.jsonl:2: no text under 'text': it is an array"),
        (b'{"text": true}', r"corpus\.jsonl:2: 'text' is true or false, not text"),
        (b'{"text": 3}', r"corpus\.jsonl:2: 'text' is a number, not text .*--text-key"),
        (b'{"text": "\xff"}', "2: not a line of JSON: .* convert the file to UTF-8"),
        ('{"text": "x"}'.encode("utf-16"), "'utf-16-le' codec .* convert the file to UTF-8"),
        (b'{"text": ' + b"1" * 5000 + b"}", r"corpus\.jsonl:2: 'text' is a number, not text"),
    ],
)
def test_broken_jsonl_lines_are_told(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "corpus.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        read(s.JsonlSource(path=str(tmp_path)))


def test_an_integer_of_any_length_is_beside_the_text(tmp_path: Path) -> None:
    line = json.dumps({"text": "fine", "n": [3, 0]}).replace("0", "1" * 5000)
    (tmp_path / "corpus.jsonl").write_text(line)
    assert read(s.JsonlSource(path=str(tmp_path))) == ["fine"]
    row = read_row(line.encode(), where="")
    assert row["n"] == [3, "1" * 5000]


def test_huggingface_streamed_or_not_is_the_same_text(hub: Path, texts: list[str]) -> None:
    pytest.importorskip("datasets")
    streamed = s.HuggingFaceSource(path=str(hub))
    assert read(streamed) == texts
    whole = s.HuggingFaceSource(path=str(hub), streaming=False)
    assert read(whole) == texts
    assert open_documents(whole).identity == open_documents(whole).identity
    with pytest.raises(
        DataError, match=r"cannot open Hugging Face dataset .*training\.dataset_path"
    ):
        open_documents(s.HuggingFaceSource(path=str(hub), split="nonsense"))


@pytest.mark.parametrize("consumed", [0, 1, 149, 150, 155, 399, 400])
def test_a_text_stream_resumes_where_it_was(hub: Path, texts: list[str], consumed: int) -> None:
    pytest.importorskip("datasets")
    stream = TextStream(s.HuggingFaceSource(path=str(hub)))
    reading = stream.read()
    assert [next(reading) for _ in range(consumed)] == texts[:consumed]
    state = json.loads(json.dumps(stream.state()))
    again = TextStream(s.HuggingFaceSource(path=str(hub)))
    assert list(again.read(state)) == texts[consumed:]
    assert list(again.read()) == texts, "the next epoch begins where the resumed one did"


def test_presets_resolve_to_sources(tmp_path: Path) -> None:
    assert resolve_sources("stdlib") == [s.StdlibSource()]
    assert resolve_sources("c4") == [s.HuggingFaceSource(path="allenai/c4", name="en")]
    # A copy with the hub's card is opened as the hub's, any other by its files.
    (tmp_path / "a.parquet").touch()
    plain = resolve_sources("fineweb-edu", dataset_path=str(tmp_path))
    assert plain == [s.ParquetSource(path=str(tmp_path))]
    (tmp_path / "README.md").touch()
    carded = resolve_sources("fineweb-edu", dataset_path=str(tmp_path))[0]
    assert isinstance(carded, s.HuggingFaceSource) and carded.name == "sample-10BT"
    assert vars(resolve_sources("c4_validation")[0])["split"] == "validation"
    assert vars(resolve_sources("c4", dataset_path="copy")[0])["path"] == "copy"
    assert resolve_sources("c4_test") == [s.JsonlSource(path="tests/assets/c4_test")]
    assert vars(resolve_sources("fineweb-edu")[0])["name"] == "sample-10BT"
    assert resolve_sources("owner/name") == [s.HuggingFaceSource(path="owner/name")]
    assert resolve_sources("shards", dataset_path="x") == [s.ShardsSource(path="x")]


def test_unknown_datasets_are_told() -> None:
    with pytest.raises(DataError, match=r"did you mean 'stdlib'\?.*owner/name"):
        resolve_sources("stdlob")
    with pytest.raises(DataError, match="set dataset_path"):
        resolve_sources("text")


def test_a_path_on_the_command_line_means_its_kind(tmp_path: Path, corpus: Path) -> None:
    assert source_of_path(str(corpus), text_key="body") == s.JsonlSource(
        path=str(corpus), text_key="body"
    )
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("x")
    assert isinstance(source_of_path(str(tmp_path / "notes"), text_key="text"), s.TextSource)
    assert source_of_path("stdlib", text_key="text") == s.StdlibSource()


def test_a_section_of_a_third_party_brings_its_documents() -> None:
    from titan.data.sources import Documents

    class Poems(s.DocumentOptions):
        type: str = "poems"

        def documents(self) -> Documents:
            return Documents(name="poems", identity=["poems"], read=lambda: iter(["a", "b"]))

    assert read(Poems()) == ["a", "b"]
    with pytest.raises(DataError, match="source 'synthetic' holds no text"):
        open_documents(s.SyntheticSource())


def test_held_out_documents_are_chosen_by_their_text_alone(texts: list[str]) -> None:
    held_out = {text for text in texts if in_validation(text, fraction=0.25)}
    assert len(held_out) == pytest.approx(100, abs=25)
    assert held_out == {text for text in reversed(texts) if in_validation(text, fraction=0.25)}
    assert {text for text in texts if in_validation(text, fraction=0.1)} <= held_out
    assert not any(in_validation(text, fraction=0.0) for text in texts)
