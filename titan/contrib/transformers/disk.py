"""Names of the tensors in a Hugging Face folder, by transformers' own table of conversions.

In memory transformers stacks experts and fuses some of their matrices. A few numbers of each parameter, converted back, tell what a folder
has in its place.
"""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedModelError


def disk_names(hf: Any, name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the tensors on disk that hold a parameter, in its order: by expert, then by row.

    Args:
        hf: transformers' model.
        name: transformers' name of the parameter in memory.
        shape: its shape.

    Raises:
        UnsupportedModelError: a parameter on disk is not a sequence of parts of it.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    from .fake_tensors import real_tensors

    # Numbers that tell where a part comes from: experts and two rows of each.
    small = (shape[0], 2, 1) if len(shape) == 3 else (2,) * len(shape)
    with real_tensors(), torch.device("cpu"):
        value = torch.arange(torch.Size(small).numel(), dtype=torch.float32).view(small)
        try:
            parts = revert_weight_conversion(hf, {name: value})
        except Exception as error:
            raise UnsupportedModelError(f"{name} has no form on disk: {error}") from error
        names = sorted(parts, key=lambda key: parts[key].flatten()[0].item())
        (part, *others) = parts.values()
        if not others and (part.shape != value.shape or not torch.equal(part, value)):
            raise UnsupportedModelError(f"{name} is stored in another form, {names[0]}")
    return names
