"""Checks of [quantize.linear.*] and [quantize.grouped_mm.*]: the active converters, and their settings. See docs/memory.md."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from .errors import Violations, choose
from .schema import Float8Section, GroupedFloat8Section, JobConfig, MXSection

FLOAT8 = ("quantize.linear.float8", "float8")
MX = ("quantize.linear.mx",)
GROUPED = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
# Settings that have no effect without a converter. recipe_name and filter_fqns are not listed, since files keep them while the
# converter is commented out.
_SWITCHES = (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "emulate",
)


def quantize_section(config: JobConfig) -> Float8Section | MXSection | None:
    """Return the section of the active converter of linear layers, or None."""
    if any(name in FLOAT8 for name in config.model.converters):
        return config.quantize.linear.float8
    return config.quantize.linear.mx if MX[0] in config.model.converters else None


def grouped_section(config: JobConfig) -> tuple[str, GroupedFloat8Section] | None:
    """Return the recipe of the experts' active converter, "float8" or "mxfp8", and its section, or None."""
    sections = config.quantize.grouped_mm
    recipes = {GROUPED[0]: ("float8", sections.float8), GROUPED[1]: ("mxfp8", sections.mx)}
    return next((recipes[n] for n in config.model.converters if n in recipes), None)


def eight_bit_sections(
    config: JobConfig,
) -> list[tuple[str, Float8Section | MXSection | GroupedFloat8Section]]:
    """Return the recipe and the section of each active converter."""
    linear, grouped = quantize_section(config), grouped_section(config)
    sections: list[tuple[str, Any]] = []
    if linear is not None:
        sections.append((linear.recipe_name or "tensorwise", linear))
    if grouped is not None:
        sections.append(("mxfp8" if grouped[0] == "mxfp8" else "rowwise", grouped[1]))
    return sections


def lacks_units(config: JobConfig, hardware: str, dtypes: Container[str]) -> str:
    """Return an error message if the hardware cannot run the job's converters, otherwise "".

    Args:
        config: the job.
        hardware: name of the hardware, for the message.
        dtypes: number formats that its matrix units multiply.
    """
    for recipe, section in eight_bit_sections(config):
        wanted = "mxfp8" if recipe.startswith("mxfp8") else "float8"
        if not section.emulate and wanted not in dtypes:
            return (
                f"{hardware} does not multiply in {wanted}; set emulate = true to compute the same numbers slowly, or "
                "remove the converter from model.converters"
            )
    return ""


def check_converters(config: JobConfig) -> Violations:
    """Yield the problems of model.converters and of the sections that it activates."""
    names, linear = config.model.converters, config.quantize.linear
    for name in names:
        if name not in FLOAT8 + MX + GROUPED:
            yield (
                "converters",
                f'unknown converter "{name}"{choose(name, FLOAT8 + MX + GROUPED)}',
            )
    if all(name in names for name in GROUPED):
        yield "converters", f'experts are converted once; use "{GROUPED[0]}" or "{GROUPED[1]}"'
    if MX[0] in names and any(name in FLOAT8 for name in names):
        yield "converters", f'a layer is converted once; use ["{FLOAT8[0]}"] or ["{MX[0]}"]'
    for section, converters in ((linear.float8, FLOAT8), (linear.mx, MX)):
        for name in _SWITCHES:
            if getattr(section, name, False) and not any(c in converters for c in names):
                fix = f'set model.converters = ["{converters[0]}"], or remove this key'
                yield (
                    f"{converters[0]}.{name}",
                    f"has no effect, as no layer is converted; {fix}",
                )
    section = quantize_section(config)
    if isinstance(section, Float8Section):
        yield from _check_float8(config, section)
    if section is not None:
        yield from _check_tokens(config, multiple=32 if isinstance(section, MXSection) else 16)


def _check_float8(config: JobConfig, section: Float8Section) -> Violations:
    recipe, gathers = section.recipe_name or "tensorwise", section.enable_fsdp_float8_all_gather
    # Whole keys, for the messages.
    gather, scales, filters = (
        f"{FLOAT8[0]}.{name}" for name in (*_SWITCHES[:2], "filter_fqns")
    )
    if gathers and recipe != "tensorwise":
        fix = 'use false, or recipe_name = "tensorwise"'
        yield gather, f"sends one scale with each weight, and {recipe} has several; {fix}"
    # Precomputed scales are for weights that FSDP gathers in float8 on the device.
    if section.precompute_float8_dynamic_scale_for_fsdp:
        if not gathers:
            yield scales, "is for gathering in float8; set enable_fsdp_float8_all_gather = true"
        if config.training.enable_cpu_offload:
            fix = "use false, or training.enable_cpu_offload = false"
            yield scales, f"scales of offloaded parameters stay on the host; {fix}"
    if "auto_filter_small_kn" in section.filter_fqns and recipe not in (
        "tensorwise",
        "rowwise",
    ):
        # torchao has measured only for these two recipes which sizes are faster.
        fix = 'name the layers, or use recipe_name = "rowwise"'
        yield filters, f'"auto_filter_small_kn" does not know recipe {recipe}; {fix}'


def _check_tokens(config: JobConfig, *, multiple: int) -> Violations:
    """Check the number of tokens that a rank multiplies at once: the inner size of the matmul for a weight's gradient."""
    parallel, training = config.parallelism, config.training
    sequences, cp = training.local_batch_size, parallel.context_parallel_degree
    if parallel.pipeline_parallel_degree > 1:
        sequences = parallel.pipeline_parallel_microbatch_size
    tokens, rest = divmod(sequences * training.seq_len, cp)
    if not rest and tokens % multiple:  # layout_rules.py reports a rest
        unit = multiple * cp
        fix = f"use {max(unit, training.seq_len // unit * unit)}"
        reason = f"a rank multiplies over {tokens} tokens at once, and 8 bits need a multiple of {multiple}"
        yield "training.seq_len", f"{reason}; {fix}"
