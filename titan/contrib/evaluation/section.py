"""Keys of evaluations: the tables [[evaluation]], and prompts in [validation]. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from titan.config.base import NonNegative, Positive, Section, StrList


class EvaluationSection(Section):
    """Tasks that are scored during a run. docs/evaluation.md has the format of their files."""

    is_list: ClassVar[bool] = True

    tasks: Annotated[StrList, Field(min_length=1)]
    """Names of shipped tasks (stdlib_choice, stdlib_cloze), or .jsonl files."""
    interval: Positive = 500
    """Steps from one evaluation to the next. The last step always evaluates."""
    num_examples: NonNegative = 0
    """Examples of each task, from its beginning. 0: all. Fewer take less time and say less."""
    local_batch_size: Positive = 8
    """Sequences, one for each choice of an example, that each rank computes in one forward pass."""


class PromptsSection(Section):
    """Texts that the model continues beside a validation."""

    prompts: list[str] = []
    """Beginnings of texts that the model continues after each validation. Its likeliest tokens are written to
    samples/step-N.txt, TensorBoard and the live page. Works on any layout, without a cache."""
    prompt_tokens: Positive = 32
    """Tokens that continue each of prompts. Each is a forward pass of all ranks."""
