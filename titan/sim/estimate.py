"""Estimate of memory per rank by formula, before anything is built. Imports no torch.

`titan check` and the start-up page use it. The activation count is that of Korthikanti et al.,
"Reducing Activation Recomputation" (arXiv:2205.05198), section 4, redone for a Llama block: RMSNorm
instead of LayerNorm, no dropout, SwiGLU, grouped keys and values, and an attention kernel that
keeps no S x S matrix. Tensors that each block keeps for its backward pass, per token and in
elements (D dim, H query heads, G key/value heads, K head dim, F ffn dim):

    inputs of the two norms                      2 D           / tp (sequence parallel)
    inputs of q, k, v and of w1, w3              2 D           gathered over tp
    q, k, v as attention sees them, its output   2 H K + 2 G K / tp
    w1 x, w3 x, silu(w1 x), their product        4 F           / tp

With K experts of width F per token, and shared experts, these rows take the place of the last one,
per token of the rank:

    tokens of the experts, and as above          K (D + 4 F)   / tp, and more on the busiest rank, by simulator.routing
    outputs of the experts, in fp32              2 K D         / tp
    shared experts                               4 F each      / tp

docs/memory.md compares the estimate with an allocator's count. It describes the fullest rank: the
first pipeline stage, whose schedule keeps up to `pp` microbatches alive. It is a formula, not a
measurement: no allocator fragmentation, no CUDA context (1 to 2 GiB), no communication buffers, no
document mask, and the categories are added up as if all were at their largest at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, TypeAlias

from titan.config.layout import Layout, keeps_gathered
from titan.config.schema import ActivationCheckpointSection, JobConfig
from titan.observe.flops import StagedSizes
from titan.parallel.sac_save_list import parse_blocks, parse_rule

from .routing import busiest_rank

ModelSizes: TypeAlias = Any
"""A family's config. The formulas read dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim, vocab_size, num_params,
num_block_params and num_embedding_params; for a mixture of experts also titan.models.common.moe_config.MoEConfig's fields."""

_GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SPARSE_ROWS = 128  # that layers which choose their keys compute at a time


def estimate_memory(
    config: JobConfig, model_config: ModelSizes, layout: Layout
) -> dict[str, float]:
    """Estimate the memory of the fullest rank.

    Args:
        config: the job.
        model_config: sizes of the model.
        layout: layout of the ranks.

    Returns:
        GiB of parameters, gradients, optimizer, activations, logits and unsharded, and their
        total.
    """
    # The first stage has the embedding and its share of the blocks.
    layers = ceil(model_config.num_blocks / layout.pp)
    params = model_config.num_params
    if layout.pp > 1:
        params = _in_blocks(model_config, layers) + model_config.num_embedding_params
    shards = layout.tp * layout.dp_shard * layout.cp
    params_bytes = params / shards * _BYTES[config.training.dtype]
    # Muon keeps less for the matrices in blocks than its second optimizer for all other parameters.
    in_blocks = _in_blocks(model_config, layers)
    moments_bytes = in_blocks * _moment_bytes(config, in_blocks=True)
    moments_bytes += (params - in_blocks) * _moment_bytes(config, in_blocks=False)
    # Of a section that a package adds, such as [average].
    added = (getattr(section, "bytes_per_parameter", 0) for _, section in config)
    moments_bytes += params * sum(added)
    # An early step frees each gradient at once, so only the gradients of one FSDP unit exist.
    at_once = 1.0
    if config.steps_in_backward and layout.accumulation == 1:
        ends = model_config.num_embedding_params  # a unit at each end, as large
        unit = model_config.num_block_params * config.parallelism.fsdp_blocks_per_unit
        at_once = max(unit, ends) / params
    # For one forward pass on one rank, before tensor parallelism.
    tokens = config.training.local_batch_size * config.training.seq_len / layout.cp
    kept, recomputed = activation_elements(config, model_config, layout, layers=layers)
    recomputed /= _num_microbatches(config, layout)  # one at a time
    compute_bytes = _BYTES[config.training.compute_dtype]
    estimate_bytes = {
        "parameters": params_bytes,
        "gradients": params_bytes * at_once,
        "optimizer": moments_bytes / shards,
        "activations": tokens * (kept + recomputed) * compute_bytes
        + _sparse_bytes(config, model_config, layout),
        "logits": _logits_bytes(config, model_config, layout, tokens=tokens),
        "unsharded": _unsharded_bytes(config, model_config, layout, layers=layers),
    }
    estimate: dict[str, float] = {name: size / _GIB for name, size in estimate_bytes.items()}
    return estimate | {"total": sum(estimate.values())}


def _in_blocks(model: ModelSizes, layers: int) -> int:
    """Return the number of parameters of the last `layers` blocks.

    Dense blocks come first, and are smaller than blocks with experts.
    """
    if not model.num_experts:
        return layers * model.num_block_params
    return sum(map(model.block_params, range(model.num_blocks - layers, model.num_blocks)))


def stacked_params(model: ModelSizes) -> int:
    """Return the parameters of a block's experts, which expert parallelism splits; 0 for a dense model."""
    num_experts = model.num_experts
    return num_experts and num_experts * model.num_expert_params


def _moment_bytes(config: JobConfig, *, in_blocks: bool) -> float:
    """Return the optimizer's bytes per parameter. Norms count as matrices: they are few."""
    optimizer, dtype = config.optimizer, config.training.dtype
    if optimizer.name == "AdamW8bit":
        # Two moments in 8 bits, and an fp32 scale for each block of at most 256 elements.
        return 2 * (1 + _BYTES["float32"] / 256)
    # Momentum alone.
    if optimizer.name == "Muon" and in_blocks:
        return _BYTES[dtype]
    traits = config.any_optimizer
    return traits.moments * _BYTES[traits.state_dtype or dtype]


def activation_elements(
    config: JobConfig, model: ModelSizes, layout: Layout, *, layers: int
) -> tuple[float, float]:
    """Count the elements of activations per token.

    Args:
        config: the job.
        model: sizes of the model.
        layout: layout of the ranks.
        layers: blocks of the rank.

    Returns:
        Elements kept for the microbatches in flight, and elements of one layer during its
        recomputation.
    """
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    # The table at the top of the file: elements that tp splits, and elements that it does not.
    split = (
        2 * model.dim + 2 * heads + 2 * kv_heads + _feed_forward_elements(config, model, layout)
    )
    whole = split / layout.tp + 2 * model.dim
    section = config.activation_checkpoint
    by_layer = _kept_by_layer(section, model, tp=layout.tp, whole=whole)
    kept = layers * by_layer * _in_flight(config, layout)
    if layout.pp == 1:  # inputs of the last norm and of the output layer
        kept += model.dim / layout.tp + model.dim
    return kept, 0 if section.mode == "none" else whole


def _sparse_bytes(config: JobConfig, model: ModelSizes, layout: Layout) -> float:
    """Return the bytes that a choice of keys takes beside those of attention to all keys, if the layers of a model choose.

    All layers keep their choices. One layer at a time has temporary tensors for `_SPARSE_ROWS` queries and all keys. Most of them are three
    of all heads for the target of the indexer's loss, or three of the indexer's heads, or gradients of keys and values, in fp32 and as computed.
    """
    job: Any = config
    if not isinstance(model, StagedSizes) or not model.index_width:
        return 0.0
    if job.sparse_attention.stages[0] == "dense":
        return 0.0
    sizes: Any = model
    item, training = _BYTES[config.training.compute_dtype], config.training
    queries, heads = training.seq_len / layout.cp, sizes.n_heads / layout.tp
    rows = min(_SPARSE_ROWS, queries)
    of_target = heads * (3 * 4 * rows + item * sizes.head_dim)
    of_scores = 3 * 4 * rows * sizes.index_heads
    of_keys = 2 * heads * sizes.head_dim * (4 + item)
    # Masks and scores of one choice are 16 bytes a query and key.
    of_layer = training.seq_len * (max(of_target, of_scores, of_keys) + 16 * rows)
    choices = queries * 4 * sizes.choices / layout.pp * _in_flight(config, layout)
    return training.local_batch_size * (choices + of_layer / _num_microbatches(config, layout))


def _feed_forward_elements(config: JobConfig, model: ModelSizes, layout: Layout) -> float:
    if not model.num_experts:
        return 4 * model.ffn_dim
    dim, ffn = model.dim, model.expert_dim
    arriving = (dim + 4 * ffn) * busiest_rank(config, model, layout)
    # fp32 counts as two elements, unless all is in fp32.
    back = dim * _BYTES["float32"] / _BYTES[config.training.compute_dtype]
    return model.top_k * (arriving + back) + model.num_shared_experts * 4 * ffn


def _kept_by_layer(
    section: ActivationCheckpointSection, model: ModelSizes, *, tp: int, whole: float
) -> float:
    """Return the mean number of elements per token that a layer keeps."""
    # Every mode keeps the block's input, from which recomputation starts.
    block_input = model.dim / tp
    if section.mode == "none":
        return whole
    if section.mode == "memory_budget":
        return block_input + section.memory_budget * (whole - block_input)
    if section.mode == "selective" and section.selective_ac_option == "op":
        lines = [parse_blocks(line) for line in section.op_keep_by_block]
        kept = [(len(blocks), entries) for blocks, entries in lines]
        kept.append((model.num_blocks - sum(count for count, _ in kept), section.op_keep))
        by_op = sum(
            n * (whole if entries is None else block_input + _kept_by_op(entries, model) / tp)
            for n, entries in kept
        )
        return by_op / model.num_blocks
    # One layer in `every` is recomputed, the others keep everything.
    every = int(section.selective_ac_option) if section.mode == "selective" else 1
    return (block_input + (every - 1) * whole) / every


def _kept_by_op(op_keep: Sequence[str], model: ModelSizes) -> float:
    """Count the results of attention and of matmuls that the list keeps.

    Other operations are not counted.
    """
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    dim, ffn, k = model.dim, model.ffn_dim, 1
    if model.num_experts:
        ffn, k = model.expert_dim, model.top_k
    # In the order of execution: q, k, v, o, w1, w3, w2.
    products = [heads, kv_heads, kv_heads, dim, k * ffn, k * ffn, k * dim]
    kept = 0
    for rule in map(parse_rule, op_keep):
        results = products if "aten.mm" in rule.names else ()
        results = [heads] if any("attention" in name for name in rule.names) else results
        kept += sum(size for n, size in enumerate(results) if rule.keeps(n))
    return kept


def _num_microbatches(config: JobConfig, layout: Layout) -> int:
    """Return the number of microbatches in a local batch; 1 without a pipeline."""
    if layout.pp == 1:
        return 1
    return ceil(
        config.training.local_batch_size / config.parallelism.pipeline_parallel_microbatch_size
    )


def _in_flight(config: JobConfig, layout: Layout) -> float:
    """Return the share of the local batch whose activations the first rank holds at once."""
    num_microbatches = _num_microbatches(config, layout)
    schedule = config.parallelism.pipeline_parallel_schedule
    # GPipe runs all forward passes first. Without a pipeline there is one forward pass.
    if layout.pp == 1 or schedule == "GPipe":
        return 1.0
    # 1F1B: one microbatch for each rank. Interleaved schedules with two stages on a rank hold more
    # before the first backward pass: 3 pp - 1 microbatches, of half the blocks each
    # (arXiv:2104.04473, section 2.2).
    held = 1.5 * layout.pp - 0.5 if schedule.startswith("Interleaved") else layout.pp
    return min(held, num_microbatches) / num_microbatches


def _logits_bytes(
    config: JobConfig, model: ModelSizes, layout: Layout, *, tokens: float
) -> float:
    """Return the bytes of the logits, their gradient, and one chunk in float32.

    The first of several stages has no logits. Logits and gradient are in the compute precision.
    They cover one chunk, with the gradients of the output layer's input and, in float32, of its
    weight; or all tokens, if the output layer is not computed in chunks.
    """
    if layout.pp > 1 or not model.vocab_size:
        return 0.0
    # 0 tokens a chunk means all at once.
    chunk = min(config.loss.chunk_tokens or tokens, tokens)
    is_whole = config.parallelism.disable_loss_parallel
    columns = model.vocab_size / (1 if is_whole else layout.tp)
    compute_bytes = _BYTES[config.training.compute_dtype]
    fp32_chunk = chunk * columns * _BYTES["float32"]
    if is_whole or not config.loss.chunk_output:
        return 2 * tokens * columns * compute_bytes + fp32_chunk
    weight = model.dim * columns * (_BYTES["float32"] + compute_bytes)
    return (
        2 * chunk * columns * compute_bytes
        + fp32_chunk
        + weight
        + tokens * model.dim * compute_bytes
    )


def _unsharded_bytes(
    config: JobConfig, model: ModelSizes, layout: Layout, *, layers: int
) -> float:
    """Return the bytes outside the shards when the backward pass begins.

    FSDP2's units are blocks and the modules at each end. Gathered (or cast) parameters: with ZeRO-3
    the output layer, the kept blocks and the next unit; with ZeRO-2 and DDP all of them. Gradients
    not yet reduced: one block and the output layer; all gradients while replicas accumulate, if
    they are reduced once a step, and in a pipeline. A single rank in the master precision uses the
    parameters as they are stored.
    """
    training = config.training
    param_bytes = _BYTES[training.compute_dtype]
    reduce_bytes = _BYTES[training.mixed_precision_reduce]
    is_cast = training.compute_dtype != training.dtype
    is_sharded = layout.dp_shard * layout.cp > 1
    is_replicated = not is_sharded and layout.dp_replicate > 1
    # Nothing is gathered, cast or reduced in buckets.
    if not (is_sharded or is_cast or is_replicated):
        return 0.0
    keeps_all = is_replicated or keeps_gathered(config, layout)
    # The last blocks, and the unit that comes next.
    per_unit = config.parallelism.fsdp_blocks_per_unit
    kept = ceil(config.parallelism.fsdp_kept_blocks / per_unit) * per_unit
    blocks = layers if keeps_all else min(kept + per_unit, layers)
    # Parameters outside blocks: embedding, last norm, output layer. The embedding is freed, unless
    # it is the output layer.
    ends = model.num_params - _in_blocks(model, model.num_blocks)
    ends = ends if layout.pp == 1 and keeps_all else model.num_embedding_params
    # Expert parallelism splits experts, and tensor parallelism all other weights. The last line
    # divides by tp.
    stacked, ep = stacked_params(model), config.parallelism.expert_parallel_degree
    block = model.num_block_params - stacked + stacked * layout.tp / ep
    gathered = param_bytes * (ends + blocks * block)
    if not (is_sharded or is_cast):
        gathered = 0  # torch computes with the parameters themselves
    unreduced = (param_bytes + reduce_bytes) * block * per_unit
    unreduced += param_bytes * model.num_embedding_params
    if not is_sharded and layout.accumulation > 1:
        unreduced = reduce_bytes * model.num_params
    once = config.parallelism.fsdp_reduce_gradients == "step" and layout.accumulation > 1
    # A pipeline accumulates whole gradients, and reduces them after the last microbatch.
    if _num_microbatches(config, layout) > 1 or (is_sharded and once):
        unreduced = reduce_bytes * (layers * block + model.num_embedding_params)
    return (gathered + unreduced) / layout.tp
