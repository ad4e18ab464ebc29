"""Hardware profiles: the figures that kernels and transfers are priced with, each with its source.

A profile is a TOML file, by name in titan/sim/hardware/ or by its path. `base` names another
profile whose figures it inherits; every figure that it states itself needs a line in [sources].
Peak rates and memory come from titan/base/hardware.toml, by `device`, unless the file states them.

An achievable share is the share of the peak that a kernel's inner loop reaches while the device is
busy for minutes (power, clocks). cost.py and network.py add the cost of tiles, waves, short kernels
and small messages. Imports no torch.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from titan.base.hardware import HARDWARE, MARGIN, by_name
from titan.config.errors import ConfigError, Problem, choose, did_you_mean, key_text
from titan.config.options import mistake
from titan.config.toml import read_toml

from .attention import FLEX, attention_kernel_of
from .measured import BUS, CARDS, tables

_FOLDER = Path(__file__).parents[1] / "hardware"
_SELF = {"name", "note", "assumes", "kin", "unsupported"}
"""Entries about the profile itself."""
_NOT_FROM_BASE = {"matmul_alone", *_SELF}
_DTYPES = sorted({"float64"}.union(*(row.peak_flops for row in HARDWARE)))
_NOT_FIGURES = {"device", "is_cpu", "margin", "measured", "sources", *_SELF}
_NOT_SET = {"network", "attention_kernel", "compute_capability", *_NOT_FIGURES}
"""Entries that `--set` does not change."""


def _increasing(curve: Curve) -> Curve:
    """Return a curve. Raises ValueError if its sizes do not increase."""
    if not curve or any(size >= later for (size, _), (later, _) in pairwise(curve)):
        raise ValueError("a curve has one point [size, value] or more, and its sizes increase")
    return curve


def _known_dtypes(figures: dict[str, float]) -> dict[str, float]:
    """Return figures by dtype. Raises ValueError for an unknown dtype, and if bfloat16 is missing."""
    for dtype in figures:
        if dtype not in _DTYPES:
            raise ValueError(f"there is no dtype '{dtype}'{choose(dtype, _DTYPES)}")
    if "bfloat16" not in figures:
        raise ValueError("needs at least bfloat16")
    return figures


Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
"""A time, a size of memory or another figure that may be 0."""
Curve = Annotated[tuple[tuple[Rate, Rate], ...], AfterValidator(_increasing)]
"""Points (size, value), by increasing size."""


class Tier(BaseModel):
    """Switches that join a block of nodes, with the block's uplink.

    Attributes:
        nodes: nodes in the block.
        oversubscription: bandwidth of the cards over that of the uplink.
        left: share of the uplink that other jobs leave.
        rails: whether cards of the same place in each node share a switch, so that other pairs of
            cards connect above the block.
        latency_us: one-way latency, on top of that between nodes of a block.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: Count
    oversubscription: float = Field(ge=1, default=1.0)
    left: Share = 1.0
    rails: bool = False
    latency_us: Amount = 0.0

    @property
    def share(self) -> float:
        """Each card's share of its bandwidth on the uplink, if all of the block use it."""
        return self.left / self.oversubscription


def _smallest_first(network: tuple[Tier, ...]) -> tuple[Tier, ...]:
    """Return the blocks of a network. Raises ValueError if they do not grow."""
    if any(tier.nodes >= above.nodes for tier, above in pairwise(network)):
        raise ValueError("the smallest block of nodes comes first, and each later one has more")
    return network


class Profile(BaseModel):
    """Figures of one kind of machine.

    GB/s and TFLOP/s are decimal, bandwidths count one direction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    device: str = ""
    """Row of titan/base/hardware.toml that peaks and memory are taken from."""
    is_cpu: bool = False
    """Whether jobs run on CPUs, which decides the meaning of training.mixed_precision_param = "auto"."""
    peak_tflops: Annotated[dict[str, Rate], AfterValidator(_known_dtypes)]
    """Peak of dense matmuls, by dtype of the operands."""
    memory_gib: Rate
    margin: float = Field(default=MARGIN, ge=0, lt=1)
    """Share of the memory that a job must leave free to fit."""
    memory_tb_per_s: Rate

    matmul_share: Annotated[dict[str, Share], AfterValidator(_known_dtypes)]
    """Share of the peak that large products sustain, by dtype; a missing dtype has bfloat16's. With `measured`, it is the one figure that
    the tables lack."""
    matmul_alone: Rate = 1.0
    """Rate of 16-bit matmuls in a job of one card, over their rate in larger jobs. Grouped matmuls have no such gain. A profile
    does not take it over from its base."""
    measured: str = ""
    """Card whose measured tables say how products, collectives and attention compare by shape (measured.py). Empty: none does."""
    num_sms: Count
    grouped_rows: int = Field(ge=0)
    """Rows to which torch's grouped matmul rounds up each group. 0: it is a loop of products."""
    compute_capability: Amount = 0.0
    """Compute capability of NVIDIA's devices, such as 9.0."""
    attention_kernel: str
    """Kernel that torch's scaled_dot_product_attention runs in 16 bits: "flash2", "cudnn" or "flash3". "cudnn": on this card torch prefers
    it, as far as its version does (attention.py). The curve "efficient" is for inputs that FlashAttention does not support."""
    cudnn_head_dim: int = 128
    """Largest head dim of cuDNN's kernel, of keys or of values. FlashAttention-2 computes larger ones."""
    attention_forward_tflops: dict[str, Curve]
    attention_backward_tflops: dict[str, Curve]
    """Rates by kernel and sequence length, of the FLOPs that a causal mask leaves."""
    attention_causal_share: dict[str, Curve]
    """Rate of causal attention over that without a mask, by kernel and sequence length."""
    attention_head_dim_share: dict[str, Curve] = {}
    """Rate over that of head dim 128, by kernel and head dim. "KERNEL_backward" is for backward passes. Between the points it is interpolated,
    beyond them the nearest holds. Kernels without a curve follow the card's measured tables."""
    memory_share: Annotated[tuple[tuple[Rate, Share], ...], AfterValidator(_increasing)]
    """Achievable share of the memory bandwidth, by bytes that a kernel moves."""
    eager_tb_per_s: Amount
    """Most bandwidth that PyTorch's own kernels reach, which have fewer loads in flight than fused ones. 0: as fused ones."""
    kernel_share: dict[str, Share] = {}
    """Most of the memory bandwidth that single kernels of PyTorch reach, by name, as a share."""
    transpose_share: Share
    """Part of this share that a transposing fused kernel reaches: it reads along one dimension and writes along another, like
    float8's casts."""
    kernel_min_us: Amount
    """Duration of a kernel with almost no work."""

    host_tiny_us: Rate
    """Host time of a tiny eager operation: torch.add of 16 x 64 numbers on the CPU. The host's recorded pace counts in it."""
    launch_us: Amount
    launch_compiled_us: Amount
    launch_transfer_us: Amount
    """Host time beyond that for the launch of an eager kernel and of a collective, and all of it for a compiled kernel."""
    compiled_call_us: Amount
    """Host time of a call of compiled code, beside its kernels."""
    host_gb_per_s: Rate
    """Bandwidth between the device and pinned host memory."""
    pageable_gb_per_s: Rate
    """Bandwidth from the device into host memory that is neither pinned nor touched before, as for `checkpoint.async_mode = "async"`."""
    host_us: Amount
    host_memory_gb_per_s: Rate
    """Each GPU's share of the bandwidth of the host's processors with their own memory: they update offloaded parameters."""
    host_tflops: Rate
    """Each GPU's share of the host's matmul rate, for Muon's update of offloaded parameters."""

    gpus_per_node: Count
    ring_gb_per_s: Rate
    """Bus bandwidth of rings within a node: all-gather, reduce-scatter."""
    all_reduce_gb_per_s: Rate
    """Bus bandwidth of the best all-reduce within a node (in the switch, if it supports that)."""
    all_to_all_gb_per_s: Rate
    p2p_gb_per_s: Rate
    nic_gb_per_s: Rate
    """Bandwidth of each GPU's share of its node's network cards."""
    nic_share: Share
    network: Annotated[tuple[Tier, ...], AfterValidator(_smallest_first)]
    """Blocks of nodes, the smallest first. Empty: all nodes reach each other at the speed of their cards."""
    compute_share_beside_transfer: Share
    """Rate of kernels while a collective holds SMs and memory bandwidth."""
    transfer_share_beside_compute: Share
    """Rate of collectives while a kernel holds SMs and memory bandwidth."""
    speed_deviation: Amount
    """Standard deviation of speed between devices of the kind. The more devices, the slower is the slowest."""
    slowest_of: Count
    """Number of devices whose slowest the achievable shares describe: 1 if one device was measured, all devices of a job if its
    speed set the shares."""

    power_w: Amount
    """Most power of one device without its host and its cooling. 0: not known."""

    context_gib: Amount
    """Driver context and kernels, outside the allocator."""
    workspace_mib: Amount
    """cuBLAS workspace, inside the allocator."""
    communicator_gib: Amount
    """Buffers of each process group's communicator, outside the allocator."""

    sources: dict[str, str]
    note: str = ""
    """Known differences between its predictions and runs; shown with the predictions."""
    assumes: str = ""
    """Properties of the machine that its name leaves open: power, memory."""
    kin: tuple[str, ...] = ()
    """Profiles of other machines with the same name. The speed of a job on them shows the uncertainty."""
    unsupported: bool = False
    """Whether its main figures lack sources, so that times are not to be relied on."""

    @model_validator(mode="after")
    def _check(self) -> Profile:
        """Raise ValueError if the kernel of attention has no curve."""
        if self.attention_kernel not in self.attention_kernels:
            raise ValueError(f"no curve of attention_kernel '{self.attention_kernel}'")
        return self

    @property
    def device_kind(self) -> str:
        """Kind of the device, as torch calls it."""
        return "cpu" if self.is_cpu else "cuda"

    @property
    def usable_gib(self) -> float:
        """Most memory that a job may need to fit."""
        return self.memory_gib * (1 - self.margin)

    @property
    def card_bytes_per_s(self) -> float:
        """Bytes per second that a card reaches."""
        return self.nic_gb_per_s * self.nic_share * 1e9

    @property
    def attention_kernels(self) -> list[str]:
        """Kernels of attention that the profile has rates of."""
        forward, backward = self.attention_forward_tflops, self.attention_backward_tflops
        return sorted(forward.keys() & backward.keys() & self.attention_causal_share.keys())

    def with_attention(
        self, kernel: str, *, backend: str = "auto", torch_version: str = ""
    ) -> Profile:
        """Return the profile with the kernel that computes attention without a mask.

        Args:
            kernel: the kernel. "auto": that of the backend.
            backend: `model.attention_backend`. With "auto", a card whose profile has another kernel than cuDNN's keeps it.
            torch_version: torch of the run; empty: the installed one.

        Raises:
            ConfigError: the profile has no curve of this kernel.
        """
        if kernel == "auto":
            if backend == "auto" and self.attention_kernel != "cudnn":
                return self
            torch = torch_version or version("torch")
            capability = self.compute_capability
            kernel = attention_kernel_of(backend, torch_version=torch, capability=capability)
        elif kernel not in (known := self.attention_kernels):
            message = f"{self.name} has no figures of {kernel}, only of {', '.join(known)}"
            raise ConfigError([Problem("simulator.attention_kernel", 0, "", message)])
        return self.model_copy(update={"attention_kernel": kernel})

    def rates_of(self, kernel: str) -> str:
        """Return the kernel whose curves a kernel of attention is priced by: itself, or the likest that the profile has."""
        # FlexAttention is compiled to FlashAttention-2's algorithm. FlashAttention-3 and -4 are near cuDNN.
        near = "flash2" if kernel in (FLEX, "efficient") else "cudnn"
        known = self.attention_kernels
        return next(k for k in (kernel, near, "cudnn", "flash2", *known) if k in known)

    def straggler(self, world_size: int) -> float:
        """Return the time of computation on the slowest of `world_size` devices, relative to the achievable shares."""
        return 1 + self.lag(max(world_size, self.slowest_of)) - self.lag(self.slowest_of)

    def lag(self, world_size: int) -> float:
        """Return how much longer the slowest of `world_size` devices takes than an average device, as a share."""
        if world_size == 1:
            return 0.0
        # Blom 1958: the largest of n draws from a normal distribution is the quantile at (n - 3/8)
        # / (n + 1/4).
        draws = (world_size - 0.375) / (world_size + 0.25)
        return self.speed_deviation * NormalDist().inv_cdf(draws)


def on_curve(curve: Curve, size: float) -> float:
    """Return the value at `size`: between points by the logarithm of the size, and constant beyond the ends.

    Args:
        curve: points (size, value), by increasing size.
        size: size to look up.

    Returns:
        The value.
    """
    place = bisect_left(curve, (size,))
    if place == 0 or place == len(curve):
        return curve[min(place, len(curve) - 1)][1]
    (size0, value0), (size1, value1) = curve[place - 1], curve[place]
    return value0 + (value1 - value0) * log(size / size0) / log(size1 / size0)


def with_figures(profile: Profile, changes: Sequence[str]) -> Profile:
    """Return a profile with other figures, which its assumptions name.

    Args:
        profile: the profile.
        changes: "FIGURE=+20%" or "FIGURE=-10%", relative to the profile's; of a curve, for all of its values. "FIGURE=VALUE" for a number.

    Raises:
        ConfigError: there is no such figure, or it cannot have the value.
    """
    values = profile.model_dump()
    figures = sorted(values.keys() - _NOT_SET)
    for text in changes:
        name, _, change = text.partition("=")
        if name not in figures:
            raise mistake("--set", f"there is no figure '{name}'{choose(name, figures)}")
        is_relative = re.fullmatch(r"[+-]\d+(\.\d+)?%", change)
        is_number = isinstance(values[name], int | float)
        if not is_relative and not (is_number and re.fullmatch(r"\d+(\.\d+)?", change)):
            message = f"'{text}': expected {name}=+20%, or a number for a single figure"
            raise mistake("--set", message)
        # pydantic reads numbers from text.
        values[name] = (
            scaled(values[name], 1 + float(change[:-1]) / 100) if is_relative else change
        )
    assumes = ", ".join(filter(None, (profile.assumes, *changes)))
    try:
        return Profile(**values | {"assumes": assumes})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise mistake("--set", f"{key_text(wrong['loc'])}: {_plain(wrong)}") from None


def scaled(value: Any, factor: float) -> Any:
    """Return a figure times a factor: a number, the values of a curve, or those of a table."""
    if isinstance(value, dict):
        return {key: scaled(part, factor) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple((size, part * factor) for size, part in value)
    return value * factor


def profile_names() -> list[str]:
    """Return the names of the profiles that titan has."""
    return sorted(file.stem for file in _FOLDER.glob("*.toml"))


def hardware_names() -> str:
    """Return all names that --hardware takes, for help and errors: `titan check` and `titan sim` share one list."""
    simulated = profile_names()
    others = [row.name for row in HARDWARE if row.name not in simulated]
    return (
        f"{', '.join(simulated)}, or a profile's TOML file; for `titan check` by formula also {', '.join(others)}, of which the "
        "simulator has no figures"
    )


def load_profile(name_or_path: str | Path) -> Profile:
    """Return a profile by its name, or from a file.

    Args:
        name_or_path: name of a file in titan/sim/hardware/, or the path of a TOML file.

    Returns:
        The profile, with the figures of its base and of its device.

    Raises:
        ConfigError: there is no such profile, or its file has a mistake.
    """
    file = _find(name_or_path, asked_in="hardware")
    values, lines = _merged(file)
    values.setdefault("name", file.stem)
    try:
        profile = Profile(**values)
        for relative in profile.kin:
            _find(relative, asked_in=f"{file}: kin")
        return profile
    except ValidationError as error:
        problems = [
            # Lines of the file at hand: a figure taken over from a base has none here.
            Problem(str(file), lines.get(e["loc"], 0), key_text(e["loc"]), _plain(e))
            for e in error.errors()
        ]
        raise ConfigError(problems) from None


def _plain(error: ErrorDetails) -> str:
    """Return one of pydantic's messages, in our words if the mistake is likely."""
    if error["type"] == "extra_forbidden":
        return f"unknown figure{did_you_mean(str(error['loc'][0]), Profile.model_fields)}"
    if error["type"] == "missing":
        return "is missing; state it, or a base to take it over from"
    return error["msg"].removeprefix("Value error, ")


def _find(name_or_path: str | Path, *, asked_in: str) -> Path:
    """Return the file of a profile."""
    name = str(name_or_path)
    if name.endswith(".toml"):
        return Path(name)
    if name.lower() in profile_names():
        return _FOLDER / f"{name.lower()}.toml"
    others = [row.name for row in HARDWARE]
    if name.lower() in others:
        message = f"the simulator has no figures of {name}; there are {hardware_names()}"
    else:
        hint = did_you_mean(name, [*profile_names(), *others])
        message = f"no profile '{name}'{hint or ';'} {'There' if hint else 'there'} are {hardware_names()}"
    raise ConfigError([Problem(asked_in, 0, "", message)])


def _merged(file: Path, *, below: Sequence[Path] = ()) -> tuple[dict[str, Any], dict[Any, int]]:
    """Return the figures of a file on top of its base's and of its device's, and the lines that state them."""
    values, lines = read_toml(file)

    def problem(key: str, message: str) -> Problem:
        return Problem(str(file), lines.get((key,), 0), key, message)

    def wrong(key: str, message: str) -> ConfigError:
        return ConfigError([problem(key, message)])

    for key in ("base", "device", "measured"):
        if not isinstance(values.get(key, ""), str):
            raise wrong(key, "is a name, in quotes")
    if not isinstance(values.get("sources", {}), dict):
        raise wrong("sources", "is a table: a line [sources], then a line for each figure")
    figures: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if base := values.pop("base", None):
        beneath = _find(base, asked_in=f"{file}: base")
        # A file that is its own base, by any number of steps.
        if beneath in below:
            raise wrong("base", "leads back here")
        figures, _ = _merged(beneath, below=(*below, file))
        sources = figures.pop("sources")
        figures = {key: value for key, value in figures.items() if key not in _NOT_FROM_BASE}
    stated = values.pop("sources", {})
    # In ascending order of weight: the base, the device's datasheet, the card's tables, the file
    # itself.
    if device := values.get("device"):
        names = [row.name for row in HARDWARE]
        if device not in names:
            raise wrong("device", f"there is no '{device}'{choose(device, names)}")
        # The table has FLOP/s and bytes/s, a profile TFLOP/s and TB/s.
        row = by_name(device)
        of_device = {
            "peak_tflops": {dtype: flops / 1e12 for dtype, flops in row.peak_flops.items()},
            "memory_gib": row.memory_gib,
            "memory_tb_per_s": row.memory_bandwidth / 1e12,
        }
        figures |= of_device
        sources |= dict.fromkeys(of_device, row.source)
    if card := values.get("measured"):
        if card not in CARDS:
            raise wrong("measured", f"there are tables of {', '.join(CARDS)}, not of {card}")
        measured = tables(card)
        figures |= {key: measured.bus_gb_per_s(key) for key in BUS}
        sources |= dict.fromkeys(BUS, measured.source)
    # A figure without a source could be a guess, and predictions would rest on it.
    known = values.keys() & Profile.model_fields.keys()  # a misspelt figure is told as such
    unsourced = known - set(filter(stated.get, stated)) - _NOT_FIGURES
    if unsourced:
        message = "[sources] does not say where it is from"
        raise ConfigError([problem(key, message) for key in sorted(unsourced)])
    return figures | values | {"sources": sources | stated}, lines
