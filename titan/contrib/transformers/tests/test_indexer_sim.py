"""Sparse attention in the simulator and in the formulas: memory, FLOPs, and the stage of each phase."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

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
KEYS, SIZE = 16, 16


def job(length: int, *stages: str, **fields: Any) -> JobConfig:
    overrides = overrides_of(KIND) | {"vocab_size": 256, "num_hidden_layers": 2} | fields
    sections: dict[str, Any] = {
        "model": {"name": "transformers", "architecture": KIND, "overrides": overrides},
        "training": {"seq_len": length, "local_batch_size": 1, "steps": 10},
        "sparse_attention": {"stages": list(stages)},
        "phase": [{"from_step": 3 * n} for n in range(1, len(stages))],
    }
    sections["training"]["mixed_precision_param"] = "float32"
    return JobConfig.model_validate(sections)


def of_layer(length: int, *, heads: int = 8, block: int = 1, chunked: bool = True) -> list[int]:
    """Bytes of a layer that are kept for the backward pass, and the peak of both passes, by chunks or with a mask of all queries and keys."""
    shapes = [(1, heads, length, SIZE)] * 3
    shapes += [(1, length, 2, SIZE), (1, length, SIZE), (1, length, 2)]
    q, k, v, *index, w = tensors = [torch.randn(shape).requires_grad_() for shape in shapes]
    sparse = SparseAttention(keys=KEYS, block=block)
    sparse.heads, sparse.loss_coeff = heads, 1.0
    of_index: Any = *index, None if block > 1 else w, w
    with TrackMemory() as memory:
        chosen = sparse.index(*of_index)
        if chunked:
            out = sparse.attend(InnerAttention(), q, k, v, chosen)
        else:
            mask = torch.zeros(length, length).scatter(-1, chosen[0, 0].long(), 1).tril() > 0
            out = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        gradient, kept = torch.ones_like(out), memory.bytes
        torch.autograd.grad(out, tensors, gradient, allow_unused=True)
    return [kept, memory.peak]


@pytest.mark.parametrize(
    ("how", "growth"), [({}, 2), ({"block": 4}, 2), ({"chunked": False}, 4)], ids=str
)
def test_memory_of_chunks_beside_a_dense_mask(how: dict[str, Any], growth: int) -> None:
    """At twice the length twice as much, though the indexer learns, and four times as much."""
    sizes = zip(*(of_layer(length, **how) for length in (1024, 2048)), strict=True)
    assert [many / few for few, many in sizes] == pytest.approx([growth] * 2, rel=0.05)


@pytest.mark.parametrize("heads", [4, 32])
def test_the_formula_of_a_layer(heads: int) -> None:
    fields = {"index_topk": KEYS, "num_attention_heads": heads, "num_key_value_heads": heads}
    fields |= {"qk_nope_head_dim": 8, "num_hidden_layers": 1, "mlp_layer_types": ["dense"]}
    phases = phases_of(job(1024, "dense", "joint", **fields), world_size=1)
    dense, joint = memory_of(phases, phases[0].config.model.sizes)
    more = (joint["activations"] - dense["activations"]) * 2**30
    kept, peak = of_layer(1024, heads=heads)
    assert kept + more - 4 * 1024 * KEYS == pytest.approx(peak, rel=0.02)


def test_peak_of_a_step_is_the_real_one(pool: Pool) -> None:
    peaks = []
    for length in (256, 512):
        config = job(length, "joint")
        real = pool.run(1, real_peak, config)[0]
        trace = trace_ranks(config, world_size=1, ranks=[0], prepare=on_cpu)[0]
        assert traced_peak(trace) == pytest.approx(real, rel=0.002)
        peaks.append(real)
    assert peaks[1] < 2 * peaks[0]  # weights and states stay


def test_flops_of_a_frozen_indexer_count_once() -> None:
    """Forward only in the stage "dense", and else for the weights too: nothing goes back into the model."""
    length, found = 256, []
    sizes: Any = job(length, "joint").model.sizes
    for stage in STAGES[:2]:
        config, flops = job(length, stage), Counter[Any]()
        for launch in events_of(trace_ranks(config, world_size=1, ranks=[0])[0].step, Launch):
            if launch.kernel.kind == "matmul":
                is_indexer = ".indexer" in launch.scope.module
                flops[launch.scope.phase, is_indexer] += launch.kernel.flops
        attention = sizes.trained_by(config).attention_flops_per_token(length, causal=False)
        formula = flops_per_token(config, sizes, causal=False) - attention
        found.append((flops, formula * length))
    (dense, of_dense), (learns, of_learning) = found
    once = 2 * length * sizes.index_params
    assert (dense["forward", True], dense["backward", True]) == (once, 0)
    assert learns["backward", True] == once
    assert dense.total() == of_dense
    assert of_learning - of_dense == once + 6 * sizes.index_width * length**2


def test_each_phase_is_simulated_in_its_stage() -> None:
    config = job(512, *STAGES)
    assert not check(config)
    how: dict[str, Any] = {"profile": load_profile("h100-sxm"), "use_cache": False}
    parts = simulate_phases(config, world_size=1, **how)
    dense, indexer, joint = (part.timeline.step_s for _, part in parts)
    assert dense < 0.8 * indexer and indexer < joint
    jobs = [phase.config for phase, _ in parts], [job(512, stage) for stage in STAGES]
    ours, alone = ([TraceRequest(c, resolve_layout(c, 1)).key for c in each] for each in jobs)
    # A trace of one stage is not read for another.
    assert ours == alone and len({*ours}) == 3
