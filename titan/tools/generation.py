"""Text generation for a batch of prompts of any lengths: `titan generate`, and descriptions of pictures in a validation.

The inner attention of each block is replaced from outside by one that caches keys and values
(`CachedAttention`), so each new token costs one position. Shorter prompts are padded on their left. A
document mask keeps the padding out, and positions begin after it, so that each prompt gets the tokens that it would get alone.

A linear recurrence has no such cache here: the whole text goes through the model for each new token.

B batch of prompts, S sequence, T cached positions, H query heads, G key/value heads, K head dim, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan.data.tokenizer import Tokenizer
from titan.models.common.attention import InnerAttention
from titan.parallel.attention_sinks import attend_with_sinks
from titan.parallel.block_attention import AttentionSpec, match_heads
from titan.parallel.module_kinds import SequenceModule, modules_of

_GREEDY = 1e-6  # temperatures below it take the likeliest token


class CachedAttention(nn.Module):
    """Inner attention of generation, with a cache of the keys and values of all positions so far.

    The first call takes the whole prompts. In each later call only the last token is new. The tokens before it are
    padding, which tensor parallelism needs to split the sequence.
    """

    def __init__(self, inner: InnerAttention) -> None:
        super().__init__()
        self.inner = inner
        self.k_BGTK: Tensor | None = None
        self.v_BGTK: Tensor | None = None
        self.ids_BT: Tensor | None = None

    def forward(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        document_ids_BS: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Compute attention to the cached and the new keys.

        Args:
            q_BHSK: queries.
            k_BGSK: keys of the prompts, or of padding and one new token.
            v_BGSK: values, as the keys.
            document_ids_BS: ids that differ between a prompt and the padding on its left, int64. None: all prompts have
                the same length.
            sinks_H: logits of `Sinks` for these heads. None: no sinks.

        Returns:
            The attention output, (B, H, S, K). In later calls the padding's output is zeros.
        """
        last = slice(-self.inner.window, None)  # without a window: all keys
        ids_BS = document_ids_BS
        if self.k_BGTK is None or self.v_BGTK is None:
            # The prompts: nothing is cached yet, and the inner attention masks them.
            self.k_BGTK, self.v_BGTK = k_BGSK[:, :, last], v_BGSK[:, :, last]
            self.ids_BT = None if ids_BS is None else ids_BS[:, last]
            return self.inner(q_BHSK, k_BGSK, v_BGSK, ids_BS, sinks_H)
        self.k_BGTK = torch.cat([self.k_BGTK, k_BGSK[:, :, -1:]], dim=2)[:, :, last]
        self.v_BGTK = torch.cat([self.v_BGTK, v_BGSK[:, :, -1:]], dim=2)[:, :, last]
        mask_B1T = None
        if self.ids_BT is not None and ids_BS is not None:
            self.ids_BT = torch.cat([self.ids_BT, ids_BS[:, -1:]], dim=1)[:, last]
            mask_B1T = (self.ids_BT == ids_BS[:, -1:])[:, None]
        # The newest token sees all cached keys, except padding.
        q_BH1K, scale = q_BHSK[:, :, -1:], self.inner.scale
        if sinks_H is not None:
            whole = {"spec": AttentionSpec(causal=False), "scale": scale, "mask_BST": mask_B1T}
            out_BH1K = attend_with_sinks(q_BH1K, self.k_BGTK, self.v_BGTK, sinks_H, **whole)
        else:
            has_mask = mask_B1T is not None
            k_BGTK, v_BGTK = match_heads(q_BH1K, self.k_BGTK, self.v_BGTK, has_mask=has_mask)
            out_BH1K = F.scaled_dot_product_attention(
                q_BH1K,
                k_BGTK,
                v_BGTK,
                attn_mask=mask_B1T[:, None] if mask_B1T is not None else None,
                scale=scale,
                enable_gqa=q_BHSK.shape[1] != k_BGTK.shape[1],
            )
        return F.pad(out_BH1K, (0, 0, q_BHSK.shape[2] - 1, 0))


@contextmanager
def cached_attention(model: nn.Module) -> Iterator[None]:
    """Cache keys and values in each inner attention of a model, and leave the model as it was."""
    # A list, since the loop changes what it walks over.
    swapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, InnerAttention)
    ]
    for parent, name, child in swapped:
        setattr(parent, name, CachedAttention(child))
    try:
        yield
    finally:
        for parent, name, child in swapped:
            setattr(parent, name, child)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A model that generates text, with a cache of keys and values.

    Attributes:
        model: a whole model, or one that tensor parallelism splits. Its ranks call the methods together.
        max_new_tokens: longest continuation.
        temperature: 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens; 0: among all.
        seed: seed of the first prompt; the next prompts have the numbers after it.
        stop: tokens that end a text, in addition to max_new_tokens.
    """

    model: nn.Module
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    stop: Collection[int | None] = ()

    def complete(self, prompts: Sequence[Sequence[int]], **inputs: Any) -> list[list[int]]:
        """Return the tokens that follow each prompt. The arguments are those of `stream`."""
        steps = list(self.stream(prompts, **inputs))
        return [
            [t for step in steps if (t := step[row]) is not None] for row in range(len(prompts))
        ]

    @torch.no_grad()
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        inputs_of: Callable[[Tensor], Mapping[str, Tensor]] | None = None,
    ) -> Iterator[list[int | None]]:
        """Yield the next token of each prompt, None after its end.

        Args:
            prompts: token ids, at least one each.
            inputs_of: maps tokens (B, S), which are -1 where there is padding, to further arguments of the model's first forward.
        """
        parameters = list(self.model.parameters())
        device = parameters[0].device
        # A sequence must divide by the number of ranks.
        ranks = next((p.device_mesh.size() for p in parameters if isinstance(p, DTensor)), 1)
        # The same seed gives the same text on a device, whatever ran before.
        generators = [
            torch.Generator(device=device).manual_seed(self.seed + row)
            for row in range(len(prompts))
        ]
        texts = [[*prompt] for prompt in prompts]
        tokens_BS, ids_BS, positions_BS = _padded(texts, ranks=ranks, device=device)
        inputs = inputs_of(tokens_BS.masked_fill(ids_BS == 0, -1)) if inputs_of else {}
        is_padded, has_ended = not ids_BS.all(), [False] * len(prompts)
        recurs = modules_of(self.model, SequenceModule)
        with nullcontext() if recurs else cached_attention(self.model):
            for _ in range(self.max_new_tokens):
                logits_BSV = self.model(
                    tokens_BS, positions_BS, ids_BS if is_padded else None, **inputs
                )
                inputs = inputs if recurs else {}
                chosen = self._choose(logits_BSV[:, -1].float(), generators)
                found = chosen.tolist()
                has_ended = [
                    end or t in self.stop for end, t in zip(has_ended, found, strict=True)
                ]
                if all(has_ended):
                    return
                yield [None if end else t for end, t in zip(has_ended, found, strict=True)]
                if recurs:
                    texts = [[*text, token] for text, token in zip(texts, found, strict=True)]
                    tokens_BS, ids_BS, positions_BS = _padded(texts, ranks=ranks, device=device)
                    is_padded = not ids_BS.all()
                    continue
                # The cache has the positions before, so only the new token goes through the model, once for each rank.
                tokens_BS = chosen[:, None].expand(-1, ranks)
                positions_BS = (positions_BS[:, -1:] + 1).expand(-1, ranks)
                ids_BS = torch.ones_like(tokens_BS)

    def _choose(self, logits_BV: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Return a token for each prompt, int64 (B,), drawn by its generator."""
        if self.temperature < _GREEDY:  # logits divided by less overflow
            return logits_BV.argmax(-1)
        if self.top_k:
            # Tokens below the k-th likeliest get probability 0.
            kth_B1 = logits_BV.topk(min(self.top_k, logits_BV.shape[1])).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
        p_BV = torch.softmax(logits_BV / self.temperature, dim=-1)
        drawn = [
            torch.multinomial(p_V, 1, generator=g)
            for p_V, g in zip(p_BV, generators, strict=True)
        ]
        return torch.cat(drawn)


def _padded(
    texts: Sequence[Sequence[int]], *, ranks: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, document ids (0 for padding, 1 for the text) and positions of texts with padding on their left, (B, S) each."""
    length = max(map(len, texts), default=0)
    length += -length % ranks
    tokens_BS = torch.zeros(len(texts), length, dtype=torch.int64, device=device)
    ids_BS = torch.zeros_like(tokens_BS)
    for row, text in enumerate(texts):
        tokens_BS[row, length - len(text) :] = torch.tensor(text, device=device)
        ids_BS[row, length - len(text) :] = 1
    return tokens_BS, ids_BS, (ids_BS.cumsum(1) - 1).clamp(min=0)


def streamed(
    tokenizer: Tokenizer, tokens: Iterable[int], *, prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text of tokens that follow a prompt, piece by piece. A character is yielded after its last byte."""
    ids, shown = [], 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.continuation(prompt, ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    if rest := tokenizer.continuation(prompt, ids)[shown:]:
        yield rest
