"""Traces of compiled jobs: what is saved against a real compiler on a CPU, what is computed and sent against the eager trace."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sim.test_trace_jobs import numbered_anew
from tests.support.ranks import Pool
from tests.support.traces import (
    events_of,
    in_turn,
    job,
    on_cpu,
    real_batches,
    real_program,
    trace_of,
)
from titan.config.schema import JobConfig
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Allocate, Free, Launch, Trace, Transfer
from titan.sim.simulate import simulate

BF16: dict[str, Any] = {"mixed_precision_param": "bfloat16"}
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
COMPILE: dict[str, Any] = {"enable": True, "components": ["model"]}
SPLIT_HEADS = {
    "overrides": {"n_layers": 2, "n_kv_heads": 4}
}  # CPU attention copies grouped heads
RECOMPUTE: dict[str, dict[str, Any]] = {
    "keep all": {},
    "by op": {"mode": "selective"},
    "full": {"mode": "full"},
    "budget": {"mode": "memory_budget", "memory_budget": 0.5},
}


def compiled_job(compiles: bool = True, **sections: Any) -> JobConfig:
    sections = {"training": BF16, "compile": COMPILE if compiles else {}, **sections}
    return job(batch=8, **sections)


# ---- memory --------------------------------------------------------------------------------------


def real_saved(config: JobConfig) -> int:
    """Bytes that the second of two blocks keeps for its backward pass, of what it made itself."""
    program = real_program(config)
    model: Any = program.model_parts[0]
    batch = real_batches(config)[0]
    saved: dict[int, int] = {}
    inputs: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    block = model.layers["1"]
    call = block._compiled_call_impl or block._call_impl
    outputs: set[int] = set()

    def watched(*args: Any, **kwargs: Any) -> Any:
        arguments = [t for arg in args for t in (arg if isinstance(arg, tuple) else (arg,))]
        inputs.update(
            t.untyped_storage().data_ptr() for t in arguments if isinstance(t, Tensor)
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            output = call(*args, **kwargs)
        inputs.update(p.untyped_storage().data_ptr() for p in block.parameters())
        outputs.add(output.untyped_storage().data_ptr())
        return output

    block.__dict__["_compiled_call_impl"] = watched
    model(batch.tokens_BS)
    return sum(size for address, size in saved.items() if address not in inputs | outputs)


def traced_saved(trace: Trace) -> int:
    """The same of a trace, with the block's output."""
    allocations = [e for e in events_of(trace.step, Allocate) if e.category == "activations"]
    return sum(
        e.size_bytes for e in allocations if f"{e.scope.module}.".startswith("layers.1.")
    )


@pytest.mark.parametrize("kind", in_turn(RECOMPUTE, slow=["keep all", "full", "budget"]))
def test_saves_what_a_real_compiler_saves(kind: str, pool: Pool) -> None:
    sections = {"model": SPLIT_HEADS, "activation_checkpoint": RECOMPUTE[kind]}
    # Inductor's decompositions and partitioner, no code generation; in fp32, as FSDP's casts on one rank would be copies.
    real = compiled_job(
        **sections,
        training={"mixed_precision_param": "float32"},
        compile={**COMPILE, "backend": "aot_eager_decomp_partition"},
    )
    config = compiled_job(**sections, training={"mixed_precision_param": "float32"})
    output = 8 * 64 * 64 * 4
    assert (
        traced_saved(trace_of(config, prepare=on_cpu))
        == pool.run(1, real_saved, real)[0] + output
    )


@pytest.mark.slow
def test_every_later_step_is_the_same() -> None:
    config = compiled_job(activation_checkpoint={"mode": "selective"})
    second, third = (trace_of(config, world=2, steps=n).step for n in (2, 3))
    assert list(numbered_anew(third)) == list(numbered_anew(second))
    alive = {e.block for e in events_of(second, Allocate)} - {e.block for e in events_of(second, Free)}  # fmt: skip
    assert not alive


# ---- operations ----------------------------------------------------------------------------------


def flops(trace: Trace) -> Counter[str]:
    counts: Counter[str] = Counter()
    for launch in events_of(trace.step, Launch):
        counts[launch.scope.phase] += launch.kernel.flops
    return +counts


def moved(trace: Trace) -> int:
    """By the blocks' kernels that multiply nothing."""
    launches = [
        e.kernel for e in events_of(trace.step, Launch) if e.scope.module.startswith("layers.")
    ]
    return sum(
        k.read_bytes + k.write_bytes for k in launches if k.kind in ("pointwise", "copy")
    )


@pytest.mark.parametrize("kind", in_turn(["keep all", "by op"], slow=["keep all"]))
def test_the_same_products_and_fewer_bytes(kind: str) -> None:
    eager, compiled = (
        trace_of(compiled_job(compiles, activation_checkpoint=RECOMPUTE[kind]), world=2)
        for compiles in (False, True)
    )
    assert flops(compiled) == flops(eager)
    assert moved(compiled) < 0.6 * moved(eager)


def test_blocks_share_a_program_and_know_their_modules() -> None:
    trace = trace_of(compiled_job(activation_checkpoint={"mode": "full"}), world=2)
    kernels: dict[int, list[Any]] = {n: [] for n in range(4)}
    for launch in events_of(trace.step, Launch):
        if launch.kernel.host == "compiled":
            _, number, *inner = launch.scope.module.split(".")
            kernels[int(number)].append((launch.kernel, launch.scope.phase, inner))
    assert kernels[0] == kernels[1] == kernels[2] == kernels[3]
    products = [(phase, ".".join(path)) for k, phase, path in kernels[0] if k.kind == "matmul"]
    counts = Counter(products)
    for phase, number in (("forward", 1), ("recompute", 1), ("backward", 2)):
        assert counts[phase, "attention.wq"] == number
    fused = [k.name for k, *_ in kernels[0] if k.name.startswith("fused: ")]
    assert any("silu" in name for name in fused) and any("rms_norm" in name for name in fused)
    assert not any(k.transposes for k, *_ in kernels[0])


def test_the_backward_of_a_custom_function_is_no_recomputation() -> None:
    """The ring's own block and one more, in each of four layers."""
    config = compiled_job(
        parallelism=LAYOUTS["CP all-gather"], activation_checkpoint={"mode": "full"}
    )
    attention = Counter(
        (e.kernel.kind, e.scope.phase)
        for e in events_of(trace_of(config, world=2).step, Launch)
        if e.kernel.kind.startswith("attention")
    )
    # In torch 2.11 nothing inside of an autograd.Function is marked for recomputation: all of it is kept (2.12 was not tried).
    again = {("attention", "recompute"): 8} if TORCH >= (2, 13) else {}
    expected = {("attention", "forward"): 8, ("attention_backward", "backward"): 8}
    assert attention == expected | again


def test_the_loss_is_compiled() -> None:
    config = compiled_job(compile={"enable": True, "components": ["loss"]})
    names = {
        e.kernel.name
        for e in events_of(trace_of(config).step, Launch)
        if e.kernel.host == "compiled"
    }
    assert any("prepare_softmax_online" in name for name in names)  # one pass over the logits


# ---- communication -------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP": {"tensor_parallel_degree": 2},
    "FSDP x TP": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "CP all-gather": {
        "context_parallel_degree": 2,
        "context_parallel_rotate_method": "allgather",
    },
    "CP Ulysses": {"context_parallel_degree": 2, "context_parallel_rotate_method": "ulysses"},
}


def sent(trace: Trace) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    for e in events_of(trace.step, Transfer):
        counts[e.kind, trace.groups[e.group].axes, e.dtype] += e.size_bytes
    return counts


@pytest.mark.parametrize("layout", in_turn(LAYOUTS, slow=["TP", "CP all-gather", "CP Ulysses"]))
def test_sends_what_the_eager_program_sends(layout: str) -> None:
    world = 4 if " x " in layout else 2
    eager, compiled = (
        trace_of(compiled_job(c, parallelism=LAYOUTS[layout]), world=world)
        for c in (False, True)
    )
    expected = sent(eager)
    # Up to 2.14 the compiler sees that the backward pass gathers k and v again, and keeps them.
    if TORCH < (2, 15) and layout == "CP all-gather":
        batch, length, heads, dim, layers = 8, 64, 2, 16, 4
        expected["all_gather", ("cp",), "bfloat16"] -= (
            2 * 2 * batch * length * heads * dim * layers
        )
    assert sent(compiled) == expected


def test_fused_kernels_read_what_a_collective_sent() -> None:
    """After an all-gather along the sequence, a kernel copies the ranks' parts side by side: it reads all that it writes."""
    trace = trace_of(compiled_job(parallelism={"tensor_parallel_degree": 2}), world=2)
    kernels = [e.kernel for e in events_of(trace.step, Launch) if e.kernel.host == "compiled"]
    [copied] = {k.read_bytes for k in kernels if k.name == "fused: cat_split"}
    assert copied == 8 * 64 * 64 * 2  # sequences, tokens, width, bytes
    added = {(k.read_bytes, k.write_bytes) for k in kernels if k.name == "fused: add"}
    # Each rank adds to its half of the tokens what attention and the feed-forward layer gave: three are read, one is written.
    assert added == {(3 * copied // 2, copied // 2)}


def test_async_tp_reads_chunks_while_it_multiplies() -> None:
    plain, pipelined = (
        trace_of(
            compiled_job(
                parallelism={"tensor_parallel_degree": 4, "enable_async_tensor_parallel": on},
                model={"overrides": {"n_layers": 2, "n_kv_heads": 4}},
            ),
            world=4,
        )
        for on in (False, True)
    )
    assert flops(pipelined) == flops(plain)
    # Each rank reads the three other ranks' quarters of what would be gathered, or scattered.
    before, after = sent(plain), sent(pipelined)
    replaced = sum(size for key, size in (before - after).items() if key[1] == ("tp",))
    read = sum(size for key, size in after.items() if key[0] == "read")
    assert read == replaced * 3 // 4 > 0
    reads = [e for e in events_of(pipelined.step, Transfer) if e.kind == "read"]
    assert {e.peer for e in reads} == {1, 2, 3}
    assert len({e.stream for e in reads}) == 2


@pytest.mark.slow
def test_float8_casts_are_fused() -> None:
    config = compiled_job(
        model={"converters": ["quantize.linear.float8"]},
        quantize={"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}},
    )
    launches = [
        e
        for e in events_of(trace_of(config, world=2).step, Launch)
        if e.kernel.host == "compiled"
    ]
    products = Counter(e.kernel.name for e in launches if e.kernel.kind == "matmul")
    assert set(products) == {"aten::_scaled_mm"}
    inputs = {e.kernel.dtype for e in launches if e.kernel.kind == "matmul"}
    assert inputs == {"float8_e4m3fn", "float8_e5m2"}
    assert not any(
        e.kernel.name in ("aten::_to_copy", "aten::clamp", "aten::mul") for e in launches
    )


def test_float8_casts_transpose() -> None:
    """Of one linear, for the products of its backward pass: its weight, its input, and the gradient of its output in both orders."""
    others = ["output", "wk", "wv", "wo", "feed_forward"]
    config = compiled_job(
        model={"converters": ["quantize.linear.float8"], "overrides": {"n_layers": 1, "n_kv_heads": 4}},
        quantize={"linear": {"float8": {"filter_fqns": others}}},
    )  # fmt: skip
    kernels = [e.kernel for e in events_of(trace_of(config).step, Launch)]
    weight, rows = 64 * 64, 8 * 64 * 64
    assert [k.write_bytes for k in kernels if k.transposes] == [rows, 2 * rows, weight]


def test_updates_compiled_for_any_size_move_what_the_weights_need() -> None:
    """fp32 weights read and written, fp32 gradients read, two moments in bf16 read and written: 20 bytes for each weight. Each
    parameter has one kernel."""
    config = job(layers=1, optimizer={"state_dtype": "bfloat16"})
    sizes = Counter(
        e.kernel.read_bytes + e.kernel.write_bytes
        for e in events_of(trace_of(config).step, Launch)
        if e.scope.phase == "optimizer" and e.kernel.host == "compiled"
    )
    embedding, square, grouped, wide = 2048 * 64, 64 * 64, 64 * 32, 64 * 192
    counts = {embedding: 2, square: 2, grouped: 2, wide: 3, 64: 3}
    assert sizes == {20 * size: count for size, count in counts.items()}


def refuse_graph_breaks(*_: Any) -> None:
    torch.compile = partial(torch.compile, fullgraph=True)


def test_watching_modules_breaks_no_graph() -> None:
    """Compiled functions of a block with experts call modules that the simulator watches."""
    config = job(
        batch=8,
        training=BF16,
        compile=COMPILE,
        model={"name": "qwen3", "flavor": "tiny_moe"},
        parallelism={"tensor_parallel_degree": 2},
    )
    profile = load_profile("h100-sxm")
    found = simulate(
        config, world_size=2, profile=profile, prepare=refuse_graph_breaks, use_cache=False
    )
    assert found.timeline.step_s > 0
