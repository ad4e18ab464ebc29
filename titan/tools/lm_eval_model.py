"""Be a model of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness, extra `evaluate`): its `LM` over titan's ranks.

Every rank asks the same questions, `Scorer` shares their rows, and each rank gets all answers. To the harness it is one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval import simple_evaluate, tasks
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titan.config.errors import did_you_mean
from titan.data import DataError
from titan.data.scoring import Row, Scorer

_MAX_NEW = 256  # tokens, where a task names no limit; as the harness has it


class TitanLM(LM):
    """Answer the harness's three kinds of requests. batch: rows of a rank's forward pass."""

    def __init__(self, scorer: Scorer, *, batch: int) -> None:
        super().__init__()
        self.scorer, self.batch = scorer, batch

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return log-likelihood of each continuation, and whether it is the greedy one."""
        rows = [self.scorer.row(*request.args) for request in requests]
        return self.scorer.score(rows, batch=self.batch)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of the longest row."""
        rows, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.scorer.tokenizer.encode(request.args[0]),
                prefix_token=self.scorer.start()[0],
                max_seq_len=self.scorer.max_length,
                context_len=1,
            )
            for context, predicted in map(make_disjoint_window, windows):
                rows.append(Row([*context, *predicted], len(predicted)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_p, _) in zip(
            owners, self.scorer.score(rows, batch=self.batch), strict=True
        ):
            totals[owner] += log_p
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy continuations up to a request's texts of "until". Raises DataError if a request wants to sample."""
        texts = [""] * len(requests)
        by_limit: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            options = request.args[1]
            if options.get("do_sample") and options.get("temperature", 1):
                raise DataError(
                    "this task samples with a temperature, and titan evaluate generates greedily only; set do_sample: false in a copy of its YAML"
                )
            limit = int(options.get("max_gen_toks", options.get("max_new_tokens", _MAX_NEW)))
            by_limit.setdefault(limit, []).append(number)
        decode = self.scorer.tokenizer.decode
        for limit, numbers in by_limit.items():
            until = []
            for number in numbers:
                stops = requests[number].args[1].get("until") or []
                until.append([stops] if isinstance(stops, str) else stops)
            room = max(self.scorer.max_length - limit, 1)
            prompts = [self.scorer.encode(requests[n].args[0])[-room:] for n in numbers]
            new = self.scorer.continue_greedily(
                prompts,
                num_new=limit,
                batch=self.batch,
                is_over=lambda n, tokens, until=until: any(s in decode(tokens) for s in until[n]),
            )
            for number, tokens, stops in zip(numbers, new, until, strict=True):
                text = decode(tokens)
                for stop in filter(None, stops):
                    text = text.partition(stop)[0]
                texts[number] = text
        return texts


def check_names(names: Sequence[str], *, include_path: str | None) -> None:
    """Raise DataError for a name that the harness does not know."""
    manager = tasks.TaskManager(include_path=include_path)
    for name in names:
        if not manager.match_tasks([name]):
            hint = did_you_mean(name, manager.all_tasks)
            raise DataError(
                f'unknown task "{name}": neither titan nor lm-evaluation-harness has it{hint}; a file of your own ends in .jsonl'
            )


def evaluate(
    scorer: Scorer,
    names: Sequence[str],
    *,
    batch: int,
    limit: int | None,
    num_fewshot: int | None,
    include_path: str | None,
) -> dict[str, dict[str, Any]]:
    """Return the figures of the harness's tasks, without their standard errors; {} where the harness gives none, on ranks above 0."""
    found = simple_evaluate(
        model=TitanLM(scorer, batch=batch),
        tasks=[*names],
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=tasks.TaskManager(include_path=include_path),
        bootstrap_iters=0,
        log_samples=False,
    )
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in figures.items()
            if isinstance(value, float) and "_stderr" not in name
        }
        for task, figures in (found or {"results": {}})["results"].items()
    }
