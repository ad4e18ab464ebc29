"""Files, overlays and overrides to one config, and back to TOML; the line of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import tabled
from titan.config.errors import ConfigError, key_text, parent
from titan.config.load import Arguments, load_config, parse_args
from titan.config.render import to_toml
from titan.config.toml import KeyPath, format_value, parse_value, read_toml

TRICKY = '''\
# a comment with [brackets] and = signs
top.dotted."quoted.key" = 'x # not a comment'  # one
[a]
text = """
[not.a.table]
key = "no"
five quotes: """""
literal = \'\'\'
[neither]
# no comment\'\'\'
numbers = [ # a comment, with commas
  1,
  [2, 3], # nested
]
inline = { x = 1, y = { "z z" = [ { w = "}" } ] } }

[[fruit]]
name = "apple"
  [fruit.color]
  hue = "red"
  [[fruit.variety]]
  name = "delicious"
  [[fruit.variety]]
  name = "smith"
[[fruit]]
name = "banana"
  [[fruit.variety]]
  name = "plantain"
[b.c]
when = 1979-05-27T07:32:00Z
[b]
escaped = "quote \\" and \\\\"
'''


def paths_of(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = {path} if path else set()
    for key, inner in pairs:
        found |= paths_of(inner, (*path, key))
    return found


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_every_key_has_its_line(tmp_path: Path, newline: str, start: str) -> None:
    path = tmp_path / "tricky.toml"
    path.write_bytes((start + TRICKY.replace("\n", newline)).encode())
    data, lines = read_toml(path)
    assert set(lines) == paths_of(data)
    source = TRICKY.splitlines()
    for key_path, line in lines.items():  # each key is written on the line it is said to be on
        named = [part for part in key_path if isinstance(part, str)][-1]
        if isinstance(key_path[-1], str):
            assert named in source[line - 1], key_path
    assert lines["fruit", 0, "variety", 1, "name"] == 24
    assert lines["fruit", 1, "variety", 0, "name"] == 28
    assert lines["a", "numbers", 1, 1] == 13
    assert lines["a", "inline", "y", "z z", 0, "w"] == 15
    assert (lines["b",], lines["b", "c"]) == (31, 29)


@pytest.mark.parametrize(
    "value",
    [
        True,
        -3,
        1e-08,
        8e-4,
        'a"b\\\n\x7fé',
        [],
        [[1], ["x"]],
        {"a b": {"c": 1.0}},
        float("inf"),
    ],
)
def test_values_are_written_as_they_are_read(value: Any) -> None:
    assert parse_value(format_value(value)) == value


def test_key_text_and_parent() -> None:
    assert key_text(("data", "sources", 0, "a b", "path")) == 'data.sources[0]."a b".path'
    assert [parent(k) for k in ("a.b[0].c", "a.b[0]", "a.b", "a", 'a."x.y"')] == [
        "a.b[0]",
        "a.b",
        "a",
        "",
        "a",
    ]


def test_later_wins(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.toml" for n in range(3)]
    files[0].write_text(
        "[training]\nsteps = 1\nseq_len = 10\n[[data.sources]]\ntype = 'stdlib'\n[[data.sources]]\ntype = 'synthetic'\n"
    )
    files[1].write_text(
        "[training]\nsteps = 2\nmax_norm = 2\n[compile]\ncomponents = ['loss']\n"
    )
    files[2].write_text("[training]\nsteps = 3\n[[data.sources]]\ntype = 'text'\npath = 'a'\n")
    config = load_config(
        files[0], overlays=files[1:], overrides=["training.seq_len=20", "training.seq_len=30"]
    )
    training = config.training
    assert (training.steps, training.max_norm, training.seq_len) == (3, 2.0, 30)
    assert [source.type for source in config.data.sources] == [
        "text"
    ]  # lists are replaced whole
    assert config.compile.components == ["loss"]


@tabled("override, section, key, value")
def test_override_values(
    override: str, section: str, key: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text("")
    assert getattr(getattr(load_config(path, overrides=[override]), section), key) == value


def test_source_list_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("")
    config = load_config(
        path, overrides=['data.sources=[{type="stdlib"}, {type="text", path="x", weight=2}]']
    )
    assert [source.weight for source in config.data.sources] == [1.0, 2.0]


def test_command_line_is_split() -> None:
    words = "job.toml --training.steps=5 top.toml --metrics.enable_wandb --model.flavor 8B --checkpoint.enable false"
    assert parse_args(
        [*words.split(), "--checkpoint.load_step", "-1", "--metrics.enable_tensorboard"]
    ) == Arguments(
        Path("job.toml"),
        (Path("top.toml"),),
        (
            "training.steps=5",
            "metrics.enable_wandb=true",
            "model.flavor=8B",
            "checkpoint.enable=false",
            "checkpoint.load_step=-1",
            "metrics.enable_tensorboard=true",
        ),
    )


@tabled("argv, message")
def test_a_wrong_command_line_is_reported(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(argv, options=["--nproc"])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("comments", [False, True])
@pytest.mark.parametrize(
    "job",
    sorted((Path(__file__).resolve().parents[2] / "train_configs").glob("*.toml")),
    ids=lambda p: p.stem,
)
def test_resolved_toml_loads_to_an_equal_config(
    job: Path, comments: bool, tmp_path: Path
) -> None:
    sources = 'data.sources=[{type="stdlib"}, {type="huggingface", path="x", name="en"}]'
    config = load_config(
        job,
        overrides=[
            sources,
            "model.overrides={n_layers=2, rope_theta=1e6}",
            'job.description=a "b" \\ é',
        ],
    )
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config, comments=comments), encoding="utf-8")
    assert load_config(path) == config
    assert to_toml(load_config(path)) == to_toml(config)


def test_keys_of_another_titan_in_the_config_of_a_run(tmp_path: Path) -> None:
    """A run's own config has every key of the titan that wrote it. What this one lacks is named; in a job it is an error."""
    job = tmp_path / "config.toml"
    job.write_text("[training]\nsteps = 7\nstepz = 1\n\n[kennel]\ndogs = 2\n")
    with pytest.raises(ConfigError, match=r"training\.stepz: unknown key"):
        load_config(job)
    (tmp_path / "environment.json").write_text("{}")
    config = load_config(job)
    assert config.training.steps == 7
    [warning] = config.source_map.warnings
    assert warning.endswith("no such keys, so they are not read: training.stepz, kennel")
    # Mistakes in keys that it has, and in what is laid over it, are mistakes.
    job.write_text("[training]\nsteps = 'seven'\n")
    with pytest.raises(ConfigError, match=r"training\.steps: expected a whole number"):
        load_config(job)
    job.write_text("[training]\nsteps = 7\n")
    with pytest.raises(ConfigError, match=r"training\.speed: unknown key"):
        load_config(job, overrides=["training.speed=1"])


def test_paths_lie_beside_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside the job is found from any folder; what is not there stays a path of the working directory."""
    for name in ("jobs/words/tokenizer.json", "jobs/a.txt", "other/a.txt", "here/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    sources = '[[data.sources]]\ntype = "text"\npath = "*.txt"\n'
    keys = '[tokenizer]\npath = "words"\n[checkpoint]\ninitial_load_path = "gone"\n'
    (tmp_path / "jobs/job.toml").write_text(keys + sources)
    found = []
    for folder in ("jobs", "here"):
        monkeypatch.chdir(tmp_path / folder)
        config = load_config(Path("../jobs/job.toml"), overrides=["model.hf_path=words"])
        source: Any = config.data.sources[0]
        loads = config.checkpoint.initial_load_path
        found.append([config.tokenizer.path, source.path, loads, config.model.hf_path])
    jobs = str(tmp_path / "jobs")
    assert found[0] == ["words", "*.txt", "gone", "words"]
    assert found[1] == [f"{jobs}/words", f"{jobs}/*.txt", "gone", "words"]
