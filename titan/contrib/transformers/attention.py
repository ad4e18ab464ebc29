"""titan's attention in the place of transformers', for every model that calls it through `AttentionInterface`.

A model is run once on meta, under the name "titan_probe". Each attention module then gets an `InnerAttention` with the scale, the
window and the causality that transformers' own mask functions describe. From then on, its name is "titan", and transformers
makes no masks.

B batch, S sequence, H query heads, G key/value heads, K head dim
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from titan.models.common.attention import InnerAttention

from .errors import UnsupportedModelError
from .fake_tensors import real_tensors
from .interface import require_known
from .sparse_attention import NO_MASK, sparse_of

RUN, PROBE = "titan", "titan_probe"
_FAR = 2**20  # a position beyond every window


@dataclass
class Probe:
    """Record of the one forward pass on meta.

    Attributes:
        calls: what each attention module was called with, by its identity.
        recurrences: operations of the forward pass for one token, of each layer with a linear recurrence, by its identity.
        reach: number of tokens before a token that a convolution needs.
        without_documents: names of classes of such layers that the documents of the model's call do not reach.
        follow: called with "", what attention returns, and the dimension of its heads.
    """

    calls: dict[int, AttentionCall] = field(default_factory=dict)
    recurrences: dict[int, int] = field(default_factory=dict)
    reach: int = 0
    without_documents: list[str] = field(default_factory=list)
    follow: Callable[[str, Tensor, int], None] = lambda *_: None


@dataclass(frozen=True)
class AttentionCall:
    """One call of transformers' attention interface.

    Attributes:
        module: the attention module.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        head_dim: channels of a query.
        takes_documents: whether the documents of the model's call arrive here.
        inputs: queries, keys and values.
    """

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    takes_documents: bool
    inputs: tuple[Tensor, Tensor, Tensor]


_probe: Probe | None = None


def is_probing() -> bool:
    """Return whether a model is being run on meta for the record."""
    return _probe is not None


def record_recurrence(
    layer: nn.Module,
    others: Mapping[str, Any],
    *,
    documents: Any,
    flops: int = 0,
    reach: int = 0,
) -> None:
    """Check a call of a part of linear attention, and record it if a model is being run for the record.

    Args:
        layer: the layer that calls it.
        others: arguments that titan does not know.
        documents: the documents of the model's call, if they arrive here.
        flops: operations for one token.
        reach: number of tokens before a token that a convolution needs.
    """
    require_known("recurrences", type(layer).__name__, (), others)
    if _probe is not None:
        _probe.reach = max(_probe.reach, reach)
        _probe.recurrences[id(layer)] = _probe.recurrences.get(id(layer), 0) + flops
        _probe.without_documents += [] if documents is not None else [type(layer).__name__]


@contextmanager
def recording() -> Iterator[Probe]:
    """Record the calls of the attention interface under the name of the probe."""
    global _probe
    from transformers import masking_utils

    # On meta there are no positions in which packed documents could be found.
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    _probe = Probe()
    try:
        yield _probe
    finally:
        _probe = None
        masking_utils.find_packed_sequence_indices = find


def register() -> None:
    """Register titan's attention with transformers under the two names."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RUN, _attend)
    AttentionInterface.register(PROBE, _record)
    AttentionMaskInterface.register(PROBE, _describe_mask)


def _attend(
    module: Any,
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    attention_mask: Tensor | None = None,
    *rest: Any,
    document_ids_BS: Any = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    # Scale, causality and window are in `inner_attention`; there is no dropout. transformers makes no mask for titan.
    sparse, chosen = sparse_of(module), _take_choice(module, others)
    given = {"attention_mask": None if attention_mask is NO_MASK else attention_mask, **others}
    require_known("attention", _name(module), rest, given)
    inner, qkv = module.inner_attention, (q_BHSK, k_BGSK, v_BGSK)
    if sparse is not None:
        out_BHSK = sparse.attend(inner, *qkv, chosen)
    else:
        sinks = () if s_aux is None else (s_aux,)
        out_BHSK = inner(*qkv, document_ids_BS, *sinks)
    return out_BHSK.transpose(1, 2).contiguous(), None


def _take_choice(module: Any, others: dict[str, Any]) -> Any:
    """Take the chosen keys out of the arguments of a layer that titan's sparse attention computes."""
    if sparse_of(module) is None:
        return None
    return others.pop("block_indices", others.pop("indices", None))


def _name(module: nn.Module) -> str:
    return f"{type(module).__name__} {getattr(module, 'layer_idx', '')}".strip()


def _record(
    module: Any,
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    attention_mask: Tensor | None = None,
    *rest: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    document_ids_BS: Any = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    assert _probe is not None
    name = _name(module)
    if _take_choice(module, others) is not None:
        module.sparse.heads, module.sparse.scored = q_BHSK.shape[1], None
    require_known("attention", name, rest, others)
    if dropout:
        raise UnsupportedModelError(
            f"{name} has attention dropout: set it to 0 in model.overrides"
        )
    if q_BHSK.shape[1] % k_BGSK.shape[1]:
        heads = f"{q_BHSK.shape[1]} query heads, and {k_BGSK.shape[1]} for keys and values"
        raise UnsupportedModelError(f"{name} has {heads}, which do not divide them")
    if id(module) in _probe.calls:
        raise UnsupportedModelError(f"{name} attends twice in a forward pass")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    described = getattr(attention_mask, "describe", None)
    if attention_mask is not None and described is None:
        raise UnsupportedModelError(
            f"{name} changes the mask that transformers makes, or makes its own"
        )
    causal, window = described() if described else (bool(causal), 0)
    module.inner_attention = InnerAttention(scale=scaling, causal=causal, window=window)
    shape = q_BHSK.shape[0], q_BHSK.shape[2], q_BHSK.shape[1], v_BGSK.shape[3]
    output = q_BHSK.new_empty(shape)
    _probe.follow("", output, 2)
    _probe.calls[id(module)] = AttentionCall(
        module,
        q_BHSK.shape[1],
        k_BGSK.shape[1],
        q_BHSK.shape[3],
        document_ids_BS is not None,
        (q_BHSK, k_BGSK, v_BGSK),
    )
    return output, None


def _describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *rest: Any,
    mask_function: Any,
    **others: Any,
) -> Tensor:
    """Return a mask on meta whose attribute `describe` returns causality and window.

    Some models make a mask of a window of 0 tokens, and no layer uses it.
    """
    require_known("masks", "a mask", rest, others)
    mask: Any = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")

    @cache
    def describe() -> tuple[bool, int]:
        with torch.device("cpu"), real_tensors():
            return spec_of(mask_function)

    mask.describe = describe
    return mask


def spec_of(sees: Callable[..., Any]) -> tuple[bool, int]:
    """Return causality and window (0: none) of one of transformers' mask functions.

    Args:
        sees: maps indices of batch, head, query and key to whether the query sees the key.

    Raises:
        UnsupportedModelError: the mask is another one.
    """

    def is_seen(query: int | Tensor, key: int | Tensor) -> Tensor:
        zero = torch.tensor(0)
        return torch.as_tensor(sees(zero, zero, torch.as_tensor(query), torch.as_tensor(key)))

    causal = not is_seen(_FAR, _FAR + 1)
    window = 0
    if not is_seen(_FAR, 0):
        near, far = 1, _FAR  # distances that are seen, and are not
        while far - near > 1:
            middle = (near + far) // 2
            near, far = (middle, far) if is_seen(_FAR, _FAR - middle) else (near, middle)
        window = near + 1 if is_seen(_FAR, _FAR - 1) else 1
    # Pairs at all distances near each other and near the window's edge, at several places.
    at = torch.cat([torch.arange(64), torch.arange(_FAR // 2 - 32, _FAR // 2 + 32)])
    by = torch.cat(
        [torch.arange(-64, 65), window + torch.arange(-2, 3), 2 ** torch.arange(7, 18)]
    )
    query, key = at[:, None].expand(-1, len(by)), at[:, None] - by
    inside = key >= 0
    distance = (query - key)[inside]
    expected = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window:
        expected &= distance < window
    if not torch.equal(is_seen(query[inside], key[inside]).expand(expected.shape), expected):
        raise UnsupportedModelError(
            "its attention mask is neither causal nor a sliding window, as for attention in chunks"
        )
    return causal, window
