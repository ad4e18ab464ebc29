"""Scores of texts by a model that is laid out for training: log-likelihood of a continuation, and whether it is greedy.

Texts are dealt to the data-parallel ranks, longest first. All ranks run the same number of forward passes, of the same shapes.
Each rank writes the figures of its texts into a tensor of all texts, and an all-reduce sums these tensors: data-parallel ranks
have other texts, context-parallel ranks have other tokens of a text, and only the last pipeline stage has logits. So every
layout gives the same numbers, and every rank has them.

Example: six texts of 5, 200, 40, 33, 31 and 3 inputs, numbered from 0, on 2 data-parallel ranks, with 2 texts in a forward pass
of a rank, seq_len 256, and lengths that are multiples of 32. `plan_passes` sorts the texts by length and returns two passes:

    pass 1   texts 1 2 3 4   length 256   rank 0 scores texts 1 and 3, rank 1 scores texts 2 and 4
    pass 2   texts 0 5       length 32    rank 0 scores text 0, rank 1 scores text 5, each with an empty row

Text 1 does not fit into 128 tokens, so pass 1 keeps 256. For pass 2, 256 is halved to 32. In pass 1, a rank's tokens are
int64[2, 256], and its labels are IGNORED except at the tokens to score. `score_rows` returns float64[2, 3]. The sum over all
ranks is float64[6, 3].

B texts in a forward pass, S tokens of a text, V vocabulary, D model, N tokens that are scored, C tokens of a chunk of the loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan.data import DataError
from titan.data.packing import Batch
from titan.data.special_tokens import begin_ids, start_ids
from titan.data.tokenizer import Tokenizer
from titan.losses.loss import IGNORED, LossSum
from titan.parallel.mesh import axis_rank, axis_size

from .passes import UNIT, plan_passes

_WIDTH = 3  # figures of a text
# Scored positions are padded to a multiple of this: there are fewer distinct shapes, and float8 matmuls need it.
_MULTIPLE = 128


class ScoredText(NamedTuple):
    """Tokens of a text, of which the last `num_scored` are scored."""

    tokens: list[int]
    num_scored: int


def score_rows(loss_sum: LossSum, output: Tensor, labels_BS: Tensor) -> Tensor:
    """Score the labels that are not IGNORED.

    The third column is additive over context-parallel ranks only if each text has one label, since each rank has a part of the
    text.

    Args:
        loss_sum: the loss of a training step, which applies the output layer.
        output: the model's output, (B, S, D or V).
        labels_BS: int64. IGNORED marks the tokens that are not scored.

    Returns:
        float64[B, 3]: summed log-probability of the labels in nats, the number of labels that are not the likeliest token, and the
        likeliest token in place of the last label.
    """
    scores_B3 = torch.zeros(
        len(labels_BS), _WIDTH, dtype=torch.float64, device=labels_BS.device
    )
    row_N, place_N = (labels_BS != IGNORED).nonzero(as_tuple=True)
    if not (count := len(row_N)):
        return scores_B3
    found: list[Tensor] = []

    def score(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        log_p_CV = logits_CV.log_softmax(dim=-1)
        likeliest_C = log_p_CV.argmax(dim=-1)
        log_p_2C = log_p_CV.gather(1, torch.stack([labels_C, likeliest_C], 1)).unbind(1)
        found.append(
            torch.stack([log_p_2C[0], log_p_2C[0] < log_p_2C[1], likeliest_C], 1).double()
        )
        return log_p_2C[0].sum()

    # Only these positions go through the output layer. Position (0, 0) fills up the last chunk.
    at = [F.pad(index, (0, -count % _MULTIPLE)) for index in (row_N, place_N)]
    loss_sum(output[at[0], at[1]], labels_BS[at[0], at[1]].clamp(min=0), custom=score)
    found_N3 = torch.cat(found)[:count]
    scores_B3[:, :2].index_add_(0, row_N, found_N3[:, :2])
    # Labels are sorted by text, so a text's last label comes just before the next text's first label.
    ends = torch.ones_like(row_N, dtype=torch.bool)
    ends[:-1] = row_N[1:] != row_N[:-1]
    scores_B3[row_N[ends], 2] = found_N3[ends, 2]
    return scores_B3


class Scorer:
    """Scorer of texts with the model of a training step. All ranks call the same methods with the same texts.

    Attributes:
        train_step: the training step, a titan.tasks.base.Scorable.
        max_length: inputs of the longest text. Of a longer text, the model sees only the end.
        unit: number that divides the length of a forward pass.
        begin: ids that begin every text.
    """

    def __init__(self, train_step: Any, tokenizer: Tokenizer) -> None:
        self.train_step, self.tokenizer, config = train_step, tokenizer, train_step.config
        mesh = train_step.mesh
        self.rank = axis_rank(mesh, "dp_replicate", "dp_shard")
        self.max_length = config.training.seq_len
        self.unit = UNIT * axis_size(mesh, "cp") * axis_size(mesh, "tp")
        self.begin = begin_ids(tokenizer, add_bos=config.data.add_bos)
        # One function object for all calls: a pipeline recognizes by it the shapes that it has seen.
        self.score_rows = partial(score_rows, train_step.loss_sum)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, after the begin token if the job adds one."""
        return [*self.begin, *self.tokenizer.encode(text)]

    def row(self, context: str, continuation: str) -> ScoredText:
        """Return the tokens of context and continuation. Only the continuation's tokens are scored.

        The cut between them is that of lm-evaluation-harness: spaces at the end of the context go to the continuation, since
        most tokenizers begin words with a space.

        Raises:
            DataError: the continuation has more than `max_length` tokens.
        """
        whole = self.encode(context + continuation)
        num_context = len(self.encode(context.rstrip()))
        if (num_scored := len(whole) - num_context) > self.max_length:
            raise DataError(
                f"an answer has {num_scored:,} tokens, and training.seq_len is {self.max_length:,}: raise that, or shorten the answer that "
                f"begins with {continuation[:40]!r}"
            )
        # A token must come before the first scored token, even if context and continuation are one token.
        if not num_context or len(whole) == 1:
            whole, num_context = [*self.start(), *whole], 1
        return ScoredText(whole, max(len(whole) - num_context, 1))

    def start(self) -> list[int]:
        """Return the token that predicts the first token of a text without context, as a list.

        Raises:
            DataError: the tokenizer has no such token.
        """
        if found := start_ids(self.tokenizer):
            return found
        raise DataError(
            "this tokenizer has no token that begins or ends a text: give a context, or a prompt"
        )

    def score(self, rows: Sequence[ScoredText], *, batch: int) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each text's continuation in nats, and whether the continuation is greedy.

        Args:
            rows: the texts.
            batch: texts in one forward pass of a rank.
        """
        found = self._figures(rows, batch)
        return [(log_p, not_greedy == 0) for log_p, not_greedy, _ in found]

    def continue_greedily(
        self,
        prompts: Sequence[list[int]],
        *,
        num_new: int,
        batch: int,
        is_over: Callable[[int, list[int]], bool] = lambda *_: False,
    ) -> list[list[int]]:
        """Return the likeliest tokens after each prompt, up to `num_new` tokens or a token that ends texts.

        Each token takes a forward pass over the whole text, without a cache. So this works on any layout.

        Args:
            prompts: tokens of each prompt.
            num_new: most new tokens for a prompt.
            batch: texts in one forward pass of a rank.
            is_over: is called with the number of a prompt and its new tokens, and returns whether the prompt is finished.
        """
        new: list[list[int]] = [[] for _ in prompts]
        open_prompts = list(range(len(prompts)))
        for _ in range(num_new):
            figures = self._figures(
                [
                    ScoredText([*(prompts[n] or self.start()), *new[n], 0], 1)
                    for n in open_prompts
                ],
                batch,
            )
            for n, (*_, likeliest) in zip([*open_prompts], figures, strict=True):
                is_end = int(likeliest) in self.tokenizer.end_ids
                new[n] += [] if is_end else [int(likeliest)]
                if is_end or is_over(n, new[n]):
                    open_prompts.remove(n)
        return new

    def continue_prompts(self, section: Any) -> dict[str, str]:
        """Return the greedy continuations of the prompts of [validation]."""
        prompts = [self.encode(prompt) for prompt in section.prompts]
        new = self.continue_greedily(
            prompts, num_new=section.prompt_tokens, batch=section.local_batch_size
        )
        return dict(
            zip(section.prompts, map(self.tokenizer.continuation, prompts, new), strict=True)
        )

    def _figures(self, rows: Sequence[ScoredText], batch: int) -> list[list[float]]:
        """Return the three figures of `score_rows` for each text."""
        step, world = self.train_step, self.train_step.num_replicas
        if not rows:
            return []
        rows = [
            ScoredText(row.tokens[-self.max_length - 1 :], min(row.num_scored, self.max_length))
            for row in rows
        ]
        inputs = [len(row.tokens) - 1 for row in rows]
        passes = plan_passes(inputs, self.max_length, batch=batch, world=world, unit=self.unit)
        batch = min(batch, -(-len(rows) // world))
        scores = torch.zeros(len(rows), _WIDTH, dtype=torch.float64, device=step.device)

        def batches() -> Iterator[Batch]:
            for group, length in passes:
                yield _pack([rows[n] for n in group[self.rank :: world]], batch, length)

        found = step.score(batches(), self.score_rows, width=_WIDTH).view(
            len(passes), batch, -1
        )
        for (group, _), figures in zip(passes, found, strict=True):
            mine = group[self.rank :: world]
            scores[mine] = figures[: len(mine)]
        if step.groups.loss is not None:
            dist.all_reduce(scores, group=step.groups.loss)
        return scores.tolist()


def _pack(rows: Sequence[ScoredText], batch: int, length: int) -> Batch:
    """Return a batch of texts, padded to `length`. The padding is on the right, where no earlier token sees it.

    Missing texts become samples without labels.
    """
    tokens_BS = torch.zeros(batch, length, dtype=torch.int64)
    labels_BS = torch.full_like(tokens_BS, IGNORED)
    for n, row in enumerate(rows):
        count, tokens = len(row.tokens) - 1, torch.tensor(row.tokens)
        tokens_BS[n, :count] = tokens[:-1]
        labels_BS[n, count - row.num_scored : count] = tokens[-row.num_scored :]
    return Batch(tokens_BS=tokens_BS, labels_BS=labels_BS)
