"""How fast text becomes batches on this machine, beside the loaders and the tokenizer library of others.

    python scripts/bench/data.py                                    # loaders and prepare
    python scripts/bench/data.py --only start --megabytes 1000      # to the first step, with and without a cache
    python scripts/bench/data.py --only documents --documents 10000000

loaders: batches of 8 x 2,048 tokens in the calling thread, from titan's shards, by a loader like nanoGPT's (random crops of one
mapped file), by TorchTitan 0.2.2's text loader (which tokenizes in every run; left out where it is not installed), and of all of
titan's raw text with an empty cache. prepare: `titan prepare`, and `tokenizers`' encode_batch_fast on as many threads, which also
reads the JSON Lines and writes the ids. Contestants take turns; tables give medians and ratios. Text is the standard
library's, or words drawn from it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from titan.config import schema as s
from titan.data.loader import Loader
from titan.data.tokenizer import build_tokenizer
from titan.tasks.next_token import NextToken
from titan.tools.prepare import main as prepare
from titan.tools.tokenizer import main as tokenizer_cli

SEQUENCE, BATCH = 2048, 8


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of wall time and of CPU time, children's included, that a call takes."""

    def cpu_s() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    wall, cpu = time.perf_counter(), cpu_s()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        function()
    return time.perf_counter() - wall, cpu_s() - cpu


def timed_command(
    command: Callable[[list[str]], int], *arguments: object
) -> tuple[float, float]:
    """Time a command of titan, which must succeed."""

    def work() -> None:
        assert command([str(argument) for argument in arguments]) == 0

    return timed(work)


def timed_prepare(
    text: Path, tokenizer: str, output: Path, *more: object
) -> tuple[float, float]:
    options = ("--input", text, "--tokenizer", tokenizer, "--output", output, *more)
    return timed_command(prepare, *options)


def library_texts() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    files = [*sorted(library.glob("*.py")), *sorted(library.glob("[!st]*/*.py"))]
    return [path.read_text(errors="replace") for path in files]


def write_copies(folder: Path) -> Path:
    """Write the library four times, about 45 MB, with a mark that makes each copy its own."""
    folder.mkdir()
    for copy in range(4):
        lines = (
            json.dumps({"text": f"# copy {copy}\n{text}"}) + "\n" for text in library_texts()
        )
        (folder / f"{copy}.jsonl").write_text("".join(lines))
    return folder


def write_words(
    file: Path, *, lengths: range, num_bytes: float = 1e18, count: int = 2**62
) -> Path:
    """Write documents of consecutive words of the library, from random places, until the file is as large as asked."""
    words = " ".join(library_texts()).split()
    generator, size = random.Random(0), 0
    with file.open("w") as lines:
        for _ in range(count):
            begin = generator.randrange(len(words) - lengths.stop)
            text = " ".join(words[begin : begin + generator.choice(lengths)])
            size += lines.write(json.dumps({"text": text}) + "\n")
            if size >= num_bytes:
                break
    return file


def open_loader(source: s.Section, vocabulary: str, cache: Path) -> Loader:
    section = s.TokenizerSection(name="auto" if vocabulary else "bytes", path=vocabulary)
    dataloader = s.DataloaderSection(num_workers=0)
    training = s.TrainingSection(
        seq_len=SEQUENCE, local_batch_size=BATCH, dataloader=dataloader
    )
    data = s.DataSection(cache_folder=str(cache)).model_copy(update={"sources": [source]})
    task = NextToken(s.JobConfig().model_copy(update={"training": training, "data": data}))
    task.tokenizer = build_tokenizer(section, hf_assets_path="")
    return task.loader(rank=0, world=1)


# ---- loaders -----------------------------------------------------------------------------------


def crops(file: Path) -> Iterator[object]:
    """Yield batches as nanoGPT's training script draws them: crops of a mapped file at random places."""
    while True:
        tokens = np.memmap(file, dtype=np.uint16, mode="r")  # mapped for each batch, as there
        places = torch.randint(len(tokens) - SEQUENCE, (BATCH,)).tolist()
        # Inputs and labels are cut and converted one by one, as there.
        yield tuple(
            torch.stack(
                [torch.from_numpy(tokens[p : p + SEQUENCE].astype(np.int64)) for p in shifted]
            )
            for shifted in (places, [place + 1 for place in places])
        )


def torchtitan_batches(file: Path, vocabulary: str) -> Iterator[object]:
    """Yield batches of TorchTitan's text loader, from a local file."""
    from datasets import load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.config import JobConfig
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    logging.disable()
    text_datasets.DATASETS["local"] = DatasetConfig(
        path=str(file),
        loader=lambda path: load_dataset(
            "json", data_files=path, split="train", streaming=True
        ),
        sample_processor=lambda row: row["text"],
    )
    config = JobConfig()
    config.training.dataset, config.training.seq_len = "local", SEQUENCE
    config.training.local_batch_size = BATCH
    tokenizer = HuggingFaceTokenizer(vocabulary)
    yield from text_datasets.build_text_dataloader(1, 0, tokenizer, config)


def titan_raw(file: Path, vocabulary: str, cache: Path) -> None:
    """Tokenize all of a file into a new cache, and read each of its rows once."""
    loader = open_loader(s.JsonlSource(path=str(file)), vocabulary, cache)
    while loader.samples.num_samples is None:
        loader.next_step()
    while loader.state_dict()["position"] < loader.samples.num_samples:
        loader.next_step()


def compare_loaders(folder: Path, vocabulary: str, *, rounds: int) -> None:
    text = write_words(folder / "words.jsonl", lengths=range(200, 1200), num_bytes=4e7)
    shards = folder / "shards"
    timed_prepare(text, vocabulary, shards)
    loader = open_loader(s.ShardsSource(path=str(shards)), vocabulary, folder)

    def steps() -> Iterator[object]:
        while True:
            yield loader.next_step()

    num_tokens = json.loads((shards / "index.json").read_text())["splits"]["train"][0]["tokens"]
    sources = {
        "titan, shards": (500, steps()),
        "like nanoGPT's": (500, crops(shards / "train-00000.bin")),
    }
    if find_spec("torchtitan"):
        sources["TorchTitan, raw text"] = (50, torchtitan_batches(text, vocabulary))
    rates: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, (count, batches) in sources.items():
            _, cpu = timed(lambda b=batches, n=count: list(islice(b, n)))
            rates.setdefault(name, []).append(count * BATCH * SEQUENCE / cpu)
        if turn < 3:
            cache = folder / f"cache-{turn}"
            _, cpu = timed(partial(titan_raw, text, vocabulary, cache))
            rates.setdefault("titan, raw text, no cache", []).append(num_tokens / cpu)
    # The first turn warms up.
    medians = {name: statistics.median(values[1:]) for name, values in rates.items()}
    print(f"\nloaders, medians of {rounds}\n\n| | M tokens/s of a core | |\n|---|--:|--:|")
    for name, value in medians.items():
        print(f"| {name} | {value / 1e6:.2f} | {value / medians['titan, shards']:.3f} |")


# ---- prepare -----------------------------------------------------------------------------------


def library_batches(files: Path, vocabulary: str, out: Path) -> None:
    """Do what `titan prepare` does by hand with the tokenizer library: JSON Lines to a file of ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{vocabulary}/tokenizer.json")
    with out.open("wb") as written:
        for file in sorted(files.glob("*.jsonl")):
            with file.open() as lines:
                while texts := [json.loads(line)["text"] for line in islice(lines, 1000)]:
                    for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                        written.write(np.array(one.ids, dtype=np.uint16).tobytes())


def compare_prepare(folder: Path, vocabulary: str, *, rounds: int, cores: int) -> None:
    corpus, figures = write_copies(folder / "corpus"), {}
    num_bytes = sum(file.stat().st_size for file in corpus.iterdir())
    os.environ |= {"RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "true"}
    for turn in range(rounds):
        workers = ("--workers", cores)
        out = [folder / f"{kind}-{turn}" for kind in ("bpe", "bytes")]
        by_hand = partial(library_batches, corpus, vocabulary, folder / "ids.bin")
        turns = {
            "titan prepare, BPE": timed_prepare(corpus, vocabulary, out[0], *workers),
            "tokenizers, BPE": timed(by_hand),
            "titan prepare, bytes": timed_prepare(corpus, "bytes", out[1], *workers),
        }
        for name, took in turns.items():
            figures.setdefault(name, []).append(took)
    print(f"\nprepare on {cores} cores, medians of {rounds}, {num_bytes / 1e6:.0f} MB\n")
    print("| | s | MB/s | CPU s |\n|---|--:|--:|--:|")
    for name, turns in figures.items():
        wall, cpu = (statistics.median(column) for column in zip(*turns, strict=True))
        print(f"| {name} | {wall:.1f} | {num_bytes / wall / 1e6:.1f} | {cpu:.1f} |")


# ---- start -------------------------------------------------------------------------------------

JOB = """
[model]
name = "llama3"
flavor = "tiny"
[training]
dataset = "jsonl"
local_batch_size = 2
seq_len = 256
steps = 1
[lr_scheduler]
warmup_steps = 1
[metrics]
enable_tensorboard = false
[checkpoint]
enable = false
"""


def start(folder: Path, text: Path, cache: Path, *, ranks: int) -> float:
    """Return the seconds from the command to the end of a run of one step."""
    (folder / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "titan.cli", "train", f"{folder}/job.toml"]
    command += [
        f"--nproc={ranks}",
        f"--training.dataset_path={text}",
        f"--data.cache_folder={cache}",
    ]
    command += [f"--job.dump_folder={folder / 'run'}"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - begin


def compare_start(folder: Path, *, rounds: int, megabytes: int) -> None:
    text = write_words(
        folder / "words.jsonl", lengths=range(200, 1200), num_bytes=megabytes * 1e6
    )
    # The start with a cache does not depend on the size.
    short = write_words(folder / "short.jsonl", lengths=range(200, 1200), num_bytes=2e7)
    start(folder, short, folder / "warm", ranks=1)
    for ranks in (1, 2):
        cold, warm = [], []
        for turn in range(rounds):
            cold.append(start(folder, text, folder / f"cold-{ranks}-{turn}", ranks=ranks))
            warm.append(start(folder, short, folder / "warm", ranks=ranks))
        print(
            f"{megabytes} MB of raw text, {ranks} rank(s), to the end of one step: no cache "
            f"{statistics.median(cold):.1f} s, cached {statistics.median(warm):.1f} s, medians of {rounds}"
        )


def many_documents(folder: Path, *, documents: int, cores: int) -> None:
    """Prepare very many short documents, and open the shards in a new process."""
    text = write_words(folder / "short.jsonl", lengths=range(4, 30), count=documents)
    shards = folder / "shards"
    wall, cpu = timed_prepare(text, "bytes", shards, "--workers", cores)
    print(
        f"\n{documents:,} documents, {text.stat().st_size / 1e6:.0f} MB: prepare {wall:.0f} s, "
        f"{cpu:.0f} CPU-s, {documents / wall:,.0f} documents/s"
    )
    source = s.ShardsSource(path=str(shards))

    def first_step() -> None:
        open_loader(source, "", folder).next_step()

    wall, _ = timed(first_step)
    print(f"opening and the first batch: {wall * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="loaders,prepare")
    add("--rounds", type=int, default=3)
    add("--cores", type=int, default=2)
    add("--megabytes", type=int, default=1000, help="raw text of `start`")
    add("--documents", type=int, default=10_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, parts = Path(name), args.only.split(",")
        vocabulary = str(folder / "bpe")
        train = ["train", "--input", "stdlib", "--vocab-size", "8192", "--output", vocabulary]
        if {"loaders", "prepare"} & {*parts}:
            timed_command(tokenizer_cli, *train)
        if "loaders" in parts:
            compare_loaders(folder, vocabulary, rounds=args.rounds)
        if "prepare" in parts:
            compare_prepare(folder, vocabulary, rounds=args.rounds, cores=args.cores)
        if "start" in parts:
            compare_start(folder, rounds=args.rounds, megabytes=args.megabytes)
        if "documents" in parts:
            many_documents(folder, documents=args.documents, cores=args.cores)


if __name__ == "__main__":
    main()
