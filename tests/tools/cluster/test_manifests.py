"""What `titan slurm` writes, that no text of the user becomes a command in it, and the manifests in examples/cluster."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell, finished
from tests.support.tables import tabled
from titan.cli import main
from titan.config.schema import FaultToleranceSection

ROOT = Path(__file__).parents[3]
JOB = "train_configs/debug_model.toml"
HOSTILE = [
    "$(touch HIT)",
    "`touch HIT`",
    "'; touch HIT; '",
    '"; touch HIT; "',
    "a b\n#SBATCH --nodes=7\ntouch HIT",
    "\n#SBATCH --wrap=x\n",
    "x\\",
    "%j%%x%",
    "#",
    "${IFS}&&touch${IFS}HIT",
    "--wrap=touch HIT",
    "Grüße 中文 \U0001f600",
    "\x1b[31m\x7f\u2028\x85",
]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def hostile_texts(count: int, *, seed: int = 0) -> list[str]:
    dice = random.Random(seed)
    pieces = [*HOSTILE, "--", *"a /=\t*~!|><()%"]
    return [*HOSTILE, *("".join(dice.choices(pieces, k=3)) for _ in range(count))]


def arguments_in(script: str, folder: Path) -> list[str]:
    """The words that a script would hand to titan.train, as bash itself splits them, with stand-ins for Slurm's commands."""
    stand_ins = folder / "bin"
    stand_ins.mkdir(exist_ok=True)
    for name, text in {
        "srun": 'printf "%s\\0" "$@" >words; exit "${CODE:-0}"',
        "scontrol": '[[ $1 == show ]] && echo n1 || echo "$@" >>scontrol.txt',
    }.items():
        (stand_ins / name).write_text(f"#!/bin/bash\ncd {shlex.quote(str(folder))}\n{text}\n")
        (stand_ins / name).chmod(0o755)
    (folder / "words").unlink(missing_ok=True)
    done = run_script(script, folder)
    words = (folder / "words").read_text().split("\0")[:-1]
    assert done.returncode == 0, done
    return words[words.index("titan.train") + 1 :]


def run_script(script: str, folder: Path, *words: str, **variables: str) -> Any:
    slurm = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1"}
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    environment = {"PATH": path, "SLURM_CPUS_ON_NODE": "2", **slurm, **variables}
    with (folder / "log").open("a") as log:
        command = ["bash", "-c", script, "job", *words]
        return subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log)


def test_slurm(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "run"
    options = "--nodes=2 --gpus-per-node 4 --time=1-00:00:00 --partition=gpu --account=me"
    shown = shell(f"slurm {JOB} {options} --training.steps=3 --job.dump_folder={folder}")
    script = (folder / "job.sbatch").read_text()
    assert shown.out == script
    assert f"sbatch {folder}/job.sbatch" in shown.err
    directives = [
        line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line
    ]
    assert {
        "job-name=debug-model",
        "nodes=2",
        "gpus-per-node=4",
        "time=1-00:00:00",
        "partition=gpu",
        "account=me",
        f'output="{folder}/slurm-%j.out"',
        "signal=B:USR1@180",
        "requeue",
    } <= set(directives)
    assert len({line.partition("=")[0] for line in directives}) == len(directives)
    job, *overrides = arguments_in(script, tmp_path)
    assert overrides == ["--training.steps=3", f"--job.dump_folder={folder}"]
    assert Path(job).read_bytes() == Path(JOB).read_bytes()
    words = (tmp_path / "words").read_text().split("\0")
    assert {"--nnodes=1", "--nproc-per-node=4", "--rdzv-backend=titan"} <= set(words)
    [port] = [int(word[19:]) for word in words if word.startswith("--rdzv-endpoint=n1")]
    assert 10_000 <= port < 30_000
    [name] = [word for word in words if word.startswith("--rdzv-id=")]
    assert re.fullmatch(r"--rdzv-id=\d+-0-[0-9a-f]{32}", name), name


def test_the_container(tmp_path: Path, shell: Shell) -> None:
    """And a site's lines: behind the directives, of which they can be none, and before the settings, which win."""
    site = tmp_path / "site.sh"
    site.write_text(f"#SBATCH --nodes=7\nexport NCCL_DEBUG=INFO NPROC=9\nenv >{tmp_path}/said")
    command = f"slurm {JOB} --nodes=1 --gpus-per-node=1 --setup={site} --mounts=/data:/data"
    shell(f"{command} --job.dump_folder={tmp_path}/run", "--container=a b.sqsh")
    script = (tmp_path / "run" / "job.sbatch").read_text()
    arguments_in(script, tmp_path)
    words = (tmp_path / "words").read_text().split("\0")
    mounts = f"--container-mounts={ROOT}:{ROOT},/data:/data"
    assert {"--container-image=a b.sqsh", mounts, f"--container-workdir={ROOT}"} <= set(words)
    assert words[words.index("titan.ops.cluster.node") - 2] == "python"
    assert script.index("\ncd --") < script.index("#SBATCH --nodes=7")
    assert "NCCL_DEBUG=INFO\n" in (tmp_path / "said").read_text()
    assert "--nproc-per-node=1" in words


@pytest.mark.parametrize("kind", ["description", "folder", "container"])
def test_hostile_text_is_never_run(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for text in hostile_texts(8):
        folder = f"{tmp_path}/run" if kind != "folder" else f"{tmp_path}/{text}"
        words = [JOB, f"--job.dump_folder={folder}", f"--job.description={json.dumps(text)}"]
        extra = [f"--container={text}"] if kind == "container" else []
        output = tmp_path / "job.sbatch"
        command = [
            "slurm",
            *words,
            "--nodes=1",
            "--gpus-per-node=0",
            f"--output={output}",
            *extra,
        ]
        code = main(command)
        if code == 0:
            job, *overrides = arguments_in(output.read_text(), tmp_path)
            assert overrides == words[1:], text
            assert Path(job).read_bytes() == Path(JOB).read_bytes(), text
            head = output.read_text().partition("\n\n")[0]
            assert all(line.startswith("#SBATCH --") for line in head.splitlines()[1:]), text
            assert "#SBATCH --wrap" not in head and "--nodes=7" not in head.replace(folder, "")
        else:
            assert (code, kind) == (2, "folder"), text
            assert "not printable" in capfd.readouterr().err
        assert not list(tmp_path.rglob("HIT")) and not Path("HIT").exists(), text


def test_a_job_runs_as_it_was_submitted(tmp_path: Path, shell: Shell) -> None:
    """Edits of its files change neither a job that waits nor one that is requeued, and two jobs of a folder do not share a copy."""
    job, overlay = tmp_path / "job.toml", tmp_path / "more.toml"
    job.write_bytes(Path(JOB).read_bytes())
    scripts = []
    for steps in (3, 4):
        overlay.write_text(f"[training]\nsteps = {steps}\n")
        where = f"--nodes=1 --gpus-per-node=0 --job.dump_folder={tmp_path}/run"
        shell(f"slurm {job} {overlay} {where}")
        scripts.append((tmp_path / "run/job.sbatch").read_text())
    job.unlink()
    overlay.write_text("nonsense")
    for script, steps in zip(scripts, (3, 4), strict=True):
        copies = arguments_in(script, tmp_path)[:2]
        assert Path(copies[0]).read_bytes() == Path(JOB).read_bytes()
        assert Path(copies[1]).read_text() == f"[training]\nsteps = {steps}\n"


def test_further_options_go_to_sbatch(tmp_path: Path, shell: Shell) -> None:
    more = ["--sbatch=--qos=high", "--", "--exclude=n[3-4],n7", "--nice"]
    shell(f"slurm {JOB} --nodes=2 --gpus-per-node=0 --job.dump_folder={tmp_path}/run", *more)
    script = (tmp_path / "run/job.sbatch").read_text()
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    wanted = ["#SBATCH --qos=high", "#SBATCH --exclude=n[3-4],n7", "#SBATCH --nice"]
    assert [line for line in lines if line in wanted] == wanted
    assert "\nMAX_RESTARTS=3\n" in script  # of several nodes


@tabled("option, message")
def test_options_that_do_not_go_to_sbatch(
    tmp_path: Path, option: str, message: str, shell: Shell
) -> None:
    job = f"{JOB} --job.dump_folder={tmp_path}/run"
    said = shell.refuse(f"slurm {job} --nodes=2 --gpus-per-node=0 --", option)
    assert f"--sbatch: {option!r}: {message}" in said
    assert not (tmp_path / "run").exists()


# srun: writes down its words, and is a preflight that finds what a file for this call says.
STEP = """
n=$(ls step-* 2>/dev/null | wc -l)
printf '%s\n' "$@" >step-$n
while (($#)); do [[ $1 == --json ]] && report=$2; shift; done
[[ ${report:-} ]] || exit 0
[[ -f finds-$n ]] && cp finds-$n "$report" && exit 1
echo '{"problems": []}' >"$report"
"""


@tabled(
    "finds, spare, modules, nodes, code",
    ids=[
        "all is well",
        "a slow node",
        "no spare node",
        "all nodes alike",
        "the job's own fault",
    ],
)
def test_preflight_in_the_allocation(
    tmp_path: Path,
    finds: list[str],
    spare: int,
    modules: list[str],
    nodes: str | None,
    code: int,
) -> None:
    command = (
        f"slurm {JOB} --nodes=2 --gpus-per-node=8 --job.dump_folder={tmp_path}/run".split()
    )
    assert main([*command, "--preflight", f"--spare-nodes={spare}", "--max-restarts=0"]) == 0
    script = (tmp_path / "run/job.sbatch").read_text()
    assert f"#SBATCH --nodes={2 + spare}\n" in script
    arguments_in(script, tmp_path)  # which makes the stand-ins
    inside = f"#!/bin/bash\ncd {shlex.quote(str(tmp_path))}\n"
    (tmp_path / "bin/srun").write_text(inside + STEP)
    (tmp_path / "bin/scontrol").write_text(f'#!/bin/bash\nprintf "n%d\\n" {{1..{2 + spare}}}\n')
    for number, text in enumerate(finds):
        (tmp_path / f"finds-{number}").write_text(text)
    done = run_script(script, tmp_path, SLURM_NNODES=str(2 + spare))
    said = (tmp_path / "log").read_text()
    steps = [path.read_text().splitlines() for path in sorted(tmp_path.glob("step-*"))]
    names = {"titan.ops.preflight": "preflight", "titan.train": "train"}
    assert [names[word] for words in steps for word in words if word in names] == modules, said
    assert done.returncode == code, said
    if nodes and spare:
        assert f"--nodelist={nodes}" in steps[-1] and "--nnodes=2" in steps[-1]
        assert any(word.startswith("--rdzv-endpoint=n1:") for word in steps[-1])
    assert ("the job needs 2: not started" in said) == (nodes is None)


def test_ranks_are_counted_on_the_node(tmp_path: Path) -> None:
    """Where Slurm knows of no GPUs. With them, its number counts."""
    script = (ROOT / "scripts/slurm/train.sbatch").read_text()
    arguments_in(script.replace('"$@"', "titan.train"), tmp_path)
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text('#!/bin/bash\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA H100"; done\n')
    smi.chmod(0o755)
    for variables, ranks in (({}, 4), ({"SLURM_GPUS_ON_NODE": "2"}, 2), ({"NPROC": "1"}, 1)):
        assert run_script(script, tmp_path, JOB, **variables).returncode == 0
        assert f"--nproc-per-node={ranks}" in (tmp_path / "words").read_text().split("\0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--partition=a\n#SBATCH --wrap=x"], "--partition: "),
        (["--account=$(x)"], "--account: "),
        (["--time=soon"], "--time: "),
        (["--nodes=0"], "--nodes: "),
        (["--hardware=../../etc/passwd"], "hardware: no profile '../../etc/passwd'"),
        (["--training.step=5"], "training.step: "),
        (["--parallelism.tensor_parallel_degree=3"], "parallelism.tensor_parallel_degree: "),
        (["--setup=none.sh"], "none.sh: cannot be read: No such file"),
        # What `titan check` looks for on this machine.
        (["--tokenizer.name=auto", "--tokenizer.path=none"], "tokenizer path 'none' does not"),
        (
            ["--training.dataset=jsonl", f"--training.dataset_path={__file__}"],
            ":1: not a line of",
        ),
    ],
)
def test_mistakes(
    options: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    job = f"slurm {JOB} --nodes=2 --gpus-per-node=2 --job.dump_folder={folder}".split()
    assert main([*job, *options]) == 2
    assert message in capfd.readouterr().err
    assert not folder.exists()


def test_it_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from titan.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = f"slurm {JOB} --nodes=2 --job.dump_folder={tmp_path}".split()
    subprocess.run(
        [sys.executable, "-c", code, *command], check=True, stdout=subprocess.DEVNULL
    )


@tabled("code, restarts, crashes, exit_code, requeued")
def test_what_becomes_of_an_exit_code(
    tmp_path: Path, code: int, restarts: int, crashes: int, exit_code: int, requeued: bool
) -> None:
    script = (ROOT / "scripts/slurm/train.sbatch").read_text()
    arguments_in(script, tmp_path)  # makes the stand-ins
    (tmp_path / "log").write_text(
        "".join(f"titan: crash {i + 1} of job\n" for i in range(crashes))
    )
    done = run_script(script, tmp_path, JOB, CODE=str(code), MAX_RESTARTS=str(restarts))
    asked = tmp_path / "scontrol.txt"
    assert (done.returncode, asked.exists() and asked.read_text()) == (
        exit_code,
        requeued and "requeue 5\n",
    )


@pytest.mark.parametrize(
    ("srun", "lost_before", "said", "code"),
    [
        ("touch $TITAN_BAD_EXIT; exec sleep 60", 0, "lost node 1", 137),
        ("touch $TITAN_BAD_EXIT; exec sleep 60", 2, "lost node 3", 137),
        ("exit 1", 0, "lost node 1", 1),  # which Slurm has noticed
    ],
)
def test_a_lost_node_is_no_crash(
    tmp_path: Path, srun: str, lost_before: int, said: str, code: int
) -> None:
    """srun waits for a node that never ends; MAX_RESTARTS counts crashes only."""
    script = (ROOT / "scripts/slurm/train.sbatch").read_text()
    arguments_in(script, tmp_path)  # makes the stand-ins
    (tmp_path / "bin/srun").write_text(f"#!/bin/bash\n{srun}\n")
    (tmp_path / "bin/sinfo").write_text(f"#!/bin/bash\necho mixed{'*' * (code == 1)}\n")
    (tmp_path / "bin/sinfo").chmod(0o755)
    (tmp_path / "log").write_text(
        "".join(f"titan: lost node {i}\n" for i in range(lost_before))
    )
    limits = {"MAX_RESTARTS": "0", "MAX_LOST_NODES": "2", "LOST_AFTER": "1"}
    assert run_script(script, tmp_path, JOB, **limits).returncode == code
    assert f"titan: {said} of job 5, on n1; MAX_LOST_NODES=2" in (tmp_path / "log").read_text()
    assert (tmp_path / "scontrol.txt").exists() == (lost_before < 2)
    assert not [*tmp_path.glob(".bad-exit*")]


def example(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "examples" / "cluster" / name).read_text())


def test_the_example_for_kubernetes() -> None:
    """Its fields are those of Kubeflow's own models, and its parts fit each other."""
    manifest = example("kubernetes.yaml")
    trainer = manifest["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert trainer["command"] == ["python", "-m", "titan.ops.cluster.node", "-m", "titan.train"]
    [patch] = manifest["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == FaultToleranceSection().grace_seconds + 60
    [node] = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in node["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    job_file, folder = trainer["args"]
    assert job_file == f"{mounts['job']}/job.toml"
    assert folder.startswith(f"--job.dump_folder={mounts['checkpoints']}/")
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="no kubeflow-trainer-api"
    )
    known = models.TrainerV1alpha1TrainJob.from_dict(manifest)
    assert contains(known.to_dict(), manifest)


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


def test_the_example_for_skypilot(tmp_path: Path) -> None:
    task = example("skypilot.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_TASK_ID": "t",
    }
    shell = ["bash", "-c", task["run"]]
    words = finished(shell, env=variables, code=None).stdout.split("\0")
    [mount] = task["file_mounts"]
    assert (
        words[:-1]
        == f"-m titan.ops.cluster.node --nnodes=4 --nproc-per-node=8 --rdzv-backend=titan --rdzv-id=t --rdzv-endpoint=10.0.0.1:29500 --rdzv-conf=rank=0 -m titan.train job.toml --job.dump_folder={mount}/run".split()
    )
