"""Orders of tokens by counting, against a stable sort."""

from __future__ import annotations

import pytest
import torch

from tests.support.tables import tabled
from titan.models.common.dispatch import places_by_expert
from titan.parallel.token_order import inverted, transposed_blocks


@pytest.mark.parametrize("twice", [False, True])
@tabled("tokens, k, experts")
def test_places_are_those_of_a_stable_sort(
    tokens: int, k: int, experts: int, twice: bool
) -> None:
    torch.manual_seed(tokens)
    ids_TK = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    if twice:  # a router may name an expert more than once
        ids_TK = torch.randint(0, experts, (tokens, k))
    places_N, counts_E = places_by_expert(ids_TK, experts)
    assert torch.equal(inverted(places_N), ids_TK.flatten().argsort(stable=True))
    assert torch.equal(counts_E, ids_TK.flatten().bincount(minlength=experts))


@pytest.mark.parametrize("shape", [(2, 4), (4, 1), (3, 5)])
def test_blocks_by_sender_become_blocks_by_expert(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    counts_Ce = torch.randint(0, 6, shape)
    counts_Ce[0] = 0  # a rank that sends nothing
    owners_R = torch.arange(shape[1]).repeat(shape[0]).repeat_interleave(counts_Ce.flatten())
    places_R = transposed_blocks(counts_Ce, len(owners_R))
    assert torch.equal(inverted(places_R), owners_R.argsort(stable=True))
