"""The typed sections of a job file, one frozen pydantic model per component.

Section and key names are TorchTitan v0.2.2's wherever the concept is the same, so that its TOML files run
here; sections without a twin there (tokenizer, data, loss, hardware) have names of their own. A component
is handed only its own section. The string under a field is its documentation: `--help`, docs/config.md and
the JSON schema are generated from it. This module imports no torch.

A choice that carries its own options (the optimizer, a data source) is a union told apart by one key;
third parties add members through the entry-point groups `titan.optimizers` and `titan.sources`, each entry
naming a subclass of base.py's `Section`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from .base import DocumentOptions, Section, load_plug_in
from .problems import Origin


def _split_commas(value: Any) -> Any:
    """TorchTitan's older files write lists as "a, b"."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1")
    return value


StrList = Annotated[list[str], BeforeValidator(_split_commas)]
LIMIT = 2**31 - 1
"""Largest count of anything: what is more is a mistake, and would overflow somewhere in torch."""
Positive = Annotated[int, Field(ge=1, le=LIMIT)]
NonNegative = Annotated[int, Field(ge=0, le=LIMIT)]
PositiveOrAuto = Annotated[int, Field(ge=-1, le=LIMIT), AfterValidator(_not_zero)]
DType = Literal["float32", "bfloat16"]


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


class ModelSection(Section):
    """Which model, of which size."""

    name: str = "llama3"
    """A model family: a folder in models/, or one registered under the entry point `titan.models`."""
    flavor: str = "debugmodel"
    """A named size of the family."""
    overrides: dict[str, int | float | bool | str] = {}
    """Fields of the flavor to change, such as n_layers = 4."""
    hf_assets_path: str = ""
    """Folder with the tokenizer (tokenizer.json or tokenizer.model) and, for conversion, safetensors and config.json."""
    converters: StrList = []
    """Model conversions: "quantize.linear.float8" (also spelt "float8") or "quantize.linear.mx", as the sections of these
    names say."""


class TokenizerSection(Section):
    """How text becomes token ids."""

    name: Literal["auto", "bytes", "tiktoken", "huggingface"] = "auto"
    """"auto": what lies in path (tokenizer.json, tokenizer.model), or "bytes" where path is empty. "bytes" is
    embedded: one token a byte. "tiktoken" reads a rank file (Llama 3's tokenizer.model), "huggingface" a tokenizer.json."""
    path: str = ""
    """File or folder; empty: model.hf_assets_path."""


class AdamOptions(Section):
    """What the optimizers below share."""

    name: str
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, applied to matrices and, with decay_norms, to all else."""
    decay_norms: bool = False
    """Decay norms, biases and other vectors too, as TorchTitan does."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How Adam's update is computed: one fused kernel, multi-tensor operations, or a loop. Where torch has no fused kernel (bf16
    moments of fp32 weights, 8 bits, stochastic rounding) it is compiled, which takes seconds at the first step; the other two are a loop."""
    stochastic_rounding: bool = False
    """Round bf16 weights (training.dtype = "bfloat16") up or down at random, right on average, so that small updates count
    without fp32 master weights."""
    early_step_in_backward: bool = False
    """Update each parameter, and free its gradient, as soon as that is ready (needs training.max_norm = 0)."""


class AdamWSection(AdamOptions):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101)."""

    name: Literal["AdamW"] = "AdamW"  # pyright: ignore[reportIncompatibleVariableOverride]
    state_dtype: DType | None = None
    """Precision the moments are kept in; unset: that of the parameters. The update is computed in fp32 whatever it is."""


class AdamSection(AdamWSection):
    """Adam (Kingma and Ba, arXiv:1412.6980): weight decay, where set, is added to the gradient."""

    name: Literal["Adam"] = "Adam"  # pyright: ignore[reportIncompatibleVariableOverride]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty added to the gradient of matrices and, with decay_norms, of all else."""


class AdamW8bitSection(AdamOptions):
    """AdamW with moments in 8 bits (arXiv:2110.02861): 2 bytes a parameter rather than 8. Vectors keep fp32."""

    name: Literal["AdamW8bit"] = "AdamW8bit"  # pyright: ignore[reportIncompatibleVariableOverride]


class MuonSection(AdamOptions):
    """Muon (kellerjordan.github.io/posts/muon, arXiv:2502.16982) for the matrices of the blocks: momentum, orthogonalized. AdamW for
    embedding, output layer and norms; beta1, beta2, eps and implementation are AdamW's."""

    name: Literal["Muon"] = "Muon"  # pyright: ignore[reportIncompatibleVariableOverride]
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Peak learning rate. Updates are scaled to the size of AdamW's, whose learning rate serves."""
    adam_lr: Annotated[float | None, Field(gt=0)] = None
    """Peak learning rate of AdamW's part; unset: lr."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Look one step ahead: orthogonalize the gradient and the momentum mixed."""
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Iterations of Newton-Schulz."""
    ns_dtype: DType = "bfloat16"
    """Precision of Newton-Schulz, and of the shards that are sent for it."""


class LRSchedulerSection(Section):
    """Linear warm-up, then constant, then decay (warmup-stable-decay, arXiv:2404.06395); see docs/config.md."""

    warmup_steps: NonNegative = 200
    """Steps over which the learning rate rises linearly to its peak. In a run that is too short for them, warm-up is cut first to its
    length, then decay to what is left, with a warning."""
    total_steps: Annotated[int | None, Field(ge=1, le=LIMIT)] = None
    """Length of the schedule; unset: training.steps."""
    decay_ratio: Annotated[float | None, Field(ge=0, le=1)] = None
    """Share of the schedule spent decaying, at its end; unset: decay begins right after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at which the decay ends, a step after the last one, as a share of the peak."""


class DataloaderSection(Section):
    """Background preparation of batches."""

    num_workers: NonNegative = 1
    """0 prepares batches in the training thread, 1 or more in a background thread."""
    persistent_workers: bool = True
    """Accepted from TorchTitan's files; the background thread always lives as long as the run."""
    pin_memory: bool = True
    """Copy batches from page-locked memory when training on an accelerator."""
    prefetch_factor: Annotated[int, Field(ge=1, le=1024)] = 4
    """Batches prepared ahead."""


class TrainingSection(Section):
    """The step: its data, its size, its precision."""

    dataset: str = "stdlib"
    """What to train on: a preset (stdlib, synthetic, text, jsonl, parquet, shards, c4, c4_test, fineweb-edu) or the
    name of a Hugging Face dataset. For several sources, or options of one, use [[data.sources]] instead."""
    dataset_path: str | None = None
    """File, folder or glob of a local dataset."""
    local_batch_size: Positive = 8
    """Sequences per data-parallel rank and forward pass."""
    global_batch_size: PositiveOrAuto = -1
    """Sequences per optimizer step over all ranks; what one forward pass does not cover is accumulated.
    -1: local_batch_size x data-parallel degree (no accumulation)."""
    seq_len: Positive = 2048
    """Tokens per sequence."""
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this global L2 norm; 0: they are not, and the norm is only reported."""
    steps: Positive = 10_000
    """Optimizer steps of the whole run."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP)."""
    expandable_segments: bool = True
    """On CUDA the caching allocator grows its segments in place, so that less memory lies idle between blocks; false: torch's own default.
    PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, where one is set, has the last word."""
    dtype: DType = "float32"
    """Precision of the master parameters and of the optimizer."""
    mixed_precision_param: DType = "bfloat16"
    """Precision of the forward and backward pass (parameters are cast when they are gathered)."""
    mixed_precision_reduce: DType = "float32"
    """Precision of gradient reduction."""
    gc_freq: Positive = 50
    """Python's garbage collector runs every so many steps, on all ranks at once, and not in between."""
    dataloader: DataloaderSection = DataloaderSection()


class LossSection(Section):
    """Cross entropy, summed over the valid tokens of the global batch in fp32 and divided by their number."""

    chunk_output: bool = True
    """Compute the output layer together with the loss, a chunk at a time, so that logits are never held whole; otherwise they are, in
    the compute precision. Applies unless parallelism.disable_loss_parallel gathers the logits."""
    chunk_tokens: NonNegative = 2048
    """Tokens whose logits are held in fp32 at a time (with chunk_output, at all); 0: all of them. With chunk_output = false, 0 is the plain
    loss that most frameworks have, for comparison: torch's cross entropy on an fp32 copy of all logits."""


class StdlibSource(DocumentOptions):
    """Embedded default: the Python standard library's own source and documentation strings on this machine."""

    type: Literal["stdlib"] = "stdlib"


class SyntheticSource(DocumentOptions):
    """Random token ids, for tests of speed; nothing can be learnt from them but their distribution."""

    type: Literal["synthetic"] = "synthetic"


class TextSource(DocumentOptions):
    """Local text files, one document each."""

    type: Literal["text"] = "text"
    path: str
    """File, folder (searched for *.txt and *.md) or glob."""


class JsonlSource(DocumentOptions):
    """Local JSON Lines (also .gz), one document a line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """File, folder (searched for *.jsonl, *.json, *.jsonl.gz, *.json.gz) or glob."""
    text_key: str = "text"
    """Field that holds the text."""


class ParquetSource(DocumentOptions):
    """Local Parquet files, one document a row."""

    type: Literal["parquet"] = "parquet"
    path: str
    """File, folder (searched for *.parquet) or glob."""
    text_key: str = "text"
    """Column that holds the text."""


class ShardsSource(DocumentOptions):
    """Memory-mapped token shards written by `titan prepare`."""

    type: Literal["shards"] = "shards"
    path: str
    """Folder that `titan prepare` wrote."""


class HuggingFaceSource(DocumentOptions):
    """A dataset of the Hugging Face hub, or a local copy of one, through `datasets`."""

    type: Literal["huggingface"] = "huggingface"
    path: str
    """Name at the hub, or a local folder `datasets` can load."""
    name: str | None = None
    """Configuration of the dataset, such as "en" of allenai/c4."""
    split: str = "train"
    """Split to read."""
    text_key: str = "text"
    """Column that holds the text."""
    streaming: bool = True
    """Read while training, rather than download first."""
    shuffle_buffer: NonNegative = 10_000
    """Documents shuffled together while streaming; 0 keeps the order of the files."""


def _members(group: str, *builtin: type[Section]) -> Any:
    """Union of the built-in sections and those registered under an entry-point group."""
    return Union[(*builtin, *(load_plug_in(e) for e in entry_points(group=group)))]


if TYPE_CHECKING:
    OptimizerSection = AdamWSection | AdamSection | AdamW8bitSection | MuonSection
    SourceSection = (
        StdlibSource
        | SyntheticSource
        | TextSource
        | JsonlSource
        | ParquetSource
        | ShardsSource
        | HuggingFaceSource
    )
else:
    OptimizerSection = Annotated[
        _members("titan.optimizers", AdamWSection, AdamSection, AdamW8bitSection, MuonSection),
        Field(discriminator="name"),
        BeforeValidator(
            lambda value: {"name": "AdamW"} | value if isinstance(value, dict) else value
        ),
    ]
    SourceSection = Annotated[
        _members(
            "titan.sources",
            StdlibSource,
            SyntheticSource,
            TextSource,
            JsonlSource,
            ParquetSource,
            ShardsSource,
            HuggingFaceSource,
        ),
        Field(discriminator="type"),
    ]


class DataSection(Section):
    """Where text comes from and how documents are packed into sequences."""

    sources: list[SourceSection] = []
    """Sources to blend; empty: what training.dataset names."""
    shuffle: bool = True
    """Visit the samples of each epoch in an order drawn from debug.seed; otherwise as they lie."""
    add_bos: bool = True
    """Begin each document with the tokenizer's begin-of-text token, where it has one."""
    add_eos: bool = True
    """End each document with the tokenizer's end-of-text token, where it has one."""
    reset_positions: bool = False
    """Count positions from each document's beginning, not the sequence's."""
    document_mask: bool = False
    """No attention between documents packed into one sequence; the token that would be predicted across a boundary is not trained on."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents, chosen by a hash of their text, kept from training and used for validation."""
    cache_folder: str = ""
    """Where tokenized text is kept between runs; empty: titan/ in the user's cache folder."""


class ParallelismSection(Section):
    """Degrees of the mesh axes: world size = pp x dp_replicate x dp_shard x cp x tp."""

    data_parallel_replicate_degree: Positive = 1
    """Replicas of the model (DDP; with a shard degree above 1, HSDP)."""
    data_parallel_shard_degree: PositiveOrAuto = -1
    """Ranks that shard parameters, gradients and optimizer state (FSDP2); -1: all that remain."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """"always" frees gathered parameters after the forward pass (ZeRO-3), "never" keeps them for the backward pass
    (ZeRO-2); "default" is "always", but "never" under pipeline parallelism."""
    fsdp_prefetch: NonNegative = 0
    """Blocks whose parameters FSDP gathers ahead, at the cost of their memory; 0: the next one, when the host gets there."""
    tensor_parallel_degree: Positive = 1
    """Ranks that split each layer's matrices."""
    disable_loss_parallel: bool = False
    """Gather the logits over tensor-parallel ranks before the loss."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with matrix products (needs compile)."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that split the layers."""
    pipeline_parallel_schedule: str = "1F1B"
    """Pipeline schedule."""
    pipeline_parallel_schedule_csv: str | None = ""
    """A schedule of one's own, as a CSV of actions per rank."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Sequences per pipeline microbatch."""
    pipeline_parallel_layers_per_stage: Annotated[int | None, Field(ge=1, le=LIMIT)] = None
    """Layers per stage; unset: split evenly."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Layers the first stage has fewer, for the embedding."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Layers the last stage has fewer, for the output layer."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage."""
    context_parallel_degree: Positive = 1
    """Ranks that split the sequence."""
    context_parallel_load_balancer: Literal["headtail", "none", "ptrr"] | None = "headtail"
    """How causal attention's work is balanced over context-parallel ranks: "headtail" gives each an early and a late
    part of the sequence, "none" one contiguous part."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = (
        "allgather"
    )
    """How context-parallel ranks see each other's keys and values: "allgather" all at once, "ring" (or "alltoall", its name in
    TorchTitan) from rank to rank, "ulysses" by trading sequence for heads."""
    expert_parallel_degree: Positive = 1
    """Ranks that split the experts."""
    expert_tensor_parallel_degree: Positive = 1
    """Tensor-parallel ranks within an expert."""

    @property
    def splits_from_both_ends(self) -> bool:
        """Whether each context-parallel rank gets an early and a late part of the sequence. Ulysses runs whole sequences, whose
        work needs no balancing."""
        method, balancer = self.context_parallel_rotate_method, self.context_parallel_load_balancer
        return balancer == "headtail" and method != "ulysses"


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


class JobConfig(Section):
    """A whole job file. Only the trainer's wiring sees all of it."""

    job: JobSection = JobSection()
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    optimizer: OptimizerSection = AdamWSection()
    lr_scheduler: LRSchedulerSection = LRSchedulerSection()
    training: TrainingSection = TrainingSection()
    data: DataSection = DataSection()
    loss: LossSection = LossSection()
    parallelism: ParallelismSection = ParallelismSection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    metrics: MetricsSection = MetricsSection()
    profiling: ProfilingSection = ProfilingSection()
    activation_checkpoint: ActivationCheckpointSection = ActivationCheckpointSection()
    compile: CompileSection = CompileSection()
    quantize: QuantizeSection = QuantizeSection()
    comm: CommSection = CommSection()
    fault_tolerance: FaultToleranceSection = FaultToleranceSection()
    hardware: HardwareSection = HardwareSection()
    simulator: SimulatorSection = SimulatorSection()
    debug: DebugSection = DebugSection()

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """Where each key was written, for problems that are found later; no part of the config's value."""
        return self._origin
