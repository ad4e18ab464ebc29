"""`titan sim --script` and simulate_step: steps of users' own scripts, against gloo runs of the same functions."""

from __future__ import annotations

import gc
import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import titan.sim
from tests.support.commands import Shell
from tests.support.ranks import Pool
from tests.support.tables import tabled
from tests.support.traces import (
    CountTransfers,
    TrackMemory,
    bytes_of,
    counts_of,
    on_cpu,
    traced_peak,
)
from titan.cli import main
from titan.contrib.sim_script.script import Script
from titan.sim.record.trace import Launch, Trace
from titan.sim.record.trace_jobs import Job, trace_jobs

EXAMPLES = Path(__file__).parents[4] / "examples"
SCRIPTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain_fsdp2.py": (2, {"dim": 64}),
    "custom_trainer.py": (4, {"tp": 2, "dim": 64}),
    "transformers_llama.py": (4, {"backend": ""}),
}


def real(script: str, settings: dict[str, Any]) -> tuple[Counter[Any], Counter[Any], int]:
    """What this rank sends in its third step, and the most memory of its steps after the first."""
    with TrackMemory() as memory:
        step, *_ = runpy.run_path(script)["build"](torch.device("cpu"), **settings)
        gc.collect()
        gc.disable()
        step()
        peaks = []
        for _ in range(3):
            memory.peak = memory.bytes
            step()
            peaks.append(memory.peak)
    with CountTransfers() as counter:
        step()
    return counter.counts, counter.bytes, min(peaks)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_its_ranks_really_do(name: str, pool: Pool) -> None:
    if "transformers" in name:
        pytest.importorskip("transformers")
    world, settings = SCRIPTS[name]
    script = str(EXAMPLES / name)
    counts, sizes, peak = pool.run(world, real, script, settings)[0]
    program = Script(script, "build", tuple(settings.items()))
    job = Job((), world, (0,), prepare=on_cpu, script=program)
    [(_, traces)] = trace_jobs([job], 1)
    assert isinstance(traces, list), traces
    [trace] = traces
    assert counts_of(trace) == counts
    assert bytes_of(trace) == sizes
    assert traced_peak(trace) == pytest.approx(peak, rel=0.002)


PLAIN_LLAMA = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def build(device):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        ids = torch.ones(2, 32, dtype=torch.int64, device=device)
        loss = model(input_ids=ids, labels=ids).loss  # with its default cache, of empty tensors
        factors = [torch.tensor(0.5, device=device), torch.asarray(0.5, device=device), loss.new_tensor(0.5)]
        factors += [torch.tensor([[0.5]], device=device), torch.tensor([], device=device).sum() + 1]
        for factor in factors:
            loss = loss * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer
"""


def test_a_model_of_transformers_as_it_comes(pool: Pool, tmp_path: Path) -> None:
    """Numbers, and tensors without any, that are made on the device."""
    pytest.importorskip("transformers")
    script = tmp_path / "plain_llama.py"
    script.write_text(PLAIN_LLAMA)
    counts, sizes, _ = pool.run(2, real, str(script), {})[0]
    job = Job((), 2, (0,), prepare=on_cpu, script=Script(str(script), "build"))
    [(_, traces)] = trace_jobs([job], 1)
    assert isinstance(traces, list), traces
    assert counts_of(traces[0]) == counts
    assert bytes_of(traces[0]) == sizes


AUTOCAST = """
import torch
import torch.nn.functional as F
from torch import nn

def build(device, compiled=0):
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 16, bias=False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, labels = torch.zeros(8, 32, device=device), torch.zeros(8, dtype=torch.int64, device=device)

    def loss_of(x, labels):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(x)
            return F.cross_entropy(logits, labels) + 0.5 * logits.softmax(-1).sum()

    loss_of = torch.compile(loss_of) if compiled else loss_of

    def step():
        loss_of(x, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer, 8
"""


@pytest.mark.parametrize("compiled", [0, 1])
def test_a_bare_loop_with_autocast(compiled: int, tmp_path: Path) -> None:
    """Products in bf16, norms and the loss in fp32, gradients in the dtype of their weights."""
    script = tmp_path / "autocast_loop.py"
    script.write_text(AUTOCAST)
    simulation = titan.sim.simulate_step(
        f"{script}:build", world_size=1, profile="h100-sxm", compiled=compiled
    )
    [trace] = simulation.traces.values()
    kernels = [e.kernel for e in launches(trace, "forward", "backward")]
    products = [k for k in kernels if k.kind == "matmul"]
    # Forward and in the weights, and in the input of the second; results in bf16, too.
    assert [k.dtype for k in products] == 5 * ["bfloat16"]
    assert sum(k.write_bytes for k in products) == 2 * (
        8 * 64 + 8 * 16 + 32 * 64 + 64 * 16 + 8 * 64
    )
    [update] = [e.kernel for e in launches(trace, "optimizer")][-1:]
    assert update.dtype == "float32"
    if not compiled:
        by_name = {k.name: k for k in kernels}
        assert by_name["aten::native_layer_norm"].dtype == "float32"
        # torch's cross entropy asks for log-probabilities in the dtype of its input; the loss itself is in fp32.
        assert by_name["aten::_log_softmax"].dtype == "bfloat16"
        assert by_name["aten::nll_loss_forward"].dtype == "float32"
        assert by_name["aten::_softmax"].write_bytes == 4 * 8 * 16
        casts = [k for k in kernels if k.name == "aten::_to_copy"]
        # Of the input, two weights and two layers' results forward; of gradients back.
        assert sum(k.read_bytes for k in casts if k.dtype == "float32") >= 4 * (
            8 * 32 + 32 * 64 + 64 * 16 + 8 * 64
        )


FUSED = """
import torch
from torch import nn

def softened(x):
    return x.logsumexp(-1) + x.sum(-1)

def by_hand(x):
    largest = x.amax(-1, keepdim=True)
    return (largest + (x - largest).exp().sum(-1, keepdim=True).log())[:, 0] + x.sum(-1)

def scaled(x):
    return 2 * x, x.sum(-1)

def build(device, of="scaled", rows=1, columns=1):
    model = nn.Linear(1, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(globals()[of])

    def step():
        with torch.no_grad():
            compiled(torch.empty(rows, columns, device=device))
        model(torch.zeros(1, 1, device=device)).sum().backward()
        optimizer.step()

    return step, model, optimizer
"""


# ({"of": "scaled", "rows": 2**16, "columns": 19_073}, 1, 1): 1.25e9 elements: Inductor counts at most 1e9 of a fused kernel.
# ({"of": "softened", "rows": 1024, "columns": 128_256}, 2, 0): A row of a vocabulary in fp32 exceeds the cache, and is read once for the maximum and once for the sum.
# ({"of": "by_hand", "rows": 1024, "columns": 128_256}, 1, 0): Written out, Inductor finds the softmax in one pass.
# ({"of": "softened", "rows": 2**16, "columns": 4096}, 1, 0): Short rows are still in the cache.
@tabled("settings, read, written")
def test_bytes_of_fused_kernels(
    settings: dict[str, Any], read: int, written: int, tmp_path: Path
) -> None:
    script = tmp_path / "fused_bytes.py"
    script.write_text(FUSED)
    simulation = titan.sim.simulate_step(
        f"{script}:build", world_size=1, profile="h100-sxm", **settings
    )
    [trace] = simulation.traces.values()
    fused = [e.kernel for e in launches(trace, "forward") if e.kernel.host == "compiled"]
    size = 4 * settings["rows"] * settings["columns"]
    assert sum(k.read_bytes for k in fused) == pytest.approx(read * size, rel=0.01)
    assert sum(k.write_bytes for k in fused) == pytest.approx(
        written * size, rel=0.01, abs=0.01 * size
    )


def launches(trace: Trace, *phases: str) -> list[Any]:
    return [e for e in trace.step if isinstance(e, Launch) and e.scope.phase in phases]


def test_in_python_and_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FLOPs, categories and modules of plain torch: 6 for each parameter of a product and token, without titan's help."""
    script, target = f"{EXAMPLES / 'plain_fsdp2.py'}:build", tmp_path / "out.json"
    sizes: dict[str, Any] = {"dim": 256, "depth": 2, "batch": 2, "length": 64}
    simulation = titan.sim.simulate_step(script, world_size=8, profile="h100-sxm", **sizes)
    products = 2 * 8 * 256**2 + 256 * 512
    [trace] = simulation.traces.values()
    assert (
        sum(e.kernel.flops for e in launches(trace, "forward", "backward"))
        == 6 * 128 * products
    )
    assert {e.kernel.kind for e in launches(trace, "optimizer")} == {"optimizer"}
    assert launches(trace, "clip")
    num_parameters = products + 512 * 256 + 512 + 2 * (5 * 256 + 2 * 256)
    report = simulation.fullest
    kept = report.by_category["parameters"], report.by_category["optimizer"]
    # Adam has two moments. The allocator rounds a shard up to 512 bytes.
    assert [n / (4 * num_parameters / 8) for n in kept] == [pytest.approx(1, rel=0.02), pytest.approx(2, rel=0.02)]  # fmt: skip

    options = [f"--{key}={value}" for key, value in sizes.items()]
    command = [
        "sim",
        "--script",
        script,
        "--world-size",
        "8",
        "--hardware",
        "h100-sxm",
        *options,
    ]
    assert main([*command, *f"--json {target} --trace {tmp_path} --quiet".split()]) == 0
    facts = json.loads(target.read_text())
    assert facts["step_time_s"] == simulation.timeline.step_s
    assert facts["layout"] == "fsdp 8" and [*facts["comm"]["by_axis"]] == ["fsdp"]
    assert facts["tokens_per_step"] == 8 * 2 * 64
    flops_per_s = 6 * 128 * products / facts["step_time_s"]
    assert facts["tflops_per_gpu"] == pytest.approx(flops_per_s / 1e12)
    assert (tmp_path / "rank-0.json").exists()
    assert "plain_fsdp2.py on 8 x h100-sxm: fsdp 8" in capsys.readouterr().out


FAULTY = """
import torch
from torch import nn

def build(device, fault=""):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(9 if fault == "shape" else 8, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    def step():
        out = model(torch.zeros(4, 8, device=device))
        if fault == "data":
            out = out[out > 0]
        out.sum().backward()
        optimizer.step()
    return (step, model) if fault == "tuple" else (step, model, optimizer)
"""


@tabled("options, message")
def test_mistakes_are_one_line(
    options: list[str], message: str, tmp_path: Path, shell: Shell
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    options = [option.replace("FILE", str(tmp_path / "faulty.py")) for option in options]
    line, *rest = (
        shell.refuse("sim", *options, "--world-size", "2", "--hardware", "h100-sxm", "--quiet")
        .strip()
        .splitlines()
    )
    assert message in line and rest in ([], ["1 problem"])


CONVOLUTIONS = """
import torch
from torch import nn


def build(device, bias: bool = True):
    with torch.device(device):
        model = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4, bias=bias), nn.Flatten(2), nn.Conv1d(16, 8, 3, bias=bias))
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 3, 32, 32, device=device)).sum().backward()
        optimizer.step()

    return step, model, optimizer
"""


@pytest.mark.parametrize("bias", [True, False])
def test_a_first_layer_whose_input_needs_no_gradient(bias: bool, tmp_path: Path) -> None:
    """A patch embedding: the backward pass of the convolution returns None for the gradient of the picture."""
    script = tmp_path / "convolutions.py"
    script.write_text(CONVOLUTIONS)
    program = Script(str(script), "build", (("bias", bias),))
    [(_, traces)] = trace_jobs([Job((), 1, (0,), script=program)], 1)
    assert isinstance(traces, list), traces
    kernels = [event.kernel for event in traces[0].step if isinstance(event, Launch)]
    flops = [kernel.flops for kernel in kernels if "convolution_backward" in kernel.name]
    # 2 FLOPs for each multiplication: 62 places of 8 outputs from 16 x 3 inputs, for two gradients; and the
    # pictures' 64 places of 16 outputs from 3 x 16 inputs, for the weight's alone.
    assert flops == [2 * 2 * (2 * 62 * 8 * 16 * 3), 2 * (2 * 64 * 16 * 3 * 16)]
