"""Names of the tensors in a Hugging Face folder, by transformers' own table of conversions.

In memory transformers stacks experts and fuses some of their matrices. A few numbers of each parameter, converted back, tell what a folder
has in its place.
"""

from __future__ import annotations

from typing import Any

from .errors import UnsupportedModelError


def disk_names(hf: Any, names: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Return the names of the tensors on disk that hold a parameter, in its order: by expert, then by row.

    Args:
        hf: transformers' model.
        names: transformers' names in memory and the shapes of parameters.

    Raises:
        UnsupportedModelError: a parameter on disk is not a sequence of parts of it.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    from .fake_tensors import real_tensors

    found = {}
    for name, shape in names.items():
        # Numbers that tell where a part comes from: experts and two rows of each.
        small = (shape[0], 2, 1) if len(shape) == 3 else (2,) * len(shape)
        with real_tensors(), torch.device("cpu"):
            value = torch.arange(torch.Size(small).numel(), dtype=torch.float32).view(small)
            try:
                parts = revert_weight_conversion(hf, {name: value})
            except Exception as error:
                raise UnsupportedModelError(f"{name} has no form on disk: {error}") from error
            firsts = [(part.flatten()[0].item(), key) for key, part in parts.items()]
            found[name] = [key for _, key in sorted(firsts)]
            (part, *others) = parts.values()
            if not others and (part.shape != value.shape or not torch.equal(part, value)):
                raise UnsupportedModelError(
                    f"{name} is stored in another form, {found[name][0]}"
                )
    return found
