"""Arguments that transformers passes to titan's functions, and configs that it makes of a job's words: known or refused, never ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.support.hf_families import families, overrides_of
from tests.support.tables import table
from titan.contrib.transformers import attention, experts, recurrence
from titan.contrib.transformers.config import ModelSource
from titan.contrib.transformers.errors import UnsupportedModelError, WrongKeyError
from titan.contrib.transformers.interface import HARMLESS, require_known
from titan.contrib.transformers.resolve import _read, describe

OF_FILE = {"architectures", "dtype", "model_type", "transformers_version"}


def words(architecture: str, **fields: Any) -> ModelSource:
    """Return the source of a job with these words."""
    return _read("", architecture, json.dumps(fields), False)


def fields_of(source: ModelSource) -> dict[str, Any]:
    return {k: v for k, v in json.loads(source.hf).items() if k not in OF_FILE}


# ---- a job's words -------------------------------------------------------------------------------


def other(value: Any) -> Any:
    """Return another value of the same type, or None."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(1, value // 2) if value else 1
    return (value / 2 if value else 0.5) if isinstance(value, float) else None


def test_every_single_override_makes_the_config_that_transformers_makes() -> None:
    accepted, wrong = 0, []
    for architecture in sorted({*families().values()}):
        kind = getattr(transformers, architecture).config_class
        try:
            defaults = kind().to_dict()
        except Exception:
            continue  # transformers does not build it
        for key in defaults.keys() - OF_FILE:
            if (value := other(defaults[key])) is None:
                continue
            try:
                ours = fields_of(words(architecture, **{key: value}))
            except (UnsupportedModelError, WrongKeyError):
                continue
            try:
                theirs = kind(**{key: value}).to_dict()
            except Exception:
                continue  # titan cuts a default for each layer to the new number
            accepted += 1
            expected = json.loads(json.dumps(theirs, default=str))
            if any(ours.get(k) != v for k, v in expected.items() if k not in OF_FILE):
                wrong.append((architecture, key))
    assert accepted > 3000 and wrong == []


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    table(__file__, "derived_fields"),
)  # fmt: skip
def test_derived_fields(
    architecture: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = fields_of(words(architecture, **SMALL, **fields))
    assert {key: found[key] for key in expected} == expected


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["axk2", "hy_v4"])
def test_an_indexer_is_refused_by_the_same_rule(kind: str) -> None:
    architecture = families()[kind]
    with pytest.raises(UnsupportedModelError, match="gets indices from transformers"):
        describe(words(architecture, **overrides_of(architecture)))


def test_more_heads_for_keys_than_for_queries_are_refused() -> None:
    small = overrides_of("MiMoV2FlashForCausalLM")
    with pytest.raises(UnsupportedModelError, match="4 query heads, and 8 for keys and values"):
        describe(words("MiMoV2FlashForCausalLM", **{**small, "num_key_value_heads": 4}))


@pytest.fixture
def probing() -> Any:
    with attention.recording() as probe:
        yield probe


X = torch.ones(1, 2, 4, 8, device="meta")
LAYER = torch.nn.Module()
SEAMS: dict[str, Callable[..., Any]] = {
    "attention": lambda *rest, **others: attention._record(
        LAYER, X, X, X, None, *rest, scaling=1.0, **others
    ),
    "attention in a run": lambda *rest, **others: attention._attend(
        LAYER, X, X, X, None, *rest, scaling=1.0, **others
    ),
    "masks": lambda *rest, **others: attention._describe_mask(
        1, 4, 4, *rest, mask_function=lambda *_: True, **others
    ),
    "experts": lambda *rest, **others: experts._run(LAYER, X, X, X, *rest, **others),
    "recurrences: a convolution": lambda **others: recurrence._convolve(LAYER, X, X, **others),
    "recurrences: the delta rule": lambda **others: recurrence._delta_rule(
        LAYER, X, X, X, X, X, **others
    ),
    "recurrences: Mamba": lambda **others: recurrence._mamba(LAYER, X, X, X, X, X, 4, **others),
}


@pytest.mark.usefixtures("probing")
@pytest.mark.parametrize("seam", SEAMS)
def test_each_seam_refuses_what_it_does_not_know(seam: str) -> None:
    for value in (torch.ones(2), 3, 0.5, True, "spiral"):
        with pytest.raises(UnsupportedModelError, match="gets chosen_keys from transformers"):
            SEAMS[seam](chosen_keys=value)
    if not seam.startswith(
        "recurrences"
    ):  # whose arguments have the names of transformers' own
        with pytest.raises(UnsupportedModelError, match="gets positional argument 1 from"):
            SEAMS[seam](torch.ones(2))


def test_what_is_not_given_and_what_is_harmless_passes() -> None:
    for seam, names in HARMLESS.items():
        given = {
            **dict.fromkeys(names, torch.ones(2)),
            "other": None,
            "output_attentions": False,
        }
        require_known(seam, "layer", (None,), given)


def test_a_mask_in_a_run_is_refused() -> None:
    """transformers makes none for titan's attention: a mask is the model's own."""
    with pytest.raises(UnsupportedModelError, match="gets attention_mask"):
        attention._attend(LAYER, X, X, X, torch.ones(4, 4))


# ---- losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "fix"),
    table(__file__, "terms_that_a_class_adds_to_its_loss_are_refused"),
)  # fmt: skip
def test_terms_that_a_class_adds_to_its_loss_are_refused(
    kind: str, fields: dict[str, Any], fix: str
) -> None:
    architecture = families()[kind]
    small = overrides_of(architecture)
    with pytest.raises(UnsupportedModelError, match=fix):
        describe(words(architecture, **{**small, **fields}))
    name, _, value = fix.partition(" = ")
    assert describe(
        words(architecture, **{**small, **fields, name: json.loads(value)})
    ).n_layers
