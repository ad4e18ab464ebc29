"""Train a small GPT with megatron-core itself, on CPUs over gloo, and write a run folder as Megatron-LM does.

    python titan/contrib/megatron/tests/megatron_run.py OUT VARIANT

OUT then holds `run/` (iter_0000002 and latest_checkpointed_iteration.txt, as Megatron-LM's training/checkpointing.py
writes them) and `reference.pt`: plain tensors that `torch.load(..., weights_only=True)` reads. It has the tokens and
losses of steps 1 to 4, and the whole weights and both moments after steps 2, 3 and 4 by Megatron's own parameter names
(`decoder.layers.3.mlp.linear_fc1.weight`, with the layer's number in the whole model, and gate over up). The whole
weights are put together here, and not by Megatron's checkpoints, so that they can judge a reader of those.

OUT is an empty folder. Megatron asks for CUDA in many places. `pretend_cuda` answers for a CPU, and touches no number.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

STEPS = 4
SAVED_STEP = 2
SEQ_LEN = 32
GLOBAL_BATCH = 4
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass
class Variant:
    """Model, layout and format of a run."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    optimizer: str = "fp32"  # fp32, fully_reshardable, dp_reshardable
    single: bool = False  # singleton_local_shards
    bf16: bool = False
    tied: bool = False
    qk_norm: bool = False
    moe: bool = (
        False  # sequential experts: a checkpoint of grouped ones has the same names and shapes
    )
    deepseek: bool = False  # latent attention, a shared expert, a layer without experts
    mtp: int = 0
    vocab: int = 512  # is padded to a multiple of 128 * tp


VARIANTS: dict[str, Variant] = {
    "dense": Variant(),
    "dense_single": Variant(single=True),
    "tied": Variant(tied=True),
    "qk_norm": Variant(qk_norm=True),
    "padded": Variant(vocab=500),
    "tp2": Variant(tp=2, vocab=500),
    "tp2_single": Variant(tp=2, vocab=500, single=True),
    "pp2": Variant(pp=2),
    "pp2_tied": Variant(pp=2, tied=True),
    "dp2": Variant(dp=2, optimizer="fully_reshardable"),
    "dp2_buckets": Variant(dp=2, optimizer="dp_reshardable"),
    "bf16": Variant(bf16=True),
    "bf16_dp2": Variant(bf16=True, dp=2, optimizer="fully_reshardable"),
    "moe": Variant(moe=True),
    "moe_single": Variant(moe=True, single=True),
    "moe_tp2": Variant(moe=True, tp=2),
    "moe_ep2": Variant(moe=True, dp=2, ep=2, optimizer="fully_reshardable"),
    "qwen3_moe": Variant(moe=True, qk_norm=True),
    "deepseek": Variant(moe=True, qk_norm=True, deepseek=True),
    "deepseek_mtp": Variant(moe=True, qk_norm=True, deepseek=True, mtp=1),
}


class OnCpu(TorchFunctionMode):
    """Make on the CPU what is asked for on "cuda", and call a CPU's tensor types by the names of CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str) and a == "cuda" else a for a in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # pyrefly: ignore[no-matching-overload]
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def pretend_cuda() -> None:
    """Answer for a CPU where Megatron asks for CUDA."""
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention
    import megatron.core.transformer.torch_norm as torch_norm

    class Stream:
        def __init__(self, *_, **__): ...
        def wait_stream(self, other): ...
        def synchronize(self): ...
        def record_event(self):
            return self

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.default_stream = Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.Tensor.cuda = lambda self, *_, **__: self
    # Dropout is 0 and weights are made on the CPU: nothing is drawn from these states.
    megatron_random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    make_norm = torch_norm.WrappedTorchNorm.__new__

    def make_any_norm(cls, config, *args, **named):
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = make_norm(cls, plain, *args, **named)
        # Megatron then adds the gradients of all tensor-parallel ranks.
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = make_any_norm
    multi_latent_attention.TELinear = type("TELinear", (), {})
    # Defined only where Transformer Engine is installed, and named all the same.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    OnCpu().__enter__()


def name_norms(variant: Variant, spec) -> None:
    """Write norms under the names that they have as parts of Transformer Engine's layers."""
    attention, mlp = "self_attention.", "mlp.linear_fc1.layer_norm_"
    if variant.deepseek:
        names = {
            f"{attention}{part}_layernorm.": f"{attention}linear_{part}_up_proj.layer_norm_"
            for part in ("q", "kv")
        }
    else:
        names = {"input_layernorm.": f"{attention}linear_qkv.layer_norm_"}
    for layer in getattr(spec, "layer_specs", [spec]):
        has_experts = "MoE" in layer.submodules.mlp.module.__name__
        fused = {} if has_experts else {"pre_mlp_layernorm.": mlp}
        layer.submodules.sharded_state_dict_keys_map = names | fused


class Attention(torch.nn.Module):
    """Attention whose values have another size than its keys, which Megatron has only in Transformer Engine's form."""

    def __init__(self, config, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, *_, **__):
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self.scale
        )
        return output.permute(2, 0, 1, 3).flatten(2)


def make_config(variant: Variant):
    """Return Megatron's TransformerConfig."""
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    options: dict[str, Any] = {}
    if variant.moe:
        options |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            # The other dispatcher, alltoall, gives gloo tensors as its split sizes.
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
        }
    if variant.deepseek:
        options |= {
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_shared_expert_intermediate_size": 64,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-2,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 2.5,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "rope_type": "rope",
        }
    else:
        options |= {"num_query_groups": 2, "kv_channels": 8}
    if variant.mtp:
        options |= {"mtp_num_layers": variant.mtp, "mtp_loss_scaling_factor": 0.1}
    dtype = torch.bfloat16 if variant.bf16 else torch.float32
    config_class = MLATransformerConfig if variant.deepseek else TransformerConfig
    return config_class(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=variant.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=variant.tp,
        # Experts with tensor parallelism want it.
        sequence_parallel=variant.moe and variant.tp > 1,
        pipeline_model_parallel_size=variant.pp,
        expert_model_parallel_size=variant.ep,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=variant.bf16,
        **options,
    )


def pad_vocabulary(variant: Variant) -> int:
    """Return the padded size, as Megatron-LM's `_vocab_size_with_padding` counts it."""
    multiple = 128 * variant.tp
    return (variant.vocab + multiple - 1) // multiple * multiple


def build_model(variant: Variant, config):
    """Return Megatron's GPTModel of this rank."""
    import megatron.core.parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    if variant.moe:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=variant.qk_norm,
            multi_latent_attention=variant.deepseek,
            normalization="RMSNorm",
        )
    for layer in getattr(spec, "layer_specs", [spec]):
        if variant.deepseek:
            layer.submodules.self_attention.submodules.core_attention = Attention
    name_norms(variant, spec)
    mtp_spec = None
    if variant.mtp:
        mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        vocab_size=pad_vocabulary(variant),
        max_sequence_length=64,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=variant.tied,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        parallel_output=True,
        mtp_block_spec=mtp_spec,
    )


def make_args(variant: Variant, config) -> argparse.Namespace:
    """Return the arguments that Megatron-LM would have of this run, by the names of training/arguments.py.

    It makes the fields of TransformerConfig from arguments of the same names.
    """
    fields = {key: value for key, value in vars(config).items() if not callable(value)}
    return argparse.Namespace(
        **{"rotary_base": 10000, **fields},
        group_query_attention=not variant.deepseek,
        seq_length=SEQ_LEN,
        max_position_embeddings=64,
        vocab_size=variant.vocab,
        padded_vocab_size=pad_vocabulary(variant),
        untie_embeddings_and_output_weights=not variant.tied,
        swiglu=True,
        position_embedding_type="rope",
        num_experts=config.num_moe_experts,
        # Optimizer and schedule.
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        lr_decay_style="cosine",
        lr_decay_iters=10,
        lr_warmup_iters=2,
        lr_warmup_init=0.0,
        weight_decay=0.1,
        weight_decay_incr_style="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        decoupled_weight_decay=True,
        clip_grad=1.0,
        use_distributed_optimizer=variant.optimizer != "fp32",
        # Run.
        train_iters=10,
        micro_batch_size=2 if variant.pp > 1 else GLOBAL_BATCH // variant.dp,
        global_batch_size=GLOBAL_BATCH,
        consumed_train_samples=SAVED_STEP * GLOBAL_BATCH,
        data_parallel_size=variant.dp,
    )


def make_optimizer(variant: Variant, args: argparse.Namespace, config, model):
    """Return Megatron's optimizer and its scheduler, as training.py's `setup_model_and_optimizer` makes them."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    names = {field.name for field in dataclasses.fields(OptimizerConfig)} & vars(args).keys()
    optimizer_config = OptimizerConfig(**{name: getattr(args, name) for name in names})
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    # Megatron-LM's scheduler counts samples: a step adds the global batch.
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.lr_decay_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
    )
    return optimizer, scheduler


def draw_tokens(variant: Variant, step: int) -> torch.Tensor:
    """Return the batch of a step, (batch, seq_len + 1)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(variant.vocab, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)


def run_step(args: argparse.Namespace, model, optimizer, scheduler, tokens) -> dict[str, float]:
    """Train one step with Megatron's own schedule; return its loss, gradient norm and learning rate."""
    import megatron.core.parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    dp_rank = ps.get_data_parallel_rank()
    mine = tokens.chunk(args.data_parallel_size)[dp_rank]
    batches = iter(mine.split(args.micro_batch_size))
    positions = torch.arange(SEQ_LEN)[None].expand(args.micro_batch_size, -1)
    mask = torch.ones(1, 1, SEQ_LEN, SEQ_LEN).tril().eq(0)

    def loss_func(output):
        loss = output.float().mean()
        # The schedule divides the loss in place by the number of micro-batches.
        return loss, {"loss": loss.detach().clone()}

    def forward_step(iterator, stage):
        batch = next(iterator)
        output = stage(batch[:, :-1], positions, mask, labels=batch[:, 1:])
        return output, loss_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=len(mine) // args.micro_batch_size,
        seq_length=SEQ_LEN,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=SEQ_LEN,
        forward_only=False,
    )
    used_lr = max(group["lr"] for group in optimizer.param_groups)
    done, norm, _ = optimizer.step()
    assert done
    scheduler.step(increment=args.global_batch_size)
    loss = torch.zeros(())
    if ps.is_pipeline_last_stage():
        loss = torch.stack([one["loss"] for one in losses]).mean()
        dist.all_reduce(loss, group=ps.get_data_parallel_group())
        loss = loss / args.data_parallel_size
    # Only the last stage has it.
    dist.broadcast(loss, dist.get_world_size() - 1)
    return {"loss": float(loss), "grad_norm": float(norm), "lr": used_lr}


def read_state(optimizer, parameter) -> dict[str, torch.Tensor]:
    """Return the master weight and both moments of a parameter, in its shape on this rank."""
    for single in optimizer.chained_optimizers:
        if hasattr(single, "buffers"):
            if not any(parameter is one for buffer in single.buffers for one in buffer.params):
                continue
            # Of the distributed optimizer each rank has a flat piece, or nothing.
            whole = {key: torch.zeros(parameter.numel()) for key in ("param", *MOMENTS)}
            with contextlib.suppress(KeyError):
                piece = single._get_model_param_range_map(parameter)["param"]
                state = single._get_main_param_and_optimizer_states(parameter)
                for key in whole:
                    whole[key][piece.start : piece.end] = state[key].float()
            for tensor in whole.values():
                dist.all_reduce(tensor, group=single.data_parallel_group)
            return {key: tensor.view_as(parameter) for key, tensor in whole.items()}
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        state = single.optimizer.state.get(main)
        if state:
            moments = {key: state[key].detach().clone() for key in MOMENTS}
            return {"param": main.detach().clone(), **moments}
    raise LookupError("no optimizer has this parameter")


def unwrap(model):
    """Return the GPTModel within DistributedDataParallel, and within Float16Module."""
    inner = model.module
    return getattr(inner, "module", inner)


def name_parameters(model) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters by names with the number of the layer (and expert) in the whole model."""
    import megatron.core.parallel_state as ps

    inner = unwrap(model)
    named = {}
    for name, parameter in inner.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(inner.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            per_rank = inner.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
            parts[at] = str(int(parts[at]) + per_rank * ps.get_expert_model_parallel_rank())
        named[".".join(parts)] = parameter
    return named


def join_shards(name: str, parameter, shards: list[torch.Tensor]) -> torch.Tensor:
    """Put a parameter's tensor-parallel shards together."""
    if len(shards) == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return shards[0]
    if name.endswith("linear_fc1.weight"):
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat(gates + ups)
    return torch.cat(shards, parameter.partition_dim)


def gather_state(variant: Variant, model, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return {"param", "exp_avg", "exp_avg_sq", "buffer"} of {name: whole tensor}, the same on each rank."""
    import megatron.core.parallel_state as ps

    found: dict[str, dict[str, torch.Tensor]] = {key: {} for key in ("param", *MOMENTS)}
    for name, parameter in name_parameters(model).items():
        group = ps.get_tensor_model_parallel_group()
        for key, tensor in read_state(optimizer, parameter).items():
            shards = [torch.empty_like(tensor) for _ in range(variant.tp)]
            dist.all_gather(shards, tensor.contiguous(), group=group)
            found[key][name] = join_shards(name, parameter, shards)
    found["buffer"] = {
        name: tensor.detach().clone()
        for name, tensor in unwrap(model).named_buffers()
        if name.endswith("expert_bias")
    }
    # Stages, and ranks with other experts, have other parameters.
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    merged: dict[str, dict[str, torch.Tensor]] = {key: {} for key in found}
    for one in everyone:
        for key, tensors in one.items():
            merged[key] |= tensors
    return merged


def save(variant: Variant, args, folder: Path, model, optimizer, scheduler) -> None:
    """Save as `save_checkpoint` and `generate_state_dict` of Megatron-LM's training/checkpointing.py do."""
    import megatron.core.parallel_state as ps
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import (
        get_default_save_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    dp_cp_group = ps.get_data_parallel_group(with_context_parallel=True)
    metadata: dict[str, Any] = {}
    if args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = variant.optimizer
        if variant.optimizer == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    metadata["singleton_local_shards"] = variant.single
    metadata["chained_optim_avoid_prefix"] = True
    written = dict(metadata)
    metadata["dp_cp_group"] = dp_cp_group
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": SAVED_STEP,
        "model": model.module.sharded_state_dict(metadata=metadata),
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    state["opt_param_scheduler"] = scheduler.state_dict()
    state["rng_state"] = ShardedObject(
        "rng_state",
        [{"torch_rng_state": torch.get_rng_state()}],
        (variant.pp, variant.tp),
        (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()),
        replica_id=ps.get_data_parallel_rank(with_context_parallel=True),
    )
    iteration = folder / f"iter_{SAVED_STEP:07d}"
    iteration.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(
        state,
        str(iteration),
        FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), dp_cp_group, False
        ),
        content_metadata=written,
    )
    if dist.get_rank() == 0:
        tracker = folder / "latest_checkpointed_iteration.txt"
        tracker.write_text(str(SAVED_STEP))


def run_rank(rank: int, world: int, out: Path, variant: Variant) -> None:
    """Train and save on one rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # mp.spawn names a rank by its number alone; Megatron reads the launcher's variables too.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
    pretend_cuda()
    import megatron.core.parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    dist.init_process_group(
        "gloo", init_method=f"file://{out}/store", rank=rank, world_size=world
    )
    ps.initialize_model_parallel(
        tensor_model_parallel_size=variant.tp,
        pipeline_model_parallel_size=variant.pp,
        expert_model_parallel_size=variant.ep,
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = make_config(variant)
    args = make_args(variant, config)
    model = build_model(variant, config)
    # Norms and biases begin at constants: a reader that mixes them up would not be seen.
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 1:
                seed = sum(name.encode())
                drawn = torch.randn(
                    parameter.numel(), generator=torch.Generator().manual_seed(seed)
                )
                parameter += 0.1 * drawn.to(parameter.dtype)
    if variant.bf16:
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(config, model)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    model = DistributedDataParallel(config, ddp_config, model)
    optimizer, scheduler = make_optimizer(variant, args, config, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    reference: dict[str, Any] = {"tokens": {}, "steps": {}, "state": {}}
    for step in range(1, STEPS + 1):
        tokens = draw_tokens(variant, step)
        reference["tokens"][step] = tokens
        reference["steps"][step] = run_step(args, model, optimizer, scheduler, tokens)
        if step >= SAVED_STEP:
            reference["state"][step] = gather_state(variant, model, optimizer)
        if step == SAVED_STEP:
            save(variant, args, out / "run", model, optimizer, scheduler)
    if rank == 0:
        torch.save(reference, out / "reference.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str]) -> None:
    """Run a variant."""
    out, name = argv
    variant = VARIANTS[name]
    world = variant.tp * variant.pp * variant.dp
    mp.spawn(run_rank, (world, Path(out).resolve(), variant), nprocs=world)


if __name__ == "__main__":
    main(sys.argv[1:])
