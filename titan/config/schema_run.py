"""Sections about how a job is run: task, parallelism, memory, compiler, number formats, checkpoints, logs, failures.

Import them from titan.config.schema, which has the other sections and `JobConfig`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import (
    HUB_DATASET,
    LIMIT,
    TOKENIZER_FILE,
    NonNegative,
    NonNegativeOrAuto,
    Permission,
    Positive,
    PositiveList,
    PositiveOrAuto,
    ReadWith,
    Section,
    StrList,
)

_BELOW_RUN = Permission("write", below_run=True)
_CHECKPOINTS = Permission("read", below_run=True, option="naming a step, or its URL,")


class JobSection(Section):
    """The run folder, and what people call the run."""

    dump_folder: Annotated[str, Permission("write")] = "./outputs"
    """The run folder. Config, metrics, logs and checkpoints are written below it. Start the same
    job with the same folder to resume it."""
    description: str = ""
    """A sentence for people, shown at start-up. It has no effect."""
    print_config: bool = False
    """Print the resolved config at start-up. config.toml in the run folder always has it."""


class ProfilingSection(Section):
    """Profiler traces and memory snapshots. `titan profile` reads a trace and shows where the step's time went."""

    enable_profiling: bool = False
    """Record a profiler trace every profile_freq steps. A recorded step is slower."""
    save_traces_folder: Annotated[str, _BELOW_RUN] = "traces"
    """Folder of the traces, below the run folder."""
    profile_freq: Positive = 10
    """Steps between traces or snapshots; at least profiler_warmup + profiler_active."""
    profiler_active: Positive = 1
    """Steps recorded in each trace. One is enough for most questions; a trace of more is larger."""
    profiler_warmup: NonNegative = 3
    """Steps that the profiler runs before it records, to leave out its own start-up."""
    record_shapes: bool = True
    """Record the shapes of operators' inputs, too. The trace is larger, and the host slower."""
    enable_memory_snapshot: bool = False
    """Write the CUDA allocator's history every profile_freq steps, and when memory runs out. View
    it at pytorch.org/memory_viz."""
    save_memory_snapshot_folder: Annotated[str, _BELOW_RUN] = "memory_snapshot"
    """Folder of the memory snapshots, below the run folder."""


class MetricsSection(Section):
    """What is logged, and where. metrics.jsonl in the run folder is always written."""

    log_freq: Positive = 10
    """Steps from one logged step to the next."""
    enable_tensorboard: bool = False
    """Also write TensorBoard event files."""
    disable_color_printing: bool = False
    """Print to the terminal without colors."""
    save_tb_folder: Annotated[str, _BELOW_RUN] = "tensorboard"
    """Folder of the TensorBoard files, below the run folder."""
    save_for_all_ranks: bool = False
    """Let every rank write its own metrics (metrics.rank-N.jsonl). By default only rank 0 does."""
    enable_wandb: Annotated[bool, Permission("network")] = False
    """Also log to Weights & Biases. Without a network it logs offline, below the run folder."""
    wandb_project: str = "titan"
    """Project name at Weights & Biases."""
    wandb_run_name: str = ""
    """Run name at Weights & Biases. Empty: the name of the run folder."""
    mfu_convention: Literal["full", "causal"] = "full"
    """How MFU counts the FLOPs of attention. "full" counts the whole S x S matrix, as PaLM and
    TorchTitan do. "causal" counts half of it, which is what a causal kernel computes."""


class ParallelismSection(Section):
    """Degrees of the mesh axes: world size = pp x dp_replicate x dp_shard x cp x tp. docs/parallelism.md says when to use which."""

    layout: Literal["fixed", "auto"] = "fixed"
    """"fixed": the degrees below. "auto": `titan train`, `titan slurm` and `titan sim` choose the fastest that fit for the
    number of ranks, and hold the keys that the job sets here. docs/simulator.md says what may change."""
    layout_reason: str = ""
    """Why titan chose this layout, for the start-up page. titan writes it for a job with layout = "auto"."""
    data_parallel_replicate_degree: Positive = 1
    """Replicas of the model (DDP). With a shard degree above 1, each replica is sharded (HSDP)."""
    data_parallel_shard_degree: PositiveOrAuto = -1
    """Ranks that shard parameters, gradients and optimizer state (FSDP2). -1: all that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after the forward pass. "always" frees them (ZeRO-3).
    "never" keeps them for the backward pass (ZeRO-2), which saves a second gathering and costs
    memory, and for all micro-batches of a step. "default" is "always", and "never" with pipeline
    parallelism and on a rank that shares its weights with none."""
    fsdp_reduce_gradients: Literal["microbatch", "step"] = "microbatch"
    """When FSDP sums gradients over ranks: after each micro-batch, or once a step. "step" divides the bytes of
    reduce-scatters by the number of micro-batches, and costs the memory of whole gradients in
    training.mixed_precision_reduce (4 bytes a parameter in float32). DDP and pipelines always do so."""
    fsdp_kept_blocks: Positive = 1
    """Last blocks of each stage that stay gathered until their backward pass all the same. The last one
    always does. Each more saves one gathering and costs its memory. `titan plan --only fsdp` chooses."""
    fsdp_blocks_per_unit: Positive = 1
    """Neighbouring blocks that FSDP gathers and reduces as one. More of them make fewer and larger
    messages, which pays where messages are small, and cost memory. `titan plan --only fsdp` chooses."""
    fsdp_prefetch: NonNegativeOrAuto = -1
    """Units (blocks, with their experts) whose parameters FSDP gathers ahead, at the cost of their memory.
    0: one, as soon as the host reaches it. -1: 1 where experts are gathered over ranks other than the rest
    of their block (expert or tensor parallelism), else 0. Raise it if communication is exposed."""
    tensor_parallel_degree: Positive = 1
    """Ranks that split each layer's matrices. Keep it within a node."""
    disable_loss_parallel: bool = False
    """Gather the logits over tensor-parallel ranks before the loss. By default each rank computes
    the loss of its part of the vocabulary."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with matmuls. Needs compile.enable."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that split the layers."""
    pipeline_parallel_schedule: str = "1F1B"
    """Order of forward and backward passes: GPipe, 1F1B, Interleaved1F1B, LoopedBFS,
    InterleavedZeroBubble, ZBVZeroBubble or DualPipeV. `titan sim --csv` writes it."""
    pipeline_parallel_schedule_csv: str | None = ""
    """File with a custom schedule instead: a line of comma-separated actions for each rank."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Sequences in each microbatch of the pipeline. local_batch_size must be a multiple of it."""
    pipeline_parallel_layers_per_stage: Annotated[int | None, Field(ge=1, le=LIMIT)] = None
    """Layers in each stage. Unset: as many stages as the schedule needs, split evenly."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Layers that the embedding counts for: the first stage gets so many fewer."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Layers that norm and output count for: the last stage gets so many fewer."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage, such as [["tok_embeddings", "layers.0"], ["layers.1",
    "norm", "output"]]. Unset: split evenly."""
    context_parallel_degree: Positive = 1
    """Ranks that split each sequence. For sequences whose activations do not fit one rank."""
    context_parallel_load_balancer: Literal["headtail", "none", "ptrr"] | None = "headtail"
    """How the work of causal attention is balanced over context-parallel ranks. "headtail" gives
    each an early and a late part of the sequence, "none" one contiguous part."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = (
        "allgather"
    )
    """How context-parallel ranks get each other's keys and values: "allgather" all at once, "ring"
    (TorchTitan: "alltoall") from rank to rank, "ulysses" by trading sequence for heads."""
    expert_parallel_degree: Positive = 1
    """Ranks that split the experts of a mixture of experts, taken from the data, context and tensor
    parallel ones: it must divide dp_shard x cp x tp. docs/moe.md says how to choose it."""
    expert_tensor_parallel_degree: Positive = 1
    """Ranks that split the matrices of an expert. Only 1: FSDP shards experts over tensor-parallel
    ranks too, with the same numbers."""

    @property
    def splits_from_both_ends(self) -> bool:
        """Return whether each context-parallel rank gets an early and a late part of the sequence."""
        # Ulysses computes whole sequences, so its work is balanced anyway.
        method, balancer = (
            self.context_parallel_rotate_method,
            self.context_parallel_load_balancer,
        )
        return balancer == "headtail" and method != "ulysses"


class CheckpointSection(Section):
    """Saving and resuming. docs/checkpoints.md has the details."""

    enable: bool = True
    """Save checkpoints, and resume from the newest one in the run folder."""
    folder: Annotated[str, _CHECKPOINTS] = "checkpoint"
    """Folder of the checkpoints, below the run folder. Also a URL that fsspec knows, such as
    "s3://bucket/run", "gs://..." or "file:///..."."""
    interval: Positive = 500
    """Steps from one save to the next. The last step is always saved."""
    interval_minutes: Annotated[float, Field(ge=0)] = 0.0
    """Also save if the last save is this many minutes ago. 0: save by steps only."""
    initial_load_path: Annotated[str | None, Permission("read")] = None
    """A checkpoint (its step-N folder) to start from if the run folder has none."""
    initial_load_model_only: Annotated[bool, ReadWith("initial_load_path")] = True
    """Load only weights from initial_load_path. false: the whole state."""
    initial_load_changes: StrList = []
    """Keys of the model in which this job may differ from the checkpoint at initial_load_path, such as
    ["model.overrides.rope_theta"]. What fits is loaded, and a line says what does not."""
    initial_load_in_hf: bool = False
    """initial_load_path (or model.hf_assets_path) is a Hugging Face folder."""
    last_save_model_only: bool = False
    """Save only weights in the last checkpoint, in export_dtype. It cannot be resumed."""
    last_save_in_hf: bool = False
    """After the last save, also write a Hugging Face folder, in export_dtype: <folder>/step-N, or
    <run>/huggingface/step-N if checkpoint.folder is a URL."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of a model-only save and of a Hugging Face folder."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training goes on while a checkpoint is written, one at a time. "disabled" waits.
    "async" copies the state to the host first. "async_with_pinned_mem" copies it during the forward
    and backward pass of the next step, into buffers that it keeps: the shortest pause, for the most
    host memory. The last save is always waited for."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What to do if a save fails, such as on a full disk: train on and try again at the next
    interval, or end the run. The last save must succeed."""
    verify: Literal["strict", "off"] = "strict"
    """Compare files with the manifest before loading. "off" also loads without a manifest."""
    keep_latest_k: NonNegative = 10
    """How many of the newest checkpoints to keep. 0 keeps all."""
    keep_every_n_steps: NonNegative = 0
    """Also keep the checkpoint of every step that is a multiple of this. 0: none."""
    load_step: Annotated[int, Field(ge=-1, le=LIMIT)] = -1
    """Step to resume from. -1: the newest."""
    exclude_from_loading: StrList = []
    """Parts not to load: "optimizer", "lr_scheduler", "dataloader", "train_state". "tokenizer": do not
    refuse weights of another tokenizer."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to find out early whether saving works."""
    create_seed_checkpoint: bool = False
    """Save the initial weights as step-0 and end. They do not depend on the layout."""
    load_only: bool = False
    """Resume from checkpoints, but save none."""

    @property
    def why_unsaved(self) -> str:
        """Return the setting because of which the run saves nothing, or an empty string."""
        if not self.enable:
            return "checkpoint.enable = false"
        return "checkpoint.load_only = true" if self.load_only else ""


class ActivationCheckpointSection(Section):
    """Recomputation of activations in the backward pass, which saves their memory. docs/memory.md has formulas and measurements."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """Activations to recompute. "none": none, which is fastest. "selective": see selective_ac_option. "full":
    every block, for the least memory. "memory_budget": the compiler chooses."""
    selective_ac_option: str | Positive = "op"
    """For mode "selective". "op": keep only the results of the operations in op_keep. A number n:
    recompute every n-th block as a whole."""
    op_keep: StrList = ["matmul/2", "attention", "network", "scales"]
    """Operations whose results "op" keeps: names such as "aten.mm", or groups: "matmul",
    "attention", "network" (reduce-scatter and all-to-all), "scales" (of float8). "/2" keeps every
    second result in a block, "/3" every third, "@0,3" the first and the fourth."""
    op_keep_by_block: StrList = []
    """Operations that "op" keeps in some blocks in place of op_keep, such as "8-15: aten.mm@0,2 attention".
    "all" keeps everything, nothing after the colon keeps nothing. `titan plan --only sac` writes this."""
    memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a block's activations that the compiler keeps, from 0 to 1 (all)."""
    preserve_rng_state: bool = False
    """Restore random states for the recomputation, for models that draw random numbers in functions. Where a
    module has dropout, they are restored anyway."""


class CompileSection(Section):
    """torch.compile, one region for each block."""

    enable: bool = False
    """Compile. The first step takes longer, up to minutes; the following ones are faster."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """Parts that torch.compile compiles. "model": each block. "loss": the elementwise part of the loss."""
    backend: str = "inductor"
    """Compiler backend. Others than "inductor", such as "aot_eager", are for debugging."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of inductor. "max-autotune-no-cudagraphs" measures which kernels are fastest, for a
    longer first step."""
    cache_folder: Annotated[str, Permission("code")] = ""
    """Folder for compiled programs, which nobody else may write into. Empty: TORCHINDUCTOR_CACHE_DIR, else titan/compile in the
    user's cache folder, or on several nodes titan-compile-UID in each node's temporary folder (TMPDIR)."""

    def backend_of(self, component: str) -> str:
        """Return the backend that compiles a component, or an empty text if it is not compiled."""
        return self.backend if self.enable and component in self.components else ""


class Float8Section(Section):
    """Float8 matmuls through torchao, if model.converters has "quantize.linear.float8". See docs/memory.md."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather parameters in float8, which halves the bytes of bf16. Only for recipe "tensorwise"."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered parameters in one reduction in each step, not in one for
    each parameter. Tensor parallelism always does so."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """What shares a scale. "tensorwise" (default): the tensor; fastest. "rowwise": each row and
    column; more exact. "rowwise_with_gw_hp": and the weight's gradient in high precision."""
    filter_fqns: StrList = ["output"]
    """Layers that stay in high precision, by parts of their names. The default keeps the output
    layer, whose rounding goes straight into the loss. [] converts all, also the output layer within
    the chunked loss. "auto_filter_small_kn" keeps layers that are too small to gain, by torchao's measurements."""
    emulate: bool = False
    """Compute the same numbers slowly on hardware without float8, such as a CPU."""


class MXSection(Section):
    """MXFP8 matmuls through torchao, if model.converters has "quantize.linear.mx": a scale for each 32 values in a row."""

    recipe_name: Literal["mxfp8_cublas", "mxfp8_cublas_rceil"] = "mxfp8_cublas"
    """Rounding of scales to a power of two: down, or ("_rceil") up, which cuts no value."""
    filter_fqns: StrList = ["output"]
    """Layers that stay in high precision, by parts of their names."""
    emulate: bool = False
    """Compute the same numbers slowly on hardware without MXFP8, such as a CPU."""


class QuantizeLinearSection(Section):
    """Low-precision linear layers."""

    float8: Float8Section = Float8Section()
    mx: MXSection = MXSection()


class GroupedFloat8Section(Section):
    """Float8 matmuls of experts through torchao, with a scale for each row.

    They are on if model.converters has "quantize.grouped_mm.float8". See docs/moe.md.
    """

    fqns: StrList = ["experts"]
    """Experts to convert, by parts of their names."""
    emulate: bool = False
    """Compute the same numbers slowly on hardware without float8, such as a CPU."""


class GroupedMXSection(GroupedFloat8Section):
    """MXFP8 matmuls of experts through torchao, if model.converters has "quantize.grouped_mm.mx"."""


class QuantizeGroupedSection(Section):
    """Low-precision experts."""

    float8: GroupedFloat8Section = GroupedFloat8Section()
    mx: GroupedMXSection = GroupedMXSection()


class QuantizeSection(Section):
    """Low-precision training."""

    linear: QuantizeLinearSection = QuantizeLinearSection()
    grouped_mm: QuantizeGroupedSection = QuantizeGroupedSection()


class ValidationSection(Section):
    """Loss on held-out text."""

    enable: bool = False
    """Validate every freq steps and after the last step."""
    dataset: Annotated[str, HUB_DATASET] = ""
    """As training.dataset. Empty: the documents of data.validation_fraction."""
    dataset_path: str | None = None
    """File, folder or glob of a local dataset."""
    local_batch_size: Positive = 8
    """Sequences that each rank computes in one forward pass."""
    seq_len: Annotated[int | None, Field(ge=1, le=LIMIT)] = None
    """Tokens in each sequence. Unset: training.seq_len."""
    freq: Positive = 100
    """Steps from one validation to the next."""
    steps: PositiveOrAuto = 10
    """Forward passes of each rank in a validation. The number is fixed, so that validation cannot
    hang, and the samples are the same each time; more data-parallel ranks read more of them. A
    finite text is read once at most. -1: the whole text, which gives the same loss for every batch
    size and layout."""


class TokenizerSection(Section):
    """How text becomes token ids."""

    name: Literal["auto", "bytes", "tiktoken", "huggingface"] = "auto"
    """Kind of tokenizer. "auto" recognizes the file in `path`, and is "bytes" if path is empty.
    "bytes" needs no file: one token for each byte. "tiktoken" reads a rank file (Llama 3's
    tokenizer.model). "huggingface" reads a tokenizer.json."""
    path: Annotated[str, TOKENIZER_FILE] = ""
    """The tokenizer's file, or its folder, as all paths of inputs beside the job file or in the working directory. Empty:
    model.hf_assets_path."""
    chat_template: Annotated[str, TOKENIZER_FILE] = ""
    """Jinja file that makes conversations text. The run folder and exported folders get a copy.
    Empty: the tokenizer's own (chat_template.jinja or tokenizer_config.json)."""
    bos_token: str = ""
    """Token of the vocabulary that begins texts, if data.add_bos. Empty: the one that the
    tokenizer's files name, if the tokenizer puts it in front of texts."""
    eos_token: str = ""
    """Token of the vocabulary that ends texts. Empty: the one that the tokenizer's files name."""
    pattern: str = ""
    """Regular expression by which a rank file cuts text. Empty: Llama 3's, for its file alone."""
    special_tokens: StrList = []
    """Special tokens that follow the last rank of a rank file with a pattern, in their order."""


class DebugSection(Section):
    """Reproducibility."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Use only deterministic algorithms. Slower, but two runs give the same bits."""
    moe_force_load_balance: bool = False
    """Send tokens to all experts in turn, whatever the router says. For benchmarks: the loads are
    equal, and nothing sensible is learned."""
    record_steps: PositiveList = []
    """Steps to record in the folder recorded of the run: digests of each module's output, and of each
    parameter's gradient and update, for `titan diff`. See docs/numerics.md."""
    document_losses: NonNegative = 0
    """Step whose documents are measured, each with its loss, in documents.json of the run. `titan audit --rows` sets it. 0: none."""
    record_perturbed: NonNegative = 0
    """Seed of a disturbance of the recorded steps: outputs of modules change by one unit in the last
    place. The spread from the same run without it is what rounding does. 0: none."""
    draws: bool = True
    """Random draws of modules in training, such as dropout. false: modules compute as in evaluation, so that two layouts, whose
    ranks draw different numbers, can be compared. `titan swap` sets it."""


class MoESection(Section):
    """Execution of experts. The experts of a model, and their balancing, are in model.overrides. See docs/moe.md."""

    expert_chunk_rows: NonNegative = 0
    """Tokens that pass a rank's experts at a time. Each chunk is computed again in the backward pass,
    so that memory does not grow with uneven loads. 0: all tokens at once."""


class TaskSection(Section):
    """Task of the model, if it is not the usual task of its family."""

    name: str = ""
    """Empty: the task of the model's family, which is next-token prediction unless the family has
    another. "next_token", or the name of an entry point `titan.tasks`."""
    options: dict[str, int | float | bool | str] = {}
    """Options of the task, such as {image_size = 32}."""


class HardwareSection(Section):
    """The run's accelerators, for MFU."""

    name: str = "auto"
    """Name of the accelerator in titan/base/hardware.toml, or "auto": by its device name."""
