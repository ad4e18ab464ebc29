"""Shapes belong to their numbers, and a page shows what was described."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from titan.config.schema import JobConfig
from titan.contrib.flux import FLAVORS
from titan.contrib.flux.captions import write_page
from titan.contrib.flux.flow_data import open_samples
from titan.contrib.flux.flow_options import SHAPES, FlowOptions
from titan.contrib.flux.shapes import Shapes


def test_shapes_belong_to_their_numbers() -> None:
    options = FlowOptions(context_len=1)
    first, again = (Shapes(options, FLAVORS["demo"], split="train", seed=3) for _ in range(2))
    rows, same = first.get(np.arange(64)), again.get(np.arange(64))
    assert np.array_equal(rows.pictures, same.pictures)
    assert rows.pictures.shape == (64, 1, 16, 16) and rows.pictures.min() == -1
    labels = rows.pooled_BC.argmax(1)
    assert {*labels.tolist()} == {*range(len(SHAPES))}
    inside = (rows.pictures > -1).mean(axis=(1, 2, 3))
    assert (
        inside[labels == SHAPES.index("disc")].mean()
        > inside[labels == SHAPES.index("ring")].mean()
    )


def test_a_page_has_a_cell_for_each_picture(tmp_path: Path) -> None:
    pixels = [np.full((8, 8, 3), 40 * n, dtype=np.uint8) for n in range(5)]
    write_page(tmp_path / "page.png", pixels, ["a"] * 5, ["a"] * 4 + ["b"])
    page = np.asarray(Image.open(tmp_path / "page.png"))
    assert page.shape == (2 * 170, 4 * 260, 3)
    assert (page[70, 60] == 0).all() and (page[70, 60 + 260] == 40).all()
    red, green = (
        (page[..., 0] > 180) & (page[..., 1] < 90),
        (page[..., 1] > 80) & (page[..., 0] < 60),
    )
    assert green[140:170].any() and not red[:170].any()  # the first four equal their texts


def test_a_package_adds_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("circles", "titan.contrib.flux.shapes:Shapes", "titan.pictures")
    monkeypatch.setattr("titan.contrib.flux.flow_options.plug_ins", lambda _: [entry])
    monkeypatch.setattr("titan.contrib.flux.flow_data.plug_ins", lambda _: [entry])
    config, sizes = JobConfig(), FLAVORS["demo"]
    found = {
        source: [key for key, _ in FlowOptions(source=source).problems(config, sizes)]
        for source in ("circles", "shapes")
    }
    assert "options.source" not in found["circles"] and "options.source" in found["shapes"]
    samples = open_samples(
        FlowOptions(source="circles", context_len=1), sizes, split="train", seed=0
    )
    assert isinstance(samples, Shapes)
