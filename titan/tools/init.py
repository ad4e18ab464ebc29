"""Command `titan init`: the starter job.

It is written as it is, for your own text with a tokenizer for it (--text), or for a Hugging Face model that goes on training (--hf).
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from titan.config.options import mistake
from titan.config.plug_ins import plug_ins
from titan.config.schema import source_of
from titan.tools.shipped import STARTER, copy, folders, require_new

from .tables import parser_of

_LARGE = 100_000_000  # bytes of a text that a larger model suits, and from which a vocabulary is learnt at most


def init(argv: list[str]) -> int:
    """Run `titan init`.

    Raises:
        ConfigError, InputError: a mistake of the user, which titan.cli reports.
    """
    options = parser_of("init").parse_args(argv)
    if options.vocab and (options.hf or not options.text):
        raise mistake(
            "--vocab", "goes with --text, and not with --hf, whose model has a tokenizer"
        )
    if options.text == "":  # of a variable that is not set
        raise mistake("--text", "names no path")
    require_new(options.file)
    changes = {}
    if options.hf:
        changes |= folders().job_of(options.hf)
        model = changes["model"]
        changes["model"] = model | {key: model.get(key) for key in ("flavor", "overrides")}
        # The starter's rate is for a small model that begins from nothing.
        changes["optimizer"] = {"name": "AdamW", "lr": 2e-5}
    if options.text:
        changes |= _for_text(options)
    return copy(STARTER, options.file, changes)


def _for_text(options: Any) -> dict[str, dict[str, Any]]:
    """Return keys that suit the text. Train a tokenizer on it, unless the model brings one."""
    from titan.data.reading import PIECE_CHARS, pieces_of  # imports numpy
    from titan.data.sources import in_validation, source_of_path

    from . import tokenizer
    from .prepare import open_all

    source: Any = source_of_path(options.text, text_key="text")
    documents = open_all([source])
    num_bytes = documents.num_bytes or 0
    path = source_of(source).path  # Python's library has none
    changes: dict[str, Any] = {"training": {"dataset": source.type, "dataset_path": path}}
    if options.hf:
        return changes
    # Flavor, and ids of the vocabulary and steps at most.
    large, small = ("10M", 4096, 2000), ("1M", 2048, 250)
    flavor, ids, steps = large if num_bytes >= _LARGE else small
    # A model learns a short text by heart if it passes over it too often.
    steps = min(steps, 25 + num_bytes // 2500)
    print(f"{documents.name}, {num_bytes:,} bytes: model {flavor}, {steps:,} steps")
    folder = options.file.with_name(f"{options.file.stem}_tokenizer")
    tokenizer.train(
        documents,
        vocab_size=options.vocab or min(ids, 512 + num_bytes // 200),
        output=folder,
        every=1 + num_bytes // _LARGE,
    )
    some, data = [*islice(documents.read(), 1000)], {}
    if len(some) < 100 and source.type == "text":
        # Part of a few long files can be kept for validation if each is several documents.
        chars = min(max(num_bytes // 400, 2000), PIECE_CHARS)
        source = source.model_copy(update={"document_chars": chars})
        some = [*islice(open_all([source]).read(), 1000)]
        data = {"sources": [{"type": "text", "path": path, "document_chars": chars}]}
    for share in (0.02, 0.05, 0.1, 0.2):
        # At least eight documents, or none.
        if sum(in_validation(document, fraction=share) for document in some) > 7:
            prompt = " ".join(next(pieces_of(some[0]))[:20].split())
            samples = {"prompts": [prompt], "prompt_tokens": 24}
            has_samples = plug_ins("titan.sections", of="validation")
            changes["validation"] = {"enable": True} | (samples if has_samples else {})
            changes["data"] = data | {"validation_fraction": share}
            if data:
                changes["training"] = {"dataset": None, "dataset_path": None}
            break
    changes["training"]["steps"] = steps
    changes["model"] = {"flavor": flavor}
    changes["tokenizer"] = {"path": str(folder)}
    return changes
