"""Model of lm-evaluation-harness over titan's ranks (github.com/EleutherAI/lm-evaluation-harness, extra `evaluate`).

Every rank makes the same requests, `Scorer` divides their texts among the ranks, and each rank gets all answers. To the
harness it is one process.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lm_eval import simple_evaluate, tasks  # takes this folder for it
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titan.base.untrusted import printable
from titan.config.errors import did_you_mean
from titan.data import DataError

from .examples import Figure
from .scoring import ScoredText, Scorer

# An error from one of these packages means that the hub was not reached.
_HUB = ("datasets", "huggingface_hub", "httpx", "requests")
_MAX_NEW = 256  # tokens, where a task names no limit; as the harness has it
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class TitanLM(LM):
    """The harness's `LM`, which answers its three kinds of requests.

    Attributes:
        scorer: scorer over titan's ranks.
        batch: sequences of a rank's forward pass.
    """

    def __init__(self, scorer: Scorer, *, batch: int) -> None:
        super().__init__()
        self.scorer, self.batch = scorer, batch

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy generation gives it."""
        return self.scorer.score(
            [self.scorer.row(*request.args) for request in requests], batch=self.batch
        )

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihoods of whole texts, in windows of the longest sequence."""
        windows = partial(
            get_rolling_token_windows,
            prefix_token=self.scorer.start()[0],
            max_seq_len=self.scorer.max_length,
            context_len=1,
        )
        encode = self.scorer.encode  # as in the harness, the tokenizer's begin token is scored
        pairs = [map(make_disjoint_window, windows(encode(r.args[0]))) for r in requests]
        rows = [
            [ScoredText([*before, *text], len(text)) for before, text in of] for of in pairs
        ]
        scores = iter(self.scorer.score([row for of in rows for row in of], batch=self.batch))
        return [sum(next(scores)[0] for _ in of) for of in rows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Generate greedy continuations, each up to one of its request's "until" texts.

        Args:
            requests: requests with a context and options each.

        Raises:
            DataError: A request wants to sample, or leaves no room for a prompt.
        """
        prompts, limits, stops = [], [], []
        for context, options in (request.args for request in requests):
            if options.get("do_sample") and options.get("temperature", 1):
                raise DataError(
                    "this task samples with a temperature, and titan evaluate generates greedily only; set do_sample: false in a copy of its YAML"
                )
            until = options.get("until") or []
            stops.append([until] if isinstance(until, str) else until)
            given = (options[name] for name in _LIMITS if options.get(name) is not None)
            limits.append(int(next(given, _MAX_NEW)))
            room = self.scorer.max_length - limits[-1]
            if room < 1:
                raise DataError(
                    f"max_gen_toks {limits[-1]} leaves no room for a prompt in training.seq_len = {self.scorer.max_length}; "
                    "set max_gen_toks in generation_kwargs of a copy of the task's YAML, or a larger --training.seq_len"
                )
            prompts.append(self.scorer.encode(context)[-room:])

        def text(n: int, tokens: list[int]) -> tuple[str, bool]:
            """Return the text before an "until" text, and whether the continuation ends there.

            As in the harness, new tokens are decoded without their prompt, and an empty "until" text ends an answer after a token.
            """
            end = self._end_at_special(tokens, stops[n])
            whole = self.scorer.tokenizer.decode(tokens[:end])
            ends = [at for stop in stops[n] if stop and (at := whole.find(stop)) >= 0]
            is_over = bool(ends) or end is not None or "" in stops[n]
            return whole[: min(ends, default=None)], is_over

        new = self.scorer.continue_greedily(
            prompts,
            num_new=max(limits, default=0),
            batch=self.batch,
            is_over=lambda n, tokens: len(tokens) >= limits[n] or text(n, tokens)[1],
        )
        return [text(n, tokens)[0] for n, tokens in enumerate(new)]

    def _end_at_special(self, tokens: list[int], stops: Sequence[str]) -> int | None:
        """Return the number of tokens up to the first "until" text with a special token, such as "</s>", or None.

        Decoded text has no special tokens, so these texts are looked for where special tokens keep their text.
        """
        tokenizer = self.scorer.tokenizer
        names = {number: name for name, number in tokenizer.special_ids.items()}
        wanted = [stop.encode() for stop in stops if any(n in stop for n in names.values())]
        written = b""
        for end, token in enumerate(tokens if wanted else (), start=1):
            written += names[token].encode() if token in names else tokenizer.token_bytes(token)
            if any(stop in written for stop in wanted):
                return end
        return None


def check_names(names: Sequence[str], *, include_path: str | None) -> None:
    """Check that the harness knows all names.

    Args:
        names: names or patterns of tasks.
        include_path: folder of more tasks, or None.

    Raises:
        DataError: A name is unknown.
    """
    manager = tasks.TaskManager(include_path=include_path)
    for name in names:
        if not manager.match_tasks([name]):
            hint = did_you_mean(name, manager.all_tasks)
            raise DataError(
                f'unknown task "{name}": neither titan nor lm-evaluation-harness has it, and no file is named (.jsonl){hint}'
            )


def evaluate(scorer: Scorer, names: Sequence[str], args: Namespace) -> dict[str, float]:
    """Run tasks of the harness and return their figures.

    Args:
        scorer: scorer over titan's ranks.
        names: names of tasks.
        args: options of `titan evaluate`.

    Returns:
        Figures as TASK/NAME. Ranks above 0 return {}, since the harness gives results on rank 0 only.

    Raises:
        DataError: The harness cannot fetch a task's data.
    """
    try:
        found = simple_evaluate(
            model=TitanLM(scorer, batch=args.batch_size),
            tasks=[*names],
            limit=args.num_examples or None,
            num_fewshot=args.num_fewshot,
            task_manager=tasks.TaskManager(include_path=args.include_path),
            bootstrap_iters=0,
        )
    except Exception as error:
        if type(error).__module__.split(".")[0] not in _HUB and not isinstance(
            error, ConnectionError
        ):
            raise
        raise DataError(
            f"{', '.join(names)}: the harness cannot fetch its data ({type(error).__name__}: {printable(str(error), 200)}); without a "
            "network, run the task once where there is one and set HF_HOME to that cache, or name a .jsonl file"
        ) from None
    found = found or {}
    samples = found.get("samples", {})
    return {
        f"{task}/{name.removesuffix(',none')}": _figure(value, name, samples.get(task, []))
        for task, figures in found.get("results", {}).items()
        for name, value in figures.items()
        if isinstance(value, float) and "_stderr" not in name
    }


def _figure(value: float, name: str, samples: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a figure of the harness, with its standard error if it is the mean of the values of its samples."""
    metric, _, kind = name.partition(",")
    mine = [sample for sample in samples if sample.get("filter", kind) == kind]
    with suppress(TypeError, ValueError, LookupError):  # values that no mean is made of
        figure = Figure.mean([float(sample[metric]) for sample in mine])
        if math.isclose(figure, value, rel_tol=1e-9):
            return figure
    figure = Figure(value)
    figure.n = len(mine)
    return figure
