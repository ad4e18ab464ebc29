"""`titan tokenizer`: train a byte-level BPE tokenizer on one's own text, or look into any tokenizer.

titan tokenizer train --input corpus/ --vocab-size 32768 --output assets/mine
titan tokenizer inspect assets/mine --text "def main(argv):"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from titan.data.errors import DataError, require
from titan.data.prepare import tokenizer_section
from titan.data.sources import open_documents, source_of_path
from titan.data.tokenizer import BOS, EOS, LLAMA3_PATTERN, build_tokenizer

_SAMPLE = "The quick brown fox jumps over the lazy dog.\ndef add(a: int, b: int) -> int:\n    return a + b\n"
_SHOWN_TOKENS = 64


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titan tokenizer", description="Train or inspect a tokenizer."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="learn a byte-level BPE vocabulary")
    train.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help='text, JSONL, Parquet, or "stdlib"',
    )
    train.add_argument("--vocab-size", type=int, required=True, help="ids in all, at least 258")
    train.add_argument("--output", required=True, metavar="DIR", help="folder for tokenizer.json")
    train.add_argument(
        "--text-key", default="text", help="field or column with the text (default: text)"
    )
    inspect = commands.add_parser("inspect", help="sizes, special tokens, and how a text is cut")
    inspect.add_argument("path", help='file, folder, or "bytes"')
    inspect.add_argument("--text", default=_SAMPLE, help="text to cut (default: a sample)")
    return parser


def train(inputs: list[str], *, vocab_size: int, output: Path, text_key: str) -> int:
    """Write tokenizer.json and tokenizer_config.json; returns the size reached. Raises DataError."""
    smallest = 256 + len((BOS, EOS))
    if vocab_size < smallest:
        raise DataError(
            f"--vocab-size {vocab_size} is below {smallest}: 256 bytes and two special tokens"
        )
    tokenizers = require("tokenizers", purpose="training a tokenizer")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    documents = [open_documents(source_of_path(path, text_key=text_key)) for path in inputs]

    def texts() -> Iterator[str]:
        for part in documents:
            yield from part.read()

    tokenizer = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer=trainer)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (output / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    return tokenizer.get_vocab_size()


def inspect(path: str, *, text: str) -> str:
    """What a tokenizer is and does, for people."""
    tokenizer = build_tokenizer(tokenizer_section(path), hf_assets_path="")
    ids = tokenizer.encode(text)
    specials = list(tokenizer.special_tokens().items())
    named = ", ".join(f"{name} = {token}" for name, token in specials[:8])
    pieces = [
        tokenizer.token_bytes(token).decode("utf-8", errors="backslashreplace") for token in ids
    ]
    num_bytes = len(text.encode())
    more = f" ... {len(ids) - _SHOWN_TOKENS} more" if len(ids) > _SHOWN_TOKENS else ""
    return "\n".join(
        [
            f"kind            {tokenizer.kind}",
            f"vocabulary      {tokenizer.vocab_size:,} ids",
            f"begin, end      {tokenizer.bos_id}, {tokenizer.eos_id}",
            f"special tokens  {len(specials)}: {named}{' ...' if len(specials) > 8 else ''}",
            f"fingerprint     {tokenizer.fingerprint}",
            f"bytes a token   {num_bytes / max(len(ids), 1):.2f} ({num_bytes} bytes, {len(ids)} tokens)",
            f"tokens          {' '.join(repr(piece)[1:-1] for piece in pieces[:_SHOWN_TOKENS])}{more}",
            f"ids             {' '.join(map(str, ids[:_SHOWN_TOKENS]))}{more}",
        ]
    )


def main(argv: list[str]) -> int:
    """Run `titan tokenizer` with its arguments; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "inspect":
            print(inspect(arguments.path, text=arguments.text))
            return 0
        output = Path(arguments.output)
        wanted = arguments.vocab_size
        size = train(arguments.input, vocab_size=wanted, output=output, text_key=arguments.text_key)
    except DataError as error:
        print(f"titan tokenizer: {error}", file=sys.stderr)
        return 2
    short = f" (asked for {wanted:,}: the text has no more pairs to merge)" if size < wanted else ""
    print(f"{output / 'tokenizer.json'}: {size:,} ids{short}")
    return 0
