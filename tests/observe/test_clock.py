"""Throughput leaves validation and saving out; the time left counts them."""

import pytest

from tests.support.metrics import Clock
from titan.observe.clock import StepTimer


def test_throughput_excludes_pauses_and_eta_counts_them() -> None:
    clock = Clock()
    timer = StepTimer(total_steps=110, step=10, clock=clock)
    with timer.data_wait():
        clock.now_s += 2.0
    clock.now_s += 8.0
    with timer.pause("validation"):
        clock.now_s += 5.0
    with timer.pause("checkpoint"):
        clock.now_s += 1.0
    window = timer.window(step=20, tokens=1000)
    assert window.num_steps == 10
    assert window.step_s == pytest.approx(1.0)
    assert window.tokens_per_s == pytest.approx(100.0)
    assert window.data_wait_s == pytest.approx(0.2)
    assert window.paused_s == pytest.approx({"validation": 5.0, "checkpoint": 1.0})
    assert window.eta_s == pytest.approx(90 * (1.0 + 0.6))


def test_eta_forgets_the_slow_first_window_then_smooths() -> None:
    clock = Clock()
    timer = StepTimer(total_steps=100, clock=clock)
    etas_s = []
    for step, step_s in ((10, 9.0), (20, 1.0), (30, 2.0)):
        clock.now_s += 10 * step_s
        etas_s.append(timer.window(step=step, tokens=1).eta_s)
    assert etas_s == pytest.approx([90 * 9.0, 80 * 1.0, 70 * (0.7 * 1.0 + 0.3 * 2.0)])
    timer.forget_mean()  # steps have another size from here on
    clock.now_s += 10 * 5.0
    assert timer.window(step=40, tokens=1, steps_left=30.5).eta_s == pytest.approx(30.5 * 5.0)


def test_windows_do_not_leak_into_each_other() -> None:
    clock = Clock()
    timer = StepTimer(total_steps=4, clock=clock)
    with timer.pause("validation"):
        clock.now_s += 3.0
    clock.now_s += 1.0
    timer.window(step=1, tokens=10)
    clock.now_s += 2.0
    second = timer.window(step=4, tokens=30)
    assert second.paused_s == {}
    assert second.tokens_per_s == pytest.approx(15.0)
    assert second.eta_s == 0.0
