"""Families with experts: exact counts of the published models, what is counted for MFU, and YaRN."""

from __future__ import annotations

import pytest
import torch

from tests.support.tables import tabled
from titan.config.model import family
from titan.config.schema import ModelSection
from titan.models.deepseek_v3 import FLAVORS as DEEPSEEK
from titan.models.gpt_oss import FLAVORS as GPT_OSS

# All parameters, those that a token meets, and those of experts: transformers' models on meta, DeepSeek-V3 without its layer
# for predicting further tokens.
COUNTS = {
    ("qwen3", "debugmodel_moe"): (315_758_848, 51_517_696, 301_989_888),
    ("qwen3", "30B-A3B"): (30_532_122_624, 3_353_032_704, 28_991_029_248),
    ("qwen3", "235B-A22B"): (235_093_634_560, 22_190_763_520, 227_096_395_776),
    ("deepseek_v3", "debugmodel"): (33_014_016, 28_098_816, 7_864_320),
    ("deepseek_v3", "16B"): (15_706_484_224, 2_661_150_208, 14_394_851_328),
    ("deepseek_v3", "236B"): (235_741_434_880, 21_375_800_320, 222_717_542_400),
    ("deepseek_v3", "671B"): (671_026_404_352, 37_552_282_624, 653_908_770_816),
    ("gpt_oss", "debugmodel"): (183_397_920, 147_912_224, 70_971_392),
    ("gpt_oss", "20b"): (20_914_757_184, 4_187_440_704, 19_116_933_120),
    ("gpt_oss", "120b"): (116_829_156_672, 5_711_982_912, 114_701_598_720),
}


@pytest.mark.parametrize(("name", "flavor"), COUNTS)
def test_published_counts(name: str, flavor: str) -> None:
    total, active, in_experts = COUNTS[name, flavor]
    config = family(name).FLAVORS[flavor]
    with torch.device("meta"):
        model = family(name).build_model(config)
    counts = {key: p.numel() for key, p in model.named_parameters()}
    assert sum(counts.values()) == config.num_params == total
    assert config.num_active_params == active
    assert sum(n for key, n in counts.items() if ".moe.experts." in key) == in_experts
    blocks = [f"layers.{i}." for i in range(config.n_layers)]
    for layer, prefix in enumerate(blocks[:4]):
        own = sum(n for key, n in counts.items() if key.startswith(prefix))
        assert own == config.block_params(layer)


def test_flops_of_latent_attention() -> None:
    """Six for each active parameter of a matrix product, and attention with heads of 192 and 128."""
    config = DEEPSEEK["16B"]
    norms = config.n_layers * config.num_block_norm_params + config.dim
    products = config.num_active_params - config.num_embedding_params - norms
    attention = 6 * 27 * 16 * (192 + 128) * 4096
    assert config.flops_per_token(4096) == 6 * products + attention


def test_flops_of_windows_and_without_biases() -> None:
    """Half of the 24 layers of 64 heads of 64 see 128 keys. What is in no product: norms, biases and sinks."""
    config = GPT_OSS["20b"]
    attention = 12 * 12 * 64 * 64 * (4096 + 128)
    q_k_v_o = 2880 * (64 + 8 + 8) * 64 + 64 * 64 * 2880
    products = 24 * (q_k_v_o + 2880 * 32 + 4 * 3 * 2880 * 2880) + 201_088 * 2880
    assert config.flops_per_token(4096) == 6 * products + attention


@tabled("overrides, refusals", ids=str)
def test_a_router_that_cannot_choose_is_refused(overrides: dict, refusals: list[str]) -> None:
    section = ModelSection(name="deepseek_v3", flavor="tiny", overrides=overrides)
    _, violations = section.resolved
    assert [f"{key}: {message}" for key, message in violations] == [
        f"model.overrides.{text}" for text in refusals
    ]
