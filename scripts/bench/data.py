"""How fast text becomes batches on this machine: `python scripts/bench/data.py`.

`titan prepare` with two workers of the standard library's text written out ten times as JSON Lines, by the byte tokenizer
and by a BPE of 8,192 tokens trained on it, once; and the loader making batches of these shards in the calling
thread, median of several rounds.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

from titan.config.schema import DataSection, ShardsSource, TokenizerSection, TrainingSection
from titan.data.loader import build_loader
from titan.data.prepare import main as prepare
from titan.data.tokenizer import build_tokenizer
from titan.data.tokenizer_cli import main as tokenizer_cli

SEQUENCE, BATCH, STEPS, ROUNDS = 2048, 8, 100, 5


def seconds(function, *arguments: object) -> float:
    begin = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert not function(*arguments)
    return time.perf_counter() - begin


def loader_tokens_per_s(shards: Path, tokenizer_path: str) -> float:
    """Median rate over rounds of STEPS batches of BATCH x SEQUENCE tokens, made in the calling thread."""
    section = TokenizerSection(name="auto" if tokenizer_path else "bytes", path=tokenizer_path)
    loader = build_loader(
        TrainingSection.model_validate(
            {"seq_len": SEQUENCE, "local_batch_size": BATCH, "dataloader": {"num_workers": 0}}
        ),
        data=DataSection(sources=[ShardsSource(path=str(shards))]),
        tokenizer=build_tokenizer(section, hf_assets_path=""),
        rank=0,
        world=1,
        seed=0,
    )
    rates = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(STEPS):
            loader.next_step()
        rates.append(STEPS * BATCH * SEQUENCE / (time.perf_counter() - begin))
    loader.close()
    return statistics.median(rates)


def write_corpus(folder: Path) -> Path:
    """About 100 MB of JSON Lines in ten files: the standard library, with a mark that makes each copy its own."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(errors="replace") for path in sorted(library.glob("*.py"))]
    texts += [path.read_text(errors="replace") for path in sorted(library.glob("[!st]*/*.py"))]
    folder.mkdir()
    for copy in range(10):
        lines = (json.dumps({"text": f"# copy {copy}\n{text}"}) + "\n" for text in texts)
        (folder / f"{copy}.jsonl").write_text("".join(lines))
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = str(folder / "bpe")
        corpus = write_corpus(folder / "corpus")
        seconds(
            tokenizer_cli,
            ["train", "--input", "stdlib", "--vocab-size", "8192", "--output", vocabulary],
        )
        for label, path in (("bytes", ""), ("BPE 8,192", vocabulary)):
            out = folder / f"shards-{label.split()[0]}"
            arguments = [
                "--input",
                str(corpus),
                "--tokenizer",
                path or "bytes",
                "--output",
                str(out),
                "--workers",
                "2",
            ]
            prepare_s = seconds(prepare, arguments)
            shards = json.loads((out / "index.json").read_text())["splits"]["train"]
            num_tokens = sum(shard["tokens"] for shard in shards)
            num_bytes = sum(shard["bytes"] for shard in shards)
            print(
                f"{label}: prepare {num_bytes / prepare_s / 1e6:.1f} MB/s, {num_tokens / prepare_s / 1e6:.1f} M tokens/s "
                f"({prepare_s:.1f} s); loader {loader_tokens_per_s(out, path) / 1e6:.0f} M tokens/s"
            )


if __name__ == "__main__":
    main()
