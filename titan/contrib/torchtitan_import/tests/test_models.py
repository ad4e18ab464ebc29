"""Flavors that TorchTitan v0.2.2 has, too, are the same models: as many parameters, and the same rotation frequencies.

Of models with experts, test_experts.py has the counts.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.test_experts import COUNTS
from titan.config.model import family
from titan.config.schema import ModelSection
from titan.contrib.torchtitan_import.differences import FLAVORS
from titan.models.common.rotary import rope_frequencies

# Family and flavor: parameters, head dim, theta, factor of Llama 3.1's scaling. Counts are those of the published weights
# (Llama 3.1 and Qwen3 at Hugging Face; of Qwen3 with tied embeddings counted once). Those of the debug models follow from the sizes
# in TorchTitan's models/llama3/__init__.py and models/qwen3/__init__.py: 2 x 2048 x 256 + 6 x 852,480 + 256, and
# 2048 x 256 + 8 x 3,932,928 + 256.
MODELS = {
    ("llama3", "debugmodel"): (6_163_712, 16, 500_000, 8),
    ("llama3", "8B"): (8_030_261_248, 128, 500_000, 8),
    ("llama3", "70B"): (70_553_706_496, 128, 500_000, 8),
    ("llama3", "405B"): (405_853_388_800, 128, 500_000, 8),
    ("qwen3", "debugmodel"): (31_987_968, 128, 1_000_000, 0),
    ("qwen3", "0.6B"): (596_049_920, 128, 1_000_000, 0),
    ("qwen3", "1.7B"): (1_720_574_976, 128, 1_000_000, 0),
    ("qwen3", "4B"): (4_022_468_096, 128, 1_000_000, 0),
    ("qwen3", "8B"): (8_190_735_360, 128, 1_000_000, 0),
    ("qwen3", "14B"): (14_768_307_200, 128, 1_000_000, 0),
    ("qwen3", "32B"): (32_762_123_264, 128, 1_000_000, 0),
}


def published_frequencies(head_dim: int, theta: float, factor: float) -> list[float]:
    """As the Llama 3.1 release scales them, a pair of channels at a time: low_freq_factor 1, high_freq_factor 4, 8192 positions."""
    result = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        wavelength = 2 * math.pi / frequency
        if factor and wavelength > 8192 / 1:
            frequency /= factor
        elif factor and wavelength > 8192 / 4:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        result.append(frequency)
    return result


@pytest.mark.parametrize(("name", "flavor"), MODELS)
def test_same_flavor_same_model(name: str, flavor: str) -> None:
    count, head_dim, theta, factor = MODELS[name, flavor]
    config = ModelSection(name=name, flavor=flavor).sizes
    with torch.device("meta"):
        model = family(name).build_model(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_params == count
    ours = rope_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, torch.device("cpu")
    )
    assert ours.tolist() == pytest.approx(
        published_frequencies(head_dim, theta, factor), rel=1e-5
    )


def test_every_shared_flavor_is_compared() -> None:
    shared = {(name, flavor) for name, flavors in FLAVORS.items() for flavor in flavors}
    assert shared <= {*MODELS, *COUNTS} and {*MODELS} <= shared
