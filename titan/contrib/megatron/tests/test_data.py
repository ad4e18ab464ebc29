"""Megatron's token files: read as Megatron reads them, trained on, resumed, and refused with one line."""

from __future__ import annotations

import struct
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import Shell
from tests.support.loaders import build_loader
from tests.support.metrics import read_json_lines
from titan.config import schema as s
from titan.contrib.megatron.data import read_files
from titan.contrib.megatron.source import MegatronSource
from titan.data import DataError
from titan.data.samples import build_samples
from titan.data.shard_samples import SampleOptions
from titan.data.tokenizer import bytes_tokenizer

TOKENIZER = bytes_tokenizer()
EOS: Any = TOKENIZER.eos_id
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 8: "<u2"}


def draw_documents(count: int, *, largest: int = 255) -> list[list[list[int]]]:
    """Documents of one to three sequences. The last token is the end-of-text token."""
    generator = np.random.default_rng(0)
    documents = []
    for _ in range(count):
        lengths = generator.integers(1, 30, size=generator.integers(1, 4))
        documents.append([generator.integers(1, largest, size=n).tolist() for n in lengths])
        documents[-1][-1].append(EOS)
    return documents


def write_by_hand(prefix: Path, documents: list[list[list[int]]], *, code: int = 8) -> Path:
    """Write the files as the page of the format says."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = np.concatenate(sequences).astype(CODES[code])
    lengths = [len(sequence) for sequence in sequences]
    offsets = np.cumsum([0, *lengths[:-1]]) * tokens.itemsize
    marks = np.cumsum([0, *map(len, documents)])
    Path(f"{prefix}.bin").write_bytes(tokens.tobytes())
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(marks))
        + np.array(lengths, "<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + marks.astype("<i8").tobytes()
    )
    return prefix


def joined(parts: list[list[int]]) -> list[int]:
    return [*chain(*parts)]


def documents_of(prefix: Path) -> list[list[int]]:
    tokens, ends = read_files(str(prefix))
    return [tokens[a:b].tolist() for a, b in pairwise(ends)]


def options(split: str = "train", **data: Any) -> SampleOptions:
    section = s.DataSection(**data)
    return SampleOptions(tokenizer=TOKENIZER, data=section, seq_len=16, split=split, seed=0)


@pytest.mark.parametrize("code", CODES)
def test_documents_equal_what_was_written(tmp_path: Path, code: int) -> None:
    documents = draw_documents(20, largest=100)
    if code < 3:  # an end-of-text token needs two bytes
        documents = [[sequence[:-1] or [1] for sequence in document] for document in documents]
    prefix = write_by_hand(tmp_path / "a", documents, code=code)
    assert documents_of(prefix) == [joined(document) for document in documents]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_files_of_megatrons_builder_are_read_as_megatron_reads_them(
    tmp_path: Path, dtype: type
) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    prefix = tmp_path / "a"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    written = draw_documents(20)
    for document in written:
        # pyrefly: ignore[bad-argument-type]
        builder.add_document(joined(document), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    theirs = IndexedDataset(str(prefix))
    borders = theirs.document_indices.tolist()
    expected = [
        np.concatenate([theirs[i] for i in range(a, b)]).tolist() for a, b in pairwise(borders)
    ]
    assert documents_of(prefix) == expected == [joined(document) for document in written]
    # The writer of these tests writes the same bytes.
    by_hand = write_by_hand(tmp_path / "b", written, code=8 if dtype == np.uint16 else 4)
    for ending in (".bin", ".idx"):
        assert Path(f"{by_hand}{ending}").read_bytes() == Path(f"{prefix}{ending}").read_bytes()


def test_the_last_documents_are_held_out(tmp_path: Path) -> None:
    documents = draw_documents(40)
    source = MegatronSource(path=str(write_by_hand(tmp_path / "a", documents)))
    flat = [joined(document) for document in documents]
    for split, expected in [("train", flat[:30]), ("validation", flat[30:])]:
        tokens = source.open(options(split, validation_fraction=0.25))
        assert tokens.read(0, count=tokens.num_tokens).tolist() == joined(expected)
    with pytest.raises(DataError, match=r"validation split .* has 0 tokens"):
        build_samples([source], options=options("validation"))


def test_whole_documents_are_packed_and_masked(tmp_path: Path) -> None:
    documents = [[[number] * (number % 5 + 1) + [EOS]] for number in range(1, 60)]
    source = MegatronSource(path=str(write_by_hand(tmp_path / "a", documents)))
    data = s.DataSection(
        # pyrefly: ignore[bad-argument-type]
        sources=[source],
        packing="best_fit",
        document_mask=True,
        cache_folder=str(tmp_path),
    )
    training = s.TrainingSection(seq_len=16, local_batch_size=4)
    loader = build_loader(training, data=data, tokenizer=TOKENIZER, rank=0, world=1, seed=0)
    [batch] = loader.next_step()
    for tokens, documents_S in zip(batch.tokens_BS, batch.document_ids_BS, strict=True):
        for number in documents_S.unique():
            inside = tokens[documents_S == number].tolist()
            if {*inside} == {EOS}:  # padding
                continue
            assert EOS not in inside[:-1], "a document ends with its end-of-text token"
            assert len({*inside} - {EOS}) == 1, "a document is of one number"


def write_job(folder: Path, prefix: Path) -> Path:
    job = folder / "job.toml"
    job.write_text(
        f"""
[model]
flavor = "tiny"
overrides = {{ n_layers = 2 }}
[data]
document_mask = true
validation_fraction = 0.1
[checkpoint]
enable = true
interval = 2
[metrics]
log_freq = 1
[lr_scheduler]
warmup_steps = 1
total_steps = 4
[job]
dump_folder = "{folder / "run"}"
[training]
dataset = "megatron"
dataset_path = "{prefix}"
seq_len = 32
steps = 4
local_batch_size = 2
mixed_precision_param = "float32"
"""
    )
    return job


def test_a_run_trains_and_a_resumed_one_goes_on(tmp_path: Path, shell: Shell) -> None:
    prefix = write_by_hand(tmp_path / "corpus", draw_documents(200))
    found = []
    for name, parts in [("whole", (4,)), ("parts", (2, 4))]:
        folder = tmp_path / name
        folder.mkdir()
        job = write_job(folder, prefix)
        for steps in parts:
            shell(f"train {job} --training.steps={steps}")
        rows = read_json_lines(folder / "run" / "metrics.jsonl")
        found.append([(row["step"], row["loss"]) for row in rows if "loss" in row])
    assert found[0] == found[1]
    assert [step for step, _ in found[0]] == [1, 2, 3, 4]


def put(position: int, content: bytes) -> Any:
    """Return a function that overwrites bytes of a file."""
    return lambda data: data[:position] + content + data[position + len(content) :]


SEQUENCES = 3  # lengths from byte 34, offsets from byte 46, document marks from byte 70
DAMAGES: dict[str, tuple[str, Any, str]] = {
    "magic": ("idx", put(0, b"XX"), "does not begin as an index"),
    "no header": ("idx", lambda data: data[:20], "does not begin as an index"),
    "version": ("idx", put(9, struct.pack("<Q", 2)), "version 2"),
    "dtype of floats": ("idx", put(17, b"\x06"), "dtype code 6"),
    "sequences": ("idx", put(18, struct.pack("<Q", 2**62)), "should have"),
    "no sequences": ("idx", lambda data: data[:18] + bytes(16), "should have"),
    "modes": ("idx", lambda data: data + bytes(SEQUENCES), "multimodal"),
    "negative length": ("idx", put(34, struct.pack("<i", -1)), "sequence 1 of 3 begins"),
    "first mark": ("idx", put(70, struct.pack("<q", 1)), "marks should rise"),
    "marks that fall": ("idx", put(78, struct.pack("<q", 9)), "marks should rise"),
    "last mark": ("idx", put(86, struct.pack("<q", 2)), "marks should rise"),
    "short tokens": ("bin", lambda data: data[:-2], "does not fit its index"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_have_one_line(tmp_path: Path, shell: Shell, damage: str) -> None:
    ending, change, expected = DAMAGES[damage]
    prefix = write_by_hand(tmp_path / "a", [[[1] * 40 + [EOS]], [[2, 3], [4, 5, 6, EOS]]])
    file = Path(f"{prefix}.{ending}")
    file.write_bytes(change(file.read_bytes()))
    said = shell.refuse(f"check {write_job(tmp_path, prefix)}")
    [line] = [
        line
        for line in said.splitlines()
        if "megatron" in line or "a.idx" in line or "a.bin" in line
    ]
    assert expected in line


def test_sequences_without_tokens_are_no_text(tmp_path: Path) -> None:
    prefix = write_by_hand(tmp_path / "a", [[[]], [[]]])
    with pytest.raises(DataError, match="has 0 bytes"):
        read_files(str(prefix))


@pytest.mark.parametrize("path", ["gone", "0.3 a 0.7 b", "a.bin"])
def test_a_path_that_is_no_prefix_is_refused(tmp_path: Path, shell: Shell, path: str) -> None:
    write_by_hand(tmp_path / "a", draw_documents(20))
    job = write_job(tmp_path, tmp_path / path)
    error = shell.refuse(f"check {job}")
    assert f"{path}.idx is no file; give the prefix of both files" in error
    assert "[[data.sources]]" in error


def test_a_dataset_without_a_path_is_refused(tmp_path: Path, shell: Shell) -> None:
    job = write_job(tmp_path, tmp_path)
    job.write_text(job.read_text().replace("dataset_path", "# dataset_path"))
    assert 'dataset_path: missing: dataset "megatron" needs it' in shell.refuse(f"check {job}")


def test_documents_without_an_end_cannot_be_masked(tmp_path: Path) -> None:
    documents = draw_documents(20)
    documents[7][-1][-1] = 5
    source = MegatronSource(path=str(write_by_hand(tmp_path / "a", documents)))
    wishes: list[dict[str, Any]] = [{"document_mask": True}, {"packing": "best_fit"}]
    for wish in wishes:
        with pytest.raises(DataError, match=r"1 of 20 documents do not end .*--append-eod"):
            source.open(options(**wish))
    assert source.open(options()).num_tokens == sum(len(q) for d in documents for q in d)


@pytest.mark.parametrize(("code", "token", "seen"), [(8, 300, 300), (4, -1, 2**32 - 1)])
def test_an_id_beyond_the_vocabulary_is_refused(
    tmp_path: Path, code: int, token: int, seen: int
) -> None:
    documents = [[[token] * 40 + [EOS]]]
    source = MegatronSource(path=str(write_by_hand(tmp_path / "a", documents, code=code)))
    samples = build_samples([source], options=options())
    with pytest.raises(DataError, match=f"hold the id {seen}, but their vocabulary has"):
        samples.get(np.arange(2))


def test_ids_are_not_tokenized_again(tmp_path: Path, shell: Shell) -> None:
    prefix = write_by_hand(tmp_path / "a", draw_documents(20))
    options = f"--dataset megatron --dataset-path {prefix} --tokenizer bytes"
    said = shell.refuse(f"prepare {options} --output {tmp_path}/out").strip()
    assert said.endswith("(ids, no text) holds no documents to train on")
