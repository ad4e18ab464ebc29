"""Score texts with a model that is laid out for training: the log-likelihood of a continuation, and whether it is greedy.

Rows of tokens are dealt to the data-parallel ranks, longest first. All ranks run the same number of forward passes, of the same
shapes. What each says of its rows becomes one sum over all ranks: data-parallel ranks have other rows, context-parallel ranks
other tokens of a row, and only the last pipeline stage has anything to say. So every layout gives the same numbers, and every rank
has them.

B rows, S tokens of a row, V vocabulary, D model, N tokens that are scored
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan.config.schema import JobConfig
from titan.data import DataError
from titan.data.packing import Batch
from titan.data.special_tokens import begin_ids, start_ids
from titan.data.tokenizer import Tokenizer
from titan.loss import IGNORED, LossSum
from titan.parallel.mesh import StepGroups, axis_rank, axis_size

UNIT = 32  # tokens of a rank's part of a row: a multiple
_WIDTH = 3  # figures of a row
# Of the positions that go through the output layer: so there are few shapes, and products in 8 bits need it.
_MULTIPLE = 128


class ScoredText(NamedTuple):
    """Hold the tokens of a text, the last of which are scored."""

    tokens: list[int]
    num_scored: int


def score_rows(loss_sum: LossSum, output: Tensor, labels_BS: Tensor) -> Tensor:
    """Return (B, 3) fp64 of the model's output (B, S, D or V): the summed log-probability of the labels that are not IGNORED,
    how many of them are not the likeliest token, and the likeliest token of the last one.

    Context-parallel ranks have parts of a row. Their sum means something in the third place only for rows with one label.
    """
    scores_B3 = torch.zeros(len(labels_BS), _WIDTH, dtype=torch.float64, device=labels_BS.device)
    row_N, place_N = (labels_BS != IGNORED).nonzero(as_tuple=True)
    if not (count := len(row_N)):
        return scores_B3
    found: list[Tensor] = []

    def score(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        log_p_CV = logits_CV.log_softmax(dim=-1)
        likeliest_C = log_p_CV.argmax(dim=-1)
        log_p_2C = log_p_CV.gather(1, torch.stack([labels_C, likeliest_C], 1)).unbind(1)
        found.append(torch.stack([log_p_2C[0], log_p_2C[0] < log_p_2C[1], likeliest_C], 1).double())
        return log_p_2C[0].sum()

    # Only these positions go through the output layer; row 0's first position fills up the last chunk.
    at = [F.pad(index, (0, -count % _MULTIPLE)) for index in (row_N, place_N)]
    loss_sum(output[at[0], at[1]], labels_BS[at[0], at[1]].clamp(min=0), custom=score)
    found_N3 = torch.cat(found)[:count]
    scores_B3[:, :2].index_add_(0, row_N, found_N3[:, :2])
    # Rows come in order, so the last label of a row is the one before the next row.
    ends = torch.ones_like(row_N, dtype=torch.bool)
    ends[:-1] = row_N[1:] != row_N[:-1]
    scores_B3[row_N[ends], 2] = found_N3[ends, 2]
    return scores_B3


def plan_passes(
    inputs: Sequence[int], max_length: int, *, batch: int, world: int, unit: int
) -> list[tuple[list[int], int]]:
    """Return the forward passes of all ranks: the numbers of their rows, longest first, and the length they are padded to.

    It is the job's sequence length, halved as often as it holds the longest row: few shapes, which all axes divide.

    Args:
        inputs: of each row. world: data-parallel ranks. unit: what divides a length.
    """
    order = sorted(range(len(inputs)), key=lambda n: -inputs[n])
    size = min(batch, -(-len(inputs) // world)) * world
    passes = []
    for group in (order[n : n + size] for n in range(0, len(inputs), size)):
        length = max_length
        while length % (2 * unit) == 0 and length // 2 >= inputs[group[0]]:
            length //= 2
        passes.append((group, length))
    return passes


class Scorable(Protocol):
    """The part of a training step that scores and generates: a model that is laid out, and where."""

    config: JobConfig
    mesh: DeviceMesh
    device: torch.device
    groups: StepGroups
    context: DeviceMesh | None
    model_parts: list[nn.Module]
    loss_sum: Any  # of next tokens: a LossSum
    num_replicas: int

    def score(
        self, batches: Iterable[Any], of_rows: Callable[[Tensor, Tensor], Tensor], *, width: int
    ) -> Tensor: ...

    def to_local(self, batch: Any) -> Any: ...


class Scorer:
    """Score texts with the model of a training step. All ranks call the same methods with the same texts.

    max_length: inputs of the longest row; of a longer text only the end is seen.
    """

    def __init__(self, train_step: Scorable, tokenizer: Tokenizer) -> None:
        self.train_step, self.tokenizer, config = train_step, tokenizer, train_step.config
        mesh = train_step.mesh
        self.rank = axis_rank(mesh, "dp_replicate", "dp_shard")
        self.max_length = config.training.seq_len
        self.unit = UNIT * axis_size(mesh, "cp") * axis_size(mesh, "tp")
        self.begin = begin_ids(tokenizer, add_bos=config.data.add_bos)
        # One function, by which a pipeline knows that it has seen these shapes.
        self.score_rows = partial(score_rows, train_step.loss_sum)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, after the token that begins documents where the job adds it."""
        return [*self.begin, *self.tokenizer.encode(text)]

    def row(self, context: str, continuation: str) -> ScoredText:
        """Return the tokens of both together, of which those after the context's are scored, as lm-evaluation-harness cuts them.

        Spaces at the context's end go to the continuation, as most tokenizers begin words with them.
        """
        whole = self.encode(context + continuation)
        num_context = len(self.encode(context.rstrip()))
        if (num_scored := len(whole) - num_context) > self.max_length:
            raise DataError(
                f"an answer has {num_scored:,} tokens, and training.seq_len is {self.max_length:,}: raise that, or shorten the answer that "
                f"begins with {continuation[:40]!r}"
            )
        # Something must predict the first token that is scored, also of a context and continuation that are one token.
        if not num_context or len(whole) == 1:
            whole, num_context = [*self.start(), *whole], 1
        return ScoredText(whole, max(len(whole) - num_context, 1))

    def start(self) -> list[int]:
        """Return the token that predicts the first one of a text without context."""
        if found := start_ids(self.tokenizer):
            return found
        raise DataError(
            "this tokenizer has no token that begins or ends a text: give a context, or a prompt"
        )

    def score(self, rows: Sequence[ScoredText], *, batch: int) -> list[tuple[float, bool]]:
        """Return log-likelihood in nats, and whether the continuation is the greedy one, of each row.

        batch: rows of a rank's forward pass.
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
        """Return the likeliest tokens after each prompt, up to `num_new` or a token that ends texts.

        Each token is a forward pass over the whole text, without a cache: any layout can do that.

        is_over: whether a prompt of this number needs no more than these tokens.
        """
        new: list[list[int]] = [[] for _ in prompts]
        open_prompts = list(range(len(prompts)))
        for _ in range(num_new):
            rows = [
                ScoredText([*(prompts[n] or self.start()), *new[n], 0], 1) for n in open_prompts
            ]
            figures = self._figures(rows, batch)
            for n, (*_, likeliest) in zip([*open_prompts], figures, strict=True):
                is_end = int(likeliest) in self.tokenizer.end_ids
                new[n] += [] if is_end else [int(likeliest)]
                if is_end or is_over(n, new[n]):
                    open_prompts.remove(n)
        return new

    def _figures(self, rows: Sequence[ScoredText], batch: int) -> list[list[float]]:
        """Return the three figures of `score_rows` of each row."""
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

        found = step.score(batches(), self.score_rows, width=_WIDTH).view(len(passes), batch, -1)
        for (group, _), figures in zip(passes, found, strict=True):
            mine = group[self.rank :: world]
            scores[mine] = figures[: len(mine)]
        if step.groups.loss is not None:
            dist.all_reduce(scores, group=step.groups.loss)
        return scores.tolist()


def _pack(rows: Sequence[ScoredText], batch: int, length: int) -> Batch:
    """Return inputs and labels of rows, padded on the right, which no earlier token sees, and with rows that say nothing."""
    tokens_BS = torch.zeros(batch, length, dtype=torch.int64)
    labels_BS = torch.full_like(tokens_BS, IGNORED)
    for n, row in enumerate(rows):
        count, tokens = len(row.tokens) - 1, torch.tensor(row.tokens)
        tokens_BS[n, :count] = tokens[:-1]
        labels_BS[n, count - row.num_scored : count] = tokens[-row.num_scored :]
    return Batch(tokens_BS=tokens_BS, labels_BS=labels_BS)
