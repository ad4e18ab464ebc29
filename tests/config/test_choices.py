"""Keys that belong to one choice of another key are refused with the others, in every section."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from tests.support.jobs import job
from titan.checks.rules import check
from titan.config.base import ReadWith, Section
from titan.config.schema import JobConfig

# A value of each such key that is not its default.
OTHER: dict[str, Any] = {
    "model.hf_path": "x",
    "model.architecture": "Phi3ForCausalLM",
    "model.plan": {"*": "colwise"},
    "model.trust_remote_code": True,
    "checkpoint.initial_load_model_only": False,
    "fault_tolerance.on_replay_mismatch": "warn",
    "simulator.twin_hardware": "cpu",
}


def declared(section: type[Section], path: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if any(isinstance(data, ReadWith) for data in field.metadata):
            yield path + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section):
                yield from declared(part, f"{path}{name}.")


def test_every_declared_key_is_tried() -> None:
    assert {*declared(JobConfig)} == OTHER.keys()


def test_a_key_whose_text_names_a_choice_is_declared() -> None:
    """A docstring that begins with For name = "..." is a promise that the key is refused elsewhere."""
    silent = []

    def visit(section: type[Section], path: str) -> None:
        for name, field in section.model_fields.items():
            is_declared = any(isinstance(data, ReadWith) for data in field.metadata)
            if (field.description or "").startswith("For name = "):
                silent.extend([] if is_declared else [path + name])
            for part in (field.annotation, *get_args(field.annotation)):
                if isinstance(part, type) and issubclass(part, Section):
                    visit(part, f"{path}{name}.")

    visit(JobConfig, "")
    assert silent == []


@pytest.mark.parametrize("key", OTHER)
def test_it_is_refused_where_nothing_reads_it(key: str) -> None:
    section, _, name = key.rpartition(".")
    changes: Any = {section: {name: OTHER[key]}}
    problems = check(job(**changes))
    assert [p.key for p in problems] == [key]
    assert "nothing reads it with" in problems[0].message


def test_it_is_taken_where_it_is_read() -> None:
    faults = {"replay_every": 5, "on_replay_mismatch": "warn"}
    assert (
        check(job(fault_tolerance=faults, simulator={"twin": True, "twin_hardware": "cpu"})) == []
    )


def test_details_wait_until_their_mode_is_switched_on() -> None:
    """Searches and overlays change the mode of a job alone; spikes are recorded whatever is done about them."""
    for mode in ("none", "full"):
        waiting = {"mode": mode, "selective_ac_option": "2", "op_keep": ["attention"]}
        assert check(job(activation_checkpoint=waiting, fault_tolerance={"spike_window": 64})) == []
