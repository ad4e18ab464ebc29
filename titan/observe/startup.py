"""Start-up page: a summary of the run on one screen. console.py prints it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.text import Text

from titan.base.hardware import MARGIN, Hardware
from titan.base.run_folder import METRICS
from titan.config.layout import (
    Layout,
    keeps_gathered,
    mesh_of,
)
from titan.config.model import model_title, num_frozen
from titan.config.phases import memory_of, phase_at, phases_of
from titan.config.schema import JobConfig
from titan.config.task import reads_text
from titan.optim.schedule import learning_rate_factor, phases

_MAX_WIDTH = 120  # columns of the page: longer lines are hard to read on a wide terminal


@dataclass(frozen=True, kw_only=True)
class StartupPage:
    """Page of text.

    Attributes:
        title: heading.
        description: job's own description, which may be empty.
        lines: text by its label, in order. An empty text is left out.
    """

    title: str
    description: str
    lines: dict[str, str]

    def render(self, width: int) -> Text:
        """Return the page for a console of `width` characters."""
        lines = {label: value for label, value in self.lines.items() if value}
        margin = max(map(len, lines)) + 4
        page = Text.assemble("\n", (self.title, "bold"), "\n")
        if self.description:
            page.append(f"  {self.description}\n", "italic")
        for label, value in lines.items():
            # Continuation lines start below the value, not below the label.
            wrapped = wrap(value, max(min(width, _MAX_WIDTH) - margin, 20))
            page.append(f"  {label}".ljust(margin), "cyan")
            page.append(("\n" + " " * margin).join(wrapped) + "\n")
        return page


def startup_page(
    config: JobConfig,
    model_config: Any,
    layout: Layout,
    *,
    run_dir: Path,
    device_name: str,
    hardware: Hardware | None,
    data: str = "",
    resume_step: int = 0,
    tokens_seen: int = 0,
    ranks_per_node: int = 0,
) -> StartupPage:
    """Return the start-up page of a job.

    Args:
        config: the job.
        model_config: sizes of the model.
        layout: layout of the ranks.
        run_dir: run folder.
        device_name: name of the device.
        hardware: profile of the device; None: unknown.
        data: the task's description of the data.
        resume_step: step that the run continues from, 0 for a fresh run.
        tokens_seen: tokens trained on up to resume_step.
        ranks_per_node: ranks of a node; 0: unknown.
    """
    phases = phases_of(config, world_size=layout.world_size)
    now = phase_at(phases, resume_step + 1).config
    training = now.training
    resumed = f", resumed after step {resume_step:,}" if resume_step else ""
    groups = config.groups.num_groups
    sequences = training.local_batch_size * layout.dp * layout.accumulation * groups
    tokens = sequences * training.seq_len
    # A resumed run may have another batch size, so the tokens before it are counted, not computed.
    in_all = tokens_seen + max(0, config.training.steps - resume_step) * tokens
    if len(phases) > 1:
        steps = sum(p.steps_after(resume_step) * p.tokens_per_step for p in phases)
        in_all = tokens_seen + steps * groups
    frozen = num_frozen(config.model, model_config)
    # Show the phase that needs the most memory.
    most = max(memory_of(phases, model_config), key=lambda gib: gib["total"], default={})
    return StartupPage(
        title=f"titan: {config.model.name} {model_title(config.model)}, {_parameters(model_config)}",
        description=config.job.description,
        lines={
            "model": _model(model_config),
            "frozen": f"{frozen:,} parameters" if frozen else "",
            "experts": _experts(config, model_config, layout, ranks_per_node),
            "data": data,
            "layout": _layout(config, layout),
            "groups": _groups(groups) if config.groups.enable else "",
            "precision": f"{training.compute_dtype} compute, "
            f"{training.mixed_precision_reduce} gradient reduction, {_states(config)}",
            f"{_units(config)[1]} per step": f"{_factors(now, layout)} = {tokens:,}",
            "steps": f"{config.training.steps:,}{resumed}; {in_all:,} {_units(config)[1]} in all",
            **{f"phase {p.number}": str(p).partition(", ")[2] for p in phases[1:]},
            "schedule": _schedule(config),
            "memory": _memory(most, hardware) if most else "",
            "hardware": _hardware(config, device_name, hardware),
            "written to": _outputs(config, run_dir),
        },
    )


def _model(model: Any) -> str:
    kv = (
        f" sharing {model.n_kv_heads} key/value heads"
        if model.n_kv_heads != model.n_heads
        else ""
    )
    # A model may have experts in all of its blocks.
    has_dense = not model.num_experts or model.n_dense_layers
    ffn = f", ffn {model.ffn_dim:,}" if has_dense else ""
    words = model.vocab_size  # a model of pictures has none
    vocabulary = f", vocabulary {words:,}" if words else ""
    return (
        f"{_count(model.n_layers, 'layers')}, dim {model.dim:,}, {_count(model.n_heads, 'heads')}"
        f"{kv}{ffn}{vocabulary}"
    )


def _groups(count: int) -> str:
    return f"{count} replica groups; never run on GPUs, tested with gloo on CPUs only"


def _units(config: JobConfig) -> tuple[str, str]:
    """Return the names of a batch's items and of a sequence's items: "sequences" and "tokens" for text."""
    return ("sequences", "tokens") if reads_text(config) else ("samples", "positions")


def _parameters(model: Any) -> str:
    total = f"{model.num_params:,} parameters"
    active = model.num_active_params
    return total if active == model.num_params else f"{total}, {active:,} of them active"


def _experts(config: JobConfig, model: Any, layout: Layout, ranks_per_node: int) -> str:
    """Describe the experts and their ranks; "" for a dense model."""
    if not model.num_experts:
        return ""
    ep, shared = config.parallelism.expert_parallel_degree, model.num_shared_experts
    parts = [f"{model.num_experts:,} of width {model.expert_dim:,}, top {model.top_k}"]
    if shared:
        parts.append(f"{shared} shared")
    num_layers = sum(map(model.is_moe_layer, range(model.num_blocks)))
    parts.append(f"in {num_layers} of {_count(model.num_blocks, 'layers')}")
    if ep > 1:
        parts.append(f"EP {ep}: {model.num_experts // ep} a rank")
        if ranks_per_node:
            # The ep axis is the fastest of its mesh, so a group has consecutive ranks.
            ends = ((first, first + ep - 1) for first in range(0, layout.world_size, ep))
            nodes = max(b // ranks_per_node - a // ranks_per_node + 1 for a, b in ends)
            parts.append(f"a group on {_count(nodes, 'nodes')}")
    return ", ".join(parts)


def _layout(config: JobConfig, layout: Layout) -> str:
    """Describe the ranks, the axes of the mesh that are longer than 1, and the kind of data parallelism."""
    parts = [_count(layout.world_size, "ranks")]
    if layout.world_size > 1:
        parts.append(f"mesh {mesh_of(config, layout)}")
    # FSDP shards over context-parallel ranks, too.
    if layout.dp_shard * layout.cp > 1:
        name = "HSDP" if layout.dp_replicate > 1 else "FSDP2"
        parts.append(f"{name} (ZeRO-{2 if keeps_gathered(config, layout) else 3})")
    elif layout.dp_replicate > 1:
        parts.append("DDP")
    return "; ".join(parts)


def _factors(config: JobConfig, layout: Layout) -> str:
    """Return the factors of the number of tokens in a step."""
    kind = "data-parallel ranks" if layout.world_size > layout.dp else "ranks"
    factors = [
        _count(config.training.local_batch_size, _units(config)[0]),
        f"{config.training.seq_len:,} {_units(config)[1]}",
        _count(layout.dp, kind),
    ]
    if layout.accumulation > 1:
        factors.append(f"{layout.accumulation:,} accumulation")
    if (groups := config.groups.num_groups) > 1:
        factors.append(f"{groups} replica groups")
    return " x ".join(factors)


def _schedule(config: JobConfig) -> str:
    """Describe the optimizer, and the learning rate over the run."""
    section, optimizer = config.lr_scheduler, config.optimizer
    # The schedule may be longer than this run.
    total = section.total_steps or config.training.steps
    warmup, decay = phases(section, total_steps=total)
    stable = total - warmup - decay
    parts = [f"{optimizer.name}, peak learning rate {optimizer.lr:g}"]
    if warmup:
        parts.append(f"{warmup:,} steps of warm-up")
    if stable > 0:
        parts.append(f"{stable:,} constant")
    if decay > 0:
        end = optimizer.lr * learning_rate_factor(total, section=section, total_steps=total)
        parts.append(f"{decay:,} of {section.decay_type} decay to {end:g}")
    return ", ".join(parts)


def _states(config: JobConfig) -> str:
    """Describe the dtypes of parameters and of the optimizer's moments."""
    optimizer, dtype = config.optimizer, config.training.dtype
    # Optimizers without this option keep moments in the dtype of the parameters.
    moments = config.any_optimizer.state_dtype or dtype
    moments = "8-bit" if optimizer.name == "AdamW8bit" else moments
    rounds = config.any_optimizer.stochastic_rounding
    rounding = " rounded stochastically" if rounds else ""
    return f"{dtype} parameters{rounding}, {moments} optimizer"


def _memory(estimate_gib: dict[str, float], hardware: Hardware | None) -> str:
    """Compare the estimate with the memory of the device, and list its categories."""
    categories = {k: _gib(v) for k, v in estimate_gib.items() if k != "total" and v > 0}
    total = f"{_gib(estimate_gib['total'])} GiB a rank by formula"
    if hardware is not None:
        total += f", of {hardware.memory_gib:g}"
        if estimate_gib["total"] > hardware.memory_gib:
            total += " (does not fit)"
        elif estimate_gib["total"] > (1 - MARGIN) * hardware.memory_gib:
            total += " (tight)"
    return f"{total}: {', '.join(f'{name} {gib}' for name, gib in categories.items())}"


def _hardware(config: JobConfig, device_name: str, hardware: Hardware | None) -> str:
    if hardware is None:
        return f"{device_name}; no profile of its peak, so MFU is n/a"
    dtype = config.training.compute_dtype
    # No device lists a peak for every dtype.
    peak = hardware.peak_flops.get(dtype)
    rate = f"{peak / 1e12:,.0f} TFLOP/s dense {dtype}" if peak else f"no peak for {dtype}"
    return f"{device_name} ({hardware.name}: {rate}); MFU counts {config.metrics.mfu_convention} attention"


def _outputs(config: JobConfig, run_dir: Path) -> str:
    """List the run folder and its files."""
    inside = [METRICS, "logs/"]
    if not config.checkpoint.why_unsaved:
        inside.append(f"{config.checkpoint.folder}/ every {config.checkpoint.interval:,} steps")
    if config.metrics.enable_tensorboard:
        inside.append(f"{config.metrics.save_tb_folder}/")
    if config.metrics.enable_wandb:
        inside.append("wandb/")
    return f"{run_dir} ({', '.join(inside)})"


def _count(number: int, plural: str) -> str:
    return f"{number:,} {plural[:-1] if number == 1 else plural}"


def _gib(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
