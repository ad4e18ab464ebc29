"""Tasks of an evaluation: questions with choices, and texts to complete, one JSON object a line. Imports no torch.

    {"context": "The cat sat on", "choices": [" the mat.", " a the."], "answer": 0}     a question with choices
    {"context": "The cat sat on the", "target": " mat"}                                  a cloze

A continuation is scored as it is written, so it contains its leading space. The figures are those of lm-evaluation-harness:

    acc              choices: the answer is the likeliest choice; cloze: each token of the target is the likeliest (greedy)
    acc_norm         choices: the answer has the highest log-likelihood per character
    log_likelihood   of the answer or target, in nats, averaged over the examples; exp(-log_likelihood) is the harness's perplexity

Standard errors are the harness's, too: the sample standard deviation over the root of the number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from titan.base.untrusted import InputError, parse_json, read_lines
from titan.config.errors import choose
from titan.data import DataError

FOLDER = Path(__file__).parent / "tasks"  # the shipped tasks, which scripts/draw_tasks.py draws
_MOST = 1_000_000  # examples of a file


@dataclass(frozen=True)
class Example:
    """A context and its possible continuations.

    Attributes:
        context: text before the continuation.
        choices: the continuations. A cloze has one.
        answer: index of the right choice. It is 0 for a cloze.
    """

    context: str
    choices: Sequence[str]
    answer: int = 0


class Figure(float):
    """Figure of a task.

    Attributes:
        n: number of examples; 0: not known.
        stderr: standard error; None: not known.
        chance: value that guessing reaches; None: none.
    """

    n: int = 0
    stderr: float | None = None
    chance: float | None = None

    @classmethod
    def mean(cls, values: Sequence[float], *, chance: float | None = None) -> Figure:
        """Return the mean of the examples' values."""
        figure = cls(fmean(values))
        figure.n, figure.chance = len(values), chance
        figure.stderr = stdev(values) / sqrt(figure.n) if figure.n > 1 else None
        return figure


@dataclass(frozen=True)
class ExampleTask:
    """Examples of a task.

    Attributes:
        name: name of the task's file without its ending.
        kind: "choices" or "target", the same for all examples.
        examples: the examples, in the order of the file.
    """

    name: str
    kind: str
    examples: Sequence[Example]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return each context with each of its choices, in order."""
        return [(e.context, choice) for e in self.examples for choice in e.choices]

    def figures(self, scores: Sequence[tuple[float, bool]]) -> dict[str, Figure]:
        """Compute the figures of the task.

        Args:
            scores: log-likelihood in nats of each of `pairs`, and whether its continuation is greedy.
        """
        rest = iter(scores)
        found = [(e, [next(rest) for _ in e.choices]) for e in self.examples]
        log_likelihood = Figure.mean([of[e.answer][0] for e, of in found])
        if self.kind == "target":
            greedy = Figure.mean([of[0][1] for _, of in found])
            return {"acc": greedy, "log_likelihood": log_likelihood}
        right = [[], []]
        for example, of in found:
            for n, lengths in enumerate(([1] * len(of), map(len, example.choices))):
                values = [
                    log_p / length for (log_p, _), length in zip(of, lengths, strict=True)
                ]
                right[n].append(
                    values.index(max(values)) == example.answer
                )  # the first of equals
        chance = fmean(1 / len(of) for _, of in found)
        acc, acc_norm = (Figure.mean(values, chance=chance) for values in right)
        return {"acc": acc, "acc_norm": acc_norm, "log_likelihood": log_likelihood}


def shipped() -> dict[str, Path]:
    """Return the files of the tasks that come with titan, by task name."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.jsonl"))}


def is_file(task: str) -> bool:
    """Return whether a task is given as a file, not by name."""
    return task.lower().endswith(".jsonl") or "/" in task


def read_task(task: str, *, num_examples: int = 0) -> ExampleTask:
    """Read a task.

    Args:
        task: name of a shipped task, or a .jsonl file.
        num_examples: number of examples to take from the beginning of the file. 0 takes all.

    Raises:
        DataError: the task is unknown, or its file is unusable. The message has file, line and fix.
    """
    file = Path(task).expanduser() if is_file(task) else shipped().get(task)
    if file is None:
        raise DataError(
            f'unknown task "{task}"{choose(task, shipped())}, or name a file: tasks/{task}.jsonl'
        )
    try:
        numbered = [*islice(read_lines(file), num_examples or _MOST)]
    except InputError as error:
        raise DataError(f"task {error}") from error
    if not numbered:
        raise DataError(
            f'task {file}: has no examples; write one object a line, with "context" and "choices" or "target"'
        )
    examples, kinds = [], []
    for number, line in numbered:
        kind, example = _parse(line, where=f"{file}:{number}")
        if kinds and kind != kinds[0]:
            raise DataError(
                f'{file}:{number}: has "{kind}", and the lines before have "{kinds[0]}"; make two files'
            )
        kinds.append(kind)
        examples.append(example)
    return ExampleTask(file.stem, kinds[0], examples)


def _parse(line: str, *, where: str) -> tuple[str, Example]:
    """Return kind and example of a line, or raise DataError."""
    row = parse_json(line, dict[str, Any], name=where)
    context, target = row.get("context"), row.get("target")
    if not isinstance(context, str):
        raise DataError(f'{where}: "context" is missing, or no text; write "" for none')
    if "choices" not in row:
        if isinstance(target, str) and target:
            return "target", Example(context, [target])
        raise DataError(f'{where}: has no answer; add "choices" and "answer", or a "target"')
    choices, answer = row["choices"], row.get("answer")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise DataError(
            f'{where}: "choices" must be a list of at least two texts, none of them empty'
        )
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(
            f'{where}: has no answer; set "answer" to the number of the right choice, 0 to {len(choices) - 1}'
        )
    return "choices", Example(context, choices, answer)
