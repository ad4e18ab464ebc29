"""Train a small GPT with megatron-core itself, on CPUs over gloo, and write a run folder as Megatron-LM does.

    python titan/contrib/megatron/tests/megatron_run.py OUT VARIANT [optimizer=fp32] [single=true] [...]

OUT then holds `run/` (iter_0000002 and latest_checkpointed_iteration.txt, as Megatron-LM's training/checkpointing.py
writes them) and `reference.pt`: plain tensors that `torch.load(..., weights_only=True)` reads. It has the tokens and
losses of steps 1 to 4, and the whole weights and both moments after steps 2, 3 and 4 by Megatron's own parameter names
(`decoder.layers.3.mlp.linear_fc1.weight`, with the layer's number in the whole model, and gate over up). The whole
weights are put together here, and not by Megatron's checkpoints, so that they can judge a reader of those.

Megatron asks for CUDA in many places. `pretend_cuda` answers for a CPU, and touches no number.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import os
import random
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
    optimizer: str = (
        "fp32"  # fp32, fully_reshardable, fully_sharded_model_space, dp_reshardable
    )
    single: bool = False  # singleton_local_shards
    bf16: bool = False
    tied: bool = False
    qk_norm: bool = False
    bias: bool = False  # of queries, keys and values, as Qwen2
    moe: bool = False
    dense_layers: int = 0  # layers before the first with experts
    grouped: bool = False  # grouped experts (moe_grouped_gemm)
    shared: bool = False  # a shared expert
    expert_bias: bool = False
    mla: bool = False
    q_lora: bool = True
    mtp: int = 0
    vocab: int = 512  # is padded to a multiple of 128 * tp
    te_names: bool = (
        True  # norms have the names that Transformer Engine's fused layers give them
    )


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
    "dp2_model_space": Variant(dp=2, optimizer="fully_sharded_model_space"),
    "dp2_buckets": Variant(dp=2, optimizer="dp_reshardable"),
    "bf16": Variant(bf16=True),
    "bf16_dp2": Variant(bf16=True, dp=2, optimizer="fully_reshardable"),
    "moe": Variant(moe=True),
    "moe_single": Variant(moe=True, single=True),
    "moe_local_names": Variant(moe=True, te_names=False),
    "moe_tp2": Variant(moe=True, tp=2),
    "moe_ep2": Variant(moe=True, dp=2, ep=2, optimizer="fully_reshardable"),
    "moe_grouped": Variant(moe=True, grouped=True),
    "moe_grouped_single": Variant(moe=True, grouped=True, single=True),
    "moe_shared": Variant(moe=True, shared=True, expert_bias=True),
    "qwen3_moe": Variant(moe=True, qk_norm=True),
    "mla": Variant(mla=True, qk_norm=True),
    "mla_local_names": Variant(mla=True, qk_norm=True, te_names=False),
    "deepseek": Variant(
        mla=True, qk_norm=True, moe=True, dense_layers=1, shared=True, expert_bias=True
    ),
    "mtp": Variant(mtp=1),
    "deepseek_mtp": Variant(
        mla=True, qk_norm=True, moe=True, dense_layers=1, shared=True, expert_bias=True, mtp=1
    ),
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
    import megatron.core.transformer.moe.experts as megatron_experts
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
    megatron_experts.gg = SimpleNamespace(
        assert_grouped_gemm_is_available=lambda: None, ops=SimpleNamespace(gmm=multiply_groups)
    )
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


def multiply_groups(rows, matrices, counts, trans_b=False):
    """Multiply each expert's rows by its matrix, as the package grouped_gemm does."""
    parts = rows.split(counts.tolist())
    chosen = matrices.transpose(1, 2) if trans_b else matrices
    return torch.cat([part @ matrix for part, matrix in zip(parts, chosen, strict=True)])


def name_norms(variant: Variant, spec) -> None:
    """Write norms under the names that they have as parts of Transformer Engine's layers."""
    attention, mlp = "self_attention.", "mlp.linear_fc1.layer_norm_"
    if variant.mla:
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
            "moe_grouped_gemm": variant.grouped,
            # The other dispatcher, alltoall, gives gloo tensors as its split sizes.
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
        }
    if variant.dense_layers:
        options["moe_layer_freq"] = [0] * variant.dense_layers + [1] * (
            4 - variant.dense_layers
        )
    if variant.shared:
        options["moe_shared_expert_intermediate_size"] = 64
    if variant.expert_bias:
        options |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 1e-2,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 2.5,
        }
    if variant.mla:
        options |= {
            "q_lora_rank": 24 if variant.q_lora else None,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "rope_type": "rope",
            "rotary_base": 10000,
        }
    else:
        options |= {"num_query_groups": 2, "kv_channels": 8}
    if variant.mtp:
        options |= {"mtp_num_layers": variant.mtp, "mtp_loss_scaling_factor": 0.1}
    dtype = torch.bfloat16 if variant.bf16 else torch.float32
    config_class = MLATransformerConfig if variant.mla else TransformerConfig
    return config_class(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=variant.bias,
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
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
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
            multi_latent_attention=variant.mla,
            normalization="RMSNorm",
        )
    for layer in getattr(spec, "layer_specs", [spec]):
        if variant.mla:
            layer.submodules.self_attention.submodules.core_attention = Attention
    if variant.te_names:
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
    """Return the arguments that Megatron-LM would have of this run, by the names of training/arguments.py."""
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(
        # Sizes.
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        group_query_attention=not variant.mla,
        kv_channels=config.kv_channels,
        seq_length=SEQ_LEN,
        max_position_embeddings=64,
        encoder_seq_length=SEQ_LEN,
        vocab_size=variant.vocab,
        padded_vocab_size=pad_vocabulary(variant),
        make_vocab_size_divisible_by=128,
        untie_embeddings_and_output_weights=not variant.tied,
        # Form of the layers.
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        apply_layernorm_1p=False,
        layernorm_zero_centered_gamma=False,
        swiglu=True,
        squared_relu=False,
        openai_gelu=False,
        add_bias_linear=False,
        add_qkv_bias=variant.bias,
        qk_layernorm=variant.qk_norm,
        qk_l2_norm=False,
        attention_output_gate=False,
        attention_backend=AttnBackend.auto,
        softmax_type="vanilla",
        window_size=None,
        apply_residual_connection_post_layernorm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Positions.
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        rope_scaling_factor=8.0,
        use_rotary_position_embeddings=True,
        # Experts.
        num_experts=config.num_moe_experts,
        moe_layer_freq=config.moe_layer_freq,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_shared_expert_gate=False,
        moe_router_topk=config.moe_router_topk,
        moe_router_topk_scaling_factor=config.moe_router_topk_scaling_factor,
        moe_router_pre_softmax=config.moe_router_pre_softmax,
        moe_router_score_function=config.moe_router_score_function,
        moe_router_enable_expert_bias=config.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=config.moe_router_bias_update_rate,
        moe_router_load_balancing_type=config.moe_router_load_balancing_type,
        moe_router_num_groups=config.moe_router_num_groups,
        moe_router_group_topk=config.moe_router_group_topk,
        moe_router_dtype=config.moe_router_dtype,
        moe_aux_loss_coeff=config.moe_aux_loss_coeff,
        moe_z_loss_coeff=config.moe_z_loss_coeff,
        moe_expert_capacity_factor=None,
        moe_token_drop_policy="probs",
        moe_grouped_gemm=config.moe_grouped_gemm,
        moe_token_dispatcher_type=config.moe_token_dispatcher_type,
        # Multi-latent attention and multi-token prediction.
        multi_latent_attention=variant.mla,
        q_lora_rank=getattr(config, "q_lora_rank", None),
        kv_lora_rank=getattr(config, "kv_lora_rank", 32),
        qk_head_dim=getattr(config, "qk_head_dim", 128),
        qk_pos_emb_head_dim=getattr(config, "qk_pos_emb_head_dim", 64),
        v_head_dim=getattr(config, "v_head_dim", 128),
        rope_type=getattr(config, "rope_type", None),
        rotary_scaling_factor=getattr(config, "rotary_scaling_factor", 1.0),
        mscale=getattr(config, "mscale", 1.0),
        mscale_all_dim=getattr(config, "mscale_all_dim", 0.0),
        original_max_position_embeddings=getattr(
            config, "original_max_position_embeddings", 4096
        ),
        beta_fast=getattr(config, "beta_fast", 32.0),
        beta_slow=getattr(config, "beta_slow", 1.0),
        mtp_num_layers=config.mtp_num_layers,
        mtp_loss_scaling_factor=config.mtp_loss_scaling_factor,
        # Optimizer and schedule.
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        lr_decay_style="cosine",
        lr_decay_iters=10,
        lr_decay_samples=None,
        lr_warmup_iters=2,
        lr_warmup_samples=0,
        lr_warmup_fraction=None,
        lr_warmup_init=0.0,
        lr_wsd_decay_style="exponential",
        lr_wsd_decay_iters=None,
        weight_decay=0.1,
        start_weight_decay=0.1,
        end_weight_decay=0.1,
        weight_decay_incr_style="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        decoupled_weight_decay=True,
        clip_grad=1.0,
        decoupled_lr=None,
        use_distributed_optimizer=variant.optimizer != "fp32",
        # Run.
        train_iters=10,
        train_samples=None,
        micro_batch_size=2 if variant.pp > 1 else GLOBAL_BATCH // variant.dp,
        global_batch_size=GLOBAL_BATCH,
        iteration=SAVED_STEP,
        consumed_train_samples=SAVED_STEP * GLOBAL_BATCH,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        seed=1,
        params_dtype=config.params_dtype,
        bf16=variant.bf16,
        fp16=False,
        fp8=None,
        # Layout.
        world_size=variant.tp * variant.pp * variant.dp,
        rank=0,
        local_rank=0,
        data_parallel_size=variant.dp,
        tensor_model_parallel_size=variant.tp,
        pipeline_model_parallel_size=variant.pp,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=variant.ep,
        expert_tensor_parallel_size=variant.tp,
        sequence_parallel=config.sequence_parallel,
        transformer_impl="local",
        # Data and checkpoints.
        tokenizer_type="NullTokenizer",
        data_path=None,
        save="run",
        load=None,
        save_interval=SAVED_STEP,
        no_save_optim=None,
        no_save_rng=None,
        ckpt_format="torch_dist",
        use_dist_ckpt=True,
        ckpt_fully_parallel_save=True,
        dist_ckpt_optim_fully_reshardable=variant.optimizer == "fully_reshardable",
    )
    return args


def make_optimizer(variant: Variant, args: argparse.Namespace, config, model):
    """Return Megatron's optimizer and its scheduler, as training.py's `setup_model_and_optimizer` makes them."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        params_dtype=args.params_dtype,
        bf16=args.bf16,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
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
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=False,
        wsd_decay_steps=None,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
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


def split_experts(name: str, tensor: torch.Tensor, config) -> dict[str, torch.Tensor]:
    """Return the matrices of grouped experts by the names that sequential ones have.

    Grouped experts are weight1 (dim, experts * 2 * ffn) and weight2 (experts * ffn, dim), which are used as
    (experts, dim, 2 * ffn) and (experts, ffn, dim).
    """
    before, which = name.rsplit("weight", 1)
    rows = config.hidden_size if which == "1" else config.moe_ffn_hidden_size
    matrices = tensor.view(config.num_moe_experts, rows, -1).transpose(1, 2).contiguous()
    return {
        f"{before}local_experts.{number}.linear_fc{which}.weight": matrix
        for number, matrix in enumerate(matrices)
    }


def gather_state(variant: Variant, model, optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return {"param", "exp_avg", "exp_avg_sq", "buffer"} of {name: whole tensor}, the same on each rank."""
    import megatron.core.parallel_state as ps

    found: dict[str, dict[str, torch.Tensor]] = {key: {} for key in ("param", *MOMENTS)}
    for name, parameter in name_parameters(model).items():
        group = ps.get_tensor_model_parallel_group()
        for key, tensor in read_state(optimizer, parameter).items():
            if "experts.weight" in name:
                found[key] |= split_experts(name, tensor, unwrap(model).config)
                continue
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
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import (
        get_default_save_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    dp_cp_group = ps.get_data_parallel_group(with_context_parallel=True)
    metadata: dict[str, Any] = {}
    if args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = variant.optimizer
        if variant.optimizer == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    metadata["singleton_local_shards"] = variant.single
    metadata["chained_optim_avoid_prefix"] = True
    metadata["dp_cp_group"] = dp_cp_group
    rng_states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        # pyrefly: ignore[missing-attribute]
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": SAVED_STEP,
        "model": model.module.sharded_state_dict(metadata=metadata),
    }
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    state["opt_param_scheduler"] = scheduler.state_dict()
    rerun = get_rerun_state_machine().state_dict(None, "torch_dist")
    if rerun:
        state["rerun_state_machine"] = rerun
    state["rng_state"] = ShardedObject(
        "rng_state",
        [rng_states],
        (variant.pp, variant.tp),
        (ps.get_pipeline_model_parallel_rank(), ps.get_tensor_model_parallel_rank()),
        replica_id=ps.get_data_parallel_rank(with_context_parallel=True),
    )
    state["num_floating_point_operations_so_far"] = 1.5e9
    iteration = folder / f"iter_{SAVED_STEP:07d}"
    iteration.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    written = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
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


def describe_groups(model, optimizer) -> dict[str, dict[str, float]]:
    """Return {name: {"wd_mult", "lr_mult"}} as Megatron's parameter groups say, of all ranks."""
    names = {id(parameter): name for name, parameter in name_parameters(model).items()}
    found = {}
    for single in optimizer.chained_optimizers:
        groups = getattr(single, "model_fp32_groups", None)
        for index, group in enumerate(single.optimizer.param_groups):
            members = list(group["params"])
            if groups is not None:
                members = list(groups[index])
            if hasattr(single, "model_float16_groups"):
                members += list(single.model_float16_groups[index])
            for parameter in members:
                name = names.get(id(parameter))
                if name is not None:
                    found[name] = {key: group[key] for key in ("wd_mult", "lr_mult")}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {name: group for one in everyone for name, group in one.items()}


def run_rank(rank: int, world: int, out: str, variant: Variant, store: str) -> None:
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

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    ps.initialize_model_parallel(
        tensor_model_parallel_size=variant.tp,
        pipeline_model_parallel_size=variant.pp,
        expert_model_parallel_size=variant.ep,
    )
    random.seed(1)
    np.random.seed(1)
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
    if variant.grouped:
        # Grouped experts take bf16 alone, since their CUDA kernel does. Nothing else asks from here on.
        config.bf16 = True
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    model = DistributedDataParallel(config, ddp_config, model)
    optimizer, scheduler = make_optimizer(variant, args, config, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    reference: dict[str, Any] = {
        "variant": dataclasses.asdict(variant),
        "tokens": {},
        "steps": {},
        "state": {},
        "groups": describe_groups(model, optimizer),
    }
    for step in range(1, STEPS + 1):
        tokens = draw_tokens(variant, step)
        reference["tokens"][step] = tokens
        reference["steps"][step] = run_step(args, model, optimizer, scheduler, tokens)
        if step >= SAVED_STEP:
            reference["state"][step] = gather_state(variant, model, optimizer)
        if step == SAVED_STEP:
            save(variant, args, Path(out) / "run", model, optimizer, scheduler)
    if rank == 0:
        torch.save(reference, Path(out) / "reference.pt")
        for step, values in reference["steps"].items():
            print(step, values)
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str]) -> None:
    """Run a variant, with changes like `tp=2`."""
    out, name, *changes = argv
    variant = dataclasses.replace(VARIANTS[name])
    for change in changes:
        key, value = change.split("=")
        kind = type(getattr(variant, key))
        setattr(variant, key, value == "true" if kind is bool else kind(value))
    world = variant.tp * variant.pp * variant.dp
    folder = Path(out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "store"
    store.unlink(missing_ok=True)
    mp.spawn(run_rank, (world, str(folder), variant, str(store)), nprocs=world)
    store.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
