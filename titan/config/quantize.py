"""Rules of [quantize.linear.*]: which converter is on, and what goes with it. See docs/float8.md."""

from __future__ import annotations

from collections.abc import Container, Iterator

from .errors import RuleViolation, choose
from .schema import Float8Section, JobConfig, MXSection

FLOAT8 = ("quantize.linear.float8", "float8")
MX = ("quantize.linear.mx",)
# Not recipe_name or filter_fqns: files keep them with the converter commented out.
_SWITCHES = (
    "enable_fsdp_float8_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp",
    "emulate",
)


def quantize_section(config: JobConfig) -> Float8Section | MXSection | None:
    """The section of the converter that is on."""
    if any(name in FLOAT8 for name in config.model.converters):
        return config.quantize.linear.float8
    return config.quantize.linear.mx if MX[0] in config.model.converters else None


def lacks_units(config: JobConfig, hardware: str, dtypes: Container[str]) -> str:
    """What is to be said if the hardware, whose matrix units multiply these dtypes, cannot run the job; else nothing."""
    section = quantize_section(config)
    wanted = "mxfp8" if isinstance(section, MXSection) else "float8"
    if section is None or section.emulate or wanted in dtypes:
        return ""
    return (
        f"{hardware} does not multiply in {wanted}; set emulate = true to compute the same numbers slowly, or take the "
        "converter out of model.converters"
    )


def check_converters(config: JobConfig) -> Iterator[RuleViolation]:
    names, linear = config.model.converters, config.quantize.linear
    for name in names:
        if name not in FLOAT8 + MX:
            yield "model.converters", f'unknown converter "{name}"{choose(name, FLOAT8 + MX)}'
    if MX[0] in names and any(name in FLOAT8 for name in names):
        yield "model.converters", f'a layer is converted once; use ["{FLOAT8[0]}"] or ["{MX[0]}"]'
    for section, converters in ((linear.float8, FLOAT8), (linear.mx, MX)):
        for name in _SWITCHES:
            if getattr(section, name, False) and not any(c in converters for c in names):
                yield (
                    f"{converters[0]}.{name}",
                    f'has no effect, as no layer is converted; set model.converters = ["{converters[0]}"], or remove it',
                )
    section = quantize_section(config)
    if isinstance(section, Float8Section):
        yield from _check_float8(config, section)
    if section is not None:
        yield from _check_tokens(config, multiple=32 if isinstance(section, MXSection) else 16)


def _check_float8(config: JobConfig, section: Float8Section) -> Iterator[RuleViolation]:
    gather, scales, recipe = *_SWITCHES[:2], section.recipe_name or "tensorwise"
    if section.enable_fsdp_float8_all_gather and recipe != "tensorwise":
        yield (
            f"{FLOAT8[0]}.{gather}",
            f"sends one scale with each weight, and {recipe} has one for each row; "
            'use false, or recipe_name = "tensorwise"',
        )
    if section.precompute_float8_dynamic_scale_for_fsdp:
        if not section.enable_fsdp_float8_all_gather:
            yield f"{FLOAT8[0]}.{scales}", f"is for gathering in float8; set {gather} = true"
        if config.training.enable_cpu_offload:
            yield (
                f"{FLOAT8[0]}.{scales}",
                "scales of offloaded parameters stay behind on the host; use false, or "
                "training.enable_cpu_offload = false",
            )
    if "auto_filter_small_kn" in section.filter_fqns and recipe == "rowwise_with_gw_hp":
        yield (
            f"{FLOAT8[0]}.filter_fqns",
            '"auto_filter_small_kn" knows what tensorwise and rowwise gain; name the layers, or use recipe_name = "rowwise"',
        )


def _check_tokens(config: JobConfig, *, multiple: int) -> Iterator[RuleViolation]:
    """A weight's gradient is a product over the tokens that a rank has at once, and 8-bit products come in multiples."""
    parallel, training = config.parallelism, config.training
    sequences, cp = training.local_batch_size, parallel.context_parallel_degree
    if parallel.pipeline_parallel_degree > 1:
        sequences = parallel.pipeline_parallel_microbatch_size
    tokens, rest = divmod(sequences * training.seq_len, cp)
    if not rest and tokens % multiple:  # a rest is check_layout's to tell
        unit = multiple * cp
        yield (
            "training.seq_len",
            f"a rank multiplies over {tokens} tokens at once, which in 8 bits must divide by {multiple}; use "
            f"{max(unit, training.seq_len // unit * unit)}",
        )
