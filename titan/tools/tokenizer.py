"""Command `titan tokenizer`.

It trains a byte-level BPE tokenizer on your text, or inspects any tokenizer:

    titan tokenizer train --input corpus/ --vocab-size 32768 --output assets/mine
    titan tokenizer inspect assets/mine --text "def main(argv):"
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from titan.config.options import CommandParser, add_options, add_quiet, is_quiet, put_json
from titan.data import DataError, require
from titan.data.reading import pieces_of
from titan.data.sources import Documents, source_of_path
from titan.data.tokenizer import BOS, EOS, LLAMA3_PATTERN, tokenizer_named

from .prepare import open_all
from .tables import OPTIONS, parser_of

_SMALLEST = 258  # bytes, and two special tokens


def _parser() -> CommandParser:
    parser = parser_of("tokenizer")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,inspect}")
    for name, add_more in (("train", add_quiet), ("inspect", CommandParser.add_json)):
        about = OPTIONS["tokenizer"][name]
        command = commands.add_parser(name, help=about["help"])
        add_more(command)
        add_options(command, about["options"])
    return parser


def train(documents: Documents, *, vocab_size: int, output: Path, every: int = 1) -> None:
    """Train a tokenizer. Write tokenizer.json and tokenizer_config.json, and say how many ids it has.

    Args:
        documents: text to learn from.
        vocab_size: number of ids to reach.
        output: folder of the files.
        every: learn from every so many pieces of the text.

    Raises:
        DataError: the size is too small, or the output exists.
    """
    if vocab_size < _SMALLEST:
        raise DataError(
            f"a vocabulary of {vocab_size} is below {_SMALLEST}: 256 bytes and two special tokens"
        )
    file = output / "tokenizer.json"
    if file.exists():
        raise DataError(
            f"'{file}' exists; a model trained with it would lose its meaning. Delete it first, or choose another name"
        )
    tokenizers = require("tokenizers", purpose="training a tokenizer")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    # Split like Llama 3, then write bytes as characters, then merge.
    tokenizer = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        # All 256 bytes have a token, so that no text is unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty() and not is_quiet(),
    )
    # Read pieces, so that a document of any size needs little memory.
    texts = (piece for document in documents.read() for piece in pieces_of(document))
    tokenizer.train_from_iterator(islice(texts, 0, None, every), trainer=trainer)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    size = tokenizer.get_vocab_size()
    short = (
        f" (asked for {vocab_size:,}: the text has no more pairs to merge)"
        if size < vocab_size
        else ""
    )
    print(f"{file}: {size:,} ids{short}")


def inspect(path: str, *, text: str) -> dict[str, Any]:
    """Return facts about a tokenizer, and how it cuts a text."""
    tokenizer = tokenizer_named(path)
    ids, num_bytes = tokenizer.encode(text), len(text.encode())
    # Decode bytes, since a token may end within a character. The slice drops the quotes of repr.
    pieces = [tokenizer.token_bytes(token) for token in ids]
    return {
        "kind": tokenizer.kind,
        "vocabulary": tokenizer.vocab_size,
        "begin": tokenizer.bos_id,
        "end": tokenizer.eos_id,
        "special tokens": tokenizer.special_ids,
        "fingerprint": tokenizer.fingerprint,
        "bytes a token": num_bytes / max(len(ids), 1),
        "tokens": [repr(piece.decode(errors="backslashreplace"))[1:-1] for piece in pieces],
        "ids": ids,
    }


def _page(facts: dict[str, Any]) -> str:
    shown = facts | {
        "vocabulary": f"{facts['vocabulary']:,} ids",
        "bytes a token": f"{facts['bytes a token']:.2f}",
    }
    return "\n".join(f"{name:<16}{value}" for name, value in shown.items())


def main(argv: list[str]) -> int:
    """Run `titan tokenizer` with its arguments. Return the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "inspect":
        facts = inspect(arguments.path, text=arguments.text)
        if not put_json(facts, arguments.json):
            print(_page(facts))
        return 0
    sources = [source_of_path(path, text_key=arguments.text_key) for path in arguments.input]
    train(open_all(sources), vocab_size=arguments.vocab_size, output=arguments.output)
    return 0
