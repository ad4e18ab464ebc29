"""Tests of the metadata of keys: the choice of another key that a key belongs to, and permissions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.support.jobs import job
from titan.checks.rules import check
from titan.config.base import ReadWith
from titan.config.keys import _models_in
from titan.config.permissions import permission_of, without_permissions
from titan.config.schema import JobConfig

# A value of each such key that is not its default.
OTHER: dict[str, Any] = {
    "model.hf_path": "x",
    "model.architecture": "Phi3ForCausalLM",
    "model.plan": {"*": "colwise"},
    "model.trust_remote_code": True,
    "checkpoint.initial_load_model_only": False,
    "fault_tolerance.on_replay_mismatch": "warn",
}


# Keys whose text gives no permission: names of what is installed here or of parts of the model, text for people, patterns, and
# local files that are read as data. task.options are those of a task that the person installed.
HARMLESS = """\
activation_checkpoint. op_keep op_keep_by_block selective_ac_option
checkpoint. exclude_from_loading initial_load_changes
compile. backend
data. skip
data.sources. messages_key name path split text_key
evaluation. tasks
hardware. name
job. description
loss. name options
metrics. wandb_project wandb_run_name
model. architecture converters flavor freeze hf_path name overrides plan
parallelism. layout_reason module_fqns_per_model_part pipeline_parallel_schedule pipeline_parallel_schedule_csv
quantize.grouped_mm. float8.fqns mx.fqns
quantize.linear. float8.filter_fqns mx.filter_fqns
simulator. routing torch_version
task. name options
tokenizer. bos_token eos_token pattern special_tokens
training. dataset_path
validation. dataset_path prompts"""


def keys(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield path + name, field
        for part in _models_in(field.annotation):
            yield from keys(part, f"{path}{name}.")


def is_text(annotation: Any) -> bool:
    return annotation is str or (
        get_origin(annotation) is not Literal and any(map(is_text, get_args(annotation)))
    )


OF_NO_TEXT = ("model.trust_remote_code", "metrics.enable_wandb")
PERMISSIONS = [key for key, field in keys(JobConfig) if permission_of(field)]


def test_each_text_of_a_job_is_a_permission_or_harmless() -> None:
    """A new key of text must say which: see Permission in titan/config/base.py."""
    lines = map(str.split, HARMLESS.splitlines())
    harmless = {table + name for table, *names in lines for name in names}
    texts = (key for key, field in keys(JobConfig) if is_text(field.annotation))
    found = {re.sub(r"nccl\.\w+", "nccl", key) for key in texts}
    assert found ^ harmless ^ {"data.sources.path"} == {*PERMISSIONS} - {*OF_NO_TEXT}


@pytest.mark.parametrize("value", ["../out", "/out", "a/../../out", "file:///out"])
@pytest.mark.parametrize("key", PERMISSIONS)
def test_a_job_that_comes_with_data_gives_no_permission(
    key: str, value: str, tmp_path: Path
) -> None:
    table, name = key.split(".", 1)
    values = {name: key in OF_NO_TEXT or value}
    if name == "sources.path":
        values, key = (
            {"sources": [{"type": "huggingface", "path": "a/b"}]},
            "data.sources[0].path",
        )
    config = JobConfig.model_validate({table: values})
    kept, lost = without_permissions(config, run=tmp_path)
    assert [*lost] == [key] and kept == JobConfig()
    assert "gives the permission" in str(lost[key].problem)
    assert without_permissions(config, run=tmp_path, granted=[key]) == (config, {})


def test_every_declared_key_is_tried() -> None:
    assert {k for k, f in keys(JobConfig) if has(f, ReadWith)} == OTHER.keys()


def test_a_key_whose_text_names_a_choice_is_declared() -> None:
    """A docstring that begins with For name = "..." is a promise that the key is refused elsewhere."""
    for _, field in keys(JobConfig):
        assert has(field, ReadWith) or not (field.description or "").startswith("For name = ")


def has(field: FieldInfo, mark: type) -> bool:
    return any(isinstance(data, mark) for data in field.metadata)


@pytest.mark.parametrize("key", OTHER)
def test_it_is_refused_where_nothing_reads_it(key: str) -> None:
    section, _, name = key.rpartition(".")
    changes = {section: {name: OTHER[key]}}
    problems = check(job(**changes))
    assert [p.key for p in problems] == [key]
    assert "nothing reads it with" in problems[0].message


def test_it_is_taken_where_it_is_read() -> None:
    faults = {"replay_every": 5, "on_replay_mismatch": "warn"}
    assert check(job(fault_tolerance=faults)) == []


def test_details_wait_until_their_mode_is_switched_on() -> None:
    """Searches and overlays change the mode of a job alone; spikes are recorded whatever is done about them."""
    for mode in ("none", "full"):
        waiting = {"mode": mode, "selective_ac_option": "2", "op_keep": ["attention"]}
        assert (
            check(job(activation_checkpoint=waiting, fault_tolerance={"spike_window": 64}))
            == []
        )
