"""LLaVA against transformers' implementation, sharded against one process, and its pictures and rows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.support.jobs import SMALL as SMALL_JOB
from tests.support.jobs import job, with_changes
from tests.support.layouts import (
    ALWAYS,
    BOUND,
    GLOBAL_BATCH,
    REPLICAS,
    RING,
    SEQUENCE,
    TRACED,
    ULYSSES,
    ZERO_BUBBLE,
    Layout,
    cp,
    differences,
    fsdp,
    pp,
    tp,
    train,
)
from tests.support.metrics import read_json_lines
from tests.support.ranks import Pool
from tests.support.tables import table, tabled
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.checks.machine import check_machine
from titan.checks.rules import check
from titan.config.schema import JobConfig
from titan.contrib.llava import FLAVORS, build_model
from titan.contrib.llava.huggingface import hf_config, hf_files, read_config
from titan.contrib.llava.image_text import PictureBatch, Pictures, image_index, patches_of
from titan.contrib.llava.image_text_options import ImageTextOptions
from titan.data import DataError
from titan.data.base import TensorBatch
from titan.data.packing import IGNORED, pack
from titan.data.special_tokens import SpecialTokens
from titan.huggingface.conversion import from_hf, to_hf
from titan.tasks import task_of
from titan.tools.answers import find_model, load_model
from titan.tools.generate import main as generate

SMALL = dataclasses.replace(FLAVORS["tiny"], n_layers=2)
PATCHES, TOKEN, BOS, EOS = SMALL.num_patches, SMALL.image_token, 1, 2
ROOM = 3  # pictures of a row


def picture_batch(layout: Layout, step: int) -> TensorBatch:
    """Rows of nought to three documents with a picture, and one without; the last row has none, and most rows have padding."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.full((GLOBAL_BATCH, SEQUENCE + 1), IGNORED)
    for number, row in enumerate(rows):
        documents = []
        for _ in range((number + 1) % (ROOM + 1)):
            text = torch.randint(3, TOKEN, (3 + 2 * number % 9,), generator=generator)
            documents += [BOS, *[TOKEN] * PATCHES, *text.tolist(), EOS]
        documents += [BOS, *torch.randint(3, TOKEN, (4,), generator=generator).tolist(), EOS]
        row[: len(documents)] = torch.tensor(documents)
    images = torch.randn(GLOBAL_BATCH, ROOM, PATCHES, SMALL.patch_dim, generator=generator)
    packed = pack(
        rows.numpy(),
        special_tokens=SpecialTokens(BOS, EOS),
        reset_positions=True,
        document_mask=True,
    )
    return PictureBatch.of(packed, images, image_token=TOKEN)


def rows(*layouts: tuple[str, tuple[tuple[str, int], ...], dict[str, Any]]) -> list[Layout]:
    # The gradients of the projector are large. Where one of its biases' passes through zero, AdamW would take its rounding error
    # for a step, unless eps is above that error (see `job_of`).
    adamw = (("eps", 1e-4),)
    shared: dict[str, Any] = {
        "model": ("llava", "tiny"),
        "batch": picture_batch,
        "optimizer": adamw,
    }
    return [Layout(name, degrees, **shared, **options) for name, degrees, options in layouts]


LAYOUTS = rows(
    ("accumulation", (), {"accumulation": 2}),
    ("FSDP2", fsdp(2), {"settings": ALWAYS}),
    ("FSDP2, prefetch", fsdp(2), {"settings": (("fsdp_prefetch", 2),)}),
    ("HSDP", (*REPLICAS, *fsdp(2)), {"accumulation": 2}),
    ("CP all-gather", cp(2), {}),
    ("CP Ulysses", cp(2), {"settings": ULYSSES}),
    ("CP ring", cp(2), {"settings": RING}),
    ("PP 1F1B", pp(2), {}),
    ("PP zero bubble", pp(2), {"settings": ZERO_BUBBLE}),
    ("FSDP2 x TP+SP, full AC", (*fsdp(2), *tp(2)), {"recompute": "full"}),
    ("FSDP2, selective AC, compiled", fsdp(2), {"recompute": "selective", "compiled": TRACED}),
    ("TP+SP, compiled", tp(2), {"compiled": TRACED}),
    ("FSDP2 x CP x TP+SP", (*fsdp(2), *cp(2), *tp(2)), {}),
    ("PP x FSDP2 x TP+SP", (*pp(2), *fsdp(2), *tp(2)), {}),
    ("FSDP2, frozen encoder, full AC", fsdp(2), {"freeze": ("vision.*",), "recompute": "full"}),
    (
        "TP+SP, only the projector",
        tp(2),
        {"freeze": ("vision.*", "[tlno]*"), "compiled": TRACED},
    ),
)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Any:
    """Return what one process computes with the same parameters frozen."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def get(freeze: tuple[str, ...]) -> dict[str, Any]:
        if freeze not in known:
            [layout] = rows(("one process", (), {"freeze": freeze}))
            [known[freeze]] = pool.run(1, train, layout)
        return known[freeze]

    return get


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_equals_one_process(layout: Layout, alone: Any, pool: Pool) -> None:
    reference, results = alone(layout.freeze), pool.run(layout.ranks, train, layout)
    for result in results:
        # Softmax takes no notice of what all keys share: these gradients are rounding errors, and so are the weights.
        for name in [name for name in result["weights"] if name.endswith(".wk.bias")]:
            found = result["gradients"].pop(name, torch.zeros(1))
            assert found.abs().max() < 1e-7 and result["weights"].pop(name).abs().max() < 1e-3
    reference = reference | {
        what: {n: t for n, t in reference[what].items() if not n.endswith(".wk.bias")}
        for what in ("gradients", "weights")
    }
    found = differences(results, reference)
    assert max(found.values()) < BOUND, found


def test_sizes() -> None:
    # As published: with the encoder's last block and the norm after it, which the decoder does not read.
    block = 4 * (1024 + 1) * 1024 + 2 * 1024 * 4096 + 1024 + 4096 + 4 * 1024
    assert FLAVORS["7B"].num_params + block + 2 * 1024 == 7_063_427_072
    published = table(__file__, "published")
    assert read_config(published) == FLAVORS["7B"]
    for name in ("tiny", "13B"):
        with torch.device("meta"):
            model = build_model(FLAVORS[name])
        assert FLAVORS[name].num_params == sum(p.numel() for p in model.parameters())
        assert read_config(hf_config(FLAVORS[name])) == FLAVORS[name]


def their_model(transformers: Any) -> Any:
    """The small model in transformers, with drawn weights."""
    written = hf_config(SMALL)
    written["vision_feature_layer"] = -2
    written["vision_config"]["num_hidden_layers"] = SMALL.vision_layers + 1
    twin = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(**written)
    ).eval()
    for name, parameter in twin.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if "norm" in name else 0.2)
    return twin


def pixels_of(patches_NPC: torch.Tensor) -> torch.Tensor:
    """Return the pictures of patches, (N, 3, height, width)."""
    size, side = SMALL.image_size, SMALL.patch_size
    cut = patches_NPC.view(-1, size // side, size // side, 3, side, side)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, size, size)


@pytest.mark.parametrize("old_names", [False, True])
def test_transformers_both_ways(old_names: bool, tmp_path: Path) -> None:
    """A folder of transformers', with names as it writes them now or as published, and the folder that comes back, compute the same."""
    transformers = pytest.importorskip("transformers")
    twin = their_model(transformers)
    twin.save_pretrained(tmp_path / "theirs")
    if old_names:
        file = tmp_path / "theirs" / "model.safetensors"
        new = "vision_tower.vision_model.".join
        save_file({new(n.split("vision_tower.")): t for n, t in load_file(file).items()}, file)
    left = [
        line for line in from_hf(tmp_path / "theirs", tmp_path / "ours") if "left out" in line
    ]
    assert len(left) == 2 and "encoder.layers.2." in left[1]
    to_hf(tmp_path / "ours", tmp_path / "back", dtype=None, file_bytes=10**9, tokenizer="bytes")
    back = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
    assert json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())["crop_size"]
    model = load_model(*find_model(tmp_path / "ours", "bytes"), device=torch.device("cpu"))
    batch: Any = picture_batch(LAYOUTS[0], 0)
    tokens, rows = (
        batch.tokens_BS[2:3],
        batch.images[2:3],
    )  # three pictures, all there are room for
    with torch.no_grad():
        ours = model(tokens, images=rows, image_index_BS=image_index(tokens, image_token=TOKEN))
        for other in (twin, back):
            expected = other(tokens, pixel_values=pixels_of(rows[0])).logits
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten pictures of several sizes, each with a text of another length."""
    draw = np.random.default_rng(0).integers
    lines = []
    for number in range(10):
        shape = (8 + number, 16 - number, 3)
        Image.fromarray(draw(256, size=shape, dtype=np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "text": "word " * (1 + number)}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    return tmp_path


def picture_job(folder: Path, **changes: dict[str, Any]) -> JobConfig:
    options = {"path": str(folder), "images": 2, "samples": 2, "max_new_tokens": 4}
    base = with_changes(
        SMALL_JOB,
        model={"name": "llava", "overrides": {"n_layers": 2}},
        task={"options": options},
        tokenizer={"name": "bytes"},
        training={"seq_len": 64, "steps": 4},
        data={"validation_fraction": 0.3, "document_mask": True, "reset_positions": True},
        validation={"enable": True, "freq": 4, "steps": 1},
    )
    return job(folder / "run", base=base, **changes)


def test_rows(folder: Path) -> None:
    """Each picture of an epoch is in one row, before its text, and only text is predicted."""
    task: Any = task_of(picture_job(folder))
    loader, texts = task.loader(rank=0, world=1), []
    for _ in range(loader.samples.num_samples or 0):
        [batch] = loader.next_step()
        for tokens, labels, index, images in zip(
            batch.tokens_BS, batch.labels_BS, batch.image_index_BS, batch.images, strict=True
        ):
            # Padding looks like begin tokens, too.
            begins = (tokens[:-1] == task.special_tokens.bos_id) & (tokens[1:] == TOKEN)
            starts = torch.nonzero(begins).flatten().tolist()
            assert index[tokens == TOKEN].tolist() == [*range(len(starts) * PATCHES)]
            assert (index[tokens != TOKEN] == -1).all() and not images[len(starts) :].any()
            for start, end, image in zip(starts, [*starts[1:], 64], images, strict=False):
                kept = labels[start:end][labels[start:end] != IGNORED]
                text = task.tokenizer.decode(kept[kept < 256].tolist())
                texts.append(text)
                number = text.count("word") - 1
                pixels = task.pictures.pixels(number, side=8)
                np.testing.assert_array_equal(image, patches_of(pixels, SMALL))
    ours = [task.pictures.texts[number] for number in task.numbers["train"]]
    assert task.numbers["validation"] and sorted(texts) == sorted(2 * ours)  # two rows a step


def test_pictures_are_prepared_as_transformers_does(folder: Path) -> None:
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    settings = hf_files(SMALL)["preprocessor_config.json"]
    prepare = clip.CLIPImageProcessorPil(**{k: settings[k] for k in ("size", "crop_size")})
    pictures = Pictures.open(ImageTextOptions(path=str(folder)))
    for number in range(10):
        theirs = prepare(Image.open(folder / f"{number}.png"), return_tensors="pt")
        ours = torch.from_numpy(patches_of(pictures.pixels(number, side=8), SMALL))
        expected = theirs["pixel_values"]
        torch.testing.assert_close(pixels_of(ours[None]), expected, rtol=0, atol=1e-5)


def test_grey_of_16_bits_is_scaled_and_a_strip_refused(tmp_path: Path) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(grey).save(tmp_path / "8.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "16.png")
    Image.new("RGB", (20_000, 1)).save(tmp_path / "strip.png")
    names = [tmp_path / name for name in ("8.png", "16.png", "strip.png")]
    pictures = Pictures(tmp_path, [""] * 3, names)
    assert np.array_equal(pictures.pixels(0, side=8), pictures.pixels(1, side=8))
    with pytest.raises(DataError, match="cannot be read: 20,000 x 1 pixels are a strip"):
        pictures.pixels(2, side=8)


@pytest.mark.parametrize(
    "prompt", ["USER: <image> what is it? ASSISTANT:", "<image>", "a b <image>", "cat", ""]
)
def test_generates_what_transformers_does_of_a_picture(
    prompt: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare greedy text on a folder that transformers wrote: with a placeholder in the prompt, and with the picture before the text."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    twin = their_model(transformers)
    twin.save_pretrained(theirs := tmp_path / "theirs")
    words = [f"w{i}" for i in range(TOKEN - 2)]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", *words])})
    made = tokenizers.Tokenizer(model)
    made.model.unk_token = "<unk>"
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<image>"])
    assert made.token_to_id("<image>") == TOKEN
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    reader.save_pretrained(theirs)
    command = f"--checkpoint {theirs} --image {folder}/3.png --temperature 0".split()
    assert generate([*command, "--prompt", prompt, "--max-new-tokens", "12"]) == 0
    text = prompt if "<image>" in prompt else "<image>" + prompt
    ids = reader(text.replace("<image>", "<image>" * PATCHES), return_tensors="pt")["input_ids"]
    patches = patches_of(Pictures(folder, [""], [folder / "3.png"]).pixels(0, side=8), SMALL)
    pixels = pixels_of(torch.from_numpy(patches[None]))
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = twin.generate(ids, pixel_values=pixels, **options)[0, ids.shape[1] :]
    assert capsys.readouterr().out.split() == reader.decode(expected).split()


def test_parquet_has_the_same_pictures(folder: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    lines = map(json.loads, (folder / "captions.jsonl").read_text().splitlines())
    rows = [
        {"picture": (folder / row["image"]).read_bytes(), "text": row["text"]} for row in lines
    ]
    (folder / "parquet").mkdir()
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "parquet" / "0.parquet")
    ours = Pictures.open(ImageTextOptions(path=str(folder / "parquet"), image_key="picture"))
    theirs = Pictures.open(ImageTextOptions(path=str(folder)))
    assert len(ours.texts) == 10 and ours.texts == theirs.texts
    np.testing.assert_array_equal(ours.pixels(3, side=8), theirs.pixels(3, side=8))
    with pytest.raises(DataError, match="no column 'image'; its columns are picture, text"):
        Pictures.open(ImageTextOptions(path=str(folder / "parquet")))


def run(config: JobConfig, kind: type[Trainer] = Trainer) -> list[dict[str, Any]]:
    trainer = kind(config)
    run_to_end(trainer)
    return read_json_lines(Path(config.job.dump_folder) / "metrics.jsonl")


def test_resumes_on_another_layout(folder: Path, pool: Pool) -> None:
    """Steps 3 and 4 after a resume: bit for bit on the same layout, on others to rounding."""
    changes = {"checkpoint": {"enable": True, "interval": 2, "keep_latest_k": 0}}
    config = picture_job(folder, **changes)
    whole = run(config)
    assert [row["step"] for row in whole] == [1, 2, 3, 4] and 0 <= whole[-1]["described"] <= 1
    assert (folder / "run" / "samples" / "step-4.png").stat().st_size > 1000
    for ranks, axis in ((1, "tensor"), (2, "tensor"), (2, "context")):
        shutil.rmtree(folder / "run" / "checkpoint" / "step-4")
        shutil.rmtree(folder / "run" / "samples")
        (folder / "run" / "metrics.jsonl").unlink()
        layout = {f"{axis}_parallel_degree": ranks}
        [rows, *_] = pool.run(
            ranks, run, picture_job(folder, **changes, parallelism=layout), PoolTrainer
        )
        assert [row["step"] for row in rows] == [3, 4]
        for name in ("loss", "grad_norm", "validation_loss", "described"):
            ours = [row[name] for row in rows if name in row]
            theirs = [row[name] for row in whole[2:] if name in row]
            assert ours == (theirs if ranks == 1 else pytest.approx(theirs, rel=1e-5))
        assert (folder / "run" / "samples" / "step-4.png").is_file()


@tabled("changes, key")
def test_problems(changes: dict[str, Any], key: str, folder: Path) -> None:
    assert not check(picture_job(folder)) and not check_machine(picture_job(folder))
    [problem] = check_machine(picture_job(folder / "nowhere"))
    assert problem.key == "task.options.path"
    assert key in [problem.key for problem in check(picture_job(folder, **changes))]
