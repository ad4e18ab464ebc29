"""Tasks of lm-evaluation-harness in `titan evaluate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan.config.options import add_options
from titan.config.toml import table_beside
from titan.data import require

from .evaluate import EvaluateExtension

if TYPE_CHECKING:
    from .scoring import Scorer


class LmEval(EvaluateExtension):
    """Tasks of lm-evaluation-harness, for every name that is no task of titan (extra `evaluate`)."""

    about = "or names of lm-eval"

    def add_options(self, parser: ArgumentParser) -> None:
        add_options(parser, table_beside(__file__, "options.toml")["lm_eval"])

    def check(self, names: Sequence[str], args: Namespace, *, what: str) -> None:
        require(
            "lm_eval", purpose=f"{what}, and a task of lm-evaluation-harness", extra="evaluate"
        )
        from .harness import check_names

        check_names(names, include_path=args.include_path)

    def evaluate(
        self, scorer: Scorer, names: Sequence[str], args: Namespace
    ) -> dict[str, float]:
        from .harness import evaluate

        return evaluate(scorer, names, args)
