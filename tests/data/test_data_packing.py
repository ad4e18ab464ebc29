"""Packing on tokens made by hand: 1 begins a document, 2 ends it."""

from __future__ import annotations

import numpy as np
import pytest

from titan.data.packing import IGNORED, pack
from titan.data.special_tokens import SpecialTokens
from titan.data.tokenizer import Tokenizer, bytes_tokenizer

# The end of a document; a whole one; the beginning of a third. Seven inputs and the last label.
ROW = np.array([[7, 2, 1, 5, 2, 1, 6, 8]])


@pytest.mark.parametrize("special_tokens", [SpecialTokens(1, 2), SpecialTokens(1, None)])
def test_positions_ids_and_labels_follow_documents(special_tokens: SpecialTokens) -> None:
    packed = pack(ROW, special_tokens=special_tokens, reset_positions=True, document_mask=True)
    assert packed.tokens_BS.tolist() == [[7, 2, 1, 5, 2, 1, 6]]
    assert packed.labels_BS.tolist() == [[2, IGNORED, 5, 2, IGNORED, 6, 8]]
    assert packed.positions_BS is not None and packed.positions_BS.tolist() == [
        [0, 1, 0, 1, 2, 0, 1]
    ]
    assert packed.document_ids_BS is not None and packed.document_ids_BS.tolist() == [
        [0, 0, 1, 1, 1, 2, 2]
    ]


def test_without_options_every_label_counts() -> None:
    packed = pack(
        ROW, special_tokens=SpecialTokens(1, 2), reset_positions=False, document_mask=False
    )
    assert packed.labels_BS.tolist() == [[2, 1, 5, 2, 1, 6, 8]]
    assert packed.positions_BS is None and packed.document_ids_BS is None


def test_framing_wraps_with_what_the_tokenizer_has() -> None:
    tokenizer = bytes_tokenizer()
    assert SpecialTokens.of(tokenizer).wrap([9]) == [256, 9, 257]
    assert SpecialTokens.of(tokenizer, add_bos=False).wrap([9]) == [9, 257]
    assert not SpecialTokens.of(tokenizer, add_bos=False, add_eos=False).marks_boundaries


def test_one_token_for_begin_and_end_is_written_once() -> None:
    tokenizer: Tokenizer = bytes_tokenizer()
    tokenizer.eos_id = tokenizer.bos_id
    special_tokens = SpecialTokens.of(tokenizer)
    assert special_tokens.wrap([9]) == [256, 9]
    assert special_tokens.starts(np.array([[256, 9, 8, 256, 9]])).tolist() == [
        [True, False, False, True, False]
    ]
