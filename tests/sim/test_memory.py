"""Memory reports of hand-made traces: peaks, what is alive then, blocks that outlive a step, and whether it fits."""

from __future__ import annotations

import pytest

from tests.support.synthetic import transfer
from titan.base.hardware import MARGIN
from titan.sim.price.profiles import Profile, load_profile
from titan.sim.record.trace import Allocate, Category, Event, Free, Group, Scope, Trace
from titan.sim.replay.memory import memory_report, tensors_behind

MIB = 2**20


def profile(memory_gib: float = 10.0, **figures: float) -> Profile:
    bare: dict[str, float] = {"context_gib": 0.0, "workspace_mib": 0, "communicator_gib": 0.0}
    return load_profile("h100-sxm").model_copy(
        update={**bare, "memory_gib": memory_gib, **figures}
    )


def get(block: int, mib: int, category: Category, module: str = "") -> Allocate:
    return Allocate(block, mib * MIB, 0, category, Scope("forward", module))


def half_step(first: int) -> list[Event]:
    """Activations of two layers and a gradient, under numbers from `first` on."""
    return [
        get(first, 40, "activations", "layers.0"),
        get(first + 1, 60, "activations", "layers.1"),
        get(first + 2, 100, "gradients", "layers.1"),
        Free(first + 1),
    ]


def training() -> Trace:
    """Parameters of 100 MiB; moments of 200 in the first step; activations of 40 and 60, gradients of 100 in each."""
    return Trace(
        0,
        8,
        setup=[get(1, 100, "parameters", "layers.0")],
        first_step=[*half_step(10), get(5, 200, "optimizer"), Free(10), Free(12)],
        step=[*half_step(30), Free(30), Free(32)],
    )


def test_peak_and_what_is_alive_then() -> None:
    report = memory_report(training(), profile())
    assert report.peak_active_bytes == 500 * MIB
    assert report.by_category == {
        "parameters": 100 * MIB,
        "gradients": 100 * MIB,
        "optimizer": 200 * MIB,
        "activations": 100 * MIB,
        "unsharded": 0,
        "temporary": 0,
    }
    assert report.by_module == {"": 200 * MIB, "layers.1": 160 * MIB, "layers.0": 140 * MIB}
    assert report.at == Scope("forward", "layers.1")
    peak = max(report.timeline, key=lambda point: sum(point.by_category.values()))
    [behind] = tensors_behind(training(), profile(), [peak])
    assert [size // MIB for _, _, size in behind] == [200, 100, 100, 100]
    assert behind[0][0] == "optimizer of no module, made in forward"
    assert ("activations of layers.*, made in forward", 2, 100 * MIB) in behind
    assert 500 * MIB <= report.peak_reserved_bytes <= 560 * MIB
    assert report.fits and not report.failure and report.num_retries == 0


def test_timeline_holds_the_peak_of_a_step() -> None:
    report = memory_report(training(), profile())
    totals = [sum(point.by_category.values()) for point in report.timeline]
    assert max(totals) == report.peak_active_bytes
    assert totals[-1] == 300 * MIB
    positions = [point.position for point in report.timeline]
    assert positions == sorted(positions)
    assert positions[0] >= 0 and positions[-1] < 1


def test_blocks_that_outlive_a_step_are_freed_in_the_next() -> None:
    """Each step frees the gradients of the step before, and leaves its own: they do not pile up."""
    trace = Trace(
        0,
        1,
        first_step=[get(1, 100, "gradients", "output")],
        step=[get(2, 50, "activations"), Free(1), get(3, 100, "gradients", "output"), Free(2)],
    )
    report = memory_report(trace, profile())
    assert report.peak_active_bytes == 150 * MIB
    assert sum(report.timeline[-1].by_category.values()) == 100 * MIB


def test_constants_of_the_machine() -> None:
    trace = training()
    trace.groups = {
        "dp": Group("dp", ("dp_shard",), tuple(range(8))),
        "one": Group("one", ("tp",), (0,)),
        "idle": Group("idle", ("cp",), (0, 1)),
    }
    trace.step = [
        *trace.step,
        transfer(1, group="dp", work=1),
        transfer(1, group="one", work=2),
    ]
    figures = {"context_gib": 0.5, "workspace_mib": 32, "communicator_gib": 0.25}
    report = memory_report(trace, profile(**figures))
    assert (
        report.outside_bytes == 768 * MIB
    )  # one communicator that is used, of more than one rank
    assert report.peak_active_bytes == 532 * MIB
    assert report.by_category["temporary"] == 32 * MIB
    assert report.by_module["cuBLAS workspace"] == 32 * MIB


@pytest.mark.parametrize(
    ("memory_mib", "runs", "fits"),
    [(640, True, True), (540, True, False), (490, False, False)],  # it needs 500
)
def test_verdict(memory_mib: int, runs: bool, fits: bool) -> None:
    """What fits leaves a tenth of the memory free."""
    report = memory_report(training(), profile(memory_mib / 1024))
    assert (report.runs, report.fits) == (runs, fits)
    assert report.usable_bytes == int(memory_mib * 0.9 * MIB) and MARGIN == 0.1
    if not runs:
        assert report.failure.startswith(
            "out of memory in forward of layers.1: 0.10 GiB more than"
        )
        assert report.peak_active_bytes == 500 * MIB  # what it would take


def test_cached_memory_given_back_can_save_a_run() -> None:
    """A block of another stream stays cached until the limit is reached."""
    beside = Allocate(2, 300 * MIB, 1, "temporary", Scope("forward"))
    step: list[Event] = [beside, Free(2), get(3, 400, "activations"), Free(3)]
    trace = Trace(0, 1, setup=[get(1, 100, "parameters")], step=step)
    wide, tight = (memory_report(trace, profile(mib / 1024)) for mib in (1000, 600))
    assert wide.fits and wide.num_retries == 0
    assert wide.peak_reserved_bytes == 800 * MIB
    assert tight.runs and tight.num_retries > 0 and not tight.fits
    assert tight.peak_reserved_bytes <= 600 * MIB
