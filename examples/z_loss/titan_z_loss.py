"""Cross entropy with the z-loss of PaLM (arXiv:2204.02311, section 5), as a loss in a separate package. C tokens, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of tokens that are not trained on


def z_loss(logits_CV: Tensor, labels_C: Tensor, *, weight: float = 1e-4) -> Tensor:
    """Return the sum over the valid tokens of cross entropy + weight * log(Z)^2, which keeps the softmax's sum Z near 1.

    Args:
        logits_CV: a chunk of whole rows, in fp32.
        labels_C: int64, IGNORED where a token is not trained on.
        weight: of the second term.
    """
    # `where` keeps the shape: a selection by a mask would have a length that the simulator cannot know.
    log_z_C = torch.where(labels_C != IGNORED, logits_CV.logsumexp(dim=-1), 0.0)
    return F.cross_entropy(logits_CV, labels_C, ignore_index=IGNORED, reduction="sum") + (
        weight * log_z_C.square().sum()
    )
