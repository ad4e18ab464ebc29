"""The sections of a job file that say how it is run: folders, logs, checkpoints, memory, compiler, number formats, failures.

Import them from titan.config.schema, which has the other sections, and `JobConfig`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import LIMIT, NonNegative, Positive, PositiveOrAuto, Section, StrList


class JobSection(Section):
    """Where the run lives."""

    dump_folder: str = "./outputs"
    """The run folder: config, metrics, checkpoints and logs are written below it."""
    description: str = ""
    """A sentence for people; shown at start-up."""
    print_config: bool = False
    """Print the resolved config at start-up (it is always written to config.toml in the run folder)."""


class ProfilingSection(Section):
    """PyTorch profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Record a profiler trace every profile_freq steps; `titan profile` says where the step went."""
    save_traces_folder: str = "traces"
    """Folder of the traces, below the run folder."""
    profile_freq: Positive = 10
    """Steps between two traces, and between two memory snapshots."""
    profiler_active: Positive = 1
    """Steps recorded in each trace."""
    profiler_warmup: NonNegative = 3
    """Steps the profiler runs before it records."""
    enable_memory_snapshot: bool = False
    """Write the CUDA allocator's history every profile_freq steps, and when memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, below the run folder."""


class MetricsSection(Section):
    """What is logged, and where to. metrics.jsonl in the run folder is always written."""

    log_freq: Positive = 10
    """Steps between two logged steps."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    disable_color_printing: bool = False
    """No colours in the terminal."""
    save_tb_folder: str = "tensorboard"
    """Folder of the TensorBoard files, below the run folder."""
    save_for_all_ranks: bool = False
    """Every rank writes its own metrics (metrics.rank-N.jsonl), not only rank 0."""
    enable_wandb: bool = False
    """Log to Weights & Biases; without a network it logs offline, below the run folder."""
    wandb_project: str = "titan"
    """Project name at Weights & Biases."""
    wandb_run_name: str = ""
    """Run name at Weights & Biases; empty: the name of the run folder."""
    mfu_convention: Literal["full", "causal"] = "full"
    """FLOPs counted for attention: "full" counts the whole S x S matrix (PaLM, TorchTitan), "causal" half of it."""
    log_layer_norms_every_n_steps: NonNegative = 0
    """Write gradient and weight norms of each block to layer_norms.jsonl (and TensorBoard, if on); 0: never."""


class CheckpointSection(Section):
    """Saving and resuming."""

    enable: bool = True
    """Save checkpoints, and resume from the newest one in the run folder."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, below the run folder; or a URL that fsspec knows: "s3://bucket/run", "gs://...", "file:///..."."""
    interval: Positive = 500
    """Steps between two saves; the last step is always saved."""
    interval_minutes: Annotated[float, Field(ge=0)] = 0.0
    """Also save when the last save is that many minutes ago; 0: no."""
    initial_load_path: str | None = None
    """A checkpoint (its step-N folder) to start from where the run folder has none."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path, not the optimizer, schedule and data position."""
    initial_load_in_hf: bool = False
    """initial_load_path (or, without one, model.hf_assets_path) is a Hugging Face folder: config.json and safetensors."""
    last_save_model_only: bool = False
    """The last save holds only the weights, in export_dtype."""
    last_save_in_hf: bool = False
    """After the last save, also write the weights as a Hugging Face folder, in export_dtype: into the checkpoint's own
    folder (<folder>/step-N), or <run>/huggingface/step-N where checkpoint.folder is a URL."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of a model-only save and of a Hugging Face folder."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training goes on, one save at a time: "async" copies the state to the host first; "async_with_pinned_mem" copies it
    during the next step's forward and backward passes, into buffers that it keeps. The last save is always waited for."""
    on_failure: Literal["continue", "stop"] = "continue"
    """When a save fails (a full disk): train on and try at the next interval, or end the run. The last save must succeed."""
    verify: Literal["strict", "off"] = "strict"
    """Before resuming, compare every file with the manifest written with it. "off" loads checkpoints without a manifest."""
    keep_latest_k: NonNegative = 10
    """Checkpoints kept; 0 keeps all."""
    keep_every_n_steps: NonNegative = 0
    """Checkpoints of steps that this divides are kept for ever; 0: none are."""
    load_step: Annotated[int, Field(ge=-1, le=LIMIT)] = -1
    """Step to resume from; -1: the newest."""
    exclude_from_loading: StrList = []
    """Parts of the state not to load: "optimizer", "lr_scheduler", "dataloader", "train_state"."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to find out early that saving works."""
    create_seed_checkpoint: bool = False
    """Save the initial weights as step-0 and end. Not needed here, since they do not depend on the layout."""
    load_only: bool = False
    """Resume, but save nothing."""


class ActivationCheckpointSection(Section):
    """Recompute activations in the backward pass rather than keep them; docs/memory.md has formulas and measurements."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """What is recomputed: nothing; what selective_ac_option says; every block whole; or what the compiler chooses."""
    selective_ac_option: str | Positive = "op"
    """"op": everything but the operations of op_keep; a number n: every n-th block whole."""
    op_keep: StrList = ["matmul/2", "attention", "network", "scales"]
    """Operations whose results "op" keeps: names such as "aten.mm", or groups: "matmul", "attention", "network" (reduce-scatter and
    all-to-all), "scales" (of float8). With "/2" only every second one in a block, with "/3" every third."""
    op_keep_modules: StrList = []
    """Modules whose matrix products and attention "op" keeps besides, as patterns of names within a block: "feed_forward.w*"."""
    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a block's activations that the compiler may keep: 1 is all, 0 is the block's input."""
    cpu_offload: bool = False
    """Copy activations to the host until the backward pass needs them: those of all blocks, or with mode "full" their inputs."""
    preserve_rng_state: bool = False
    """Restore random states for the recomputation."""


class CompileSection(Section):
    """torch.compile, one region per block."""

    enable: bool = False
    """Compile."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """"model": each block; "loss": the elementwise part of the loss."""
    backend: str = "inductor"
    """Compiler backend."""
    mode: Literal["default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"] = (
        "default"
    )
    """inductor's: "max-autotune-no-cudagraphs" measures which kernels are the fastest, "reduce-overhead" replays CUDA graphs (one rank
    in one precision only), "max-autotune" does both."""
    cache_folder: str = ""
    """Where compiled programs are kept, so that a restart is quick; empty: titan/compile in the user's cache folder."""


class Float8Section(Section):
    """Float8 matrix products through torchao, where model.converters has "quantize.linear.float8"; see docs/float8.md."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather parameters in float8: half of bf16's bytes (recipe "tensorwise")."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Find the scales of all gathered parameters in one reduction a step, not one for each. Always so with tensor parallelism."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """What shares a scale: the whole tensor (the fastest), or each row and column (more exact), "_with_gw_hp" with the weight's
    gradient in high precision (the most exact). Unset: "tensorwise"."""
    filter_fqns: StrList = ["output"]
    """Parts of the names of layers left in high precision. [] converts the output layer too, whose rounding goes straight into the
    loss. "auto_filter_small_kn": layers too small to gain, by torchao's measurements."""
    emulate: bool = False
    """Compute the same numbers slowly on hardware without float8, a CPU too."""


class MXSection(Section):
    """MXFP8 matrix products through torchao, where model.converters has "quantize.linear.mx": a scale for each 32 values in a row."""

    recipe_name: Literal["mxfp8_cublas", "mxfp8_cublas_rceil"] = "mxfp8_cublas"
    """How a scale is rounded to a power of two: down, or ("_rceil") up, so that no value is cut off."""
    filter_fqns: StrList = ["output"]
    """Parts of the names of layers left in high precision."""
    emulate: bool = False
    """Compute the same numbers slowly on hardware without MXFP8, a CPU too."""


class QuantizeLinearSection(Section):
    float8: Float8Section = Float8Section()
    mx: MXSection = MXSection()


class QuantizeSection(Section):
    """Low-precision training."""

    linear: QuantizeLinearSection = QuantizeLinearSection()


class CommSection(Section):
    """Process groups and the flight recorder."""

    init_timeout_seconds: Positive = 300
    """Limit for a collective during set-up and the first step."""
    train_timeout_seconds: Positive = 100
    """Limit for a collective after the first step."""
    heartbeat_timeout_seconds: NonNegative = 30
    """A rank that has not been heard of for so long (its host lost, stopped, or its interpreter locked by an extension) ends the run on all
    ranks, and is named with its host; 0: ranks do not listen for each other. docs/fault-tolerance.md."""
    trace_buf_size: Annotated[int, Field(ge=0, le=10_000_000)] = 2_000
    """Collectives the flight recorder remembers; 0 switches it off. To write 20,000 down takes a rank some seconds, 2,000 a tenth of it."""
    save_traces_folder: str = "flight_recorder"
    """Folder of its dumps, below the run folder."""
    save_traces_file_prefix: str = "rank-"
    """Beginning of a dump's file name; the rank follows."""


class FaultToleranceSection(Section):
    """What a run does when something is wrong: with its losses, its weights, or itself; docs/fault-tolerance.md."""

    grace_seconds: Positive = 120
    """After SIGTERM, SIGUSR1 or SIGINT: seconds to finish the step and save. Then the process ends, with the stacks of its threads
    in logs/. Shorter than what the scheduler grants between this signal and SIGKILL."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """Where the loss or the gradient norm of a step is NaN or infinite: end the run; train on without this step's update; or go back to the
    newest checkpoint and train on without the samples that led here."""
    on_spike: Literal["off", "warn", "skip", "rewind", "stop"] = "off"
    """Where the loss lies more than spike_threshold deviations above those before it: do not look; say so; or as above. Anything but "off", and
    on_nonfinite other than "stop", make the host wait for each step before it updates."""
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    """Robust z-score (distance from the median over 1.4826 x median absolute deviation) above which a loss is a spike."""
    spike_window: Annotated[int, Field(ge=8, le=LIMIT)] = 128
    """Newest losses that a loss is compared with."""
    spike_min_steps: Annotated[int, Field(ge=8, le=LIMIT)] = 32
    """Losses that must be known before one can be a spike: the first steps of a run fall fast."""
    max_skips: Positive = 10
    """Steps skipped in a row after which the run ends."""
    max_rewinds: Positive = 3
    """Rewinds since the last start after which the run ends."""
    rewind_steps: Positive = 100
    """Steps whose samples a rewind leaves out: the bad one and those before it, as far back as the checkpoint."""
    check_replicas_every_n_steps: NonNegative = 0
    """Compare hashes of all weights that several ranks hold, and end the run where they differ; 0: never. docs/fault-tolerance.md."""
    step_timeout_seconds: NonNegative = 0
    """A step that takes longer (the first: by comm.init_timeout_seconds more) ends the run, with the stacks of all ranks in logs/ and
    the rank to look at in status.json; 0: no limit. Saves and validation have no part in it."""


class ValidationSection(Section):
    """Loss on held-out text."""

    enable: bool = False
    """Validate every freq steps and after the last."""
    dataset: str = ""
    """As training.dataset; empty: the documents that data.validation_fraction keeps from training."""
    dataset_path: str | None = None
    """File, folder or glob of a local dataset."""
    local_batch_size: Positive = 8
    """Sequences per rank and forward pass."""
    seq_len: Annotated[int | None, Field(ge=1, le=LIMIT)] = None
    """Tokens per sequence; unset: training.seq_len."""
    freq: Positive = 100
    """Steps between two validations."""
    steps: PositiveOrAuto = 10
    """Forward passes of each rank and validation: fixed, so that it cannot hang, and over the same samples each time, of which more data-parallel
    ranks take more. A finite text is read once at most. -1: all of it, which gives the same loss for every batch size and layout."""


class SimulatorSection(Section):
    """What `titan sim`, `titan check` and `titan plan` take for granted; training does not read it."""

    torch: Literal["installed", "2.6"] = "installed"
    """Whose program is simulated: that of the torch which is installed, or what torch 2.6 made of pipelines and of compiled context
    parallelism, for runs that were published in its time; docs/simulator.md says what differs."""


class DebugSection(Section):
    """Reproducibility."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Use only deterministic algorithms; slower."""


class HardwareSection(Section):
    """What the run's accelerators can do, for MFU."""

    name: str = "auto"
    """A hardware profile (titan/observe/hardware.py lists them), or "auto": recognised from the device's name."""
