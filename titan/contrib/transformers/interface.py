"""Arguments with which transformers calls titan's functions: attention, masks, experts and linear recurrences.

titan uses an argument, or knows by name that it changes nothing. It refuses every other one, since a model that passes it would be
trained as another model: chosen keys of a sparse attention, for example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import UnsupportedModelError

# What every layer's call may carry on: positions, which are in queries and keys by then, and requests for other outputs. None of the
# outputs is asked for, and no call has a cache.
_OF_CALL = frozenset(
    {"position_ids", "position_embeddings", "num_items_in_batch", "deterministic"}
)
HARMLESS: dict[str, frozenset[str]] = {
    # The mask describes the window. Only kernels of other packages read it here.
    "attention": _OF_CALL | {"sliding_window"},
    # Sizes and places of a block of the mask, and the form that other implementations want. A mask of padding that the model makes
    # without any padding is all ones.
    "masks": frozenset(
        {
            *("q_offset", "kv_offset", "attention_mask", "allow_is_causal_skip", "local_size"),
            *("allow_is_bidirectional_skip", "dtype", "config", "use_vmap", "device"),
        }
    ),
    "experts": frozenset(),
    # Chunks and final states are of other implementations.
    "recurrences": _OF_CALL | {"output_final_state", "chunk_size"},
}
"""Arguments that change nothing, for each seam."""


def require_known(
    seam: str, where: str, positional: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Check the arguments of a call that titan does not use.

    Args:
        seam: one of `HARMLESS`.
        where: what is called, for the message.
        positional: positional arguments after those that titan uses.
        named: keyword arguments other than those that titan uses.

    Raises:
        UnsupportedModelError: an argument may change what the model computes. None and False are not given.
    """
    unknown = [f"positional argument {n}" for n, x in enumerate(positional, 1) if x is not None]
    for name, value in named.items():
        if value is not None and value is not False and name not in HARMLESS[seam]:
            unknown.append(name)
    if unknown:
        raise UnsupportedModelError(
            f"{where} gets {', '.join(unknown)} from transformers, which titan's {seam} would ignore: it would train another model"
        )
