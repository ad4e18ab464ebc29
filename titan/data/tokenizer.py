"""Tokenizers of three kinds, behind one small class.

The kinds are "bytes" (embedded, one token a byte, through tiktoken), "tiktoken" (a rank file such as Llama 3's tokenizer.model)
and "huggingface" (a tokenizer.json, through `tokenizers`). Text never becomes a special token: a document that contains
"<|end_of_text|>" is encoded as those characters. So the begin and end ids mark document boundaries and nothing else.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiktoken

from titan.base.untrusted import printable, read_bytes, read_text
from titan.config.model import model_title
from titan.config.schema import JobConfig, TokenizerSection
from titan.data import DataError, require
from titan.data import tokenizer_files as beside
from titan.data.reading import pieces
from titan.data.special_tokens import Tokenizer
from titan.data.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
# Llama 3 cuts text by this pattern before merging (its released tokenizer.py). `titan tokenizer train` uses it too.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_RANKS, _LLAMA3_NUM_SPECIALS = 128_000, 256
# Limits of Llama 3's tokenizer.py. The regular expression engine overflows on longer text, and merging is slow on longer runs
# of white space, and on longer text without white space.
_MAX_CHARS, _MAX_RUN = 400_000, 25_000
_MAX_GAPS = 2**20  # unused ids below the highest id
_LONG_RUN = re.compile(r"\S{512,}|\s{512,}")


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by ranks, as a tiktoken.Encoding. The special tokens follow the last rank."""

    def __init__(
        self,
        ranks: dict[bytes, int],
        *,
        kind: str,
        pattern: str,
        specials: list[str],
    ) -> None:
        self.special_ids = {name: len(ranks) + n for n, name in enumerate(specials)}
        self.kind = kind
        self.vocab_size = len(ranks) + len(specials)
        self.bos_id = self.eos_id = None
        self.token_texts, self.begin_ids, self.end_ids = {}, [], set()
        marks = (("bos", BOS), ("eos", EOS))
        self.name_tokens(**{which: name for which, name in marks if name in specials})
        self._encoding = tiktoken.Encoding(
            kind, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_ids
        )

    def encode(self, text: str) -> list[int]:
        # The pattern's engine is safe on any text up to this length.
        if len(text) <= _MAX_RUN:
            return self._encoding.encode_ordinary(text)
        return [i for piece in _pieces(text) for i in self._encoding.encode_ordinary(piece)]

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self._encoding.encode(text, allowed_special="all")
        starts = self._encoding.decode_with_offsets(ids)[1]
        # A token that contains only a part of a character still spans the character.
        ends = [max(begin + 1, end) for begin, end in pairwise([*starts, len(text)])]
        return ids, list(zip(starts, ends, strict=True))

    def token_bytes(self, token: int) -> bytes:
        # Special tokens follow the last rank.
        if token >= self.vocab_size - len(self.special_ids):
            return b""
        return self._encoding.decode_single_token_bytes(token)


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json file, through the `tokenizers` library."""

    kind = "huggingface"

    def __init__(self, path: Path) -> None:
        tokenizers = require("tokenizers", purpose=f"tokenizer {path}")
        content = read_text(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the library raises bare Exception, or panics
            why = f"not a valid tokenizer.json: {printable(str(error), 200)}"
            if '"default_vocab_size"' in content[:4096]:
                why = "is Mistral's tekken.json, which is not supported; use the model's tokenizer.json"
            raise DataError(f"tokenizer {path}: {why}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        beside.add_tokens(self._tokenizer, path)
        self._tokenizer.encode_special_tokens = True  # encode their text like any other
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self._names = {token: name for name, token in vocab.items()}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = {
            t.content: number for number, t in sorted(added.items()) if t.special
        }
        decoder = self._tokenizer.decoder
        # A byte-level tokenizer spells bytes as printable characters, which _BYTE_OF_CHAR undoes.
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        last = max(vocab.values(), default=-1)
        # A single high id could make a vocabulary, and so an embedding, of any size.
        if not 0 <= last < len(vocab) + _MAX_GAPS:
            raise DataError(
                f"tokenizer {path}: {len(vocab):,} tokens with numbers up to {last:,}"
            )
        self.bos_id = beside.find_special(path.parent, "bos", vocab)
        self.eos_id = beside.find_special(path.parent, "eos", vocab)
        # The begin and end ids may lie beyond the vocabulary.
        self.vocab_size = max(last, self.bos_id or 0, self.eos_id or 0) + 1
        self.end_ids = beside.generation_ends(path.parent)
        if self.eos_id is not None:
            self.end_ids.add(self.eos_id)
        self.begin_ids = self._find_begin(beside.read_beside(path.with_name(TOKENIZER_CONFIG)))
        own = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        texts = {
            which: self._names[token] for which, token in own.items() if token in self._names
        }
        self.token_texts = texts | beside.token_texts(path.parent)
        self.unread = beside.unread_beside(path.parent)
        self.file = path

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the name of the file, since the library's own pickle forgets encode_special_tokens.
        named = ("bos_id", "eos_id", "special_ids", "token_texts", "begin_ids", "end_ids")
        return type(self), (self.file,), {name: getattr(self, name) for name in named}

    def _find_begin(self, config: dict[str, Any]) -> list[int] | None:
        """Return the ids that the post-processor puts before a text.

        None means that it puts nothing, and that a text may still begin with `bos_id`.
        """
        plain, whole = self._ids("a"), self._tokenizer.encode("a").ids
        starts = (n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
        found = whole[: next(starts, 0)]
        # transformers 4 obeyed add_bos_token; version 5 asks only the post-processor. `titan tokenizer train` writes neither.
        is_ours = (
            self._tokenizer.post_processor is None and self._names.get(self.bos_id or 0) == BOS
        )
        return found if found or not (is_ours or config.get("add_bos_token")) else None

    def id_of(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> list[int]:
        # Encoding takes 200 bytes a character, so long text is encoded in pieces.
        first, *others = [*pieces([text])] or [""]
        ids = self._ids(first)
        for piece in others:
            ids += self.encode_rest(piece)
        return ids

    def encode_rest(self, text: str) -> list[int]:
        if self._joins:
            return self._ids(text)
        # The text before a cut is a word, or the end of a line.
        before = "x" if text[:1].isspace() else "x\n"
        start, ids = self._ids(before), self._ids(before + text)
        return ids[len(start) :] if ids[: len(start)] == start else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        # The library releases the interpreter's lock only for batches.
        with _naming_panics(self.file):
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _joins(self) -> bool:
        """Return whether the ids of a text's pieces are the ids of the text. SentencePiece puts a space before each piece."""
        cuts = ("x", " x"), ("x\n", "x")
        return all(self._ids(a) + self._ids(b) == self._ids(a + b) for a, b in cuts)

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        with _naming_panics(self.file):
            encoding = self._recognising.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _recognising(self) -> Any:
        """Return a copy of the tokenizer that encodes the text of a special token as that token."""
        twin = type(self._tokenizer).from_str(self._tokenizer.to_str())
        # Add tokens that are special only by the job. The others have flags of their own.
        added = {t.content for t in twin.get_added_tokens_decoder().values() if t.special}
        twin.add_special_tokens([n for n in self.special_ids if n not in added])
        return twin

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        name = self._names.get(token, "")
        if name in self.special_ids:
            return b""
        if self._byte_level and all(char in _BYTE_OF_CHAR for char in name):
            return bytes(_BYTE_OF_CHAR[char] for char in name)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):  # SentencePiece's byte fallback
            return bytes([int(name[3:5], 16)])
        # SentencePiece spells a space as U+2581.
        return name.replace("▁", " ").encode()


@contextmanager
def _naming_panics(file: Path | None) -> Iterator[None]:
    """Raise DataError for a panic of the library, such as that of a pattern with too many ways to match."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        why = printable(str(error), 200)
        raise DataError(
            f"tokenizer {file}: its pattern or model fails on a text: {why}"
        ) from error


def bytes_tokenizer() -> Tokenizer:
    """Return the tokenizer with one token a byte, 0 to 255, then begin (256) and end (257) of text."""
    # There are no merges, so the pattern's cuts do not change the ids. 64 characters are the fastest.
    return TiktokenTokenizer(
        {bytes([byte]): byte for byte in range(256)},
        kind="bytes",
        pattern=r"(?s:.{1,64})",
        specials=[BOS, EOS],
    )


def tiktoken_tokenizer(
    path: Path, *, pattern: str = "", specials: Sequence[str] = ()
) -> Tokenizer:
    """Return the tokenizer of a rank file: lines of "base64(token) rank".

    Such a file contains neither the pattern that cuts text nor the special tokens after the last rank.

    Args:
        path: the rank file.
        pattern: regular expression that cuts text. Empty means that the file must be Llama 3's.
        specials: texts of the special tokens after the last rank. They are used only with a pattern.

    Raises:
        DataError: the file is not a rank file, or the pattern is missing or invalid.
    """
    lines = enumerate(read_bytes(path).splitlines(), start=1)
    ranks = dict(_rank_line(line, where=f"{path}:{number}") for number, line in lines)
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise DataError(
            f"tokenizer {path}: its {len(ranks)} ranks are not the numbers from 0 without gaps"
        )
    if not pattern and (
        len(ranks) != _LLAMA3_RANKS or any(bytes([n]) not in ranks for n in range(256))
    ):
        raise DataError(
            f"tokenizer {path}: its {len(ranks):,} ranks are not Llama 3's {_LLAMA3_RANKS:,}, and a rank file does not say how "
            "text is cut: use the model's tokenizer.json, or set tokenizer.pattern and tokenizer.special_tokens"
        )
    # Names and order are those of Llama 3's release.
    reserved = [f"<|reserved_special_token_{n}|>" for n in range(_LLAMA3_NUM_SPECIALS - 5)]
    header = ["<|start_header_id|>", "<|end_header_id|>"]
    llama3 = [BOS, EOS, *reserved[:4], *header, reserved[4], "<|eot_id|>", *reserved[5:]]
    try:
        tokenizer = TiktokenTokenizer(
            ranks,
            kind="tiktoken",
            pattern=pattern or LLAMA3_PATTERN,
            specials=list(specials) if pattern else llama3,
        )
    except ValueError as error:
        why = printable(str(error), 200)
        raise DataError(f"tokenizer.pattern cannot be used with {path}: {why}") from error
    tokenizer.file = path
    return tokenizer


def _rank_line(line: bytes, *, where: str) -> tuple[bytes, int]:
    parts = line.split()
    try:
        token, rank = parts
        return base64.b64decode(token, validate=True), int(rank)
    except ValueError as error:
        why = "not a line of 'base64-token rank'. A SentencePiece tokenizer.model (Llama 2) is not supported"
        if len(parts) == 2 and parts[1].isdigit() and line.isascii():  # as in Whisper's files
            why = f"'{printable(parts[0].decode(), 40)}' is not base64, so a rank has no token"
        elif line[:1] in (b"{", b"["):
            why = "this is JSON or TOML, not ranks"
        raise DataError(
            f"tokenizer {where}: {why}; use the model's tokenizer.json instead"
        ) from error


def build_tokenizer(section: TokenizerSection, *, hf_assets_path: str) -> Tokenizer:
    """Build the tokenizer of a job.

    Args:
        section: the section [tokenizer].
        hf_assets_path: `model.hf_assets_path`, where the tokenizer is if the section has no path.

    Raises:
        DataError: the file is missing, or of another kind.
    """
    tokenizer = _open_file(section, hf_assets_path)
    tokenizer.name_tokens(bos=section.bos_token, eos=section.eos_token)
    template = Path(section.chat_template).expanduser()
    if section.chat_template and not template.is_file():
        raise DataError(
            f"tokenizer.chat_template '{template}' is no file; name a Jinja file, or leave it empty for the tokenizer's own"
        )
    tokenizer.chat_template = (
        read_text(template) if section.chat_template else _template_beside(tokenizer)
    )
    return tokenizer


def open_tokenizer(config: JobConfig) -> Tokenizer:
    """Build the job's tokenizer, and compare its size with the model's vocabulary.

    Raises:
        DataError: the tokenizer cannot be read, or has more tokens than the model.
    """
    tokenizer = build_tokenizer(config.tokenizer, hf_assets_path=config.model.hf_assets_path)
    model, size = config.model.sizes, tokenizer.vocab_size
    if size > model.vocab_size:
        raise DataError(
            f"the tokenizer has {size:,} tokens, but {config.model.name} {model_title(config.model)} has a vocabulary of "
            f'{model.vocab_size:,}; set model.overrides.vocab_size = "auto", or use another tokenizer'
        )
    return tokenizer


def _template_beside(tokenizer: Tokenizer) -> str:
    """Return the chat template among a tokenizer's files, or "" if there is none.

    A template "tool_use" beside the default one is for conversations with tools, as in transformers. Both become one template.
    """
    if tokenizer.file is None:
        return ""
    folder = tokenizer.file.parent
    if (file := folder / CHAT_TEMPLATE).is_file():
        others = (folder / "additional_chat_templates").glob("tool_use.jinja")
        named = {other.stem: read_text(other) for other in others} | {
            "default": read_text(file)
        }
    else:
        found = beside.read_beside(folder / "tokenizer_config.json").get("chat_template")
        rows = found if isinstance(found, list) else [{"name": "default", "template": found}]
        named = {row.get("name"): row.get("template") for row in rows if isinstance(row, dict)}
    default, tools = (str(named.get(name) or "") for name in ("default", "tool_use"))
    if not (default and tools):
        return default
    # Jinja drops the last line's end of a template, and with these signs no other space.
    both = tools.removesuffix("\n"), default.removesuffix("\n")
    return "{% if tools is not none +%}" + "{%+ else +%}".join(both) + "{%+ endif %}"


def _open_file(section: TokenizerSection, hf_assets_path: str) -> Tokenizer:
    where = section.path or hf_assets_path
    if section.name == "bytes" or (section.name == "auto" and not where):
        return bytes_tokenizer()
    if not where:
        raise DataError(
            f'tokenizer.name = "{section.name}" needs tokenizer.path (or model.hf_assets_path)'
        )
    path = Path(where).expanduser()
    if not path.exists():
        raise DataError(
            f"tokenizer path '{path}' does not exist; set tokenizer.path to a tokenizer.json, a tokenizer.model or a folder "
            f'with one, or tokenizer.name = "bytes" for the embedded one, or {_how_to_fetch(path)}'
        )
    file = path if path.is_file() else _find_file(path, section.name)
    if section.name == "huggingface" or (section.name == "auto" and file.suffix == ".json"):
        return HuggingFaceTokenizer(file)
    return tiktoken_tokenizer(file, pattern=section.pattern, specials=section.special_tokens)


def tokenizer_named(value: str, *, chat_template: str = "") -> Tokenizer:
    """Return the tokenizer that a word on a command line means: "bytes", a file or a folder."""
    named = {"name": "bytes"} if value == "bytes" else {"path": value}
    section = TokenizerSection.model_validate({**named, "chat_template": chat_template})
    return build_tokenizer(section, hf_assets_path="")


def _find_file(folder: Path, kind: str) -> Path:
    # Prefer tokenizer.json, since it names the special tokens, too.
    names = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
    wanted = {"huggingface": names[:1], "tiktoken": names[1:], "auto": names}[kind]
    for name in wanted:
        if (folder / name).is_file():
            return folder / name
    fetch = _how_to_fetch(folder)
    raise DataError(
        f"no tokenizer in folder '{folder}': looked for {', '.join(wanted)}; {fetch}"
    )


# Owners of models at the hub, by the beginning of a model's name.
_OWNERS = {
    "llama": "meta-llama",
    "meta-llama": "meta-llama",
    "qwen": "Qwen",
    "mixtral": "mistralai",
    "mistral": "mistralai",
    "deepseek": "deepseek-ai",
    "olmoe": "allenai",
    "gpt-oss": "openai",
    "opt": "facebook",
}


def _how_to_fetch(path: Path) -> str:
    """Return the command that downloads a tokenizer from the hub to the folder where a job looks for it."""
    folder = path.parent if path.suffix in (".json", ".model") else path
    owners = (
        owner for start, owner in _OWNERS.items() if folder.name.lower().startswith(start)
    )
    repo = shlex.quote(f"{next(owners, 'OWNER')}/{folder.name}")
    where = f"--local-dir {shlex.quote(str(folder))}"
    return f"fetch it to where the job looks: hf download {repo} --include 'tokenizer*' {where}"


def _pieces(text: str) -> Iterator[str]:
    """Yield the text in pieces within Llama 3's limits. Nearly always, the text is one piece."""
    for start in range(0, len(text), _MAX_CHARS):
        part = text[start : start + _MAX_CHARS]
        begin = 0
        # Cut long runs of one kind by length, as Llama 3's tokenizer.py does.
        for run in _LONG_RUN.finditer(part):
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable bytes stand for themselves, and other bytes are characters from 256 on."""
    # The printable characters of Latin-1, as GPT-2's encoder.py lists them.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {chr(byte): byte for byte in printable}
    return spelling | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
