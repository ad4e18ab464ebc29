"""`[[phase]]`: which steps a phase has, the learning rate over them, and what is refused where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT, job
from tests.support.tables import table
from titan.checkpoint.identity import change_lines, changed_settings
from titan.checks.rules import check_to_run
from titan.config.errors import ConfigError
from titan.config.load import load_config
from titan.config.phases import longest_sequence, phases_of
from titan.config.render import to_toml
from titan.config.schema import JobConfig
from titan.optim.schedule import learning_rate_factor

SOURCES = [{"type": "stdlib"}, {"type": "synthetic", "weight": 2.0}]
BATCH = {"local_batch_size": 2, "seq_len": 32, "steps": 100}


def phased(*tables: dict[str, Any], **sections: Any) -> JobConfig:
    return job(phase=tables, **{"training": BATCH, "data": {"sources": SOURCES}} | sections)


def test_steps_tokens_and_settings_of_each_phase() -> None:
    config = phased(
        {"from_step": 11, "global_batch_size": 8},
        {"from_tokens": 5_000, "seq_len": 64, "weights": [1.0, 0.0]},
        {"from_step": 50, "local_batch_size": 4},
    )
    first, ramp, long, last = phases_of(config, world_size=2)
    # 10 steps of 4 x 32 tokens; then 8 x 32 a step, so that 5,000 are reached after 15 more.
    assert [(p.first_step, p.last_step) for p in (first, ramp)] == [(1, 10), (11, 25)]
    assert [(p.first_step, p.last_step) for p in (long, last)] == [(26, 49), (50, 100)]
    assert [p.sequences for p in (first, ramp, long, last)] == [4, 8, 8, 8]
    # What a phase does not set stays as it was in the phase before.
    assert last.config.training.seq_len == 64 and [
        s.weight for s in last.config.data.sources
    ] == [
        1.0,
        0.0,
    ]
    assert [p.tokens for p in (first, last)] == [10 * 4 * 32, 51 * 8 * 64]
    assert longest_sequence(config) == 64 and not last.config.phase
    # A job without phases is one; more ranks reach a number of tokens sooner.
    assert [p.steps for p in phases_of(phased(), world_size=1)] == [100]
    assert (
        phases_of(phased({"from_tokens": 1280, "seq_len": 64}), world_size=4)[1].first_step == 6
    )


def test_phases_survive_a_round_trip_and_a_change_is_news(tmp_path: Path) -> None:
    config = phased(
        {"from_step": 11, "global_batch_size": 8}, {"from_tokens": 9_999, "seq_len": 64}
    )
    (tmp_path / "job.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "job.toml") == config
    other = phased(
        {"from_step": 12, "global_batch_size": 8}, {"from_tokens": 9_999, "seq_len": 64}
    )
    [change] = change_lines(changed_settings(to_toml(config), other, sequences=(None, 4)))
    assert change.startswith("phase: ") and "from_step = 12" in change


def rates(config: JobConfig, *steps: int) -> list[float]:
    of = {
        "section": config.lr_scheduler,
        "total_steps": 100,
        "phases": phases_of(config, world_size=1),
    }
    return [learning_rate_factor(step, **of) for step in steps]


def test_an_annealing_phase_goes_on_from_the_rate_and_ends_at_its_floor() -> None:
    constant = {"warmup_steps": 4, "decay_ratio": 0.0}
    config = phased(
        {"from_step": 11, "global_batch_size": 8},
        {"from_step": 81, "min_lr_factor": 0.2},
        lr_scheduler=constant,
    )
    assert rates(config, 2, 4, 10, 11, 80, 81) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(config, 91, 101) == pytest.approx([0.6, 0.2])
    # From the middle of a decay, to another rate, and on from the end of the schedule before.
    cosine = {"warmup_steps": 0, "decay_type": "cosine", "min_lr_factor": 0.1}
    config = phased(
        {"from_step": 51, "decay_type": "linear"},
        {"from_step": 71, "lr_factor": 0.4},
        {"from_step": 81, "seq_len": 64},
        {"from_step": 91, "decay_type": "sqrt", "min_lr_factor": 0.0},
        lr_scheduler=cosine,
    )
    plain = phased(lr_scheduler=cosine)
    assert rates(config, 20, 50, 51) == rates(plain, 20, 50, 51)
    middle = rates(plain, 51)[0]
    assert rates(config, 61, 70) == pytest.approx([middle / 2, middle / 20])
    assert rates(config, 71, 85, 90, 91) == [0.4] * 4
    assert rates(config, 100) == pytest.approx([0.4 * (1 - 0.9**0.5)])
    # Without a new schedule, a phase leaves the job's as it is.
    assert rates(phased({"from_step": 30, "seq_len": 64}), 29, 30, 99) == rates(
        phased(), 29, 30, 99
    )


def test_the_page_gives_a_long_stage_its_own_layout(tmp_path: Path) -> None:
    section = (
        (ROOT / "docs/optimizers.md").read_text().partition("### A layout for each phase")[2]
    )
    overlay = tmp_path / "long_stage.toml"
    overlay.write_text(section.partition("```toml")[2].partition("```")[0])
    config = load_config(ROOT / "train_configs/fineweb_edu_1b.toml", overlays=[overlay])
    check_to_run(config, world_size=8)
    phases = phases_of(config, world_size=8)
    assert [phase.mesh for phase in phases] == ["dp_shard 8", "dp_shard 8", "dp_shard 2 x cp 4"]
    assert {phase.tokens_per_step for phase in phases} == {524_288}
    assert [phase.layout.accumulation for phase in phases] == [2, 2, 8]


# A key of the phase has its line. A key that it inherits from the job names the phase.
WRONG = table(__file__, "wrong")


@pytest.mark.parametrize(("phase", "sections", "message"), WRONG)
def test_a_layout_that_cannot_be_is_refused(
    phase: dict[str, Any], sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = phased({"from_step": 5, **phase}, **sections)
    file = tmp_path / "job.toml"
    file.write_text(to_toml(config).replace("from_step = 5\n", "from_step = 5  # here\n"))
    with pytest.raises(ConfigError) as error:
        check_to_run(load_config(file), world_size=4)
    [problem] = [str(p) for p in error.value.problems if message in str(p)]
    lines = file.read_text().splitlines()
    place = lines[int(problem.split(":")[1]) - 1]
    assert place.partition(" =")[0] in problem or place == "[[phase]]", (place, problem)


def test_what_is_equal_in_the_ranks_is_no_change_of_layout() -> None:
    """So a written 4 in place of -1 needs no checkpoint."""
    one, same = (
        {"data": {"sources": []}},
        {"data_parallel_shard_degree": 4, "context_parallel_degree": 1},
    )
    config = phased({"from_step": 5, **same}, checkpoint={"enable": False}, **one)
    assert [p.mesh for p in phases_of(config, world_size=4)] == ["dp_shard 4"] * 2
    check_to_run(config, world_size=4)


def test_rules_hold_in_each_phase() -> None:
    """Also a rule that knows nothing of phases: two context-parallel ranks cut a sequence into four chunks."""
    config = phased({"from_step": 5, "seq_len": 2}, parallelism={"context_parallel_degree": 2})
    with pytest.raises(ConfigError, match="2 is not a multiple of 2 x cp 2 x tp 1 = 4"):
        check_to_run(config, world_size=2)
