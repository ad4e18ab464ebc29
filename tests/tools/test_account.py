"""The account of lost time: figures of traces made by hand, and the first cause of runs that are slow on purpose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from tests.support.commands import Shell, command
from tests.support.profiler_traces import Trace, adds_up, step_trace
from tests.support.ranks import Pool
from tests.support.slow_hooks import Slow
from tests.support.tables import tabled
from tests.support.trainers import PoolTrainer, Trainer, run_to_end
from titan.config.load import load_from_argv
from titan.config.toml import tomllib
from titan.run.standard_hooks import standard_hooks
from titan.tools.account import CHANGES, _seconds, account, page
from titan.tools.trace import analyse
from titan.tools.trace_files import read_trace

main = command("profile")
TABLE = tomllib.loads(
    (Path(__file__).parents[2] / "scripts/bench/lost_time.toml").read_text(encoding="utf-8")
)
FIRST = {
    "fp32 products in a bf16 job": "fp32",
    "a job in fp32": "fp32",
    ".item() for each token": "sync",
    "a norm by hand": "norm",
    "batches of one sequence": "batch",
    "a slow loader": "titan loader",
    "a slow rank": "rank",
    "the math kernel of SDPA": "math",
    "garbage collection in each step": "titan gc",
    "recompilation in each step": "compilation",
    "a row in each step": "log",
    "a checkpoint in each step": "checkpoint",
}


def sums_of(facts: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of each cause that has some, after a check that all figures add up."""
    sums = {cause: sum(places.values()) for cause, places in facts["lost_ms"].items()}
    lost_ms = sum(sums.values()) + facts["unattributed_ms"]
    assert facts["reference_ms"] + lost_ms == pytest.approx(facts["step_ms"], abs=1e-9)
    assert [*sums.values()] == sorted(sums.values(), reverse=True)
    return {cause: ms for cause, ms in sums.items() if ms}


def account_of(*traces: Trace, rows: Any = (), **options: Any) -> dict[str, Any]:
    timelines = {f"rank-{n}": analyse(trace.events) for n, trace in enumerate(traces)}
    assert all(map(adds_up, timelines.values()))
    asked: dict[str, Any] = {"tokens": 1000, "simulated": None, "job": {}} | options
    return account(timelines, rows, **asked)


def product(trace: Trace, begin: float, end: float, dtype: str, size: int) -> None:
    shapes = {"Input Dims": [[size, 100], [100, 100]], "Input type": [dtype, dtype]}
    trace.op("aten::mm", begin, end, **shapes)


def job_in(dtype: str) -> Any:
    return {"training": {"mixed_precision_param": dtype}}


def example() -> Trace:
    """The step of the module's docstring; its milliseconds are microseconds times 1000."""
    t = Trace()
    t.range("ProfilerStep#9", 0, 100_000)
    t.range("titan hook Slow.before_forward", 0, 30_000)
    t.range("compile_inner (dynamo_timed)", 5_000, 25_000)
    t.range("titan: layers.0.norm", 30_000, 50_000)
    for number, name in enumerate(("var_mean", "sub", "rsqrt")):
        t.op(f"aten::{name}", 30_000 + 4_000 * number, 34_000 + 4_000 * number)
    t.op("aten::mul", 42_000, 50_000)
    product(t, 50_000, 80_000, "float", 1000)
    product(t, 80_000, 90_000, "c10::BFloat16", 1000)
    t.op("aten::item", 90_000, 100_000)
    return t


def test_the_example_of_the_docstring() -> None:
    facts = account_of(example())
    assert sums_of(facts) == pytest.approx(
        {"compilation": 20, "titan hook ": 10, "norm": 12, "fp32": 20, "sync": 10}
    )
    assert facts["reference_ms"] == pytest.approx(28)
    assert facts["unattributed_ms"] == pytest.approx(0)
    assert facts["lost_ms"]["titan hook "].keys() == {"titan hook Slow.before_forward"}
    lines = [*page(facts)]
    assert lines[0] == "step 100.0 ms; 28.0 ms without the lost time"
    assert lines[2].split() == ["0.0", "0.0%", "10,000", "measured"]
    # 1,000 tokens in 100 - 20 ms.
    assert lines[3].split()[:4] == ["20.0", "20.0%", "12,500", "recompilation:"]
    assert lines[-1].split() == ["0.0", "0.0%", "10,000", "not", "attributed"]


def test_casts_beside_products_in_fp32_are_lost_too() -> None:
    """A bf16 product, one in fp32 of the same work at a third of the rate, its cast, and a cast elsewhere."""
    t = Trace()
    t.range("ProfilerStep#9", 0, 60_000)
    t.range("titan: layers.0.a", 0, 50_000)
    product(t, 0, 10_000, "c10::BFloat16", 1000)
    t.op("aten::_to_copy", 10_000, 20_000)
    product(t, 20_000, 50_000, "float", 1000)
    t.range("titan: layers.0.b", 50_000, 60_000)
    t.op("aten::_to_copy", 50_000, 60_000)
    assert sums_of(account_of(t)) == pytest.approx({"fp32": 20 + 10})


def test_a_bf16_job_without_a_product_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of bf16 is measured, here 4 times that of fp32, unless the job is in fp32."""
    shapes = ((1000, 100), (100, 100))
    seconds = {(shapes, "bfloat16"): 1.0, (shapes, "float32"): 4.0}
    monkeypatch.setattr("titan.tools.account._seconds", lambda *key: seconds[key])
    t = Trace()
    t.range("ProfilerStep#9", 0, 100_000)
    product(t, 0, 100_000, "float", 1000)
    assert sums_of(account_of(t, job=job_in("bfloat16"))) == pytest.approx({"fp32": 75})
    assert sums_of(account_of(t, job=job_in("float32"))) == {}


@tabled("kernel, share")
def test_a_bf16_job_without_bf16_on_a_gpu(kernel: str, share: float) -> None:
    t = Trace()
    product(t, 0, 10, "float", 1000)
    t.launch(1, kernel, 10, 100)
    assert sums_of(account_of(t, job=job_in("bfloat16")))["fp32"] == pytest.approx(0.09 * share)


def test_a_measured_product_takes_time() -> None:
    shapes = ((256, 64), (64, 32))
    assert 0 < _seconds(shapes, "bfloat16") < 1 > _seconds(shapes, "float32") > 0


@tabled("operators, cause")
def test_norms_and_attention_by_hand(operators: str, cause: str) -> None:
    t = Trace()
    for number, name in enumerate(operators.split()):
        t.op(f"aten::{name}", 1000 * number, 1000 * number + 1000)
    assert {*sums_of(account_of(t))} == {cause} - {""}


def test_functions_of_another_program(tmp_path: Path) -> None:
    """Norms and attention without modules, in steps that nobody marked, forward and backward."""
    x = torch.ones(4, 64, 16, requires_grad=True)
    optimizer = torch.optim.SGD([x])
    with profile() as recorded:
        for _ in range(3):
            y = (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + 1)
            torch.matmul(torch.softmax(y @ y.mT, -1), y).sum().backward()
            optimizer.step()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    steps = read_trace(tmp_path / "trace.json")
    assert steps.num_steps == 2 and "2 from update to update" in steps.note
    lost_ms = account({"": steps}, [], tokens=0, simulated=None, job={})["lost_ms"]
    assert [*map(len, (lost_ms["norm"], lost_ms["math"]))] == [2, 2]  # forward and backward


@tabled("what, events, job, lost")
def test_causes_of_a_table(what: str, events: Any, job: Any, lost: Any) -> None:
    """Milliseconds of events, and those that are lost."""
    t = Trace()
    for kind, name, begin, end in events:
        t.host(kind, name, 1000 * begin, 1000 * end)
    assert sums_of(account_of(t, job=job)) == pytest.approx(lost), what


def test_a_validation_is_a_pause_as_often_as_rows_say() -> None:
    """Its forward passes are no micro-batches, and its time is not the profiler's."""
    t = Trace()
    t.range("ProfilerStep#9", 0, 300_000)
    t.range("titan: layers.0", 0, 100_000)
    product(t, 0, 98_000, "float", 1000)
    t.range("titan hook Validation.step_end", 100_000, 300_000)
    for begin in (100_000, 200_000):
        t.range("titan: layers.0", begin, begin + 100_000)
        product(t, begin, begin + 100_000, "float", 1000)
    common = {"step_s": 0.1, "tokens_per_s": 1e4, "data_wait_s": 0.0, "validation_s": 0.2}
    facts = account_of(t, rows=[{"step": n} | common for n in (10, 20, 30)])
    assert sums_of(facts) == {"checkpoint": pytest.approx(20)}
    assert facts["step_ms"] == pytest.approx(120)


def test_a_hidden_copy_is_not_lost_and_idle_time_after_a_wait_is() -> None:
    """Microseconds: a copy beside a product, a wait until the product ends, and a device that is idle while the host launches again."""
    t = Trace()
    t.range("ProfilerStep#9", 0, 2_000)
    t.launch(1, "Memcpy HtoD (Pageable -> Device)", 5, 800, stream=8)
    t.launch(3, "nvjet_hsh_256x128", 10, 1_000)
    t.op("aten::item", 20, 1_010)
    for begin in (1_020, 1_300):  # operators between which the rule must hold
        t.op("aten::add", begin, begin + 250)
    t.launch(1_551, "nvjet_hsh_256x128", 1_600, 2_000)
    sums = {cause: ms * 1e3 for cause, ms in sums_of(account_of(t)).items()}
    assert sums == pytest.approx({"sync": 600, "unpinned": 5, "host_idle": 5})


def test_data_that_comes_late_after_a_wait_is_the_loaders() -> None:
    t = Trace()
    t.range("ProfilerStep#9", 0, 2_000)
    t.launch(1, "nvjet_hsh_256x128", 5, 1_000)
    t.op("aten::item", 20, 1_010)
    t.range("titan loader", 1_020, 1_500)
    t.launch(1_510, "nvjet_hsh_256x128", 1_600, 2_000)
    sums = {cause: ms * 1e3 for cause, ms in sums_of(account_of(t)).items()}
    assert sums == pytest.approx({"titan loader": 480, "sync": 120, "host_idle": 5})


def test_nothing_above_three_percent() -> None:
    t = Trace()
    t.range("ProfilerStep#9", 0, 100_000)
    product(t, 0, 98_000, "float", 1000)
    t.op("aten::item", 98_000, 100_000)
    facts = account_of(t)
    assert sums_of(facts) == {"sync": pytest.approx(2)}
    assert "nothing above 3%" in [*page(facts)][3]


def test_rows_tell_of_pauses_and_of_the_profilers_own_time() -> None:
    """A traced step of 100 ms; the others take 99.9967, of which a row in ten waits, saves and is written."""
    t = example()
    t.events[-1]["name"] = "titan hook Metrics.step_end"
    common = {"step_s": 0.0999967, "tokens_per_s": 2000 / 0.0999967, "data_wait_s": 0.004}
    rows = [{"step": n, "checkpoint_s": 0.5} | common for n in (10, 20, 30)]
    rows[-1]["checkpoint_s"] = 7  # a run saves at its end, whatever its interval
    facts = account_of(t, rows=rows)
    sums = sums_of(facts)
    # Nine of ten times 10 ms of rows go, and 4 ms of data and 50 of a checkpoint come.
    assert facts["tokens"] == pytest.approx(2000)
    assert facts["step_ms"] == pytest.approx(99.9967 - 0.9 * 9.9997 + 54, abs=1e-3)
    assert sums["checkpoint"] == pytest.approx(50) and sums["titan loader"] == pytest.approx(4)
    # The traced step has a row, and one in ten has one. Each of the eleven events took the profiler 0.3 us.
    assert sums["log"] == pytest.approx((10 - 0.0003) / 10)


def test_what_exceeds_the_simulated_step() -> None:
    simulated = {"step_time_s": 3e-4, "comm": {"exposed_s": 3e-5}, "time": {"host_s": 2e-5}}
    alone, facts = account_of(step_trace()), account_of(step_trace(), simulated=simulated)
    more, less = sums_of(alone), sums_of(facts)
    assert more["communication_exposed"] - less["communication_exposed"] == pytest.approx(0.03)
    assert more["host_idle"] - less["host_idle"] == pytest.approx(0.02)
    assert facts["reference_ms"] == pytest.approx(0.3)


def test_causes_of_a_gpu() -> None:
    trace = step_trace()
    trace.op("aten::item", 330, 890)
    facts = account_of(trace)
    sums = {cause: ms * 1e3 for cause, ms in sums_of(facts).items()}
    # The call waits for a copy, and the device is idle from 880 to 900, 10 us of them after it. Before its first kernel the host is late.
    assert sums == pytest.approx(
        {"host_idle": 97, "communication_exposed": 83, "recomputed": 100, "sync": 40}
    )
    places = facts["lost_ms"]["communication_exposed"]
    assert places["mesh_dp_shard"] == pytest.approx(0.033)
    assert facts["reference_ms"] == pytest.approx(0.66)


def test_casts_of_a_program_in_fp32_are_its_work() -> None:
    t = Trace()
    t.range("ProfilerStep#9", 0, 200_000)
    product(t, 0, 100_000, "float", 1000)
    t.op("aten::_to_copy", 100_000, 200_000)
    t.op("aten::copy_", 100_000, 200_000)
    assert sums_of(account_of(t)) == {}


@tabled("waits, slowest, late")
def test_a_rank_is_slow_in_most_steps(waits: Any, slowest: str, late: float) -> None:
    """By more than it waits itself, or by its own times in the rows; else it is chance. Milliseconds of each step, by rank."""
    traces = Trace(), Trace()
    for t, rank_waits in zip(traces, waits, strict=True):
        for number, ms in enumerate(rank_waits):
            begin = 1e5 * number
            t.range(f"ProfilerStep#{number}", begin, begin + 1e5)
            t.range("gloo:all_reduce", begin, begin + 1e3 * ms, thread=3)
    common = {"step_s": 0.1, "tokens_per_s": 1000}
    rows = [{"step": 1, "slowest_rank": int(rank)} | common for rank in 2 * slowest]
    assert sums_of(account_of(*traces, rows=rows)).get("rank", 0) == pytest.approx(late)


def test_a_rank_that_others_wait_for() -> None:
    slow = step_trace()
    slow.events = [e for e in slow.events if "ReduceScatter" not in e["name"]]
    facts = account_of(step_trace(), slow)
    assert facts["lost_ms"]["rank"] == {"rank-1": pytest.approx(0.05)}
    assert sums_of(facts)["communication_exposed"] == pytest.approx(0.033)
    assert sums_of(facts)["unpinned"] == pytest.approx(0.02)
    # Its own account does not blame it.
    assert "rank" not in sums_of(account_of(slow, step_trace()))


def test_the_trace_of_another_program(tmp_path: Path, shell: Shell) -> None:
    """A trace of a plain PyTorch program, without a run folder: the time of its named ranges and of `.item()`."""
    x = torch.ones(64, 64)
    with profile(record_shapes=True) as recorded:
        with record_function("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            for _ in range(300):
                x.clone()
        for _ in range(5000):
            x[0, 0].item()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    facts = json.loads(shell(f"profile {tmp_path}/trace.json --tokens 64 --json").out)
    sums = sums_of(facts)
    assert facts["tokens"] == 64 and {"sync", "titan loader"} <= {*sums}
    assert next(iter(sums)) == "sync"
    said = shell(f"profile {tmp_path}/trace.json").out
    assert "waits for the device" in said and "?  measured" in said and "-0.0" not in said


# ---- runs that are slow on purpose -----------------------------------------------------------------


def train_slowly(folder: Path, name: str, trainer_class: Any = Trainer) -> None:
    row = TABLE["row"][name]
    (folder / "job.toml").write_text(TABLE["job"])
    keys = [*row.get("both", []), *row.get("slow", []), f"job.dump_folder={folder}"]
    os.environ |= {"SLOW": "", "SLOW_S": "0.02"} | row.get("env", {})
    config = load_from_argv([str(folder / "job.toml"), *map("--{}".format, keys)])

    def hooks(trainer: Any) -> list[Any]:
        return sorted([*standard_hooks(trainer), Slow(trainer)], key=lambda h: h.priority)

    run_to_end(trainer_class(config, hooks=hooks))


def named_first(folder: Path, name: str, shell: Shell) -> str:
    job = folder / "meant.toml"
    meant = TABLE["row"][name].get("meant", "auto")
    job.write_text(f"[training]\nmixed_precision_param = '{meant}'")
    return next(iter(sums_of(json.loads(shell(f"profile {folder} --job {job} --json").out))))


@pytest.mark.parametrize("name", [name for name in FIRST if name != "a slow rank"])
def test_the_slowness_is_named_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    for variable in ("SLOW", "SLOW_S"):
        monkeypatch.setenv(variable, "")
    # On many CPUs bf16 is no faster.
    rates = {"bfloat16": 1.0, "float32": 2.0}
    monkeypatch.setattr("titan.tools.account._seconds", lambda _, dtype: rates[dtype])
    train_slowly(tmp_path, name)
    torch._dynamo.reset()
    assert named_first(tmp_path, name, shell) == FIRST[name]


def train_in_pool(folder: Path) -> None:
    train_slowly(folder, "a slow rank", PoolTrainer)


def test_a_slow_rank_is_named_first(pool: Pool, tmp_path: Path, shell: Shell) -> None:
    pool.run(2, train_in_pool, tmp_path)
    assert named_first(tmp_path, "a slow rank", shell) == "rank"


def test_each_row_of_the_benchmark_has_its_cause() -> None:
    assert FIRST.keys() == TABLE["row"].keys() and {*FIRST.values()} <= CHANGES.keys()
