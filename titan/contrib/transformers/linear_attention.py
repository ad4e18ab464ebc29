"""Linear attention of hybrid models, which call `LinearAttention` between their projections.

Each head has a state of K x V numbers, which every position decays, corrects and reads:

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

    gates g            strengths beta
    for each head      yes              gated delta rule (Gated DeltaNet, arXiv:2412.06464)
    none               yes              delta rule (DeltaNet, arXiv:2406.06484)
    for each channel   yes              Kimi Delta Attention (arXiv:2510.26692)
    for each head      none             S_t = exp(g_t) S_{t-1} + k_t v_t^T, state space duality (Mamba 2, arXiv:2405.21060). Its C, B and
                                        dt x are q, k and v, its dt A is g, and the scale is 1

The sequence is computed in chunks of C positions. The changes of the state within a chunk solve a triangular system (the WY form), for all
chunks at once. Then a loop over chunks carries the state. For example, 4,096 positions in chunks of 64 are 64 systems of 64
equations, and 64 steps of the loop.

Gates are logarithms, and not above zero. Every exponent is a sum of gates over a range of positions, and never a difference of two such
sums. So no exponential overflows, and strong gates cost no digits. A gate may be -inf: it drops the state where a document starts.

B batch, S positions, H value heads, G query/key heads, K size of a key, V size of a value, N chunks, C positions of a chunk
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from titan.parallel.documents import DocumentMask

from .linear_attention_borders import Bordered, State
from .linear_attention_kernels import attend_with_kernel, has_kernel


class LinearAttention(Bordered):
    """Linear attention over grouped heads, optionally only within documents.

    Attributes:
        scale: factor of the output. None: 1 / sqrt(K).
        chunk: number of positions that are computed at once, a power of two.
    """

    def __init__(self, *, scale: float | None = None, chunk: int = 64) -> None:
        super().__init__()
        self.scale = scale
        self.chunk = chunk

    def forward(
        self,
        q_BGSK: Tensor,
        k_BGSK: Tensor,
        v_BHSV: Tensor,
        gates: Tensor | None = None,
        betas_BHS: Tensor | None = None,
        document_ids_BS: Tensor | DocumentMask | None = None,
    ) -> Tensor:
        """Return the output, (B, H, S, V), in the values' dtype.

        Args:
            q_BGSK: queries. H is a multiple of G, and value head h reads query head h // (H // G).
            k_BGSK: keys. With strengths, their length must be 1 or less.
            v_BHSV: values.
            gates: logarithms of what remains of the state at each position: (B, H, S), or (B, H, S, K) for each channel. None:
                all remains.
            betas_BHS: strengths of the delta rule, from 0 to 2. None: no delta rule.
            document_ids_BS: numbers of the documents that are packed into each sequence, int64, or their `DocumentMask`. The state
                is zero before each document. None: no documents.
        """
        borders, starts_BS = self.borders, self.borders.starts(document_ids_BS)
        q, k, v, *rest = (
            None if x is None else borders.split(x, dim=2)
            for x in (q_BGSK, k_BGSK, v_BHSV, gates, betas_BHS)
        )
        assert q is not None and k is not None and v is not None
        out, _ = linear_attention(
            q,
            k,
            v,
            *rest,
            scale=self.scale,
            chunk=self.chunk,
            starts_BS=None if starts_BS is None else borders.split(starts_BS, dim=1),
            state=None if borders.part is None else borders.states_before,
        )
        return borders.join(out, dim=2)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Pad with positions that leave the state as it is, in fp32 at least: (B, H, S, ...) -> (B, H, N, C, ...)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))


def linear_attention(
    q_BGSK: Tensor,
    k_BGSK: Tensor,
    v_BHSV: Tensor,
    gates: Tensor | None = None,
    betas_BHS: Tensor | None = None,
    *,
    scale: float | None = None,
    chunk: int = 64,
    starts_BS: Tensor | None = None,
    state: State = None,
) -> tuple[Tensor, Tensor]:
    """Compute linear attention, in fp32 at least, or by a kernel (linear_attention_kernels.py).

    Args:
        q_BGSK: queries.
        k_BGSK: keys.
        v_BHSV: values.
        gates: see `LinearAttention.forward`, as for all arguments before it.
        betas_BHS: strengths of the delta rule, or None.
        scale: factor of the output. None: 1 / sqrt(K).
        chunk: number of positions that are computed at once, a power of two.
        starts_BS: whether a document starts at a position, bool. None: no documents.
        state: state before the first position, or the function that returns it (see `State`).

    Returns:
        The output, (B, H, S, V), in the values' dtype, and the state after the last position, (B, H, K, V), in fp32 at least.
    """
    (length, v_size), k_size = v_BHSV.shape[2:], k_BGSK.shape[-1]
    if callable(state):
        # More columns of the state, with values of zero, compute the linear map.
        unit = F.pad(torch.eye(k_size, device=v_BHSV.device), (v_size, 0))
        both = linear_attention(
            q_BGSK,
            k_BGSK,
            F.pad(v_BHSV, (0, k_size)),
            gates,
            betas_BHS,
            scale=scale,
            chunk=chunk,
            starts_BS=starts_BS,
            state=unit.expand(*v_BHSV.shape[:2], -1, -1),
        )
        before = state(*both[1].split([v_size, k_size], dim=-1))
        out, last = (x[..., :v_size] + x[..., v_size:] @ before.to(x.dtype) for x in both)
        return out, last
    factor = k_size**-0.5 if scale is None else scale
    if has_kernel(q_BGSK, v_BHSV, gates, betas_BHS):
        return attend_with_kernel(
            q_BGSK,
            k_BGSK,
            v_BHSV,
            gates,
            betas_BHS,
            scale=factor,
            starts_BS=starts_BS,
            state=state,
        )

    copies = v_BHSV.shape[1] // k_BGSK.shape[1]
    q, k = (_in_chunks(x, chunk).repeat_interleave(copies, dim=1) for x in (q_BGSK, k_BGSK))
    q = q * factor
    new = _in_chunks(v_BHSV, chunk)
    gates = torch.zeros_like(v_BHSV[..., 0]) if gates is None else gates
    g = gates if gates.ndim == 4 else gates[..., None]
    if starts_BS is not None:
        g = g.masked_fill(starts_BS[:, None, :, None], -math.inf)
    g = _in_chunks(g, chunk)
    # What remains of the chunk's first state at each position, and of each position's change at the chunk's end.
    remains, left = g.cumsum(dim=-2).exp(), _sum_after(g).exp()
    removed = None
    if betas_BHS is None:
        [scores] = _decayed_products(q[None], k, g)
    else:
        scores, system = _decayed_products(torch.stack([q, k]), k, g)
        # The change at position t is beta_t (v_t - sum_{s<t} system_ts change_s - S^T k_t remains_t). S is known in the loop only.
        betas = _in_chunks(betas_BHS[..., None], chunk)
        targets = torch.cat([new, k * remains], dim=-1) * betas
        new, removed = torch.linalg.solve_triangular(
            system * betas, targets, upper=False, unitriangular=True
        ).split([v_size, k_size], dim=-1)
    written, whole = (k * left).mT, remains[..., -1:, :].mT
    first = new.new_zeros(*new.shape[:2], k_size, v_size) if state is None else state
    current = first.to(new)
    befores: list[Tensor] = []
    for n in range(new.shape[2]):
        befores.append(current)
        change = new[:, :, n] if removed is None else new[:, :, n] - removed[:, :, n] @ current
        current = whole[:, :, n] * current + written[:, :, n] @ change
    states = torch.stack(befores, dim=2)
    change = new if removed is None else new - removed @ states
    out = (q * remains) @ states + scores @ change
    return out.flatten(2, 3)[:, :, :length].to(v_BHSV.dtype), current


def _decayed_products(rows: Tensor, keys: Tensor, gates: Tensor) -> Tensor:
    """Return the products of each row with the keys up to its position, each decayed by the gates after the key.

    Args:
        rows: queries or keys, (..., C, K).
        keys: keys, (..., C, K).
        gates: gates, (..., C, K), or (..., C, 1) for all channels.

    Returns:
        The products, (..., C, C), which are zero above the diagonal.
    """
    size = keys.shape[-2]
    if gates.shape[-1] == 1:
        after = torch.ones(size, size, dtype=torch.bool, device=keys.device).tril(-1)
        sums = torch.where(after, gates, 0.0).cumsum(dim=-2)
        return rows @ keys.mT * sums.masked_fill(after.mT, float("-inf")).exp()
    if size == 1:
        return (rows * keys).sum(dim=-1, keepdim=True)
    # Decays differ by channel. From the first half to the second, each is that to the middle times that from there.
    rows, keys, gates = (x.unflatten(-2, (2, -1)) for x in (rows, keys, gates))
    to_middle, from_middle = _sum_after(gates[..., 0, :, :]), gates[..., 1, :, :].cumsum(dim=-2)
    across = (rows[..., 1, :, :] * from_middle.exp()) @ (
        keys[..., 0, :, :] * to_middle.exp()
    ).mT
    first, second = _decayed_products(rows, keys, gates).unbind(dim=-3)
    top = torch.cat([first, torch.zeros_like(across)], dim=-1)
    return torch.cat([top, torch.cat([across, second], dim=-1)], dim=-2)


def _sum_after(x: Tensor) -> Tensor:
    """Return the sum of the positions after each position, (..., C, K)."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(dim=-2).flip(-2)
