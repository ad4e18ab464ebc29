"""`titan sim --calibrate-from`: traces of other programs, and a trace of the installed torch on a GPU whose rates are known.

The files in traces/ are extracts of real traces of A100s (facebookresearch/HolisticTraceAnalysis, MIT license). No trace of a GPU can be
made here, so torch's profiler records a program on the CPU, and the launches and kernels of a GPU are added in Kineto's format.
"""

from __future__ import annotations

import gzip
import json
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from titan.cli import main
from titan.sim.price.cost import Cost
from titan.sim.price.profiles import load_profile
from titan.sim.record.trace import Group, Kernel, Scope, Transfer

TRACES = Path(__file__).parent / "traces"
# The program runs on small tensors. In its trace these sizes stand for large ones.
TOKENS, DIM, HIDDEN, LENGTH, HEADS = 17, 19, 23, 29, 3
SIZES = {TOKENS: 16384, DIM: 4096, HIDDEN: 14336, LENGTH: 4096, HEADS: 32}
STEPS = 6
TYPES = {"float": "c10::BFloat16"}
MATMUL_FLOPS, FORWARD_FLOPS, BACKWARD_FLOPS, BYTES_PER_S, BUS = 400e12, 300e12, 200e12, 2.0e12, 250e9  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calibrated(trace: Path, *more: str) -> Any:
    assert main(["sim", "--calibrate-from", str(trace), *more]) == 0
    return load_profile(Path(f"{trace.name.partition('.')[0]}-hardware.toml"))


def test_a_foreign_trace_with_shapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five additions and copies each of a DLRM step: 2.3 ms for 2.9 GB, by the shapes in the file."""
    found = calibrated(TRACES / "a100_shapes.json")
    base = load_profile("a100-80g")
    add, copy = (3 * 4096 * 2798 * 4 * 1e-6, 2 * 4096 * 2798 * 4 * 4e-6)
    assert add == pytest.approx(137.5, rel=0.01) and copy == pytest.approx(366.7, rel=0.01)
    events = json.loads((TRACES / "a100_shapes.json").read_text())["traceEvents"]
    kernels = [e for e in events if e["cat"] == "kernel"]
    copies = [e["dur"] for e in kernels if "copy" in e["name"]]
    one = Kernel("aten::copy_", "pointwise", read_bytes=183369728, write_bytes=183369728)
    # A copy alone is one of three operators that set the level.
    assert Cost(found).kernel_s(one) * 1e6 == pytest.approx(sum(copies) / len(copies), rel=0.15)
    assert Cost(base).kernel_s(one) < 0.8 * Cost(found).kernel_s(one)
    assert found.matmul_share["bfloat16"] == base.matmul_share["bfloat16"]  # TF32's changed
    printed = capsys.readouterr().out
    assert "eager_tb_per_s" in printed and " 15  2.3 ms" in printed
    # Its operators' time on the host; a copy between dtypes waits in others.
    host = [e["dur"] for e in events if e["name"] in ("aten::add", "aten::mul", "aten::copy_")]
    assert found.launch_us > 0 and found.host_tiny_us > 0
    assert min(host) < found.launch_us + found.host_tiny_us < sum(host) / len(host)
    assert "matmul_share tfloat32" in printed and "attention" not in printed


def test_a_foreign_trace_without_shapes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All-reduces of two A100s, in all as fast as the fastest of each size, since the others waited."""
    trace = TRACES / "nccl_arguments.json"
    found = calibrated(trace, "--hardware", "a100-80g")
    fastest: dict[int, float] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        said = event["args"]
        if said["Collective name"] == "allreduce":
            size = said["In msg nelems"] * 4
            fastest[size] = min(event["dur"], fastest.get(size, float("inf")))
    priced = [
        Cost(found).transfer(sent("all_reduce", size), Group("", (), (0, 1)), rank=0).seconds
        for size in fastest
    ]
    assert sum(priced) == pytest.approx(sum(fastest.values()) * 1e-6, rel=0.005)
    # Some 9 GB/s: their link is not NVLink.
    assert found.all_reduce_gb_per_s < 0.1 * load_profile("a100-80g").all_reduce_gb_per_s
    printed = capsys.readouterr().out
    assert "the trace has no shapes" in printed and "all_reduce_gb_per_s" in printed
    assert found.matmul_share == load_profile("a100-80g").matmul_share


def step() -> None:
    """Run a program whose operators are those of a language model's block."""
    x = torch.randn(TOKENS, DIM)
    weights = [torch.randn(HIDDEN, DIM, requires_grad=True), torch.randn(DIM, HIDDEN)]
    hidden = F.linear(F.linear(x, weights[0]), weights[1])
    hidden.mul(hidden).add_(hidden)
    q, k, v = (torch.randn(2, HEADS, LENGTH, 128, requires_grad=True) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    hidden.sum().backward()


def with_kernels(trace: dict[str, Any]) -> dict[str, float]:
    """Add a GPU's launches and kernels to a trace of the CPU, and return the microseconds of each class."""
    spent: dict[str, float] = {}
    numbers, events = count(1), trace["traceEvents"]
    trace["deviceProperties"] = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132, "totalGlobalMem": 85024112640}]  # fmt: skip

    def kernel(
        what: str, name: str, us: float, thread: dict[str, Any], at: float = 0.1, **more: Any
    ) -> None:
        number = next(numbers)
        common = {
            "ph": "X",
            "pid": thread["pid"],
            "tid": thread["tid"],
            "ts": thread["ts"] + at,
        }
        args = {"correlation": number, "External id": thread["args"]["External id"]}
        events.append(common | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 0.1, "args": args})  # fmt: skip
        args |= {"device": 0, "stream": 7} | more
        events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": thread["ts"], "dur": us, "args": args})  # fmt: skip
        spent[what] = spent.get(what, 0.0) + us

    for event in [e for e in events if e.get("cat") == "cpu_op"]:
        args, name = event["args"], event["name"]
        if "Input Dims" not in args:
            continue
        args["Input Dims"] = [[SIZES.get(n, n) for n in dims] for dims in args["Input Dims"]]
        args["Input type"] = [TYPES.get(text, text) for text in args["Input type"]]
        dims = args["Input Dims"]
        if name == "aten::mm":
            (m, k), (_, n) = dims[:2]
            kernel("matmul", "nvjet_hsh_256x128", 2e6 * m * k * n / MATMUL_FLOPS, event)
        elif (
            name == "aten::linear"
        ):  # after its matmul has returned: a kernel that no shape explains
            kernel("other", "other_library", 1e4, event, at=event["dur"] - 0.01)
        elif name == "aten::mul":
            kernel("pointwise", "vectorized_elementwise_kernel", 3 * 2e6 * prod(dims[0]) / BYTES_PER_S, event)  # fmt: skip
        elif name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
            backward = name.endswith("_backward")
            event["name"] = name.replace("_flash_attention_for_cpu", "_cudnn_attention")
            args["Concrete Inputs"] = [""] * (14 if backward else 6) + ["True", "False"]
            batch, heads, length, size = dims[1]
            flops = (10 if backward else 4) * batch * heads * size * length * (length + 1) / 2
            rate = BACKWARD_FLOPS if backward else FORWARD_FLOPS
            kernel(f"attention{backward}", "cudnn_generated_fort_native_sdpa", 1e6 * flops / rate, event)  # fmt: skip
    last = [e for e in events if e.get("cat") == "cpu_op"][-1]
    for waited in (1.0, 3.0):  # the second waited for other ranks
        said = {"Collective name": "_allgather_base", "In msg nelems": 2**24, "Out msg nelems": 2**27, "Group size": 8, "dtype": "BFloat16"}  # fmt: skip
        us = waited * 7 / 8 * 2**28 / BUS * 1e6
        kernel("collective", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", us, last, **said)  # fmt: skip
    return spent


def test_rates_of_a_known_machine_come_back(folder: Path) -> None:
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(STEPS):
            step()
    recorded.export_chrome_trace(str(folder / "plain.json"))
    trace = json.loads((folder / "plain.json").read_text())
    spent = with_kernels(trace)
    with gzip.open(folder / "mine.json.gz", "wt") as file:
        json.dump(trace, file)
    found, base = calibrated(folder / "mine.json.gz"), load_profile("h100-sxm")
    cost, tokens, dim, hidden = Cost(found), SIZES[TOKENS], SIZES[DIM], SIZES[HIDDEN]
    # Forward, forward, the gradient between them, and that of the first weight.
    products = [(tokens, dim, hidden), (tokens, hidden, dim), (tokens, dim, hidden), (hidden, tokens, dim)] * STEPS  # fmt: skip
    priced = sum(cost.kernel_s(matmul(*sizes)) for sizes in products) * 1e6
    flops = sum(2 * prod(sizes) for sizes in products)
    assert spent["matmul"] * MATMUL_FLOPS / 1e6 == pytest.approx(flops)
    assert priced == pytest.approx(spent["matmul"], rel=0.005)
    moved = 2 * tokens * dim
    one = Kernel("aten::mul", "pointwise", read_bytes=2 * moved, write_bytes=moved)
    assert cost.kernel_s(one) * 1e6 == pytest.approx(spent["pointwise"] / STEPS, rel=0.01)
    shape = (2, 32, 4096, 128)
    for kind, what in (
        ("attention", "attentionFalse"),
        ("attention_backward", "attentionTrue"),
    ):
        kernel = Kernel("aten::attention", kind, (shape,) * 3, "bfloat16", causal=True)
        assert cost.kernel_s(kernel) * 1e6 == pytest.approx(spent[what] / STEPS, rel=0.005)
    assert found.attention_kernel == "cudnn"
    gathered = cost.transfer(sent("all_gather", 2**28), Group("", (), tuple(range(8))), rank=0)
    assert gathered.seconds == pytest.approx(7 / 8 * 2**28 / BUS, rel=0.01)
    assert found.num_sms == base.num_sms and "mine.json.gz" in found.sources["matmul_share"]
    assert found.matmul_share["float8"] == base.matmul_share["float8"]  # no kernel says


def sent(kind: Any, size: int) -> Transfer:
    return Transfer(kind, "", size, "", 0, True, 0, Scope("forward"))


def matmul(m: int, k: int, n: int) -> Kernel:
    return Kernel("aten::mm", "matmul", ((m, k), (k, n)), "bfloat16", 2 * m * k * n)


def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    recorded.export_chrome_trace(str(folder / "cpu.json"))
    (folder / "half.json").write_text((TRACES / "a100_shapes.json").read_text()[:5000])
    (folder / "other.json").write_text('{"losses": [1, 2]}')
    nameless = (TRACES / "nccl_arguments.json").read_text().replace("NVIDIA A100-PG509-200", "")
    (folder / "nameless.json").write_text(nameless)
    strange = (
        ("Input Dims", [5, []]),
        ("Input Dims", [[4], [4], [4]]),
        ("Input type", []),
        ("Input type", [1, 2]),
    )
    for number, (key, value) in enumerate(strange):
        trace = on_a_gpu(json.loads((folder / "cpu.json").read_text()))
        trace["traceEvents"][-2]["args"][key] = value  # of aten::mm
        (folder / f"strange{number}.json").write_text(json.dumps(trace))
    for name, what in {
        "Group size": 10**12,
        "Out msg nelems": "many",
        "dur": float("nan"),
    }.items():
        trace = on_a_gpu(json.loads((folder / "cpu.json").read_text()))
        said = {
            "Collective name": "allgather",
            "dtype": "Float",
            "Group size": 8,
            "Out msg nelems": 2**20,
        }
        kernel = trace["traceEvents"][-1]
        kernel |= (
            {"args": kernel["args"] | said | {name: what}} if name != "dur" else {name: what}
        )
        (folder / f"nccl{name[:3]}.json").write_text(json.dumps(trace))
    for file, says in {
        **{
            f"strange{number}.json": "not a whole trace of torch's profiler"
            for number in range(4)
        },
        **{
            f"nccl{name}.json": "not a whole trace of torch's profiler ("
            for name in ("Gro", "Out", "dur")
        },
        "cpu.json": "has no kernels of a GPU",
        "half.json": "not a whole trace of torch's profiler",
        "other.json": "not a whole trace of torch's profiler",
        "none.json": "none.json: No such file or directory",
        "nameless.json": "names no device: state the most similar profile with --hardware",
    }.items():
        assert main(["sim", "--calibrate-from", file]) == 2, file
        error = capsys.readouterr().err
        assert says in error and "--calibrate-from" in error and "Traceback" not in error
    shapes = str(TRACES / "a100_shapes.json")
    for more, says in {
        ("--calibrate", "none/mine.toml"): "--calibrate: there is no folder none",
        ("--calibrate", "."): "--calibrate: cannot write",
        ("job.toml",): "job.toml: is no option, and --calibrate-from needs no job",
        ("--hardwar=h100",): "--hardwar=h100: is no option",
    }.items():
        assert main(["sim", "--calibrate-from", shapes, *more]) == 2, more
        assert says in capsys.readouterr().err
    assert not [*folder.glob("*-hardware.toml")]


def on_a_gpu(
    trace: dict[str, Any], *, dtype: str = "float", size: int = 2, us: float = 900.0
) -> dict[str, Any]:
    """Return a trace of the CPU whose last matmul runs on an H100: the operator, its launch and its kernel come last."""
    events = trace["traceEvents"]
    operator = [e for e in events if e.get("name") == "aten::mm"][-1]
    operator["args"] |= {"Input Dims": [[size, size]] * 2, "Input type": [dtype] * 2}
    operator["args"].pop("Input Strides", None)
    same = {
        "ph": "X",
        "pid": operator["pid"],
        "tid": operator["tid"],
        "args": {"correlation": 7},
    }
    launch = same | {
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": operator["ts"],
        "dur": operator["dur"] / 2,
    }
    kernel = same | {"cat": "kernel", "name": "gemm", "ts": operator["ts"], "dur": us}
    devices = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    last = [e for e in events if e is not operator]
    return trace | {
        "deviceProperties": devices,
        "traceEvents": [*last, launch, operator, kernel],
    }


@pytest.mark.parametrize(
    ("dtype", "name"), [("c10::Half", "float16"), ("double", ""), ("c10::complex<float>", "")]
)
def test_a_dtype_changes_its_own_share_alone(folder: Path, dtype: str, name: str) -> None:
    """Half precision has bfloat16's share until a trace says more; a dtype without a peak says nothing of another's."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    recorded.export_chrome_trace(str(folder / "cpu.json"))
    # 4,096 cubed in 1 ms: 137 TFLOP/s, 0.139 of 989.
    trace = on_a_gpu(
        json.loads((folder / "cpu.json").read_text()), dtype=dtype, size=4096, us=1000.0
    )
    (folder / "mm.json").write_text(json.dumps(trace))
    found, base = (
        calibrated(folder / "mm.json").matmul_share,
        load_profile("h100-sxm").matmul_share,
    )
    assert {dtype: share for dtype, share in found.items() if dtype != name} == base
    if name:
        kernel = Kernel("aten::mm", "matmul", ((4096, 4096),) * 2, name, 2 * 4096**3)
        assert Cost(load_profile(folder / "mm-hardware.toml")).kernel_s(
            kernel
        ) == pytest.approx(1e-3, rel=0.01)


def test_a_figure_at_its_limit_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cards that are twice as fast as the profile's: no share exceeds 1, so the kernels do not take their time."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    recorded.export_chrome_trace(str(folder / "cpu.json"))
    trace = on_a_gpu(json.loads((folder / "cpu.json").read_text()), us=5000.0)
    sizes = {"Group size": 2, "In msg nelems": 2**28, "Out msg nelems": 2**29}
    said = {
        "Collective name": "allgather",
        "dtype": "BFloat16",
        "Process Group Ranks": "[0, 8]",
        **sizes,
    }
    trace["traceEvents"][-1]["args"] |= said
    (folder / "fast.json").write_text(json.dumps(trace))
    assert calibrated(folder / "fast.json").nic_share == 1
    assert (
        "nic_share is at its limit: its kernels took 5.0 ms, and take 1"
        in capsys.readouterr().out
    )
