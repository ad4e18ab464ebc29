"""`titan sim`, as a user types it: the page, the JSON that DESIGN promises, traces and pages in files, sweeps, mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import titan
from tests.support.commands import Shell, finished
from tests.support.jobs import ROOT
from titan.cli import main
from titan.config.load import load_from_argv
from titan.config.model import family
from titan.sim.price.profiles import load_profile
from titan.sim.record import trace_cache
from titan.sim.record.trace import CATEGORIES
from titan.sim.record.trace_cache import read_entry
from titan.sim.replay.memory import memory_report
from titan.sim.report import text as report
from titan.sim.report.intervals import HARDWARE, errors
from titan.sim.search.variants import Variant, front

JOB = [
    "train_configs/debug_model.toml",
    "--training.seq_len=64",
    "--training.local_batch_size=2",
]
ON = ["--hardware", "h100-sxm"]


@pytest.fixture
def sim(shell: Shell) -> Any:
    """Return a function that runs `titan sim` on the job, and requires the exit code."""
    return partial(shell, f"sim {' '.join(JOB)}")


@pytest.fixture
def facts_of(sim: Any) -> Any:
    """Return a function that simulates the job on a number of H100s, and returns what --json says."""

    def simulated(world_size: int, *options: str) -> Any:
        return json.loads(sim(f"--world-size={world_size}", *ON, *options, "--json=-").out)

    return simulated


def test_page_json_trace_and_html(tmp_path: Path, sim: Any) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace", "html")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    options += ["--csv", str(tmp_path / "1f1b.csv")]
    pipeline = "--parallelism.pipeline_parallel_degree=2"
    printed = sim("--world-size", "4", *ON, pipeline, *options).out
    assert printed.startswith("llama3 tiny on 4 x h100-sxm: pp 2 x dp_shard 2\n")
    for line in (
        "tokens/s/GPU",
        "where the time goes",
        "pipeline bubble",
        "fits: ",
        "pipeline rank",
    ):
        assert line in printed

    facts = json.loads(files["json"].read_text())
    memory = facts["memory"]
    assert set(memory["by_category_gib"]) == set(CATEGORIES)
    assert sum(memory["by_category_gib"].values()) == pytest.approx(memory["peak_active_gib"])
    assert sum(memory["by_module_gib"].values()) == pytest.approx(memory["peak_active_gib"])
    for category, by_module in memory["by_category_and_module_gib"].items():
        assert sum(by_module.values()) == pytest.approx(memory["by_category_gib"][category])
        assert all(n <= memory["by_module_gib"][name] for name, n in by_module.items())
    assert memory["peak_reserved_gib"] >= memory["peak_active_gib"]
    tokens = facts["tokens_per_s_per_gpu"] * 4 * facts["step_time_s"]
    assert tokens == pytest.approx(2 * 64 * 2) == facts["tokens_per_step"]
    assert facts["mfu"] == pytest.approx(facts["tflops_per_gpu"] / 989)
    assert (
        facts["mfu_convention"] == "full" and facts["hardware"] == "h100-sxm" and facts["fits"]
    )
    assert "\n  assumed   700 W, 80 GB of HBM3, attention in cudnn\n" in printed
    [(kin, speed)] = facts["hardware_kin"].items()
    assert kin == "h100-96g-500w" and f"if it is {kin}: {speed:,.0f} tokens/s/GPU" in printed
    noted = facts | {"hardware_note": "too fast", "hardware_lacks": "no run"}
    assert report.page(noted).startswith("UNSUPPORTED PROFILE h100-sxm: no run, so times")
    assert "\n  h100-sxm: too fast\n" in report.page(noted)
    assert not facts["hardware_lacks"] and "UNSUPPORTED" not in printed
    assert [rank["rank"] for rank in facts["per_rank"]] == [0, 2]
    assert 0 < facts["pipeline"]["bubble_fraction"] < 1
    assert facts["wall_s"] > 0
    time, comm = facts["time"], facts["comm"]
    parts = sum(time[f"{name}_s"] for name in ("compute", "copies", "host", "peers"))
    assert parts + comm["exposed_s"] == pytest.approx(facts["step_time_s"])
    assert sum(time["by_module_s"].values()) == pytest.approx(time["compute_s"])
    assert (
        "  compute by module\n" in printed and "layers.*.feed_forward.w1" in time["by_module_s"]
    )
    assert comm["exposed_s"] == pytest.approx(
        sum(a["exposed_s"] for a in comm["by_axis"].values())
    )
    assert comm["by_axis"]["dp_shard"]["bytes"] > 0 < comm["by_axis"]["pp"]["count"]

    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 2}
    assert "ncclDevKernel_AllGather(dp_shard layers.1)" in {e["name"] for e in events}
    # The counter misses only the cuBLAS workspace and the rounding of blocks.
    for rank in (0, 2):
        counted = [
            sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == rank
        ]
        [peak] = [r["peak_active_gib"] for r in facts["per_rank"] if r["rank"] == rank]
        assert 0 <= peak - 1 / 32 - max(counted) < 0.01 * peak
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert any(": all_gather dp_shard" in name for name in names) and "compute" in names
    assert (tmp_path / "1f1b.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    page = files["html"].read_text()
    assert "GiB: 1 x temporary of cuBLAS workspace, made in forward" in page
    assert "/*DATA*/null" not in page and "https://" not in page and "rank" in page


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium, to lay a page out")
def test_a_timeline_of_few_rows_is_high_enough_to_read(tmp_path: Path, sim: Any) -> None:
    """Also on a telephone. The page begins with four figures, which are the terminal's, and ends with tables."""
    page, frames = tmp_path / "page.html", tmp_path / "frames.html"
    printed = sim("--world-size", "2", *ON, "--html", str(page)).out
    frame = '<iframe src="page.html" style="width: {}px; border: 0"></iframe>'
    measure = """
    onload = () => document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(({ contentDocument: page }) =>
      [page.documentElement.scrollWidth, page.getElementById("timeline").clientHeight, page.querySelector("h2").previousElementSibling.id,
       [...page.querySelectorAll(".tiles b, section:nth-of-type(-n+3) td:nth-child(2)")].map(part => part.textContent.replace(" GiB", ""))]))"""
    body = "".join(map(frame.format, (390, 1200)))
    frames.write_text(f"{body}<script>{measure}</script>")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    command += ["--allow-file-access-from-files", "--hide-scrollbars", frames.as_uri()]
    shown = finished(command, timeout=120, code=None).stdout
    pages = json.loads(re.findall(r"<title>(.*)</title>", shown)[0])
    for width, (across, high, before, cells) in zip((390, 1200), pages, strict=True):
        assert across == width and high >= 300 and before == "tiles"
        assert len(cells) > 16 and [cell for cell in cells if cell not in printed] == []


def test_memory_is_that_of_the_allocator_the_job_has(
    facts_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default allocator takes segments of 2 and 20 MiB and more; expandable ones grow page by page in one range for each pool."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reserved = {}
    for expandable in (True, False):
        setting = f"--training.expandable_segments={str(expandable).lower()}"
        reserved[expandable] = facts_of(2, setting)["memory"]["peak_reserved_gib"]
    # One trace serves both, and one pace of the host.
    entries = [trace for path in tmp_path.rglob("*.pickle") for trace in read_entry(path) or []]
    [trace] = [trace for trace in entries if trace.step]
    assert len(entries) == 2
    for expandable, gib in reserved.items():
        report = memory_report(trace, load_profile("h100-sxm"), expandable=expandable)
        assert report.peak_reserved_bytes / 2**30 == gib
    assert reserved[True] != reserved[False]


def test_a_sweep_goes_on_where_hardware_lacks_float8(
    sim: Any,
) -> None:
    converted = ("--world-size", "1", "--model.converters", '["quantize.linear.float8"]')
    several = ("--hardware", "a100-80g,h100-sxm", "--sweep", "training.local_batch_size=2")
    printed = sim(*converted, *several).out
    assert (
        "2 variants: 1 fit" in printed and "1 cannot run: a100-80g does not multiply" in printed
    )


def _refuse_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_recording(*_: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(
        "titan.sim.record.trace_cache.trace_jobs",
        lambda jobs, *_, **__: no_recording() if jobs else iter(()),
    )


FLEX = "FlexAttention"
DOCUMENTS = "--data.document_mask=true --data.add_eos=true"
GATHERED = "--parallelism.context_parallel_degree=2 --parallelism.context_parallel_rotate_method=allgather"


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ("--model.attention_backend=fa3", "flash3"),
        ("--simulator.torch_version=2.10.0+cu128", "flash2"),
        (DOCUMENTS, "flash2"),
        (f"{DOCUMENTS} {GATHERED}", FLEX),
        ("--training.mixed_precision_param=float32 --model.attention_backend=math", ""),
    ],
)
def test_the_page_names_the_kernel_of_attention(
    facts_of: Any, options: str, kernel: str
) -> None:
    facts = facts_of(2, *options.split())
    assert facts["attention_kernel"] == kernel
    assert ("attention in" in report.page(facts).splitlines()[1]) == bool(kernel)
    assert ("h100-sxm has no rates of FlexAttention" in report.page(facts)) == (kernel == FLEX)
    shares = facts["interval"]["shares"]
    # Off by 25% more. The class's own deviation is that of errors.toml.
    wider = 0.25 * shares.get("attention across ranks", 0) / errors()["sigma"][HARDWARE]
    assert shares.get("this card's figures", 0) == pytest.approx(wider * (kernel == FLEX))


def test_figures_of_the_hardware_are_set_without_another_trace(
    sim: Any, facts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = facts_of(2)
    _refuse_to_record(monkeypatch)
    # This step waits for the host, whose tiny operation takes 1.3 us.
    twice, same = (facts_of(2, f"--set=host_tiny_us={us}") for us in ("+100%", "1.3"))
    assert twice["host"]["tiny_us"] == 2.6 and same["step_time_s"] == first["step_time_s"]
    assert 1.8 < twice["step_time_s"] / first["step_time_s"] < 2
    assert twice["hardware_assumes"] == "700 W, 80 GB of HBM3, host_tiny_us=+100%"
    for change, message in (
        ("host_tiny=1", "no figure 'host_tiny'; did you mean 'host_tiny_us'"),
        ("matmul_share=+90%", "matmul_share.bfloat16: Input should be less than or equal to 1"),
        ("nic_gb_per_s=fast", "'nic_gb_per_s=fast': expected nic_gb_per_s=+20%, or a number"),
        ("nic_gb_per_s=+20", "expected nic_gb_per_s=+20%"),
        ("matmul_share=0.7", "expected matmul_share=+20%"),
    ):
        assert message in sim("--world-size=2", *ON, f"--set={change}", code=2).err


def test_a_trace_whose_blocks_are_not_alike_is_kept(
    facts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second block recomputed: nothing to extend."""
    settings = "mode=selective", "selective_ac_option=2"
    options = [f"--activation_checkpoint.{setting}" for setting in settings]
    options += ["--model.overrides.n_layers=15"]
    first = facts_of(1, *options)
    _refuse_to_record(monkeypatch)
    assert facts_of(1, *options)["step_time_s"] == first["step_time_s"]


def test_the_trace_is_kept_for_other_hardware_and_replicas(
    facts_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hsdp = "--parallelism.data_parallel_replicate_degree"
    first = facts_of(4, f"{hsdp}=2")
    _refuse_to_record(monkeypatch)
    slower = facts_of(4, f"{hsdp}=2", "--hardware=a100-80g")
    # The step itself waits for the host.
    assert slower["time"]["compute_s"] > first["time"]["compute_s"]
    categories = [result["memory"]["by_category_gib"] for result in (first, slower)]
    assert categories[0]["activations"] == categories[1]["activations"] > 0
    wider = facts_of(64, f"{hsdp}=32")
    near, far = (facts["comm"]["by_axis"]["dp_replicate"] for facts in (first, wider))
    assert far["bytes"] == near["bytes"]
    assert far["exposed_s"] + far["overlapped_s"] > near["exposed_s"] + near["overlapped_s"]
    with pytest.raises(AssertionError, match="traced again"):
        facts_of(8, f"{hsdp}=2")  # other shards


def test_a_known_job_needs_no_torch(tmp_path: Path) -> None:
    """Nor numpy: each takes more CPU time to import than the simulation of a recorded job."""
    probe = (
        "import sys; from titan.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'jinja2'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", probe, "sim", *JOB, "--world-size", "2", *ON, "--quiet"]
    for _ in range(2):
        done = finished(command, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, cwd=ROOT)
        assert done.stdout.endswith("[]\n"), done.stdout
    assert len([*tmp_path.rglob("*.pickle")]) == 2  # the trace, and the host's pace


def test_a_trace_depends_on_titans_own_source_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a checkout, titan's path includes the repository, with its tests and environments."""
    (tmp_path / "other.py").touch()
    before = trace_cache.source_hash()
    monkeypatch.setattr(titan, "__path__", [*titan.__path__, str(tmp_path)])
    trace_cache.source_hash.cache_clear()
    assert trace_cache.source_hash() == before


def test_sweep(tmp_path: Path, sim: Any) -> None:
    file = tmp_path / "sweep.json"
    options = f"--world-size=2 --hardware=h100-sxm,a100-80g --json={file}".split()
    batches = "--sweep=training.local_batch_size=1,2,3"
    printed = sim(*options, batches, "--sweep=parallelism.tensor_parallel_degree=1,2,4").out
    variants = json.loads(file.read_text())
    assert len(variants) == 18
    assert [v["settings"]["parallelism.tensor_parallel_degree"] for v in variants[:6]] == [
        *"112244"
    ]
    refused = [v for v in variants if v["problem"]]
    assert len(refused) == 6 and all(
        v["settings"]["parallelism.tensor_parallel_degree"] == "4" for v in refused
    )
    columns = (
        "hardware local_batch_size tensor_parallel_degree tokens/s/GPU MFU step s GiB front"
    )
    assert printed.splitlines()[0].split() == columns.split()
    speeds = [float(line.split()[3].replace(",", "")) for line in printed.splitlines()[1:13]]
    assert speeds == sorted(speeds, reverse=True)
    assert "18 variants: 12 fit" in printed and re.search(r"6 cannot run: .*2", printed)
    repeated = ("--world-size", "2", "--hardware", "h100-sxm,H100-SXM", "--json", "-")
    twice = sim(*repeated, "--sweep", "training.local_batch_size=2,2").out
    assert len(json.loads(twice)) == 1


def test_sweep_over_world_sizes(sim: Any, facts_of: Any) -> None:
    """Each size is what it is alone, in one table with other keys."""
    sweep = ("--sweep", "world_size=1,2,3", "--sweep", "parallelism.tensor_parallel_degree=1,2")
    variants = json.loads(sim(*ON, *sweep, "--json", "-").out)
    assert [v["settings"]["world_size"] for v in variants] == [*"112233"]
    assert [bool(v["problem"]) for v in variants] == [False, True, False, False, False, True]
    alone = facts_of(2)
    swept = variants[2]["facts"]
    assert swept["world_size"] == 2 and swept["layout"] == alone["layout"]
    assert swept["step_time_s"] == alone["step_time_s"] and swept["memory"] == alone["memory"]


def test_thousands_of_devices(facts_of: Any) -> None:
    """A rank of 4,096 holds a row of each matrix; its shards cross the cards, so that it is slower than one of eight."""
    few, many = facts_of(8), facts_of(4096)
    assert many["world_size"] == 4096 and "x dp_shard 4096 x" in many["layout"]
    assert many["comm"]["by_axis"]["dp_shard"]["card_bytes"] > 0
    assert few["comm"]["by_axis"]["dp_shard"]["card_bytes"] == 0
    assert many["tokens_per_s_per_gpu"] < few["tokens_per_s_per_gpu"]
    config = load_from_argv(JOB)
    with torch.device("meta"):
        model = family(config.model.name).build_model(config.model.sizes)
    rows = [4 * p[0].numel() * -(-len(p) // 4096) for p in model.parameters()]
    rotations = 4 * config.training.seq_len * 2 * config.model.sizes.head_dim
    # The allocator rounds to 512 bytes.
    least = sum(-(-size // 512) * 512 for size in rows) + rotations
    held = many["memory"]["by_category_gib"]["parameters"] * 2**30
    assert held == least


def test_fp32_on_an_accelerator_is_warned_of_and_its_mfu_marked(
    sim: Any,
) -> None:
    """ "auto" is bfloat16 there, and float32 on the CPU."""
    results = {}
    for hardware, precision in (("h100-sxm", "float32"), ("h100-sxm", "auto"), ("cpu", "auto")):
        options = ["--world-size=1", f"--hardware={hardware}", "--json=-"]
        printed = sim(*options, f"--training.mixed_precision_param={precision}")
        facts = results[hardware, precision] = json.loads(printed.out)
        is_slow = precision == "float32"
        assert ("leaves an accelerator's tensor cores idle" in printed.err) == is_slow
        assert ("% of fp32 (" in report.page(facts)) == (facts["mfu_dtype"] == "float32")
        assert "the formula of `titan check` says" in report.page(facts)
    slow, fast, _ = results.values()
    assert [one["mfu_dtype"] for one in results.values()] == ["float32", "bfloat16", "float32"]
    assert slow["mfu"] == pytest.approx(slow["tflops_per_gpu"] / 67)
    assert fast["mfu"] == pytest.approx(fast["tflops_per_gpu"] / 989)
    sizes = [one["memory"]["formula_gib"] for one in results.values()]
    assert sizes[0] == sizes[2] > sizes[1]


def test_utilization_is_that_of_the_recorded_products(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An 8B model in float8 on two ranks, recomputed: by hand, from its matrices."""
    options = ["--world-size=2", "--hardware=h100-sxm", "--json=-", "--quiet"]
    options += ["--model.flavor=8B", "--model.converters=quantize.linear.float8"]
    options += ["--training.seq_len=2048", "--activation_checkpoint.mode=full"]
    assert main(["sim", *JOB, *options]) in (0, 3)
    facts = json.loads(capsys.readouterr().out)
    blocks = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    rest = 6 * 128256 * 4096 + 12 * 32 * 4096 * 2048
    ideal_s = 6 * blocks / 1979e12 + rest / 989e12
    by_hand = facts["tokens_per_s_per_gpu"] * ideal_s
    assert facts["utilization"] == pytest.approx(by_hand, rel=1e-6)
    assert facts["utilization"] < facts["mfu"]


def test_check_says_how_long_a_pipeline_idles(shell: Shell) -> None:
    """3 of 4 + 3 units of 1F1B with 4 ranks and 4 microbatches (arXiv:2104.04473)."""
    four = "--parallelism.pipeline_parallel_degree=4 --training.local_batch_size=4"
    printed = shell(f"check train_configs/debug_model.toml --world-size=4 {four}").out
    assert "\nbubble   43% of the step, by the schedule alone" in printed


def test_the_exit_code_says_whether_it_fits(tmp_path: Path, sim: Any, facts_of: Any) -> None:
    batch = "--training.local_batch_size=64"
    needed = facts_of(1, batch)["memory"]["needed_gib"]
    file = tmp_path / "mine.toml"
    for room, code, verdict in (
        (1.2, 0, "fits: "),
        (1.05, 0, "TIGHT: "),
        (0.7, 1, "DOES NOT FIT: "),
    ):
        file.write_text(
            f'name = "mine"\nbase = "h100-sxm"\nmemory_gib = {needed * room}\n'
            '[sources]\nmemory_gib = "this test"\n'
        )
        page = sim("--world-size=1", batch, f"--hardware={file}", code=code).out
        assert f"  memory    {verdict}" in page and ("10%" in page) == (code == 0)


def test_the_front_holds_what_nothing_beats() -> None:
    def variant(speed: float, gib: float, fits: bool = True) -> Variant:
        memory = {"needed_gib": gib}
        return Variant({}, "h", {"tokens_per_s_per_gpu": speed, "memory": memory, "fits": fits})

    best, smaller = variant(9, 50), variant(7, 20)
    beaten, too_big = variant(6, 30), variant(10, 99, False)
    assert front([beaten, smaller, too_big, best]) == [best, smaller]


def test_speed_on_machines_of_the_same_name(facts_of: Any) -> None:
    """The width of the guess is what a simulation of the other machine says, where kernels set the step's time."""
    large = "--training.local_batch_size=8 --training.seq_len=2048 "
    large += "--model.overrides.dim=1024 --model.overrides.ffn_dim=4096"
    facts = {}
    for name in ("h100-sxm", "h100-96g-500w"):
        facts[name] = facts_of(1, *large.split(), f"--hardware={name}")
        # Matmuls set the time: a tenth faster, they take 1/1.1 of it. Nothing is sent.
        decides, one = facts[name]["decides"], facts[name]
        shorter = one["interval"]["shares"]["matmuls"] * (1 - 1 / 1.1)
        gain = one["tokens_per_s_per_gpu"] / decides["matmuls"]
        assert gain == pytest.approx(1 - shorter, abs=0.01)
        assert decides["links"] == one["tokens_per_s_per_gpu"]
    for name, other in (("h100-sxm", "h100-96g-500w"), ("h100-96g-500w", "h100-sxm")):
        guess, speed = facts[name]["hardware_kin"][other], facts[other]["tokens_per_s_per_gpu"]
        assert guess == pytest.approx(speed, rel=0.01)
        assert speed != pytest.approx(facts[name]["tokens_per_s_per_gpu"], rel=0.03)
