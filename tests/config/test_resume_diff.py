"""A resume with another model is refused, for every field of every family, before anything is imported, renamed or deleted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import job
from titan.base.run_folder import write_status
from titan.checkpoint.identity import change_lines, changed_settings, job_facts
from titan.config.model import families, family
from titan.config.render import to_toml
from titan.config.schema import JobConfig, ModelSection
from titan.run.train import before_start

# What only weighs terms of the loss or makes the initial weights. tests/checkpoint/test_other_model.py shows that it is no more.
OF_TRAINING = {
    "init_std",
    "gate_init_std",
    "mtp_coeff",
    "load_balance_coeff",
    "sequence_balance_coeff",
    "global_balance_coeff",
    "router_z_loss_coeff",
}


def flavors() -> dict[str, dict[str, Any]]:
    """Return two flavors of each family: the smallest, and the one whose fields differ most from the defaults."""
    found = {}
    for name in (n for n in families() if family(n).FLAVORS):
        sizes = family(name).FLAVORS
        found[name] = {min(sizes, key=lambda flavor: sizes[flavor].num_params): None, list(sizes)[-1]: None}  # fmt: skip
    return found


ROWS = [(name, flavor) for name, of_family in flavors().items() for flavor in of_family]


# What has to change along, or the sizes are none of a model.
ALONG = {"num_groups": {"top_groups": 1}, "num_experts": {"top_k": 1, "expert_dim": 64}}


def other_values(value: Any) -> Iterator[Any]:
    """Yield what a field may be instead."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, str):
        yield from ("sigmoid", "softmax")
    elif isinstance(value, int):
        yield from (value * 2, value + 1, value // 2, value + 2, value - 1, 1)
    elif isinstance(value, float):
        yield from (value * 2, value / 2, 0.5)


def changed(model: dict[str, Any], field: str, value: Any) -> dict[str, Any] | None:
    """Return a legal [model] section with another value of a field; None: it has none alone."""
    for other in other_values(value):
        section = model | {"overrides": ALONG.get(field, {}) | {field: other}}
        if other != value and not ModelSection.model_validate(section).resolved[1]:
            return section
    return None


def save(
    folder: Path, config: JobConfig, *, step: int = 20, facts: bool = True
) -> dict[str, int]:
    """Write what a run leaves, as far as a start looks at it; return each file and its inode."""
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").write_text("{}")
    saved = {"step": step, "tokens": 1, "config": to_toml(config)}
    saved |= {"model": job_facts(config)} if facts else {}
    (path / "titan.json").write_text(json.dumps(saved))
    return files(folder)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_ino for path in folder.rglob("*")}


@pytest.mark.parametrize(("name", "flavor"), ROWS, ids=map("-".join, ROWS))
def test_every_field_that_the_model_computes_with_is_refused(
    name: str, flavor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what does not matter to weights is not; with the step's facts, and for steps of an older titan without them."""
    model = {"name": name, "flavor": flavor, "overrides": {}}
    sizes = family(name).FLAVORS[flavor]
    seen, unchanged = 0, set()
    for facts in [flavor == list(family(name).FLAVORS)[-1]]:
        before = save(tmp_path, job(tmp_path, model=model), facts=facts)
        assert before_start(job(tmp_path, model=model)) is None
        for field in (field for field in dataclasses.fields(sizes) if field.init):
            value = getattr(sizes, field.name)
            section = changed(model, field.name, value)
            if section is None:
                unchanged.add(field.name)
                continue
            code = before_start(job(tmp_path, model=section))
            printed = capsys.readouterr().err
            if field.name in OF_TRAINING:
                assert (code, printed) == (None, ""), field.name
                continue
            seen += 1
            assert code == 2 and "was saved with" in printed and printed.count("\n") == 1, field
            assert f"model.overrides.{field.name}" in printed
            assert files(tmp_path) == before
    # No job file can change a tuple.
    assert seen >= 10 and unchanged <= {"rope_axes"}


def test_both_values_and_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from titan.config.load import load_config

    file = tmp_path / "job.toml"
    text = '[job]\ndump_folder = "{}"\n[model]\nflavor = "tiny"\n[model.overrides]\nrope_theta = {}\n'
    file.write_text(text.format(tmp_path / "run", "1e4"))
    save(tmp_path / "run", load_config(file))
    file.write_text(text.format(tmp_path / "run", "1e6"))
    assert before_start(load_config(file)) == 2
    step = tmp_path / "run/checkpoint/step-20"
    assert (
        f"{file}:6: model.overrides.rope_theta: 1000000.0, but {step} was saved with 10000.0: this is another model."
        in (printed := capsys.readouterr().err)
    )
    # What it advises: another run that begins with these weights.
    again = [f'checkpoint.initial_load_path = "{step}"', 'checkpoint.initial_load_changes = ["model.overrides.rope_theta"]']  # fmt: skip
    assert all(advice in printed for advice in again)
    overrides = [
        f"job.dump_folder={tmp_path / 'new'}",
        *(line.replace(" = ", "=") for line in again),
    ]
    assert before_start(load_config(file, overrides=overrides)) is None
    # However the path is written.
    overrides[1] = overrides[1].replace("checkpoint/step-20", "./checkpoint/step-20/")
    assert before_start(load_config(file, overrides=overrides)) is None
    # Only the keys that it names may differ.
    assert (
        before_start(load_config(file, overrides=[*overrides, "model.overrides.n_heads=8"]))
        == 2
    )
    assert "model.overrides.n_heads: 8, but" in capsys.readouterr().err
    # Nor is another step taken without it.
    assert before_start(load_config(file, overrides=overrides[:2])) == 2


def test_the_family_the_task_and_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, job(tmp_path, model={"flavor": "tiny", "overrides": {}}))
    assert before_start(job(tmp_path, model={"name": "qwen3", "flavor": "tiny", "overrides": {}})) == 2  # fmt: skip
    assert 'model.name: "qwen3", but' in capsys.readouterr().err

    def flux(**options: Any) -> JobConfig:
        model = {"name": "flux", "flavor": "demo", "overrides": {}}
        return job(tmp_path / "flux", model=model, task={"options": options})

    save(tmp_path / "flux", flux())
    for options in ({"size": 32}, {"context_len": 8}, {"classes": 4}, {"patch": 2}):
        [(key, value)] = options.items()
        assert before_start(flux(**options)) == 2
        assert f"task.options.{key}: {value}, but" in capsys.readouterr().err
    # Data, loss and samples may change.
    for options in ({"path": "x"}, {"dropout": 0.2}, {"shift": 2.0}, {"sample_rows": 2}):
        assert before_start(flux(**options)) is None


def test_a_damaged_newest_step_does_not_hide_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, job(tmp_path), step=10)
    save(tmp_path, job(tmp_path), step=20)
    (tmp_path / "checkpoint/step-20/titan.json").write_text("{")
    other = {"overrides": {"n_layers": 3}}
    assert before_start(job(tmp_path, model=other)) == 2
    assert "step-10 was saved with 2" in capsys.readouterr().err
    # Of the step that is asked for.
    save(tmp_path, job(tmp_path, model=other), step=30)
    assert before_start(job(tmp_path, model=other)) is None
    assert before_start(job(tmp_path, model=other, checkpoint={"load_step": 10})) == 2
    # Where nothing of it can be read, the load itself finds out.
    (tmp_path / "checkpoint/step-30/titan.json").write_text(
        '{"step": 30, "tokens": 1, "config": "[model]\\nname = 3"}'
    )
    assert before_start(job(tmp_path, model=other)) is None


def test_a_finished_run_is_not_another_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: dict[str, Any] = {"training": {"steps": 20}}
    save(tmp_path, job(tmp_path, **run))
    write_status(tmp_path, state="done", exit_code=0, step=20)
    assert before_start(job(tmp_path, **run)) == 0
    assert before_start(job(tmp_path, training={"steps": 10})) == 0
    assert "nothing to do" in capsys.readouterr().out
    changes: list[dict[str, Any]] = [
        {"model": {"overrides": {"n_layers": 3}}},
        {"optimizer": {"lr": 1e-5}},
        {"optimizer": {"name": "Muon"}},
        {"training": {"steps": 20, "dataset": "stdlib"}},
        {"data": {"document_mask": True}},
        {"lr_scheduler": {"warmup_steps": 2}},
    ]
    for change in changes:
        before = files(tmp_path)
        assert before_start(job(tmp_path, **run | change)) == 2
        printed = capsys.readouterr()
        assert "nothing to do" not in printed.out and printed.err.count("\n") == 1
        [(section, _)] = change.items()
        assert f"{section}." in printed.err and files(tmp_path) == before
    # Another layout is the same job.
    assert before_start(job(tmp_path, **run, parallelism={"tensor_parallel_degree": 2})) == 0


def test_precision_is_said_and_not_refused(tmp_path: Path) -> None:
    save(tmp_path, job(tmp_path))
    eight_bits = job(tmp_path, model={"converters": ["quantize.linear.float8"], "overrides": {"n_layers": 2}})  # fmt: skip
    assert before_start(eight_bits) is None
    [change] = change_lines(
        changed_settings(to_toml(job(tmp_path)), eight_bits, sequences=(None, 1))
    )
    assert change == 'model.converters: [] -> ["quantize.linear.float8"]'


def test_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, titan.train; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
