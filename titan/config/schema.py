"""The typed sections of a job file, one frozen pydantic model per component.

Section and key names are TorchTitan v0.2.2's wherever the concept is the same, so that its TOML files run
here; sections without a twin there (tokenizer, data, loss, hardware) have names of their own. A component
is handed only its own section; schema_run.py has those of running the job, and this module is where all are imported from. The string under a field is its documentation: `--help`, docs/config.md and
the JSON schema are generated from it. This module imports no torch.

A choice that carries its own options (the optimizer, a data source) is a union told apart by one key;
third parties add members through the entry-point groups `titan.optimizers` and `titan.sources`, each entry
naming a subclass of base.py's `Section`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, PrivateAttr

from .base import (
    LIMIT,
    DocumentOptions,
    DType,
    NonNegative,
    Positive,
    PositiveOrAuto,
    Section,
    StrList,
    load_plug_in,
)
from .errors import SourceMap
from .schema_run import (
    ActivationCheckpointSection,
    CheckpointSection,
    CommSection,
    CompileSection,
    DebugSection,
    FaultToleranceSection,
    HardwareSection,
    JobSection,
    MetricsSection,
    ProfilingSection,
    QuantizeSection,
    SimulatorSection,
    ValidationSection,
)
from .schema_run import (
    Float8Section as Float8Section,
)
from .schema_run import (
    MXSection as MXSection,
)


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

    _source_map: SourceMap = PrivateAttr(default_factory=SourceMap)

    @property
    def source_map(self) -> SourceMap:
        """Where each key was written, for problems that are found later; no part of the config's value."""
        return self._source_map
