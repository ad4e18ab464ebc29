"""Traces of small jobs: memory and operations against real CPU runs of the same program, places, repetition, errors."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.commands import finished
from tests.support.ranks import Pool
from tests.support.tables import table
from tests.support.traces import (
    events_of,
    in_turn,
    job,
    left_behind,
    on_cpu,
    real_peak,
    trace_of,
    trace_ranks,
    traced_peak,
)
from titan.checks.rules import resolve_layout
from titan.config.schema import JobConfig
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record import trace_jobs as record_module
from titan.sim.record import tracer
from titan.sim.record.trace import (
    HOST,
    Allocate,
    Event,
    Kernel,
    Launch,
    Synchronize,
    Transfer,
)
from titan.sim.record.trace_jobs import TraceError, distinct_ranks
from titan.sim.replay.queues import replay

SELECTIVE = {"mode": "selective"}


# ---- memory --------------------------------------------------------------------------------------


H100 = Cost(load_profile("h100-sxm"))
BF16: dict[str, Any] = {"mixed_precision_param": "bfloat16"}
MEMORY: dict[str, tuple[int, dict[str, Any]]] = table(__file__, "memory")


@pytest.mark.parametrize(
    "name",
    in_turn(
        MEMORY,
        slow=[
            "FSDP2",
            "FSDP2, full AC",
            "Muon",
            "8-bit Adam",
            "whole logits",
            "accumulation",
            "DDP",
            "early step",
        ],
    ),
)
def test_peak_is_the_real_one(name: str, pool: Pool) -> None:
    world, sections = MEMORY[name]
    sections = {**sections, "training": {**BF16, **sections.get("training", {})}}
    # Large enough that the peak is in the forward or backward pass: clipping squares gradients one by one on a CPU only.
    config = job(batch=8, **sections)
    real = pool.run(world, real_peak, config)[0]
    trace = trace_ranks(config, world_size=world, ranks=[0], prepare=on_cpu)[0]
    assert traced_peak(trace) == pytest.approx(real, rel=0.002)


# ---- operations ----------------------------------------------------------------------------------


def test_without_balance_the_rank_with_the_sequences_end_is_traced() -> None:
    """Two ranks, cut once through the sequence: the second sees two blocks of keys in each of four layers, the first one."""
    context: dict[str, Any] = {"context_parallel_degree": 2}
    ranks = {
        balancer: trace_ranks(job(parallelism=context | {"context_parallel_load_balancer": balancer}), world_size=2)
        for balancer in ("headtail", "none")
    }  # fmt: skip
    assert [[*traces] for traces in ranks.values()] == [[0], [1]]
    in_forward = [
        launch.kernel.causal
        for launch in events_of(ranks["none"][1].step, Launch)
        if launch.kernel.kind == "attention" and launch.scope.phase == "forward"
    ]
    assert sorted(in_forward) == [False] * 4 + [True] * 4
    pipeline = job(parallelism=context | {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "context_parallel_load_balancer": "none",
    })  # fmt: skip
    assert distinct_ranks(pipeline, resolve_layout(pipeline, 8)) == [2, 6]


def test_matrix_products_are_the_models() -> None:
    config = job(batch=8, training=BF16, activation_checkpoint={"mode": "full"})
    trace = trace_of(config, world=2)
    by_phase: Counter[str] = Counter()
    for launch in events_of(trace.step, Launch):
        if launch.kernel.kind in ("matmul", "attention"):
            by_phase[launch.scope.phase] += launch.kernel.flops
        elif launch.kernel.kind == "attention_backward":
            # FlashAttention multiplies five times, the formula counts four: what is recomputed inside is no work of the model's.
            by_phase["backward"] += launch.kernel.flops * 4 // 5
    tokens = 8 * 64
    sizes = config.model.sizes
    blocks = sizes.flops_per_token(64) - 6 * sizes.num_embedding_params
    # The loss runs its backward products within the forward pass.
    head = 6 * sizes.num_embedding_params
    assert by_phase["forward"] == tokens * (blocks / 3 + head)
    assert by_phase["backward"] == tokens * blocks * 2 / 3
    # w2, the last product, is not needed again: recomputation stops before it.
    w2 = 2 * sizes.dim * sizes.ffn_dim * sizes.n_layers
    assert by_phase["recompute"] == tokens * (blocks / 3 - w2)


def test_kernels_know_what_they_move() -> None:
    trace = trace_of(job(batch=8, training=BF16), world=2)
    launches = sorted(events_of(trace.step, Launch), key=lambda e: e.kernel.write_bytes)
    kernels = {(e.kernel.name, e.scope.module): e.kernel for e in launches}
    product = kernels["aten::mm", "layers.1.feed_forward.w1"]
    assert product.kind == "matmul" and product.dtype == "bfloat16"
    attention = next(k for k in (kernels[n] for n in kernels) if k.kind == "attention")
    assert attention.shapes == ((8, 4, 64, 16), (8, 2, 64, 16), (8, 2, 64, 16))
    assert attention.causal
    assert attention.read_bytes == 2 * 8 * 64 * 16 * (4 + 2 + 2)
    adam = kernels["aten::_fused_adamw_", ""]
    shard = job().model.sizes.num_params // 2
    assert adam.kind == "optimizer"
    # Of one of two groups of parameters.
    assert adam.write_bytes == pytest.approx(3 * 4 * shard, rel=0.05)
    assert adam.read_bytes == pytest.approx(4 * 4 * shard, rel=0.05)


def test_places() -> None:
    trace = trace_of(job(activation_checkpoint={"mode": "full"}, training=BF16), world=2)
    products = [e for e in events_of(trace.step, Launch) if e.kernel.kind == "matmul"]
    scopes = Counter((e.scope.phase, e.scope.module) for e in products)
    for phase, number in (("forward", 1), ("recompute", 1), ("backward", 2)):
        assert scopes[phase, "layers.2.attention.wq"] == number
    assert scopes["recompute", "layers.2.feed_forward.w2"] == 0
    names = {(e.kernel.name, e.scope.phase) for e in events_of(trace.step, Launch)}
    assert ("aten::_fused_adamw_", "optimizer") in names
    assert ("aten::_foreach_norm", "clip") in names
    gathers = Counter(
        (e.scope.phase, e.scope.module)
        for e in events_of(trace.step, Transfer)
        if e.kind == "all_gather"
    )
    assert gathers["forward", "layers.0"] == 1
    # Not the last block's, nor the embedding's and the output layer's.
    assert sum(n for (phase, _), n in gathers.items() if phase == "backward") == 3
    scatters = [
        e.scope.module for e in events_of(trace.step, Transfer) if e.kind == "reduce_scatter"
    ]
    assert scatters[:3] == [
        "norm",
        "layers.3",
        "layers.2",
    ]  # the output layer is in the norm's unit


@pytest.mark.parametrize("compiled", [False, True])
def test_pipeline_actions(compiled: bool) -> None:
    traces = []
    for schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        config = job(
            batch=4,
            training=BF16,
            compile={"enable": compiled},
            parallelism={
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": schedule,
            },
        )
        traces.append(trace_ranks(config, world_size=2, ranks=[1])[1])
    whole, split = (
        sum(e.kernel.flops for e in events_of(t.step, Launch) if "F" not in e.scope.action)
        for t in traces
    )
    assert whole == split > 0
    trace = traces[1]
    actions = list(dict.fromkeys(e.scope.action for e in events_of(trace.step, Launch)))
    assert (
        actions[actions.index("1F0")]
        < actions[actions.index("1I0")]
        < actions[actions.index("1W0")]
    )
    expected = {
        f"{stage}{kind}{chunk}" for stage in (1, 3) for kind in "FIW" for chunk in range(4)
    }
    assert expected == {a for a in actions if a}
    peers = {(e.kind, e.peer) for e in events_of(trace.step, Transfer) if e.peer >= 0}
    assert peers == {("send", 0), ("recv", 0)}


def test_categories() -> None:
    trace = trace_of(job(batch=8, training=BF16), world=2)
    sizes = job().model.sizes
    left: Counter[str] = Counter()
    for event in left_behind(trace):
        left[event.category] += event.size_bytes
    shard = 4 * sizes.num_params // 2
    rotations = 4 * job().training.seq_len * 2 * sizes.head_dim
    assert left["parameters"] == shard + rotations
    assert left["optimizer"] == pytest.approx(2 * shard, rel=0.001)  # and the numbers of steps
    assert set(left) == {"parameters", "optimizer"}
    gradients = sum(
        e.size_bytes for e in events_of(trace.step, Allocate) if e.category == "gradients"
    )
    assert gradients == shard
    count: Counter[str] = Counter(e.category for e in events_of(trace.step, Allocate))
    assert count["activations"] and count["unsharded"] and count["temporary"]


def test_gradients_that_microbatches_add_up_are_no_activations() -> None:
    """FSDP keeps whole gradients in fp32 until the last microbatch: of this stage's parameters, once."""
    pipeline = {"pipeline_parallel_degree": 2}
    config = job(batch=4, training=BF16, parallelism=pipeline)
    trace = trace_ranks(config, world_size=4, ranks=[2])[2]
    allocations = events_of(trace.step, Allocate)
    assert not any(
        e.category == "activations" and e.scope.phase == "backward" for e in allocations
    )
    parameters = sum(
        e.size_bytes for e in events_of(trace.setup, Allocate) if e.category == "parameters"
    )
    whole = [
        e for e in allocations if e.category == "gradients" and e.scope.phase == "backward"
    ]
    assert sum(e.size_bytes for e in whole) >= 2 * parameters  # sharded over two ranks


def test_every_later_step_is_the_same() -> None:
    """So nothing is left alive that the step before did not leave."""
    config = job(training=BF16, activation_checkpoint=SELECTIVE)
    second, third = (trace_of(config, world=2, steps=n).step for n in (2, 3))
    assert list(numbered_anew(third)) == list(numbered_anew(second))


def numbered_anew(events: list[Event]) -> Iterator[Any]:
    """Blocks, events and works are numbered through: say instead how long ago they were."""
    seen: dict[tuple[str, int], int] = {}
    for index, event in enumerate(events):
        fields = {name: getattr(event, name) for name in event.__slots__}
        for name in ("block", "event", "work"):
            if name in fields:
                first = seen.setdefault((name, fields[name]), index)
                fields[name] = index - first
        yield type(event).__name__, fields


# ---- what the program does in bf16, with the kernels of a GPU ------------------------------------


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_attention_that_selective_checkpointing_keeps_does_not_run_again(method: str) -> None:
    settings = {"context_parallel_degree": 2, "context_parallel_rotate_method": method}
    config = job(training=BF16, parallelism=settings, activation_checkpoint=SELECTIVE)
    phases = Counter(
        e.scope.phase
        for e in events_of(trace_of(config, world=2).step, Launch)
        if e.kernel.kind.startswith("attention")
    )
    blocks = (
        1 if method == "ulysses" else 2
    )  # each layer's own part of the sequence, the other's
    assert phases == {"forward": 4 * blocks, "backward": 4 * blocks}


LARGER = {"n_layers": 4, "dim": 512}
GATHERED_FLOAT8 = {"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}}


def offloaded_update(**sections: Any) -> tuple[JobConfig, list[Kernel]]:
    """Return a job that keeps its parameters on the host, and the kernels of its update, which all run there."""
    config = job(training={**BF16, "enable_cpu_offload": True}, **sections)
    launches = events_of(trace_of(config, world=2).step, Launch)
    update = [e for e in launches if e.scope.phase == "optimizer"]
    assert {e.stream for e in update} == {HOST}
    return config, [e.kernel for e in update]


def test_offloaded_parameters_are_the_hosts_work() -> None:
    model = {"overrides": LARGER}
    trace = trace_of(job(model=model, training={**BF16, "enable_cpu_offload": True}), world=2)
    work = [e for e in events_of(trace.step, Launch) if e.stream == HOST]
    updates = [e.kernel for e in work if e.kernel.name == "aten::_fused_adamw_"]
    assert {e.scope.phase for e in work} == {"clip", "optimizer"}
    shard = job(model=model).model.sizes.num_params // 2
    assert sum(k.write_bytes for k in updates) == pytest.approx(3 * 4 * shard, rel=0.01)
    seconds = sum(H100.host_s(e.kernel) for e in work)
    assert seconds > 7 * 4 * shard / 60e9  # reads four numbers for each parameter, writes three
    update = replay({0: trace}, H100)
    assert update.ranks[0].host_s > 0.5 * seconds


@pytest.mark.parametrize("float8", [False, True])
def test_offloaded_8_bit_moments_are_updated_on_the_host(float8: bool) -> None:
    """By a compiled update, and in the parameters themselves, from which torchao's wrapper is to be taken off there."""
    config, update = offloaded_update(
        model={"overrides": {**LARGER, "ffn_dim": 1024}}
        | ({"converters": ["float8"]} if float8 else {}),
        optimizer={"name": "AdamW8bit"},
        quantize=GATHERED_FLOAT8 if float8 else {},
    )
    shard = config.model.sizes.num_params // 2
    # Weights and gradients in fp32, and two moments of a byte with a scale in fp32 for each 64.
    assert sum(k.write_bytes for k in update) == pytest.approx(6.125 * shard, rel=0.01)
    assert sum(k.read_bytes for k in update) == pytest.approx(10.125 * shard, rel=0.01)


def test_offloaded_matrices_are_the_hosts_work_under_muon() -> None:
    """In float8 as well: what torchao wraps is pinned, too. Their products take as long as the host's processors need."""
    _, update = offloaded_update(
        model={"converters": ["float8"], "overrides": LARGER},
        optimizer={"name": "Muon"},
        quantize=GATHERED_FLOAT8,
    )
    products = [k for k in update if k.kind == "matmul"]
    # Five steps of Newton-Schulz, of three products each, of at least the smallest matrix.
    flops = sum(k.flops for k in products)
    assert flops >= 5 * 3 * 2 * 192 * 192 * 512
    seconds = sum(map(H100.host_s, products))
    assert seconds >= 0.999 * flops / (H100.profile.host_tflops * 1e12)


# ---- what cannot be traced -----------------------------------------------------------------------


def test_says_what_cannot_be_traced() -> None:
    config = job(
        model={"converters": ["quantize.linear.mx"]},
        quantize={"linear": {"mx": {"filter_fqns": ["output"]}}},
        training=BF16,
    )
    with pytest.raises(
        TraceError, match=r"rank 0 cannot be traced .*module layers\.0\.attention\.wq.*mx"
    ):
        trace_of(config)


def _child_that_fails(*args: Any) -> None:
    def fail(op: Any, args: Any) -> Any:
        if op.name == "aten::silu_backward":
            raise ValueError("no room")
        return []

    tracer.workspace_bytes = fail
    record_module.trace_child(*args)


def test_says_what_failed_in_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd's thread may take the process with it."""
    monkeypatch.setattr(record_module, "trace_child", _child_that_fails)
    with pytest.raises(TraceError, match=r"^rank 0 .*silu_backward.*\(backward, .*ValueError: no room"):  # fmt: skip
        trace_ranks(job(training=BF16), world_size=1)


def test_a_dense_job_imports_no_pipelining_and_no_compiler() -> None:
    code = """
import sys
from tests.support.traces import job
from titan.sim.record.trace_jobs import Job, trace_job
[_] = trace_job(Job((job(layers=1),), 2, (0,)))
modules = ("torch.distributed.pipelining", "torch._inductor.graph", "torch._functorch.partitioners")
print([name for name in modules if name in sys.modules], flush=True)
import os; os._exit(0)
"""
    done = finished([sys.executable, "-c", code])
    assert done.stdout.strip() == "[]", done.stdout


def test_recording_processes_inherit_imports_that_nobody_collects() -> None:
    code = """
import titan.sim.record.preload, gc, sys
print(gc.isenabled(), gc.get_freeze_count() > 100_000)
import titan.sim.record.compiled
print("torch._inductor.select_algorithm" in sys.modules, "jinja2" in sys.modules)
"""
    assert finished([sys.executable, "-c", code]).stdout.split() == [
        "True",
        "True",
        "True",
        "False",
    ]


# ---- the host ------------------------------------------------------------------------------------


WITHOUT_WAITS: dict[str, tuple[int, dict[str, Any]]] = table(__file__, "without_waits")


@pytest.mark.parametrize(("world_size", "sections"), WITHOUT_WAITS.values(), ids=WITHOUT_WAITS)
def test_the_host_never_waits_for_the_device(world_size: int, sections: dict[str, Any]) -> None:
    """Copies of a step are asynchronous, and nothing is read back."""
    traces = trace_ranks(job(**sections), world_size=world_size, ranks=[0])
    assert [e for e in traces[0].step if isinstance(e, Synchronize)] == []


# ---- document masks ------------------------------------------------------------------------------


LENGTH = 96  # no other size of the model
GATHERED = {"context_parallel_degree": 2, "context_parallel_rotate_method": "allgather"}
MASKED = {"document_mask": True, "add_eos": True}


def kernels(
    world_size: int = 1, *, precision: str = "bfloat16", **sections: Any
) -> list[Kernel]:
    """Return the kernels of rank 0 of a job with sequences of LENGTH tokens."""
    training = {"seq_len": LENGTH, "mixed_precision_param": precision}
    config = job(batch=4, training=training, **sections)
    step = trace_ranks(config, world_size=world_size, ranks=[0])[0].step
    return [e.kernel for e in step if isinstance(e, Launch)]


def are_square(found: list[Kernel]) -> bool:
    """Return whether a kernel takes or makes a matrix of all queries by all keys."""
    return any(shape[-2:] == (LENGTH, LENGTH) for k in found for shape in k.shapes)


def test_documents_cost_what_causal_attention_costs() -> None:
    """FlashAttention in 16 bits, by blocks under CP, and no mask of S x S: how long documents are is not known."""

    def attention(found: list[Kernel]) -> Counter[Any]:
        kinds = ("attention", "attention_backward")
        return Counter((k.kind, k.shapes, k.flops, k.causal) for k in found if k.kind in kinds)

    documents = kernels(data=MASKED)
    assert {k.name for k in documents if k.kind == "attention"} == {"torch_attn::_varlen_attn"}
    assert attention(documents) == attention(kernels())
    split = kernels(2, data=MASKED, parallelism=GATHERED)
    assert {(k.shapes[0][2], k.shapes[1][2]) for k in split if k.kind == "attention"} == {
        (LENGTH // 2, LENGTH)
    }
    # One FlashAttention takes documents, whatever torch prefers without them, and the blocks of CP are FlexAttention's.
    assert {H100.attention_kernel(k) for k in documents if k.kind == "attention"} == {"flash2"}
    assert {H100.attention_kernel(k) for k in split if k.kind == "attention"} == {
        "FlexAttention"
    }
    assert not are_square(documents + split)


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("fa4", {"aten::_scaled_dot_product_flash_attention"}),
        ("efficient", {"aten::_scaled_dot_product_efficient_attention"}),
        ("math", set()),
    ],
)
def test_the_jobs_backend_is_recorded(backend: str, names: set[str]) -> None:
    """The memory-efficient kernel takes no grouped heads, and "math" is matmuls around a softmax."""
    found = kernels(model={"attention_backend": backend})
    assert {k.name for k in found if k.kind == "attention"} == names
    softmaxes = [k for k in found if k.name == "aten::_safe_softmax"]
    assert len(softmaxes) == (4 if backend == "math" else 0)


def test_windows_cost_as_many_keys() -> None:
    """In 16 bits, in 32, with documents, and where context-parallel ranks hold parts: no layer keeps S x S of anything."""
    window = 24
    overrides = {"n_layers": 3, "window": window}
    model = {"name": "gpt_oss", "flavor": "tiny", "overrides": overrides}

    def keys(found: list[Kernel]) -> Counter[int]:
        return Counter(k.shapes[1][2] for k in found if k.kind == "attention")

    # Two layers of three have a window.
    for found in (kernels(model=model), kernels(model=model, data=MASKED)):
        assert keys(found) == {window: 2, LENGTH: 1}
        [*local, whole] = sorted(
            (k for k in found if k.kind == "attention_backward"), key=lambda k: k.flops
        )
        assert [k.flops * LENGTH // window for k in local] == [whole.flops] * 2
    masked = kernels(2, model=model, data=MASKED, parallelism=GATHERED)
    assert keys(masked) == {window: 2, LENGTH: 1}
    # Of 48 positions, chunks of 24 each: an own one twice, and what is within reach before them.
    split = kernels(2, model=model, parallelism=GATHERED)
    assert set(keys(split)) <= {window - 1, window, LENGTH // 2}
    assert not are_square(kernels(model=model, precision="float32") + split)


def test_grouped_heads_in_32_bits_keep_no_scores() -> None:
    """torch has no fused kernel for them on a GPU (titan/parallel/block_attention.py: match_heads)."""
    fp32 = {"mixed_precision_param": "float32"}
    trace = trace_of(job(layers=1, training=fp32), world=1)
    kinds = Counter(event.kernel.kind for event in events_of(trace.step, Launch))
    assert kinds["attention"] == kinds["attention_backward"] == 1, kinds
