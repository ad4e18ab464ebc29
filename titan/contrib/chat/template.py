"""Chat templates: they turn conversations into tokens, and mark which tokens belong to answers.

A template is a Jinja text, from chat_template.jinja or tokenizer_config.json. It runs in Jinja's sandbox with the settings and
functions that transformers documents for chat templates. Answers are the text within `{% generation %}`. In a template without
these marks, an answer is a difference: the text of the messages up to the answer, less the text of the messages before it with
`add_generation_prompt`. A template that changes earlier messages later needs the marks.

titan/data/writer.py calls `ChatTemplate.encode` for each conversation, and `titan generate` calls `prompt`. Imports no torch.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension

from titan.base.untrusted import printable
from titan.data import DataError
from titan.data.special_tokens import CONTEXT, KIND_SHIFT, PREDICTED, START
from titan.data.tokenizer import Tokenizer
from titan.data.unread import Counts, count

from .limits import LimitedEnvironment, LimitError, limited
from .messages import Chat, is_learnt

if TYPE_CHECKING:
    import numpy as np
    from jinja2.parser import Parser

# Marks around answers in the rendered text. Unicode reserves these two code points as noncharacters (section 23.7), and
# messages.py replaces them in messages.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_WITH_MARKS = "{% generation %}"  # no template can read a value of this name
# Names of a message's reasoning. transformers fills the first two from any of them.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class _Marks(Extension):
    """Jinja extension that returns the text of `{% generation %}`, within marks if the template gets `_WITH_MARKS`.

    Its body is a call block, as in transformers, so that names which are set there stay there.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_around", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body, lineno=line)

    def _around(self, context: Any, caller: Callable[[], str]) -> str:
        text = caller()
        return f"{_BEGIN}{text}{_END}" if _WITH_MARKS in context else text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """Chat template of a tokenizer.

    Attributes:
        source: the text of the template.
        tokenizer: the tokenizer that encodes the rendered text.
        names: names that the template reads beside the messages, such as "tools".
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compile the template.

        Raises:
            DataError: the text is not valid Jinja.
        """
        self.source, self.tokenizer = source, tokenizer
        environment: Any = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.names = meta.find_undeclared_variables(environment.parse(source))
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            why = printable(str(error), 200) or type(error).__name__
            line = getattr(error, "lineno", None)
            where = f" of tokenizer {tokenizer.file}" if tokenizer.file else ""
            raise DataError(
                f"the chat template{where} (or tokenizer.chat_template) is not valid Jinja{f' in line {line}' if line else ''}: {why}"
            ) from error

    @staticmethod
    def of(tokenizer: Tokenizer) -> ChatTemplate:
        """Return the template of a tokenizer.

        Raises:
            DataError: the tokenizer has no template.
        """
        if not tokenizer.chat_template:
            where = (
                f"tokenizer {tokenizer.file}" if tokenizer.file else "the embedded tokenizer"
            )
            raise DataError(
                f"{where} has no chat template, which conversations need: set tokenizer.chat_template to a Jinja file, or put "
                "chat_template.jinja beside the tokenizer"
            )
        return ChatTemplate(tokenizer.chat_template, tokenizer)

    def __reduce__(self) -> tuple[type, tuple[str, Tokenizer]]:
        return type(self), (self.source, self.tokenizer)  # a compiled template has no pickle

    def prompt(self, chat: Chat, *, where: str) -> list[int]:
        """Return the ids of a conversation up to the beginning of its next answer.

        Args:
            chat: the conversation so far.
            where: file and line of the conversation, for an error message.

        Raises:
            DataError: the template refuses the messages, or a message spells a special token.
        """
        self._check(chat, where=where)
        return self.tokenizer.encode_rendered(
            self.render(chat, where=where, add_generation_prompt=True)
        )[0]

    def encode(self, chat: Chat, *, where: str, unread: Counts | None = None) -> np.ndarray:
        """Return the ids of a conversation, each with its kind (special_tokens.py): PREDICTED for an answer's tokens.

        Args:
            chat: the whole conversation.
            where: file and line of the conversation, with which an error message begins.
            unread: gets the keys of messages that neither the template nor titan reads.

        Returns:
            int64[tokens]: id and kind of each token.

        Raises:
            DataError: the template refuses the conversation, or has no answers in it.
        """
        import numpy as np

        values = _values(chat)
        self._check(values, where=where)
        text, answers = self._with_answers(values, where=where)
        if unread is not None:
            keys: list[str] = []
            for message in values["messages"]:
                # A template may read reasoning under any of its names.
                read = message.seen | {*(_REASONING if message.seen & {*_REASONING} else ())}
                keys += [k for k in message if k not in read and dict.get(message, k)]
            count(unread, "messages", keys, of=len(values["messages"]))
        ids, spans = self.tokenizer.encode_rendered(text)
        if answers is None or not ids:
            fix = "write {% generation %} and {% endgeneration %} around answers"
            raise DataError(f"{where}: the chat template writes no answers; {fix}")
        spans_T2, kinds_T = np.array(spans), np.full(len(ids), CONTEXT)
        for begin, end in answers:
            kinds_T[(spans_T2[:, 1] > begin) & (spans_T2[:, 0] < end)] = PREDICTED
        kinds_T[0] = START
        return np.array(ids, dtype=np.int64) | (kinds_T << KIND_SHIFT)

    @cached_property
    def end_ids(self) -> set[int]:
        """Return the first special token that the template writes after an answer, as a set of at most one id."""
        answer = "An answer."
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        _, found, after = self.render(messages, where="chat").rpartition(answer)
        special = {*self.tokenizer.special_ids.values()} if found else set()
        return {*[i for i in self.tokenizer.encode_rendered(after)[0] if i in special][:1]}

    def unread_beside(self, chat: Chat) -> list[str]:
        """Return the fields beside the messages that the template does not name."""
        return [name for name in _values(chat) if name not in {*self.names, "messages"}]

    def _with_answers(
        self, values: dict[str, Any], *, where: str
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return the text of a conversation, and the (begin, end) of each answer that is learnt, in characters.

        The answers are None if the template writes none.
        """
        messages: list[Any] = values["messages"]

        def render(number: int, **options: bool) -> str:
            return self.render(
                {**values, "messages": messages[:number]}, where=where, **options
            )

        text = render(len(messages))
        learnt = {
            number: is_learnt(message, where=where)
            for number, message in enumerate(messages, start=1)
            if message["role"] == "assistant"
        }
        if "endgeneration" in self.source:
            values[_WITH_MARKS], flags = True, [*learnt.values()]
            plain, answers = _marked(render(len(messages)))
            if plain != text or answers is None:
                raise DataError(
                    f"{where}: the chat template changes or cuts the text of {{% generation %}} after {{% endgeneration %}}, by a filter "
                    "or a test; write the marks around what it prints at last"
                )
            if not answers or all(flags):
                return text, answers or None
            # How many answers the template has written after each message.
            written = [len(_marked(render(number))[1] or ()) for number in learnt]
            return text, [a for n, a in enumerate(answers) if flags[bisect_right(written, n)]]
        answers = []
        for number in (number for number, is_one in learnt.items() if is_one):
            before = render(number - 1, add_generation_prompt=True)
            upto = render(number)
            if not (upto.startswith(before) and text.startswith(upto)):
                raise DataError(
                    f"{where}: the chat template writes message {number} in another way than its prompt says, or changes it "
                    "later; write {% generation %} and {% endgeneration %} around answers in the template"
                )
            answers.append((len(before), len(upto)))
        return text, answers if learnt else None

    def render(self, chat: Chat, *, where: str, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, as transformers' `apply_chat_template` writes it."""
        values = {
            "tools": None,
            "documents": None,
            **self.tokenizer.token_texts,
            **_values(chat),
        }
        try:
            with limited():
                return self._template.render(
                    {**values, "add_generation_prompt": add_generation_prompt}
                )
        except Exception as error:  # a template is code, and may raise anything
            why = printable(str(error), 200) or type(error).__name__
            if isinstance(error, LimitError | MemoryError | RecursionError):
                why += f" (tokenizer {self.tokenizer.file})"
            raise DataError(
                f"{where}: the chat template refuses the messages: {why}"
            ) from error

    @cached_property
    def _takes_parts(self) -> bool:
        """Return whether the template writes the texts of a content that is a list of parts, not the list itself."""
        part = {"type": "text", "text": "A part of a text."}
        found = self.render([{"role": "user", "content": [part]}], where="chat")
        return part["text"] in found and "'type'" not in found and '"type"' not in found

    def _check(self, chat: Chat, *, where: str) -> None:
        """Raise DataError for parts that the template does not take, and for a text that spells a special token."""
        beside = _values(chat)
        messages = beside.pop("messages")
        named: dict[str, Any] = {f"message {n}": m for n, m in enumerate(messages, start=1)}
        for name, value in [*named.items(), *beside.items()]:
            texts = [*_texts(value)]
            if found := next(
                (n for n in self.tokenizer.special_ids if any(n in t for t in texts)), ""
            ):
                raise DataError(
                    f"{where}: {name} spells the special token {found}, and would become it; remove or rewrite it"
                )
        for name, message in named.items():
            if isinstance(dict.get(message, "content"), list) and not self._takes_parts:
                raise DataError(
                    f"{where}: {name} is a list of parts, which the chat template does not take; join their texts"
                )


def answer_ends(tokenizer: Tokenizer) -> list[int]:
    """Return all ids that end an answer of a model with this tokenizer, the chat template's own first."""
    ends: set[int] = set()
    with suppress(DataError):  # a template that takes no plain question and answer
        ends = ChatTemplate.of(tokenizer).end_ids
    return [*ends, *sorted(tokenizer.end_ids - ends)]


class _Message(dict[str, Any]):
    """Message that remembers which of its keys a template read."""

    seen: set[object]

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.seen.update(self)
        return super().items()


def _values(chat: Chat) -> dict[str, Any]:
    """Return the variables of a template: the messages, and the fields beside them by name."""
    values: dict[str, Any] = {"messages": chat} if isinstance(chat, list) else {**chat}
    values = values.pop("chat_template_kwargs", {}) | values
    return values | {"messages": [_message(message) for message in values["messages"]]}


def _message(message: dict[str, Any]) -> _Message:
    if isinstance(message, _Message):
        return message
    given = (message[name] for name in _REASONING if message.get(name) is not None)
    reasoning, (first, second, _) = next(given, None), _REASONING
    whole = {second: reasoning, **message, first: reasoning}
    found = _Message(message if reasoning is None else whole)
    found.seen = set()
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a message, at any depth. Keys count too, since a template may write the keys of arguments."""
    if isinstance(value, str):
        yield value
    for inner in dict.items(value) if isinstance(value, dict) else ():
        yield from _texts(inner)
    for inner in value if isinstance(value, list | tuple) else ():
        yield from _texts(inner)


def _marked(text: str) -> tuple[str, list[tuple[int, int]] | None]:
    """Return a text without marks, and the (begin, end) of each marked part in it; None if a mark lacks its partner."""
    parts = re.split(f"([{_BEGIN}{_END}])", text)
    marks = "".join(parts[1::2])
    ends = [*accumulate(map(len, parts[::2]))]
    is_whole = marks == (_BEGIN + _END) * (len(marks) // 2)
    pairs = zip(ends[:-1:2], ends[1::2], strict=False) if is_whole else None
    return "".join(parts[::2]), None if pairs is None else [*pairs]
