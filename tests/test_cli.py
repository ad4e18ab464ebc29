"""The `titan` command as users run it: exit codes, where text goes, time, and that torch is never imported."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import Shell, finished
from tests.support.tables import tabled
from titan import cli
from titan.base.untrusted import InputError
from titan.commands import ALIASES, GONE, GROUPS, command_names, load_command
from titan.config.errors import ConfigError
from titan.config.options import CommandParser, command_parser
from titan.ops.launch import environment

ROOT = Path(__file__).resolve().parents[1]
DEBUG = "train_configs/debug_model.toml"
# Runs the command, then says on the last line of stderr whether torch or numpy was imported.
PROBE = "import sys; from titan.cli import main; code = main(); print(not {'torch', 'numpy'}.isdisjoint(sys.modules), file=sys.stderr); sys.exit(code)"


def titan(*argv: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the lines of stderr; asserts that torch and numpy were not imported and no traceback shown."""
    result = finished([sys.executable, "-c", PROBE, *argv], cwd=ROOT, timeout=60, code=None)
    *stderr, imported = result.stderr.splitlines()
    assert imported == "False", result.stderr
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout, stderr


def test_help_lists_every_command_and_imports_little() -> None:
    probe = "import sys; from titan.cli import main; main(['--help']); print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    out = finished([sys.executable, "-c", probe]).stdout
    assert out.splitlines()[-1] == "[]"
    # Without titan/contrib, five of them are missing.
    installed = {
        group: [name for name in names if name in command_names()]
        for group, names in GROUPS.items()
    }
    assert len(command_names()) == sum(map(len, GROUPS.values())) or not has_contrib()
    assert re.findall(r"^\w[\w ]+$", out, re.MULTILINE) == [*filter(installed.get, GROUPS)]
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == [
        name for names in installed.values() for name in names
    ]


def has_contrib() -> bool:
    return find_spec("titan.contrib") is not None


class _Seen(Exception):
    """Stops a command when it parses its line."""


def parsers(monkeypatch: pytest.MonkeyPatch) -> dict[str, CommandParser]:
    """The parsers of all commands, and of what `convert` and `tokenizer` do, as they are when they parse."""
    found = {}

    def see(self: CommandParser, *_: object) -> None:
        ways = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        found.update(
            {p.prog: p for way in ways for p in way.choices.values()} or {self.prog: self}
        )
        raise _Seen

    monkeypatch.setattr(CommandParser, "parse_known_args", see)
    for name in command_names():
        with pytest.raises(_Seen):
            load_command(name)([])
    return found


# They answer nothing, or write files of a format that they have not chosen.
WITHOUT_JSON = (
    "init prepare train slurm watch plot generate"
    " tokenizer-train convert-from-hf convert-to-hf convert-from-megatron"
)


def test_all_commands_have_one_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of one meaning share their names, and every command that answers a question gives data for --json."""
    without = set()
    for prog, parser in parsers(monkeypatch).items():
        options = {
            o: a for a in parser._actions for o in a.option_strings if a.help != "==SUPPRESS=="
        }
        for one, other in (("--nproc", "--world-size"), ("--output", "--out")):
            assert options.get(one) is options.get(other), (prog, one, other)
        for others in ("--gpus", "--nodes", "--nproc-a"):
            assert others not in options or "--world-size" in options, (prog, others)
        assert {"--checkpoint", "--run", "--dir", "--o"}.isdisjoint(
            options
        ) or prog == "titan sim"
        json = options.get("--json")
        if json is None:
            without.add(prog.removeprefix("titan ").replace(" ", "-"))
        else:
            assert (json.nargs, json.const, json.metavar) == ("?", "-", "FILE"), prog
    expected = WITHOUT_JSON.split()
    assert without == {w for w in expected if w.partition("-")[0] in command_names()}


@tabled("words, target")
def test_json_never_takes_the_subject_for_its_file(
    words: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "trace.json").write_text("{}")
    parser = command_parser("profile", summary="")
    parser.add_argument("run", nargs="*")
    parser.add_argument("--step", type=int)
    parser.add_json()
    options, _ = parser.parse_known_args(words.split())
    assert options.json == target
    (tmp_path / "rows.csv").write_text("loss")
    with pytest.raises(ConfigError, match=r"rows\.csv exists and holds no JSON"):
        parser.parse_known_args(["--json", "rows.csv", "RUN"])


def test_names_of_other_programs(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    monkeypatch.chdir(ROOT)
    for name, words in ALIASES.items():
        if words[0] not in command_names():
            assert "unknown" in shell.refuse(f"{name}")
            continue
        assert (said := shell(f"{name} --help")).out.startswith(f"usage: titan {words[0]}")
        assert not said.err
    for name in GONE:
        assert GONE[name] in shell.refuse(f"{name}")


def test_help_of_no_command_imports_torch() -> None:
    probe = "import sys; sys.modules['torch'] = None; from titan.cli import main; from titan.commands import command_names as all_; "
    probe += "sys.exit(any([main([*n.split(), '--help']) for n in ('convert to-hf', *all_())]))"
    subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True)


def test_config_prints_toml_that_reproduces_the_run(tmp_path: Path) -> None:
    code, out, err = titan(
        "config", DEBUG, "--training.steps=7", "--lr_scheduler.decay_ratio", "0.5"
    )
    assert (code, err) == (0, [])
    assert "\nsteps = 7\n" in out and "\ndecay_ratio = 0.5\n" in out
    again = tmp_path / "config.toml"
    again.write_text(out)
    assert titan("config", str(again))[1] == out


def test_a_run_folder_on_a_full_disk_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    """No byte can be written, which folders do not need; and `titan check` asks the file system."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    argv = ["train", DEBUG, f"--job.dump_folder={tmp_path}/run"]
    run = [sys.executable, "-c", limit + PROBE, *argv]
    result = finished(run, cwd=ROOT, timeout=60, code=None)
    first, imported = result.stderr.splitlines()
    assert (result.returncode, imported) == (2, "False")
    assert first.startswith("command line: job.dump_folder: cannot be written: [Errno 27]")
    assert list((tmp_path / "run").iterdir()) == []
    full = SimpleNamespace(f_bavail=0, f_blocks=1000)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.chdir(ROOT)
    for command in ("check", "train"):
        assert f"no space is left on the disk of {tmp_path}" in shell.refuse(
            f"{command}", *argv[1:]
        )


def test_check_of_another_machine_looks_for_no_files() -> None:
    job = ["check", "train_configs/llama3_1b.toml", "--training.dataset=stdlib"]
    code, _, err = titan(*job)
    assert code == 2
    assert err[0].startswith("train_configs/llama3_1b.toml:11: model.hf_assets_path: tokenizer")
    assert titan(*job, "--hardware=h100-sxm", "--formula")[0] == 0


def test_a_warning_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = tmp_path / "job.toml"
    job.write_text(f"[job]\ndump_folder = '{tmp_path / 'file'}'\n[training]\nbatch_size = 4\n")
    code, _, err = titan("train", str(job))
    assert code == 2 and sum("training.batch_size" in line for line in err) == 1


def test_check_knows_the_profiles_of_the_simulator(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'name = "mine"\nbase = "h100-sxm"\nmemory_gib = 4.0\n[sources]\nmemory_gib = "a test"\n'
    )
    for hardware, answer in (
        (str(mine), "of 4.0 GiB on mine"),
        ("H100-96G-500W", "of 95.0 GiB on h100-96g-500w"),
    ):
        code, out, _ = titan("check", DEBUG, f"--hardware={hardware}", "--formula")
        assert code == 0 and answer in out


def test_answers_take_less_than_a_second(tmp_path: Path) -> None:
    """Of processor time: what else the machine does is no matter."""
    job = tmp_path / "job.toml"
    job.write_text("[training]\nstep = 5\n")
    for argv in (
        ["config", DEBUG],
        ["check", DEBUG],
        ["config", str(job)],
        ["--help"],
        ["config", "--schema"],
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        titan(*argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0, argv


def test_check_says_layout_size_and_memory() -> None:
    code, out, err = titan(
        "check", DEBUG, "--world-size", "4", "--training.global_batch_size=64"
    )
    assert (code, err) == (0, [])
    assert "4 ranks = pp 1 x dp_replicate 1 x dp_shard 4 x cp 1 x tp 1" in out
    assert (
        "8 sequences x 256 tokens x 4 data-parallel ranks x 2 accumulation = 16,384 tokens"
        in out
    )
    assert "by formula" in out and "no problems" in out
    facts = json.loads(titan("check", DEBUG, "--world-size=4", "--json")[1])
    assert facts["layout"]["dp_shard"] == 4 and facts["tokens_per_step"] == 4 * 8 * 256
    assert facts["memory_gib"]["total"] > 0 and facts["problems"] == []


@tabled("argv, place")
def test_wrong_command_lines(argv: list[str], place: str) -> None:
    code, out, err = titan(*argv)
    assert (code, out) == (2, "")
    assert err[0].startswith(place)


def test_options_are_checked(shell: Shell) -> None:
    assert "--world-size" in shell("check --help").out
    shell("--version")


def install(folder: Path, package: str, **groups: dict[str, str]) -> None:
    """What pip leaves of a package's metadata: its entry points, as titan.GROUP = {name: object}."""
    metadata = folder / f"{package}-0.1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n"
    )
    lines = [
        line
        for group, entries in groups.items()
        for line in (
            f"[titan.{group}]",
            *(f"{name} = {what}" for name, what in entries.items()),
        )
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def test_the_optimizer_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module may be imported first, before anything of titan; and it trains."""
    page = (ROOT / "docs" / "optimizers.md").read_text().split("## An optimizer of your own")[1]
    code, package, job = re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)[:3]
    (tmp_path / "my_sgd.py").write_text(code)
    (tmp_path / "job.toml").write_text(job)
    [entry] = re.findall(r'^sgd = "(.*)"$', package, re.MULTILINE)
    install(tmp_path, "my-sgd", optimizers={"sgd": entry})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    exit_code, shown, _ = titan("config", str(tmp_path / "job.toml"))
    assert exit_code == 0 and 'name = "SGD"\nlr = 0.1\nmomentum = 0.95' in shown
    program = """
import my_sgd, sys, torch
from titan.config.load import load_config
from titan.optim.optimizers import build_optimizer
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizer = build_optimizer(load_config(sys.argv[1]).optimizer, [("weight", weight)])
optimizer.step()
print(weight.tolist(), optimizer.param_groups[0]["initial_lr"])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "job.toml")]
    result = finished(command, cwd=tmp_path, code=None)
    assert result.stdout == "[0.8999999761581421, 0.8999999761581421] 0.1\n", result.stderr


def test_a_plug_in_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    install(tmp_path, "my-model", models={"mine": "not_there"})
    said = "cannot be loaded: ModuleNotFoundError: No module named 'not_there'"
    exit_code, _, lines = titan("check", DEBUG, "--model.name=mine")
    assert (exit_code, lines[0]) == (2, f"entry point mine (package my-model) {said}")
    install(tmp_path, "my-sgd", optimizers={"sgd": "not_there:SGDSection"})
    exit_code, _, lines = titan("train", DEBUG)
    assert (exit_code, lines[0]) == (2, f"entry point sgd (package my-sgd) {said}")


def test_other_commands_reach_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for command, module in {
        "prepare": "titan.tools.prepare",
        "plot": "titan.tools.plot",
        "generate": "titan.tools.generate",
    }.items():
        seen: list[list[str]] = []
        monkeypatch.setitem(
            sys.modules,
            module,
            SimpleNamespace(main=lambda argv, seen=seen: seen.append(argv) or 3),
        )
        assert cli.main([command, "--help"]) == 3
        assert seen == [["--help"]]


def test_quiet_reaches_whatever_reports_progress(
    monkeypatch: pytest.MonkeyPatch, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    from titan.config.options import is_quiet
    from titan.data.cache import display
    from titan.data.writer import Progress
    from titan.sim.report.text import say

    monkeypatch.setenv("TITAN_QUIET", "")  # and as it was, after the test
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    seen: list[bool] = []
    monkeypatch.setattr("titan.run.train.main", lambda argv: seen.append(is_quiet()) or 0)
    monkeypatch.setenv("RANK", "0")
    for options in ((), ("--quiet",), ("-q",)):
        monkeypatch.setenv("TITAN_QUIET", "")
        shell(f"train {DEBUG}", *options)
        say("7 of 9")
        text: Any = SimpleNamespace(num_bytes=100)
        with display(text, title="tokenizing") as report:
            report(Progress(documents=3, tokens=20, num_bytes=50))
        shown = capsys.readouterr().err
        assert ("7 of 9" in shown, "3 documents" in shown) == (not options, not options), shown
    assert seen == [False, True, True]
    for command in ("train", "sim", "plan", "prepare"):
        assert "-q, --quiet" in shell(f"{command} --help").out, command


def test_far_more_processes_than_cores_are_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that starts processes warns, since `environment` makes the variables of all of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("titan.base.hardware.fitting_processes", lambda: 9)
    with pytest.raises(
        InputError, match=r"--nproc 10: 10 processes take 2.5 GiB.*; here 9 fit"
    ):
        environment(10)
    for number, warned in ((8, False), (9, True)):
        environment(number)
        assert (f"warning: {number} processes on 2 cores" in capsys.readouterr().err) == warned


def test_a_check_without_hardware_says_what_it_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a login node without GPUs, as what the same job takes on the machine that it is for."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("titan.checks.rules.count_accelerators", lambda: 0)
    files = [
        "train_configs/llama3_1b.toml",
        "--tokenizer.name=bytes",
        "--training.dataset=synthetic",
    ]
    argv = ["check", *files, "--world-size", "8"]
    assert cli.main([*argv, "--hardware", "h100-sxm", "--formula", "--json"]) == 0
    gib = json.loads(capsys.readouterr().out)["memory_gib"]["total"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert "in float32, by formula" in printed
    assert (
        f"for this CPU. For a GPU add --hardware, such as h100-sxm: {gib:.1f} GiB in bfloat16"
        in printed
    )
    assert cli.main([*argv, "--hardware", "h100-sxm", "--formula"]) == 0
    assert "for this CPU" not in capsys.readouterr().out


def test_one_process_trains_in_place(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    seen: list[list[str]] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("titan.base.hardware.count_accelerators", lambda: 0)
    monkeypatch.setattr("titan.run.train.main", lambda argv: seen.append(argv) or 75)
    shell("train", DEBUG, "--training.steps=5", code=75)
    assert seen == [[DEBUG, "--training.steps=5"]]
    monkeypatch.setenv("RANK", "0")  # under torchrun nothing is checked or started here
    shell("train anything.toml --nproc 4", code=75)
    assert seen[1] == ["anything.toml"]


def test_check_says_whether_it_fits() -> None:
    job = ["check", "train_configs/llama3_1b.toml", "--formula", "--hardware"]
    code, out, _ = titan(*job, "h200-sxm")
    assert code == 0 and any(line.startswith("fits: 47") for line in out.splitlines()), out
    code, out, _ = titan(*job, "a100-40g", "--json")
    facts = json.loads(out)
    # As `titan sim` ends.
    assert code == 1 and facts["fits"] is False and facts["hardware"] == "a100-40g"
    code, _, err = titan(*job, "h200")
    assert code == 2
    assert err[0].startswith(
        "hardware: no profile 'h200'; did you mean 'h200-sxm'? There are a100-80g, "
    )
    # One list of names for both commands.
    assert titan("sim", job[1], "--world-size=1", "--hardware=h200")[2] == err


def test_a_package_adds_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    code = 'def bark(argv):\n    """Bark as often as it is asked.\n\n    No more."""\n    print("wuff " * len(argv))\n    return 5\n'
    (tmp_path / "my_dog.py").write_text(code)
    entries = {"bark": "my_dog:bark", "check": "my_dog:bark", "lost": "not_there:main"}
    install(tmp_path, "my-dog", commands=entries)
    _, shown, _ = titan("--help")
    assert re.search(r"\n  bark +bark as often as it is asked\n", shown)
    assert re.search(r"\n  check +find the mistakes", shown)  # titan's own names are taken
    # A broken package does not take the help away.
    assert re.search(r"\n  lost +cannot be loaded: ModuleNotFoundError", shown)
    assert titan("bark", "a", "b")[:2] == (5, "wuff wuff \n")
    exit_code, _, [line] = titan("barks")
    assert (exit_code, line) == (
        2,
        "command line: barks: unknown command; did you mean 'bark'?",
    )
    exit_code, _, [line] = titan("zzzzzz")
    assert exit_code == 2 and " bark, " in line and " lost" in line
    said = "entry point lost (package my-dog) cannot be loaded: ModuleNotFoundError"
    exit_code, _, [line, *_] = titan("lost")
    assert exit_code == 2 and line.startswith(said)


def test_an_unset_hardware_is_no_hardware() -> None:
    code, out, _ = titan("check", DEBUG, "--hardware=")
    assert code == 0 and "not simulated" not in out
