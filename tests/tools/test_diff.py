"""`titan diff`: the module of each silent bug, right layouts, recorded runs, and mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import clean_pairs, silent_bugs
from tests.support.clean_pairs import PAIRS, Pairs
from tests.support.commands import Shell
from tests.support.jobs import job
from tests.support.ranks import Pool
from tests.support.silent_bugs import BUGS, RECORDED, Reference, found_with
from titan.cli import main as titan
from titan.numerics.diff.compare import compare, guess_of, in_order
from titan.numerics.recorded import FOLDER, RecordedStep, RecordedTensor, read_steps, write_step
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(Pool((silent_bugs.__name__,), quiet=True))


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    return Pairs(Pool((clean_pairs.__name__,), quiet=True))


# ---- silent bugs, and right layouts --------------------------------------------------------------


@pytest.mark.parametrize("bug", BUGS)
def test_a_silent_bug_is_named(bug: str, reference: Reference) -> None:
    about = BUGS[bug]
    found, losses = found_with(bug, reference, RECORDED)
    first = found.differences[0]
    assert (first.kind, first.name, first.step) == (*about.first, about.step), (
        found.differences[:3]
    )
    assert all(map(math.isfinite, losses.values()))  # nothing but the numbers is wrong


def test_bugs_cover_all_parallelisms_and_the_table_counts_right() -> None:
    layouts = {bug.layout.split()[0] for bug in BUGS.values()}
    assert layouts >= {"TP", "CP", "PP", "EP", "FSDP"}
    drills = [name for name, bug in BUGS.items() if "#" not in bug.source]
    assert len(BUGS) >= 26 and len(BUGS) - len(drills) >= 14
    assert len(PAIRS) >= 60


@pytest.mark.parametrize("pair", PAIRS, ids=", ".join)
def test_a_right_layout_is_equal(pair: tuple[str, str, str], pairs: Pairs) -> None:
    found = pairs.compare(*pair)
    assert not found.differences, found.differences[0]
    assert found.compared > 300


# ---- comparison ----------------------------------------------------------------------------------

KINDS = ("weight", "output", "output gradient", "gradient", "update")


def step(
    scale: dict[tuple[str, str], float] | None = None, noise: float = 0.0, **about: Any
) -> RecordedStep:
    """Return a step of two layers, with some tensors multiplied, and all moved by a relative noise."""
    tensors = []
    for number, name in enumerate(("embed", "layers.0", "layers.1", "head")):
        for kind in KINDS:
            full = name if kind.startswith("output") else f"{name}.weight"
            factor = (scale or {}).get((kind, full), 1.0) * (
                1 + noise * (1 if number % 2 else -1)
            )
            sums = [
                [factor * (1 + p + c + number) * (-1) ** (p * c) for c in range(8)]
                for p in range(4)
            ]
            norm = math.sqrt(sum(x * x for row in sums for x in row) / 4)
            tensors.append(RecordedTensor(kind, full, "float32", norm, sums))
    values: Any = {
        "step": 1,
        "loss": 2.0 * (1 + noise),
        "grad_norm": 3.0 * (1 + noise),
        "axes": {},
    }
    values |= {"computes_in": "float32", "about": {}} | about
    return RecordedStep(**values, tensors=tensors)


def first_of(two: RecordedStep, noise: float = 3e-7) -> tuple[str, str]:
    found = compare([step()], [two], [step(noise=noise)])
    return (
        (found.differences[0].kind, found.differences[0].name)
        if found.differences
        else ("", "")
    )


def test_tensors_are_compared_in_the_order_in_which_they_are_computed() -> None:
    keys = in_order(step())
    assert [kind for kind, name in keys if not name] == ["loss", "gradient norm"]
    outputs = [name for kind, name in keys if kind == "output"]
    assert outputs == ["embed", "layers.0", "layers.1", "head"]
    backward = [key for key in keys if key[0] in ("output gradient", "gradient")]
    assert backward[:4] == [
        ("output gradient", "head"),
        ("gradient", "head.weight"),
        ("output gradient", "layers.1"),
        ("gradient", "layers.1.weight"),
    ]
    assert keys.index(("loss", "")) > keys.index(("output", "head"))
    assert keys.index(("loss", "")) < keys.index(("output gradient", "head"))
    assert keys.index(("gradient norm", "")) < keys.index(("update", "head.weight"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_difference_is_named_and_rounding_is_not(kind: str) -> None:
    name = "layers.0" if kind.startswith("output") else "layers.0.weight"
    later = (
        {("update", f"{n}.weight"): 2.0 for n in ("embed", "head")} if kind != "update" else {}
    )
    assert first_of(step({(kind, name): 1.5, **later})) == (kind, name)
    assert first_of(step(noise=1e-6)) == ("", "")
    assert first_of(step({(kind, name): math.nan})) == (kind, name)


def test_what_is_normal_is_measured() -> None:
    two = step({("output", "layers.0"): 1 + 1e-4})
    assert first_of(two, noise=1e-7) == ("output", "layers.0")
    assert first_of(two, noise=3e-5) == ("", "")


def test_what_weights_are_off_by_goes_on_into_their_step() -> None:
    def moved(weights: float, gradients: float) -> RecordedStep:
        return step(
            {
                ("weight", "layers.0.weight"): 1 + weights,
                ("gradient", "layers.0.weight"): 1 + gradients,
            },
            step=2,
        )

    def found(two: RecordedStep) -> list[tuple[str, str]]:
        spread = [step(step=2, noise=1e-6)]
        return [(d.kind, d.name) for d in compare([step(step=2)], [two], spread).differences]

    assert found(moved(0.0, 6e-5)) == [("gradient", "layers.0.weight")]
    assert found(moved(2e-5, 6e-5)) == []
    assert found(moved(2e-5, 6e-3)) == [("gradient", "layers.0.weight")]
    assert found(moved(6e-3, 6e-3))[0] == ("weight", "layers.0.weight")


def test_loss_and_gradient_norm_are_compared_where_they_are_computed() -> None:
    wrong = {("output gradient", "head"): 2.0, ("update", "head.weight"): 2.0}
    assert first_of(step(wrong, loss=4.0)) == ("loss", "")
    assert first_of(step({("update", "head.weight"): 2.0}, grad_norm=1.0)) == (
        "gradient norm",
        "",
    )
    found = compare([step()], [step(loss=4.0)], [step(noise=1e-7)]).differences[0]
    assert found.after == "output of head" and "2 times" not in found.after


def test_a_parameter_without_a_gradient_is_a_difference() -> None:
    two = step()
    kept = [t for t in two.tensors if (t.kind, t.name) != ("gradient", "layers.1.weight")]
    found = compare([step()], [dataclasses.replace(two, tensors=kept)], [step(noise=1e-7)])
    assert [(d.kind, d.name, d.guess) for d in found.differences] == [
        ("gradient", "layers.1.weight", "the other run has none")
    ]
    found = compare([dataclasses.replace(two, tensors=kept)], [two], [step(noise=1e-7)])
    assert [str(d) for d in found.differences] == [
        "step 1: gradient of layers.1.weight: the reference has none"
    ]
    # No gradient of any parameter: an update in the backward pass uses them up.
    kept = [t for t in two.tensors if t.kind != "gradient"]
    assert not compare([step()], [dataclasses.replace(two, tensors=kept)]).differences


def test_an_update_of_which_a_part_is_another_one_differs_whatever_rounding_does() -> None:
    a, b = step(), step({("update", "layers.0.weight"): 1.6})
    # A hundred times this spread would be more than all of the update.
    found = compare(
        [a],
        [b],
        [
            step(
                {
                    ("update", f"{n}.weight"): 1.02
                    for n in ("embed", "layers.0", "layers.1", "head")
                }
            )
        ],
    )
    assert [(d.kind, d.name) for d in found.differences] == [("update", "layers.0.weight")]


def test_empty_chunks_are_no_equal_parts() -> None:
    def of_four(x: RecordedTensor) -> RecordedTensor:
        sums = [[v * (n % 2 == 0) for n, v in enumerate(row)] for row in x.sums]
        return dataclasses.replace(x, sums=sums, norm=None)

    a = of_four(step().tensors[0])
    noisy = [[v + 0.3 * (-1) ** (n // 2) for n, v in enumerate(row)] for row in a.sums]
    assert "only the parts" not in guess_of(a, of_four(dataclasses.replace(a, sums=noisy)), {})
    last = [[*row[:6], 9 * row[6], row[7]] for row in a.sums]
    assert "only the parts 4 of 4 along" in guess_of(a, dataclasses.replace(a, sums=last), {})


@pytest.mark.parametrize(
    ("change", "axes", "words"),
    [
        (lambda sums: [[2 * x for x in row] for row in sums], {"tp": 2}, "2 times as large, as if tp's 2 ranks"),
        (lambda sums: [[x / 4 for x in row] for row in sums], {"dp_shard": 4}, "1/4 of it, as if it had been divided by dp_shard's"),
        (lambda sums: [[3 * x for x in row] for row in sums], {"tp": 2}, "it is 3 times the reference"),
        (lambda sums: [[0.0] * 8 for _ in sums], {}, "it is zero"),
        (lambda sums: [[math.nan] * 8 for _ in sums], {}, "it is not finite"),
        (lambda sums: [[*row[:6], 9 * row[6], row[7]] for row in sums], {}, "only the parts 7 of 8"),
        (lambda sums: [[x + 1e-3 * (-1) ** n for n, x in enumerate(row)] for row in sums], {}, "a small difference"),
        (lambda sums: [[x + 0.3 * (-1) ** n for n, x in enumerate(row)] for row in sums], {}, "part of its values"),
    ],
)  # fmt: skip
def test_a_difference_is_put_into_words(change: Any, axes: dict[str, int], words: str) -> None:
    a = step().tensors[0]
    b = dataclasses.replace(a, sums=change(a.sums), norm=None)
    assert words in guess_of(a, b, axes)


# ---- recorded runs -------------------------------------------------------------------------------


def write(folder: Path, *steps: RecordedStep) -> str:
    folder.mkdir()
    for one in steps:
        write_step(folder, one)
    return str(folder)


def test_recorded_runs_are_compared(tmp_path: Path, shell: Shell) -> None:
    right, moved = write(tmp_path / "a", step()), write(tmp_path / "moved", step(noise=3e-7))
    wrong = write(tmp_path / "b", step({("output", "layers.1"): 0.5}, axes={"tp": 2}))
    assert read_steps(tmp_path / "a") == [step()]
    assert "equal: 22 tensors compared" in (said := shell(f"diff {right} {right}").out)
    assert "rounding was not measured" in said
    path = tmp_path / "found.json"
    said = shell(f"diff {right} {wrong} --spread {moved} --json {path}", code=1).out
    assert "first: step 1: output of layers.1 differs by 5.0e-01" in said
    assert "1/2 of it, as if it had been divided by tp's 2 ranks" in said
    assert "equal before it: output of layers.0" in said
    assert json.loads(path.read_text())["differences"][0]["name"] == "layers.1"


def test_a_record_without_outputs_is_no_silent_verdict(tmp_path: Path, shell: Shell) -> None:
    kept = [tensor for tensor in step().tensors if not tensor.kind.startswith("output")]
    run = write(tmp_path / "a", dataclasses.replace(step(), tensors=kept))
    assert "parameters only: the model does not run on meta" in shell(f"diff {run} {run}").out


def empty(folder: Path) -> None:
    folder.mkdir()


def other_step(folder: Path) -> None:
    write(folder, step(step=7))


def other_model(folder: Path) -> None:
    named = [dataclasses.replace(t, name=f"h.{n}.weight") for n, t in enumerate(step().tensors)]
    write(folder, dataclasses.replace(step(), tensors=named))


def cut_off(folder: Path) -> None:
    write(folder, step())
    path = folder / FOLDER / "step-1.json"
    path.write_text(path.read_text()[:200])


def other_format(folder: Path) -> None:
    write(folder, step())
    path = folder / FOLDER / "step-1.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))


def other_content(folder: Path) -> None:
    (folder / FOLDER).mkdir(parents=True)
    (folder / FOLDER / "step-1.json").write_text('["a"]')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (empty, "has no recorded steps: train with --debug.record_steps=1,2,3"),
        (other_step, "recorded no step in common"),
        (other_model, "different models: no name of a tensor is in both, such as ['embed.weight'] and ['h.0.weight']"),
        (cut_off, "step-1.json is no recorded step"),
        (other_format, "format 99, and this titan reads format 1"),
        (other_content, "step-1.json is no recorded step"),
    ],
)  # fmt: skip
def test_a_mistake_is_a_line_and_exit_code_2(
    damage: Any, words: str, tmp_path: Path, shell: Shell
) -> None:
    right = write(tmp_path / "a", step())
    damage(tmp_path / "b")
    said = shell.refuse(f"diff {right} {tmp_path}/b").strip()
    assert words in said and len(said.splitlines()) == 1


def test_a_spread_of_another_job_is_refused(tmp_path: Path, shell: Shell) -> None:
    right = write(tmp_path / "a", step(), step(step=2))
    others = [
        write(tmp_path / "short", step(noise=1e-7)),
        write(tmp_path / "far", step(noise=0.9), step(noise=0.9, step=2)),
        str(tmp_path / "model"),
        right,
    ]
    other_model(tmp_path / "model")
    write_step(tmp_path / "model", step(step=2))
    words = "is no run of A's job with record_perturbed"
    for folder in others:
        said = shell.refuse(f"diff {right} {right} --spread {folder}").strip()
        assert words in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("word", ["--b.optimizer.lr=1", "--optimizer.lr=1", "third"])
def test_what_a_recorded_run_cannot_use_is_refused(
    word: str, tmp_path: Path, shell: Shell
) -> None:
    run = write(tmp_path / "a", step())
    assert f"{word}: a recorded run is read as it is" in shell.refuse(
        f"diff {run} {run} {word}"
    )


JOB = """
[model]
flavor = "tiny"
[model.overrides]
n_layers = 2
[tokenizer]
name = "bytes"
[training]
dataset = "synthetic"
seq_len = 32
local_batch_size = 2
steps = 2
"""


def test_jobs_are_trained_and_a_changed_key_is_named(tmp_path: Path, shell: Shell) -> None:
    (path := tmp_path / "job.toml").write_text(JOB)
    changed = "--b.model.overrides.norm_eps=1e-2 --b.metrics.log_freq=7 --steps=1"
    said = shell(f"diff {path} {path} {changed} --output {tmp_path}/runs", code=1).out
    assert "first: step 1: output of layers.0.attention_norm" in said
    for line in ("metrics.log_freq: 10 -> 7\n", "model.overrides.norm_eps: not set -> 0.01\n"):
        assert f"A and B differ in {line}" in said
    # Its runs are there, and equal to themselves.
    run = str(tmp_path / "runs" / "a")
    assert (
        "the largest difference is 0%"
        in shell(f"diff {run} {run} --spread {tmp_path}/runs/spread").out
    )
    for keys in (["--b.training.local_batch_size=4"], ["--b.debug.seed=7"]):
        said, progress = shell(f"diff {path} {path} --steps=1", *keys, code=1)
        assert f"differ in {keys[0][4:].partition('=')[0]}: " in said
        assert "on 1 rank" in progress
        assert said.endswith(
            "the batches differ in their tokens: other samples or another shape\n"
        )


def test_a_phase_may_have_another_layout(tmp_path: Path) -> None:
    (path := tmp_path / "job.toml").write_text(f"{JOB}global_batch_size = 2\n")
    phase = (
        "[[phase]]\nfrom_step = 2\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = 1\n"
    )
    (other := tmp_path / "other.toml").write_text(path.read_text() + phase)
    keys = ["--training.local_batch_size=1", "--nproc-a=2", "--nproc-b=2"]
    assert titan(["diff", str(path), str(other), *keys]) == 0


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_is_recomputed_is_recorded_and_disturbed(mode: str, tmp_path: Path) -> None:
    def steps(name: str, **sections: Any) -> list[RecordedStep]:
        trainer = Trainer(job(tmp_path / name, **sections), hooks=standard_hooks)
        trainer.run()
        trainer.close()
        return read_steps(tmp_path / name)

    checkpoint, recorded = {"activation_checkpoint": {"mode": mode}}, {"record_steps": [1, 2]}
    plain = steps("plain", debug=recorded)
    found = compare(plain, steps("ac", debug=recorded, **checkpoint))
    assert (found.differences, found.left_out, found.worst) == ([], 0, 0.0)
    moved = steps("moved", debug=recorded | {"record_perturbed": 1}, **checkpoint)
    assert 0 < compare(plain, moved).worst < 1
