"""Sparse attention in the simulator and in the formulas: memory, FLOPs, and the stage of each phase."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf_sizes import overrides_of
from tests.support.ranks import Pool
from tests.support.traces import (
    TrackMemory,
    events_of,
    on_cpu,
    real_peak,
    trace_ranks,
    traced_peak,
)
from titan.checks.rules import check, resolve_layout
from titan.config.phases import memory_of, phases_of
from titan.config.schema import JobConfig
from titan.contrib.transformers.sparse_attention import SparseAttention
from titan.models.common.attention import InnerAttention
from titan.observe.flops import flops_per_token
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Launch
from titan.sim.record.trace_cache import TraceRequest
from titan.sim.report.phases import simulate_phases

KIND = "DeepseekV32ForCausalLM"
STAGES = ["dense", "indexer", "joint"]
H, K, I, D, N = 8, 16, 2, 8, 16  # of a layer


def job(length: int, stages: list[str], **fields: Any) -> JobConfig:
    overrides = overrides_of(KIND) | {"vocab_size": 256, "max_position_embeddings": 4096}
    sections: dict[str, Any] = {
        "model": {"name": "transformers", "architecture": KIND, "overrides": overrides | fields},
        "training": {"steps": 10, "seq_len": length, "local_batch_size": 1, "mixed_precision_param": "float32"},
        "lr_scheduler": {"warmup_steps": 2},
        "loss": {"chunk_tokens": 100},
        "sparse_attention": {"stages": stages},
        "phase": [{"from_step": 3 * n} for n in range(1, len(stages))],
    }  # fmt: skip
    return JobConfig.model_validate(sections)


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def plain(q: Tensor, k: Tensor, v: Tensor, index: list[Tensor], keys: int) -> list[Tensor]:
    """Attention over chosen keys by a mask of all queries and keys, and the indexer's loss."""
    q_index, k_index, weights = index
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    dots = torch.relu(torch.einsum("btid,bsd->bits", q_index, k_index) * D**-0.5)
    scores = torch.einsum("bti,bits->bts", weights, dots)
    best = scores.masked_fill(~causal, -torch.inf).topk(keys, -1).indices
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & causal
    p = (q @ k.mT * K**-0.5).masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    log_q = scores.masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0)
    target = p.detach().mean(1)
    return [p @ v, (target.xlogy(target) - target * log_q).sum()]


def of_layer(length: int, *, chunked: bool, heads: int = H) -> tuple[int, int]:
    """Bytes of a layer that are kept for the backward pass, and the peak of both passes."""
    q, k, v = (drawn(1, heads, length, K) for _ in range(3))
    index = [drawn(1, length, I, D), drawn(1, length, D), drawn(1, length, I)]
    gradient = torch.ones(1, heads, length, K)
    with TrackMemory() as memory:
        if chunked:
            sparse = SparseAttention(keys=N, scale=D**-0.5)
            sparse.heads, sparse.loss_coeff = heads, 1.0
            chosen = sparse.index(*index, index[0])  # pyrefly: ignore[bad-argument-count]
            out = [sparse.attend(InnerAttention(), q, k, v, chosen)]
        else:
            out = plain(q, k, v, index, N)
        kept = memory.bytes
        torch.autograd.backward(out, [gradient, None][: len(out)])
    return kept, memory.peak


def test_memory_of_chunks_beside_a_dense_mask() -> None:
    """At twice the length: twice as much, and four times as much."""
    chunked, dense = (
        [of_layer(length, chunked=chunked) for length in (512, 1024)]
        for chunked in (True, False)
    )
    for (kept, peak), (longer_kept, longer_peak) in [chunked]:
        assert longer_kept == pytest.approx(2 * kept, rel=0.01)
        assert longer_peak == pytest.approx(2 * peak, rel=0.01)
    for few, many in zip(*dense, strict=True):
        assert 3.8 < many / few < 4
    assert dense[1][1] > 6 * chunked[1][1]


@pytest.mark.parametrize("heads", [4, 32])
def test_the_formula_of_a_layer(heads: int) -> None:
    """Its temporary tensors, which `titan check` adds to what is kept."""
    length = 1024
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "index_topk": N}
    sizes |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "index_head_dim": D}
    config = job(length, ["joint"], num_hidden_layers=1, mlp_layer_types=["dense"], **sizes)
    model: Any = config.model.sizes
    choices, temporary = model.sparse_bytes(config, sequences=1, tp=1)
    assert choices == 4 * length * N
    kept, peak = of_layer(length, chunked=True, heads=heads)
    assert kept + temporary == pytest.approx(peak, rel=0.02)
    half = config.training.model_copy(update={"seq_len": length // 2})
    shorter = config.model_copy(update={"training": half})
    assert model.sparse_bytes(shorter, sequences=2, tp=1) == (choices, temporary)


def test_peak_of_a_step_is_the_real_one(pool: Pool) -> None:
    """The recorder runs the step of the job, chunk by chunk."""
    peaks = []
    for length in (256, 512):
        config = job(length, ["joint"], num_hidden_layers=2)
        real = pool.run(1, real_peak, config)[0]
        trace = trace_ranks(config, world_size=1, ranks=[0], prepare=on_cpu)[0]
        assert traced_peak(trace) == pytest.approx(real, rel=0.002)
        peaks.append(real)
    assert peaks[1] < 2 * peaks[0]  # weights and states stay


def matmuls(stage: str, length: int) -> tuple[Counter[str], Any]:
    """FLOPs of an indexer's matmuls by phase, and the job."""
    config = job(length, [stage])
    flops = Counter[str]()
    for launch in events_of(trace_ranks(config, world_size=1, ranks=[0])[0].step, Launch):
        if launch.kernel.kind == "matmul":
            flops[launch.scope.phase] += launch.kernel.flops
            if ".indexer" in launch.scope.module:
                flops[f"indexer, {launch.scope.phase}"] += launch.kernel.flops
    return flops, config


def test_flops_of_a_frozen_indexer_count_once() -> None:
    """Forward only in the stage "dense", and else forward and for the weights: nothing goes back into the model."""
    length = 256
    (dense, config), (learns, later) = (matmuls(stage, length) for stage in STAGES[:2])
    sizes: Any = config.model.sizes
    once = 2 * length * sum(each.params for each in sizes.indexers)
    assert dense["indexer, forward"] == once and dense["indexer, backward"] == 0
    assert learns["indexer, backward"] == once
    # All matmuls but attention's are the model's, in the formula and in the program.
    trained = sizes.trained_by(config)
    by_formula = flops_per_token(config, sizes, causal=False) * length
    attention = trained.attention_flops_per_token(length, causal=False) * length
    assert dense["forward"] + dense["backward"] == by_formula - attention
    scores = 6 * sizes.index_width * length**2
    more = flops_per_token(later, sizes, causal=False) * length - by_formula
    assert more == once + scores
    joint = flops_per_token(job(length, ["joint"]), sizes, causal=False) * length
    keys = sizes.attention_flops_per_token(length, causal=False) * length
    assert joint - (by_formula + more) == keys - attention < 0


def test_each_phase_is_simulated_in_its_stage() -> None:
    config = job(512, STAGES, num_hidden_layers=2)
    assert not check(config)
    profile = load_profile("h100-sxm")
    parts = simulate_phases(config, world_size=1, profile=profile, use_cache=False)
    times = [part.timeline.step_s for _, part in parts]
    assert times[0] < 0.8 * times[2] and times[1] < times[2]
    keys = []
    for stage, (phase, _) in zip(STAGES, parts, strict=True):
        alone = job(512, [stage], num_hidden_layers=2)
        requests = [TraceRequest(c, resolve_layout(c, 1)) for c in (phase.config, alone)]
        assert requests[0].key == requests[1].key
        keys.append(requests[0].key)
    assert len({*keys}) == 3  # a trace of one stage is not read for another
    phases = phases_of(config, world_size=1)
    dense, indexer, joint = memory_of(phases, config.model.sizes)
    assert dense["activations"] < indexer["activations"] <= joint["activations"]
    assert dense["parameters"] == joint["parameters"]
