"""Flow matching, the task of diffusion models, on pictures or their latents.

It is rectified flow (arXiv:2209.03003) with the times of Stable Diffusion 3 (arXiv:2403.03206, section 3.1). A sample has a picture
x, noise n and a time t. The model sees (1 - t) x + t n, and predicts the velocity n - x. The loss is the mean of the squared error
over all elements of the global batch. Noise, time and dropout of the context belong to the sample's number, so that every layout,
accumulation and resumed run draws the same numbers.

B batch, S patches, T context positions, C channels of a patch, or of what the name says, A axes of a position
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor, nn

from titan.base.run_writer import run_files
from titan.data import DataError, require
from titan.data.base import Samples, TensorBatch
from titan.data.loader import Collate
from titan.data.order import derive_key
from titan.parallel.context import unshard_sequence
from titan.tasks.base import LossFunction, Microbatch, SampleContext, Task

from .flow_data import Encoded, FlowSamples, Rows, open_samples
from .flow_options import SHAPES, FlowOptions
from .patches import grid, to_patches, to_pictures

_TIMES = 8  # of validation, in turn


@dataclass(frozen=True, kw_only=True)
class FlowBatch(TensorBatch):
    """Micro-batch of pictures. valid_B is 1 for samples that count, int64."""

    ALONG_SEQUENCE = ("patches_BSC", "noise_BSC", "positions_BSA", "context_BTC")

    patches_BSC: Tensor
    noise_BSC: Tensor
    positions_BSA: Tensor
    context_BTC: Tensor
    pooled_BC: Tensor
    time_B: Tensor
    valid_B: Tensor

    def ignore_from(self, row: int) -> None:
        self.valid_B[row:] = 0


# ---- the task ------------------------------------------------------------------------------------


class FlowMatching(Task):
    """Flow matching: the model predicts the velocity between a picture and noise."""

    options: FlowOptions

    def dataset(self, split: str, *, rank: int, world: int) -> FlowSamples:
        seed = self.config.debug.seed if split == "train" else 0
        return open_samples(self.options, self.sizes, split=split, seed=seed)

    def collate(self, samples: Samples) -> Collate:
        assert isinstance(samples, FlowSamples)
        return partial(self._batch, seed=samples.seed, split=samples.split)

    def _batch(self, rows: Rows, *, first_sample: int, seed: int, split: str) -> FlowBatch:
        numbers = range(first_sample, first_sample + len(rows.pictures))
        patches = to_patches(rows.pictures, self.options.patch)
        noise, times, keeps = zip(*(self._draw(seed, split, n) for n in numbers), strict=True)
        keeps_B = np.array(keeps, dtype=np.float32)
        return FlowBatch(
            patches_BSC=torch.from_numpy(patches),
            noise_BSC=torch.from_numpy(np.stack(noise)),
            positions_BSA=self._positions().repeat(len(patches), 1, 1),
            context_BTC=torch.from_numpy(rows.context_BTC * keeps_B[:, None, None]),
            pooled_BC=torch.from_numpy(rows.pooled_BC * keeps_B[:, None]),
            time_B=torch.tensor(times, dtype=torch.float32),
            valid_B=torch.ones(len(patches), dtype=torch.int64),
            first_sample=first_sample,
        )

    def _draw(self, seed: int, split: str, number: int) -> tuple[ndarray, float, bool]:
        """Return the noise of a sample, (S, C), its time, and whether it keeps its context."""
        options = self.options
        random = np.random.Generator(
            np.random.Philox(key=derive_key(seed, split, "flow", number))
        )
        shape = (options.num_patches, self.sizes.in_channels)
        noise = random.standard_normal(shape, dtype=np.float32)
        if split != "train":
            return noise, (number % _TIMES + 0.5) / _TIMES, True
        is_normal = options.time == "logit_normal"
        time = 1 / (1 + np.exp(-random.standard_normal())) if is_normal else random.random()
        return noise, self._shifted(float(time)), random.random() >= options.dropout

    def _shifted(self, time: float) -> float:
        """Return the time that corresponds to `time` in a larger picture (arXiv:2403.03206, equation 23)."""
        shift = self.options.shift
        return shift * time / (1 + (shift - 1) * time)

    def _positions(self) -> Tensor:
        """Return index 0, row and column of each patch, (S, 3) int64."""
        side = torch.arange(self.options.size // self.options.patch)
        rows, columns = torch.meshgrid(side, side, indexing="ij")
        return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).flatten(0, 1)

    def describe(self) -> str:
        options = self.options
        source = (
            "shapes" if options.source == "shapes" else f"{options.source} of {options.path}"
        )
        size = f"{options.channels} x {options.size} x {options.size}"
        patches = f"{options.num_patches} patches of {options.patch} x {options.patch}"
        return f"{source}, {size} in {patches}, with {options.context_len} context positions"

    def fake_batch(self) -> FlowBatch:
        batch, sizes = self.config.training.local_batch_size, self.sizes
        length = self.options.num_patches
        return FlowBatch(
            patches_BSC=torch.zeros(batch, length, sizes.in_channels),
            noise_BSC=torch.zeros(batch, length, sizes.in_channels),
            positions_BSA=torch.zeros(batch, length, 3, dtype=torch.int64),
            context_BTC=torch.zeros(batch, self.options.context_len, sizes.context_dim),
            pooled_BC=torch.zeros(batch, sizes.pooled_dim),
            time_B=torch.zeros(batch),
            valid_B=torch.zeros(batch, dtype=torch.int64),
        )

    def random_batch(self, seed: int) -> FlowBatch:
        batch = super().random_batch(seed)
        assert isinstance(batch, FlowBatch)
        return replace(batch, positions_BSA=self._positions().repeat(len(batch.time_B), 1, 1))

    def microbatch(self, batch: FlowBatch) -> Microbatch:
        """Return noisy patches, and velocities with a last channel that is 1 where a sample counts."""
        time_B11 = batch.time_B[:, None, None]
        patches, noise = batch.patches_BSC, batch.noise_BSC
        counts_BS1 = (
            batch.valid_B[:, None, None].expand(*patches.shape[:2], 1).to(patches.dtype)
        )
        inputs = {
            name: getattr(batch, name)
            for name in ("positions_BSA", "context_BTC", "pooled_BC", "time_B")
        }
        if self.sizes.guidance_embed:
            inputs["guidance_B"] = torch.full_like(batch.time_B, self.options.guidance)
        return Microbatch(
            (1 - time_B11) * patches + time_B11 * noise,
            torch.cat([noise - patches, counts_BS1], dim=-1),
            batch.valid_B.sum() * patches[0].numel(),
            inputs,
        )

    def loss(self, mesh: Any, *, output: Any, float8: Any) -> LossFunction:
        return squared_error_sum

    # ---- pictures of the model -------------------------------------------------------------------

    def generate(self, run: SampleContext) -> None:
        """Draw pictures, a column for each label, into samples/step-N.png, or latents into a file .npy. They are the same on every layout."""
        patches = self.drawn(run.train_step)
        if run.rank == 0:
            kind = "png" if self.options.channels in (1, 3) else "npy"
            name = f"samples/step-{run.step}.{kind}"
            run_files(run.run_dir).make(name, lambda file: self._write(patches, file))

    def draw(self, model: nn.Module, text: str, *, seed: int, file: Path) -> None:
        """Draw pictures of a label, or without a label a column for each one, into a file .png or .npy.

        Args:
            model: the model.
            text: number of the label, or name of the shape; empty: all labels.
            seed: seed of the noise.
            file: the file to write.

        Raises:
            DataError: there is no such label, or no such kind of file.
        """
        options, label = self.options, None
        names = SHAPES[: options.classes] if options.source == "shapes" else ()
        what, count = "label of this task", options.classes
        if options.source == "encoded":  # whose encodings are all that the model knows of it
            what, count = "item that is held out", self._conditions().num_items
        if text:
            label = (
                names.index(text) if text in names else int(text) if text.isdecimal() else -1
            )
            if not 0 <= label < count:
                known = f"0 to {count - 1}" + (f" or {', '.join(names)}" if names else "")
                raise DataError(f'--prompt "{text}": no {what}; take {known}')
        endings, kinds = [".npy"], "latents; end it in .npy"
        if options.channels in (1, 3):
            endings, kinds = [".npy", ".png"], "pictures; end it in .png or .npy"
        if file.suffix not in endings:
            raise DataError(f"--output {file}: the model draws {kinds}")
        noise = self._of_noise(seed=seed, label=label).to(next(model.parameters()).device)
        self._write(self._drawn(model, self.microbatch(noise), None), file)

    def _write(self, patches: ndarray, file: Path) -> None:
        pictures = to_pictures(patches, self.options)
        if file.suffix == ".npy":
            np.save(file, pictures)
        else:
            image = require("PIL.Image", purpose="pictures", extra="vision")
            pixels = grid(pictures, self.options.sample_rows)
            # Pillow has no third dimension for grey.
            image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file)

    def drawn(self, train_step: Any) -> ndarray:
        """Return patches of `sample_rows` pictures of each label, (rows x labels, S, C) fp32. All ranks call this, and draw all pictures."""
        (model,) = train_step.model_parts
        local = train_step.to_local(self._of_noise())
        return self._drawn(model, local, train_step.context)

    def _conditions(self) -> FlowSamples:
        """Return the dataset with the conditions of pictures to draw. Conditions of labels need no files."""
        kind = Encoded if self.options.source == "encoded" else FlowSamples
        return kind(self.options, self.sizes, split="validation", seed=0)

    def _of_noise(self, *, seed: int = 0, label: int | None = None) -> FlowBatch:
        """Return noise at time 1, to draw `sample_rows` pictures of each label or of one label: each twice, with context and without."""
        options = self.options
        which = slice(label, None if label is None else label + 1)
        count = options.classes if label is None else label + 1
        conditions = self._conditions().conditions(count)
        context, pooled = (np.concatenate([c[which]] * options.sample_rows) for c in conditions)
        pictures = np.zeros(
            (len(context), options.channels, options.size, options.size), np.float32
        )
        rows = Rows(pictures, context, pooled)
        batch = self._batch(rows, first_sample=0, seed=seed, split="sample")
        without = {"context_BTC": torch.zeros_like, "pooled_BC": torch.zeros_like}
        double = batch.map(lambda name, x: torch.cat([x, without.get(name, torch.clone)(x)]))
        return replace(double, time_B=torch.ones_like(double.time_B))

    @torch.no_grad()
    def _drawn(self, model: nn.Module, local: Microbatch, cp: Any) -> ndarray:
        """Return the patches at time 0, after Euler steps with the guided velocity (arXiv:2207.12598). `cp`: mesh of context parallelism."""
        options = self.options
        x_BSC = local.input
        times = [
            self._shifted(n / options.sample_steps) for n in range(options.sample_steps, -1, -1)
        ]
        for time, next_time in pairwise(times):
            inputs = {**local.inputs, "time_B": torch.full_like(local.inputs["time_B"], time)}
            with_context, alone = model(x_BSC, **inputs).float().chunk(2)
            velocity = alone + options.sample_guidance * (with_context - alone)
            x_BSC = x_BSC - (time - next_time) * velocity.repeat(2, 1, 1)
        x_BSC = x_BSC.chunk(2)[0].contiguous()
        if cp is not None:
            parts = [torch.empty_like(x_BSC) for _ in range(cp.size())]
            dist.all_gather(parts, x_BSC, group=cp.get_group())
            balanced = self.config.parallelism.splits_from_both_ends
            x_BSC = unshard_sequence(
                torch.cat(parts, 1), dim=1, size=cp.size(), balanced=balanced
            )
        return x_BSC.cpu().numpy()


def squared_error_sum(output_BSC: Tensor, targets_BSC: Tensor) -> Tensor:
    """Return the sum of squared errors, fp32. The last channel of the targets is the weight of a patch."""
    target_BSC, weight_BS1 = targets_BSC[..., :-1], targets_BSC[..., -1:]
    return (F.mse_loss(output_BSC.float(), target_BSC, reduction="none") * weight_BS1).sum()
