"""The text of the start-up page and of the lines, at the widths people have."""

import io
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.metrics import Clock, step_row
from tests.support.tables import tabled
from titan.base.hardware import by_name
from titan.config.layout import Layout
from titan.config.schema import (
    JobConfig,
    LRSchedulerSection,
    MetricsSection,
    ModelSection,
    ParallelismSection,
    TrainingSection,
)
from titan.models.llama3.config import FLAVORS
from titan.observe.console import Console, duration
from titan.observe.startup import StartupPage, startup_page

ESCAPE = "\x1b"


def printed(
    speak: Callable[[Console], None],
    *,
    total_steps: int = 10_000,
    section: MetricsSection | None = None,
    **options: Any,
) -> str:
    out = options.pop("file", None) or io.StringIO()
    console = Console(section or MetricsSection(), total_steps=total_steps, file=out, **options)
    speak(console)
    console.close()
    return out.getvalue()


def page_of(
    flavor: str = "8B", hardware: str | None = None, steps: int = 1000, **degrees: int
) -> StartupPage:
    ones = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "accumulation": 2}
    config = JobConfig(
        model=ModelSection(flavor=flavor),
        training=TrainingSection(steps=steps),
        lr_scheduler=LRSchedulerSection(warmup_steps=200, decay_ratio=0.1, min_lr_factor=0.1),
    )
    return startup_page(
        config,
        FLAVORS[flavor],
        Layout(**(ones | degrees)),
        run_dir=Path("outputs/x"),
        device_name="NVIDIA H200" if hardware else "CPU",
        hardware=by_name(hardware) if hardware else None,
        data="stdlib; tokenizer bytes, 264 tokens",
    )


def test_the_page_shows_the_schedule_that_is_run() -> None:
    def shown(steps: int) -> str:
        return page_of(steps=steps).lines["schedule"].removeprefix("AdamW, peak learning rate ")

    assert shown(100) == "0.0008, 100 steps of warm-up"  # of 200
    assert shown(210) == "0.0008, 200 steps of warm-up, 10 of linear decay to 0.000152"  # of 21


def test_step_line_in_a_log_file() -> None:
    text = printed(lambda console: console.step(step_row(120, loss=3.45214, mfu=0.431)))
    assert text == (
        "step    120/10,000  loss  3.4521  gnorm  1.234  lr 3.00e-04     131,072 tok/s"
        "  mfu 43.1% full-attn  gpu  61.20 GiB  data   0.3ms  eta  3:19:48\n"
    )


def test_a_mixture_of_experts_shows_its_imbalance() -> None:
    text = printed(lambda console: console.step(step_row(1, mfu=0.4, expert_imbalance=1.4249)))
    assert text.endswith("  data   0.3ms  eta  3:19:48  moe  1.42x\n")


def test_cpu_says_rss_and_no_mfu() -> None:
    text = printed(
        lambda console: console.step(step_row(1, memory_kind="rss", memory_gib=0.87))
    )
    assert "  mfu n/a  rss   0.87 GiB  " in text


def test_lines_with_a_convention_of_mfu_are_no_wider_than_160() -> None:
    def speak(console: Console) -> None:
        for step, mfu in ((1, 0.051), (99_999, 0.431)):
            console.step(step_row(step, mfu=mfu, mfu_convention="causal", data_wait_s=0.4))

    first, second = printed(speak, total_steps=100_000).splitlines()
    assert len(first) == len(second) <= 160
    assert first.index("causal-attn") == second.index("causal-attn")


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_narrow_terminals_lose_columns_not_lines(width: int) -> None:
    text = printed(
        lambda console: console.step(step_row(7, loss=3.45214, mfu=0.4)), width=width
    )
    assert text.count("\n") == 1 and len(text) <= width + 1
    assert "loss  3.4521" in text and "tok/s" in text
    assert ("eta" in text) == (width >= 80)


def test_plain_text_unless_a_terminal_with_colours() -> None:
    def speak(console: Console) -> None:
        console.startup(page_of())
        console.step(step_row(1))
        console.validation({"step": 1, "validation_loss": 2.5, "bits_per_byte": 1.25})
        console.message("saved [bold]x[/bold]")
        logging.getLogger("titan.data").warning("%s", "careful")

    file = printed(speak)
    without_colours = printed(
        speak, is_terminal=True, width=140, section=MetricsSection(disable_color_printing=True)
    )
    terminal = printed(speak, is_terminal=True, width=140)
    assert ESCAPE not in file
    assert file == without_colours
    assert ESCAPE in terminal and "training" in terminal  # the bar
    assert file.endswith(
        "step      1/10,000  validation loss 2.5000  1.2500 bits/byte\n"
        "saved [bold]x[/bold]\nwarning: careful\n"
    )


def test_only_rank_0_prints_but_every_rank_logs(caplog: pytest.LogCaptureFixture) -> None:
    def speak(console: Console) -> None:
        console.step(step_row(1))
        console.message("hello")
        logging.getLogger("titan").warning("careful")

    with caplog.at_level(logging.INFO, logger="titan"):
        assert printed(speak, rank=1, is_terminal=True) == ""
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "hello"),
        ("WARNING", "careful"),
    ]


def test_last_words_are_left_to_standard_error() -> None:
    def end(_: Console) -> None:
        logging.getLogger("titan").error("the disk is full", extra={"last_words": True})

    assert printed(end) == ""


def test_startup_page() -> None:
    text = printed(lambda console: console.startup(page_of(hardware="h200-sxm")))
    lines = text.splitlines()
    assert lines[1] == "titan: llama3 8B, 8,030,261,248 parameters"
    page = {line[2:19].strip(): line[19:] for line in lines[2:] if line[2:3].strip()}
    assert page["layout"] == "4 ranks; mesh dp_shard 4; FSDP2 (ZeRO-3)"
    assert (
        page["tokens per step"]
        == "8 sequences x 2,048 tokens x 4 ranks x 2 accumulation = 131,072"
    )
    assert page["steps"] == "1,000; 131,072,000 tokens in all"
    assert page["schedule"] == (
        "AdamW, peak learning rate 0.0008, 200 steps of warm-up, 700 constant, "
        "100 of linear decay to 8.72e-05"
    )
    assert (
        "(h200-sxm: 989 TFLOP/s dense bfloat16); MFU counts full attention" in page["hardware"]
    )
    assert "GiB a rank by formula, of 139.7: parameters 7.48, gradients 7.48" in page["memory"]
    assert page["data"] == "stdlib; tokenizer bytes, 264 tokens"
    assert max(map(len, lines)) <= 120


def test_startup_page_of_one_cpu_rank_and_of_hsdp_with_tp() -> None:
    one = page_of("demo", dp_shard=1, accumulation=1)
    assert one.lines["layout"] == "1 rank"
    assert one.lines["tokens per step"] == "8 sequences x 2,048 tokens x 1 rank = 16,384"
    assert one.lines["hardware"] == "CPU; no profile of its peak, so MFU is n/a"
    many = page_of(dp_replicate=2, dp_shard=4, tp=2)
    assert (
        many.lines["layout"]
        == "16 ranks; mesh dp_replicate 2 x dp_shard 4 x tp 2; HSDP (ZeRO-3)"
    )
    assert "x 8 data-parallel ranks x 2 accumulation" in many.lines["tokens per step"]
    assert "(does not fit)" in page_of("405B", hardware="h100-sxm").lines["memory"]


@tabled("ranks_per_node, where")
def test_startup_page_of_a_mixture_of_experts(ranks_per_node: int, where: str) -> None:
    config = JobConfig(
        model=ModelSection(name="qwen3", flavor="30B-A3B"),
        parallelism=ParallelismSection(expert_parallel_degree=8),
    )
    page = startup_page(
        config,
        config.model.sizes,
        Layout(pp=1, dp_replicate=1, dp_shard=24, cp=1, tp=1, accumulation=1),
        run_dir=Path("outputs/x"),
        device_name="CPU",
        hardware=None,
        ranks_per_node=ranks_per_node,
    )
    assert page.title == (
        "titan: qwen3 30B-A3B, 30,532,122,624 parameters, 3,353,032,704 of them active"
    )
    experts = "128 of width 768, top 8, in 48 of 48 layers, EP 8: 16 a rank"
    assert page.lines["experts"] == experts + where
    assert "ffn" not in page.lines["model"]  # no block has one


@tabled("seconds, text")
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_z_score_does_not_shift_the_columns() -> None:
    plain = printed(lambda c: c.step(step_row(7, mfu=0.4)))
    usual = printed(lambda c: c.step(step_row(7, mfu=0.4, loss_z=5.9, grad_norm_z=-9.0)))
    assert usual == plain
    with_z = printed(lambda c: c.step(step_row(7, mfu=0.4, loss_z=12.3, grad_norm_z=99.0)))
    assert with_z.splitlines() == [
        plain.rstrip("\n"),
        "step      7/10,000  loss unusual: 12.3 deviations above the last steps  gradient norm unusual: 99.0 deviations above the last steps",
    ]


def test_columns_stay_where_they_are_over_a_whole_run() -> None:
    """Steps of one digit to six, a loss that diverges, throughput of any size; MoE and validations come and go."""
    rows = [
        step_row(1, loss=12.0, tokens_per_s=912.0, eta_s=273_600.0, expert_imbalance=1.5),
        step_row(
            20, loss=999.99996, grad_norm=99.9999, tokens_per_s=1_234_567.0, memory_gib=139.7
        ),
        step_row(300, loss=float("nan"), grad_norm=float("nan"), eta_s=5.0, data_wait_s=12.5),
        step_row(40_000, loss=98_765.4321, grad_norm=1e12, tokens_per_s=45_000_000.0),
        step_row(500_000, loss=0.0, grad_norm=float("inf"), eta_s=0.0, memory_kind="rss"),
    ]
    rows[1:] = [row | {"mfu": mfu} for row in rows[1:] for mfu in (0.4, None)]
    rows[0] = rows[0] | {"mfu": 1.1}

    def speak(console: Console) -> None:
        for row in rows:
            console.step(row)
            console.validation({"step": row["step"], "validation_loss": 2.5})

    for width in (None, 80, 100, 120):
        lines = printed(speak, total_steps=900_000, width=width).splitlines()
        shown = [line for line in lines if "validation" not in line]
        assert len(shown) == len(rows)
        for end in (
            "/900,000",
            "loss",
            "gnorm",
            "lr",
            "tok/s",
            "mfu",
            "GiB",
            "data",
            "ms",
            "eta",
        ):
            places = {line.index(end) for line in shown if end in line}
            everywhere = all(end in line for line in shown)
            assert len(places) == everywhere, (end, width)  # in all lines, or left out of all
        # The numbers too: each ends where the others do.
        # pyrefly: ignore[missing-attribute]
        ends = {re.search(r"loss +\S+", line).end() for line in shown}
        ends_of_rate = {line.index(" tok/s") for line in shown}
        assert len(ends) == len(ends_of_rate) == 1
        if width is None:
            assert [line[line.index("eta") :].split()[1:3] for line in shown[:2]] == [
                ["3d", "04:00"],
                ["3:19:48"],
            ]


def test_the_bar_counts_down_between_logged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("titan.observe.console.time.monotonic", clock)

    def speak(console: Console) -> None:
        bar = console.bar
        assert bar is not None
        console.advance(1)
        assert bar.tasks[0].fields["eta"] == "-"  # no step was logged
        console.step(step_row(10, eta_s=100.0))
        for later_s, eta in ((40, "1:00"), (50, "0:10"), (20, "0:00")):
            clock.now_s += later_s
            console.advance(11)
            assert bar.tasks[0].fields["eta"] == eta
        assert (bar.tasks[0].completed, bar.tasks[0].total) == (11, 10_000)

    printed(speak, is_terminal=True, width=80)


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows after it was sent the text, without those that are empty."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] != ESCAPE:
            lines[row] = (
                lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            )
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_garbles_the_bar_and_the_bar_garbles_nothing(width: int) -> None:
    shown: list[list[str]] = []
    out = io.StringIO()

    def speak(console: Console) -> None:
        for step in (1, 2):
            console.step(step_row(step))
            logging.getLogger("titan").warning(f"careful {step}")
            print(f"printed {step}")
            console.message(f"saved {step}")
            assert console.bar is not None
            console.bar.refresh()
            shown.append(screen(out.getvalue()))

    printed(speak, is_terminal=True, width=width, file=out)
    shown.append(screen(out.getvalue()))
    for lines, steps in zip(shown, (1, 2, 2), strict=True):
        if lines is not shown[-1]:  # after the end the bar is gone
            bar = lines.pop()
            assert bar.startswith("training ") and f"step {steps}/10,000" in bar
            assert "eta 3:19:48" in bar and len(bar) <= width
        assert len(lines) == 4 * steps
        for step in range(1, steps + 1):
            row, *others = lines[4 * step - 4 : 4 * step]
            assert row.startswith(f"step      {step}/10,000  loss")
            assert others == [f"warning: careful {step}", f"printed {step}", f"saved {step}"]


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_no_escapes_and_no_bar(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal whose user wants no colours, or which has none."""
    monkeypatch.setenv("TERM", "xterm-256color")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def speak(console: Console) -> None:
        console.step(step_row(1))
        logging.getLogger("titan").warning("careful")

    assert ESCAPE in printed(speak, width=140, file=Terminal())
    monkeypatch.setenv(variable, "dumb" if variable == "TERM" else "1")
    assert ESCAPE not in printed(speak, width=140, file=Terminal())


def test_quiet_keeps_warnings_and_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_QUIET", "1")

    def speak(console: Console) -> None:
        console.startup(page_of())
        console.step(step_row(9, loss_z=50.0))
        console.message("saved")
        logging.getLogger("titan").warning("careful")
        console.step(step_row(10))
        console.validation({"step": 10, "validation_loss": 2.5})
        console.message("goodput", always=True)

    for terminal in (True, False):
        lines = printed(speak, total_steps=10, is_terminal=terminal, width=80).splitlines()
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", line)[:28] for line in lines]
        assert plain == [
            "warning: careful",
            "step 10/10  loss  1.0000  gn",
            "step 10/10  validation loss ",
            "goodput",
        ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_text_steers_the_terminal(is_terminal: bool) -> None:
    text = f"saved {ESCAPE}]0;owned to ftp://me:secret@host/run"
    shown = printed(lambda console: console.message(text), is_terminal=is_terminal)
    assert "saved \\u001b]0;owned to ftp://me:...@host/run" in shown
