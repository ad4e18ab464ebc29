"""Hook that scores tasks every `interval` steps of each [[evaluation]], and continues the prompts of [validation].

titan/contrib/evaluation/examples.py defines the figures.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from titan.base.rows import Row
from titan.base.untrusted import printable
from titan.observe.clock import Window
from titan.optim.averaged import averaged
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress

from .examples import read_task
from .scoring import Scorer


class Evaluation(Hook):
    """Evaluation on the same examples each time.

    Attributes:
        row: figures of this step, with names such as "eval/stdlib_cloze/acc".
        tasks: section and task of each evaluation.
        rows: encoded examples of each task.
    """

    priority = 90

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.row: Row = {}
        config: Any = trainer.config  # with the keys of section.py
        # Each rank reads the files, so an error in them ends all ranks alike, before the first step.
        self.tasks = [
            (section, read_task(task, num_examples=section.num_examples))
            for section in config.evaluation
            for task in section.tasks
        ]
        # Encode once: a task has thousands of rows, and is scored often.
        self.rows = [[self.scorer.row(*pair) for pair in task.pairs] for _, task in self.tasks]

    @cached_property
    def scorer(self) -> Scorer:
        """Return the scorer of texts with the model of the run."""
        tokenizer = self.trainer.tokenizer
        assert tokenizer is not None, "the rules demand a task of text"
        return Scorer(self.trainer.train_step, tokenizer)

    def _is_due(self, interval: int) -> bool:
        step, last_step = self.trainer.step, self.trainer.last_step
        return step == last_step or step % interval == 0

    def validates(self) -> bool:
        return any(self._is_due(section.interval) for section, _ in self.tasks)

    def step_end(self) -> None:
        self.row = self._evaluate() if self.validates() else {}

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        return self.row

    def _evaluate(self) -> Row:
        trainer, row = self.trainer, {}
        with (
            trainer.timer.pause("validation"),
            averaged(trainer.train_step, validates=True),
        ):
            for (section, task), rows in zip(self.tasks, self.rows, strict=True):
                if self._is_due(section.interval):
                    scores = self.scorer.score(rows, batch=section.local_batch_size)
                    figures = task.figures(scores).items()
                    row |= {f"eval/{task.name}/{name}": value for name, value in figures}
        text = ", ".join(
            f"{name[5:]} {value:.4f}" for name, value in row.items()
        )  # after eval/
        trainer.events.write(
            "evaluation", step=trainer.step, spent=trainer.timer.total_s, text=text
        )
        trainer.console.message(f"step {trainer.step:,}  evaluation: {text}")
        return row


def continue_prompts(run: RunProgress) -> dict[str, str]:
    """Return the continuations of the prompts of [validation], by their prompts."""
    section: Any = run.config.validation
    hook = run.hook(Evaluation) if section.prompts else None
    texts = hook.scorer.continue_prompts(section) if hook else {}
    for prompt, text in texts.items():
        shown = printable(prompt + text).replace("\\u000a", "\n  | ")
        run.console.message(f"step {run.step:,}  writes\n  | {shown}")
    return texts
