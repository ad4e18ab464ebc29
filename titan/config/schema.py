"""Sections of a job file, one frozen pydantic model for each component.

Names of sections and keys are those of TorchTitan v0.2.2 if the concept is the same, so that its TOML files run here.
Sections that it does not have (tokenizer, data, loss, hardware) have our names. A component gets only its own section. The
sections about the model and about how a job is run are in model.py and schema_run.py; import all of them from here.

The string below a field is its documentation: docs/config.md, the JSON schema and `titan config --comments` show it. It says
what the key does, the unit, what the default means, and when to change it.

A choice with its own options (the optimizer, a data source) is a union, and one key names the member. Other packages add
members through the entry-point groups `titan.optimizers` and `titan.sources`, with a subclass of base.py's `Section`, and keys
and sections through `titan.sections`. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field, PrivateAttr

from .added_sections import extend
from .base import (
    HUB_DATASET,
    LIMIT,
    DocumentOptions,
    DType,
    NonNegative,
    Permission,
    Positive,
    PositiveOrAuto,
    RowList,
    Section,
    TokenFiles,
    completed,
)
from .errors import SourceMap
from .model import ModelSection
from .plug_ins import load_plug_in, plug_ins
from .schema_comm import CommSection
from .schema_course import PhaseSection
from .schema_faults import FaultToleranceSection
from .schema_run import (
    ActivationCheckpointSection,
    CheckpointSection,
    CompileSection,
    DebugSection,
    HardwareSection,
    JobSection,
    MetricsSection,
    MoESection,
    ParallelismSection,
    ProfilingSection,
    QuantizeSection,
    TaskSection,
    TokenizerSection,
    ValidationSection,
)
from .schema_run import Float8Section as Float8Section
from .schema_run import GroupedFloat8Section as GroupedFloat8Section
from .schema_run import MXSection as MXSection


class AdamOptions(Section):
    """Settings that all optimizers share."""

    name: str
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment for each step."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment for each step."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of the update, so that it is not zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices and, with decay_norms, of all the rest."""
    decay_norms: bool = False
    """Also decay norms, biases and other vectors. Set it to reproduce TorchTitan, which does."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How Adam's update is computed: in one fused kernel, with multi-tensor operations, or in a
    loop over parameters. torch has no fused kernel for bf16 moments of fp32 weights, 8-bit moments
    and stochastic rounding: "fused" then compiles the update, which takes seconds at the first
    step, and the other two are a loop."""
    stochastic_rounding: bool = False
    """Round updates of bf16 weights up or down at random, so that they are right on average. Small
    updates then count without fp32 master weights. Needs training.dtype = "bfloat16"."""
    early_step_in_backward: bool = False
    """Update each parameter and free its gradient as soon as the gradient is ready. Saves the
    memory of the gradients. Needs training.max_norm = 0."""


class AdamWSection(AdamOptions):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101)."""

    name: Literal["AdamW"] = "AdamW"
    state_dtype: DType | None = None
    """Precision in which the moments are stored. Unset: that of the parameters. "bfloat16" saves
    half of their memory. The update is always computed in fp32."""


class AdamSection(AdamWSection):
    """Adam (Kingma and Ba, arXiv:1412.6980). Weight decay, if set, is added to the gradient."""

    name: Literal["Adam"] = "Adam"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty, added to the gradient of matrices and, with decay_norms, of all other parameters."""


class AdamW8bitSection(AdamOptions):
    """AdamW with 8-bit moments, 2 bytes for each parameter instead of 8 (arXiv:2110.02861). Moments of vectors stay in fp32."""

    name: Literal["AdamW8bit"] = "AdamW8bit"


class MuonSection(AdamOptions):
    """Muon for the matrices of the blocks: orthogonalized momentum (kellerjordan.github.io/posts/muon, arXiv:2502.16982).

    AdamW updates the embedding, the output layer and the norms, with beta1, beta2, eps and implementation.
    """

    name: Literal["Muon"] = "Muon"
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Peak learning rate. Muon's updates are scaled to the size of AdamW's, so a learning rate that
    suits AdamW is a good start."""
    adam_lr: Annotated[float | None, Field(gt=0)] = None
    """Peak learning rate of the parameters that AdamW updates. Unset: lr."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the momentum for each step."""
    nesterov: bool = True
    """Orthogonalize a mixture of gradient and momentum (Nesterov), not the momentum alone."""
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Iterations of Newton-Schulz. Fewer are faster and less exact."""
    ns_dtype: DType | None = None
    """Precision of Newton-Schulz, and of the shards that ranks exchange for it. Default: bfloat16, and float32 on CPUs, where bfloat16
    takes 20 times as long."""


class LRSchedulerSection(Section):
    """Linear warm-up, then constant, then decay (warmup-stable-decay, arXiv:2404.06395). docs/config.md has the formula."""

    warmup_steps: NonNegative = 200
    """Steps in which the learning rate rises linearly to its peak. If the run is too short, warm-up
    is cut to its length first, then decay to what is left, with a warning."""
    total_steps: Annotated[int | None, Field(ge=1, le=LIMIT)] = None
    """Steps of the schedule, if it is to be longer than the run. Unset: training.steps."""
    decay_ratio: Annotated[float | None, Field(ge=0, le=1)] = None
    """Share of the schedule that decays, at its end. Unset: all after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rate at the end of the decay, one step after the last, as a share of the peak."""


class DataloaderSection(Section):
    """Background preparation of batches."""

    num_workers: NonNegative = 1
    """0 prepares batches in the training thread, 1 or more in one background thread."""
    pin_memory: bool = True
    """Copy batches from page-locked memory, so that copies overlap with computation."""
    prefetch_factor: Annotated[int, Field(ge=1, le=1024)] = 4
    """Batches prepared ahead. Raise it if data_wait_s in the metrics is not near 0."""


class TrainingSection(Section):
    """The training step: its data, its size and its precision."""

    dataset: Annotated[str, HUB_DATASET] = "stdlib"
    """What to train on: a preset (stdlib, synthetic, text, jsonl, csv, parquet, shards, c4,
    c4_test, fineweb-edu) or the name of a Hugging Face dataset (owner/name). For several sources, or options
    of one, use [[data.sources]] instead."""
    dataset_path: str | None = None
    """File, folder or glob of a local dataset."""
    local_batch_size: Positive = 8
    """Sequences that each data-parallel rank computes in one forward pass."""
    global_batch_size: PositiveOrAuto = -1
    """Sequences in an optimizer step, over all ranks. If it is more than one forward pass covers,
    gradients are accumulated. -1: local_batch_size x data-parallel degree, without accumulation."""
    seq_len: Positive = 2048
    """Tokens in each sequence."""
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Scale gradients down to this global L2 norm. 0: only report the norm."""
    steps: Positive = 10_000
    """Optimizer steps of the whole run, including those before a resume."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP). Slow."""
    expandable_segments: bool = True
    """Let CUDA's caching allocator grow its segments in place, which wastes less memory. false:
    torch's default. PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF take precedence."""
    dtype: DType = "float32"
    """Precision of the master parameters and of the optimizer."""
    mixed_precision_param: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward and backward pass. Gathered parameters are cast to it. "auto": bfloat16
    on accelerators, float32 on CPUs. float32 is about ten times slower on an H100. float16 is for
    accelerators without bfloat16 (T4, V100): the loss has a dynamic scale, and a step whose gradients
    are infinite updates nothing."""
    mixed_precision_reduce: DType = "float32"
    """Precision in which gradients are summed over ranks."""
    gc_freq: Positive = 50
    """Steps from one run of Python's garbage collector to the next. All ranks collect in the same
    step, so that none makes the others wait at another time."""
    dataloader: DataloaderSection = DataloaderSection()

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Return the precision of the forward and backward pass. "auto" means accelerators; `JobConfig.on_device` handles a CPU."""
        asked = self.mixed_precision_param
        return "bfloat16" if asked == "auto" else asked


class LossSection(Section):
    """Cross entropy, or an installed package's loss: the fp32 sum over the global batch's valid tokens, divided by their number."""

    name: str = "cross_entropy"
    """What training minimizes: "cross_entropy", or the name of an entry point `titan.losses`. Validation
    reports the cross entropy with any loss."""
    options: dict[str, int | float | bool | str] = {}
    """Keyword arguments of a package's loss, such as {weight = 1e-4}."""
    chunk_output: bool = True
    """Compute the output layer together with the loss, a chunk of tokens at a time, so that the
    whole logits are never in memory. false: they are, in the compute precision. Has no effect if
    parallelism.disable_loss_parallel gathers the logits."""
    chunk_tokens: NonNegative = 2048
    """Tokens whose logits are in fp32 at a time. With chunk_output these are all the logits that
    exist. 0: all tokens. With chunk_output = false, 0 is the plain loss of most frameworks, for
    comparison: torch's cross entropy on an fp32 copy of all logits. Lower it for memory: more
    saves little time (docs/memory.md)."""


class StdlibSource(DocumentOptions):
    """The embedded default: source code and documentation of this machine's Python standard library."""

    type: Literal["stdlib"] = "stdlib"


class SyntheticSource(DocumentOptions):
    """Random token ids, for measuring speed. A model can learn only their distribution."""

    type: Literal["synthetic"] = "synthetic"


class TextSource(DocumentOptions):
    """Local text files, one document each."""

    type: Literal["text"] = "text"
    path: str
    """File, folder (searched for *.txt and *.md, also .gz and .zst) or glob."""
    document_chars: NonNegative = 0
    """Cut each file into documents of at most so many characters, after a line or a word, so that part of a single file can be
    kept for validation. 0: a file is a document."""


class JsonlSource(DocumentOptions):
    """Local JSON Lines (also .gz and .zst), one document in each line."""

    type: Literal["jsonl"] = "jsonl"
    path: str
    """File, folder (searched for *.jsonl, *.ndjson and *.json, also .gz and .zst) or glob."""
    text_key: str = "text"
    """Field that holds the text."""
    messages_key: str = ""
    """Field that holds a conversation, a list of {"role": ..., "content": ...}, such as "messages".
    The tokenizer's chat template makes it tokens, and only answers are predicted. Empty: text_key."""


class CsvSource(DocumentOptions):
    """Local tables of values separated by commas, semicolons or tabs, one document in each row."""

    type: Literal["csv"] = "csv"
    path: str
    """File, folder (searched for *.csv and *.tsv, also .gz and .zst) or glob. The first row names the columns."""
    text_key: str = "text"
    """Column that holds the text."""


class ParquetSource(DocumentOptions):
    """Local Parquet files, one document in each row."""

    type: Literal["parquet"] = "parquet"
    path: str
    """File, folder (searched for *.parquet) or glob."""
    text_key: str = "text"
    """Column that holds the text."""
    messages_key: str = ""
    """Column that holds a conversation, as for JSON Lines. Empty: text_key."""


class ShardsSource(TokenFiles):
    """Memory-mapped token shards, written by `titan prepare`."""

    type: Literal["shards"] = "shards"
    path: str
    """Folder that `titan prepare` wrote."""


class HuggingFaceSource(DocumentOptions):
    """A dataset of the Hugging Face hub, or a local copy of one, read through `datasets`."""

    type: Literal["huggingface"] = "huggingface"
    path: Annotated[str, Permission("network")]
    """Name at the hub, or a local folder that `datasets` can load."""
    name: str | None = None
    """Configuration of the dataset, such as "en" of allenai/c4."""
    split: str = "train"
    """Split to read."""
    text_key: str = "text"
    """Column that holds the text."""
    streaming: bool = True
    """Read the data while training. false: download all of it first."""
    shuffle_buffer: NonNegative = 10_000
    """Documents shuffled together while streaming. 0 keeps the order of the files."""


class SourceDefaults:
    """Attributes of a source that titan reads, for sources that lack some.

    Attributes:
        type: kind of the source.
        path: its files.
        weight: its share of the samples.
        streaming: it is read while training.
        text_key: name of the field with the text.
        messages_key: name of the field with messages.
        documents: function that returns its `Documents`.
    """

    type: str = ""
    path: str | None = None
    weight: float = 1.0
    streaming: bool = False
    text_key: str | None = None
    messages_key: str = ""
    documents: Callable[[], Any] | None = None


def source_of(section: Section) -> SourceDefaults:
    """Return a source, which may be another package's, with what it lacks."""
    return completed(section, SourceDefaults)


def streams(section: Section) -> bool:
    """Return whether a source is read while training."""
    return source_of(section).streaming


def reads_chats(section: Section) -> bool:
    """Return whether a source has conversations."""
    return bool(source_of(section).messages_key)


class OptimizerDefaults:
    """Attributes of [optimizer] that titan reads, for optimizers that lack some.

    Attributes:
        weight_decay: decay of the weights.
        decay_norms: norms and biases decay, too.
        state_dtype: dtype of the moments; None: that of the weights.
        moments: number of moments of each parameter.
        stochastic_rounding: bf16 weights are rounded at random.
        early_step_in_backward: a parameter is updated once its gradient is ready.
        build: function that returns the optimizer of a list of parameters.
    """

    weight_decay: float = 0
    decay_norms: bool = True
    state_dtype: str | None = None
    moments: int = 2
    stochastic_rounding: bool = False
    early_step_in_backward: bool = False
    build: Callable[[list[Any]], Any] | None = None


class GroupDefaults:
    """Attributes of [fault_tolerance] that titan reads, without the keys of replica groups.

    Attributes:
        enable: the run is a replica group.
        group_number: its number, from 0.
        num_groups: number of all groups.
    """

    enable: bool = False
    group_number: int = 0
    num_groups: int = 1


# The built-in members. Type checkers see only these.
_Optimizers = AdamWSection | AdamSection | AdamW8bitSection | MuonSection
_LocalSources = TextSource | JsonlSource | CsvSource | ParquetSource | ShardsSource
_Sources = StdlibSource | SyntheticSource | _LocalSources | HuggingFaceSource


def _members(group: str, built_in: Any) -> Any:
    """Return the union of the built-in sections and the sections registered under an entry-point group."""
    # pyrefly: ignore[not-a-type, unknown-name]
    return Union[(built_in, *(load_plug_in(entry) for entry in plug_ins(group)))]


if TYPE_CHECKING:
    OptimizerSection = _Optimizers
    SourceSection = _Sources
else:
    OptimizerSection = Annotated[
        _members("titan.optimizers", _Optimizers),
        Field(discriminator="name"),
        # An [optimizer] without a name is AdamW.
        BeforeValidator(
            lambda value: {"name": "AdamW"} | value if isinstance(value, dict) else value
        ),
    ]
    SourceSection = Annotated[_members("titan.sources", _Sources), Field(discriminator="type")]


class DataSection(Section):
    """Where text comes from, and how documents are packed into sequences."""

    sources: list[SourceSection] = []
    """Sources to blend by their weights. Empty: what training.dataset names."""
    shuffle: bool = True
    """Visit samples in an order drawn from debug.seed for each epoch. false: file order."""
    packing: Literal["cut", "best_fit"] = "cut"
    """How documents fill sequences. cut: one after another, cut wherever a sequence ends. best_fit:
    whole, where they leave the least room, with padding in what stays free. Only documents longer
    than a sequence are cut. Not for streams."""
    add_bos: bool = True
    """Begin each document with the tokenizer's begin-of-text token, if it has one. A tokenizer that
    does not add one to the texts that it encodes needs tokenizer.bos_token as well."""
    add_eos: bool = True
    """End each document with the tokenizer's end-of-text token, if it has one."""
    reset_positions: bool = False
    """Count positions from the start of each document. Needs document_mask."""
    document_mask: bool = False
    """Mask attention between documents. The first token of a document is
    then not predicted from the document before it."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the documents, chosen by a hash, kept from training for validation."""
    skip: RowList = []
    """Documents not to train on: SOURCE:ROW, as `titan audit --rows` prints them, or files of such
    lines. Their tokens become padding from now on, and all other samples stay as they are."""
    cache_folder: Annotated[str, Permission("write")] = ""
    """Folder for tokenized text. Empty: titan/ in the user's cache folder."""


class JobConfig(Section):
    """A whole job file. Only the code that wires components together sees all of it."""

    job: JobSection = JobSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    tokenizer: TokenizerSection = TokenizerSection()
    optimizer: OptimizerSection = AdamWSection()
    lr_scheduler: LRSchedulerSection = LRSchedulerSection()
    training: TrainingSection = TrainingSection()
    data: DataSection = DataSection()
    phase: list[PhaseSection] = []
    loss: LossSection = LossSection()
    parallelism: ParallelismSection = ParallelismSection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    moe: MoESection = MoESection()
    metrics: MetricsSection = MetricsSection()
    profiling: ProfilingSection = ProfilingSection()
    activation_checkpoint: ActivationCheckpointSection = ActivationCheckpointSection()
    compile: CompileSection = CompileSection()
    quantize: QuantizeSection = QuantizeSection()
    comm: CommSection = CommSection()
    fault_tolerance: FaultToleranceSection = FaultToleranceSection()
    hardware: HardwareSection = HardwareSection()
    debug: DebugSection = DebugSection()

    _source_map: SourceMap = PrivateAttr(default_factory=SourceMap)
    _whole: JobConfig | None = PrivateAttr(default=None)

    @property
    def any_optimizer(self) -> OptimizerDefaults:
        """Return [optimizer], which may be another package's, with what it lacks."""
        return completed(self.optimizer, OptimizerDefaults)

    @property
    def groups(self) -> GroupDefaults:
        """Return [fault_tolerance], with what it lacks if no package adds the keys of replica groups."""
        return completed(self.fault_tolerance, GroupDefaults)

    @property
    def steps_in_backward(self) -> bool:
        """Return whether the optimizer updates a parameter once its gradient is ready."""
        return self.any_optimizer.early_step_in_backward

    @property
    def source_map(self) -> SourceMap:
        """Return the place where each key was written, for later problems. It is not part of the config's value."""
        return self._source_map

    @property
    def whole(self) -> JobConfig:
        """Return the job as it was written, also from the job of a part of the run (`with_sections`)."""
        return self._whole or self

    def with_sections(self, sections: dict[str, Section]) -> JobConfig:
        """Return the job with other sections, for a part of the run."""
        job = self.model_copy(update=sections)
        job._whole = self.whole
        return job

    def on_device(self, kind: str) -> JobConfig:
        """Return the job as a kind of device ("cuda", "cpu") runs it: with a precision in place of "auto".

        To get the compute precision, read `training.compute_dtype`. Only these two functions interpret "auto".
        """
        training = self.training
        if training.mixed_precision_param != "auto":
            return self
        dtype = "float32" if kind == "cpu" else training.compute_dtype
        training = training.model_copy(update={"mixed_precision_param": dtype})
        return self.model_copy(update={"training": training})


if not TYPE_CHECKING:
    JobConfig = extend(JobConfig, globals())
