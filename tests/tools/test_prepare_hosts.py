"""`titan prepare --engine`: a Ray cluster or a Slurm array writes the bytes that one process writes, whatever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest

from tests.data.conftest import make_texts, write_jsonl
from tests.support.commands import command
from tests.support.fineweb_edu import write_files
from titan.contrib.prepare_hosts import parts
from titan.contrib.prepare_hosts.hosts import _MAX_ARRAY
from titan.data import sources
from titan.data.reading import PIECE_CHARS

main = command("prepare")

OPTIONS = ["--tokenizer", "bytes", "--shard-tokens", "5000", "--validation-fraction", "0.1"]


def prepare(output: Path, corpus: Path, *options: str) -> int:
    return main(["--input", str(corpus), "--output", str(output), *OPTIONS, *options])


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without those of its subfolder slurm/."""
    assert not (folder / "parts").exists()
    files = [file for file in folder.iterdir() if file.is_file() and file.name != "lock"]
    return {file.name: file.read_bytes() for file in files}


def jsonl(folder: Path) -> None:
    for number in range(7):
        write_jsonl(folder / f"{number}.jsonl", make_texts(60, seed=number))
    (folder / "3.jsonl").write_text("")


def zstandard(folder: Path) -> None:
    """As datatrove writes it, with nulls and empty texts."""
    for number in range(5):
        rows: list = [{"text": text, "id": "x"} for text in make_texts(60, seed=number)]
        rows[::7] = [{"text": ""}, {"text": None}] * 4 + [{"text": "last"}]
        with pyarrow.CompressedOutputStream(
            str(folder / f"{number}.jsonl.zst"), "zstd"
        ) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def parquet(folder: Path) -> None:
    write_files(folder, make_texts(400), files=2, group=10)


def long_text(folder: Path) -> None:
    """Documents of several pieces, of which each is longer than a shard, between short ones."""
    for number in range(6):
        words = " ".join(make_texts(PIECE_CHARS // 30 if number % 2 else 3, seed=number))
        (folder / f"{number}.txt").write_text(words)


@pytest.mark.parametrize("write", [jsonl, zstandard, parquet, long_text])
@pytest.mark.parametrize("unit_bytes", [1, 3000])
def test_shares_give_the_bytes_of_one_process(
    tmp_path: Path,
    write: Callable[[Path], None],
    unit_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    write(corpus)
    assert prepare(tmp_path / "one", corpus, "--workers", "1") == 0
    monkeypatch.setattr(parts, "UNIT_BYTES", unit_bytes)
    assert prepare(tmp_path / "shares", corpus, "--engine", "slurm") == 0
    if write is parquet and unit_bytes == 1:
        plan = json.loads((tmp_path / "shares/parts/plan.json").read_text())
        assert len(plan["places"]) == 40, "a unit for each row group"
    for number in (3, 1, 1, 2):
        assert not (tmp_path / "shares/index.json").exists()
        share = ["--engine", "slurm", "--share", str(number), "3"]
        assert prepare(tmp_path / "shares", corpus, *share) == 0
    assert content_of(tmp_path / "shares") == content_of(tmp_path / "one")
    # A task that comes late finds the folder complete, and so does the command.
    assert prepare(tmp_path / "shares", corpus, "--engine", "slurm", "--share", "3", "3") == 0
    assert prepare(tmp_path / "shares", corpus, "--engine", "slurm", "--share", "4", "3") == 2
    assert prepare(tmp_path / "shares", corpus, "--engine", "ray") == 0


def test_one_process_finishes_what_tasks_began(tmp_path: Path) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    jsonl(corpus)
    assert prepare(tmp_path / "one", corpus) == 0
    assert prepare(tmp_path / "both", corpus, "--engine", "slurm") == 0
    assert prepare(tmp_path / "both", corpus) == 0
    assert content_of(tmp_path / "both") == content_of(tmp_path / "one")
    assert not (tmp_path / "both" / "parts").exists()


def test_conversations(tmp_path: Path) -> None:
    """Kinds of ids, from the template; and what one process left on the way is taken over."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}")  # fmt: skip
    rows = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": text}] for n, text in enumerate(make_texts(300))]  # fmt: skip
    corpus = tmp_path / "chat.jsonl"
    corpus.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    chat = ["--messages-key", "messages", "--chat-template", str(template)]
    assert prepare(tmp_path / "one", corpus, *chat) == 0
    for shares in (1, 2):
        folder = tmp_path / str(shares)
        assert prepare(folder, corpus, *chat, "--engine", "slurm") == 0
        for number in range(shares):
            share = ["--share", str(number + 1), str(shares), "--engine", "slurm"]
            assert prepare(folder, corpus, *chat, *share) == 0
        assert content_of(folder) == content_of(tmp_path / "one")


def test_an_array_goes_on_where_tasks_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script, run by a shell as Slurm runs it, for each task in any order. One of them dies, and is requeued."""
    (corpus := tmp_path / "corpus").mkdir()
    jsonl(corpus)
    assert prepare(tmp_path / "one", corpus, "--workers", "1") == 0
    monkeypatch.setattr(parts, "UNIT_BYTES", 1)
    monkeypatch.chdir(tmp_path)
    words = ["--input", "corpus/*.jsonl", "--output", "array", *OPTIONS, "--engine", "slurm"]
    assert main([*words, "--workers", "3"]) == 0
    folder = tmp_path / "array"
    script = folder / "slurm/prepare.sbatch"
    assert "--array=1-3 " in script.read_text() and f"--output={folder}/slurm/%a.log" in script.read_text()  # fmt: skip

    def task(number: int) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(number)}
        return subprocess.run(["bash", script], env=environment, cwd="/", capture_output=True, text=True)  # fmt: skip

    done = task(2)
    assert done.returncode == 0 and "share 2 of 3 is done; 4 of 6 units are left" in done.stdout
    # It died between two files of a unit, and while it wrote a third.
    (folder / "parts/0.train.bin").write_bytes(b"half" * 99)
    (folder / "parts/3.npy.elsewhere-1.tmp").write_bytes(b"half")
    before = {file: file.stat().st_mtime_ns for file in (folder / "parts").glob("*.npy")}
    assert main([*words, "--workers", "3"]) == 0
    assert task(3).returncode == 0
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert "train: " in task(1).stdout
    assert content_of(folder) == content_of(tmp_path / "one")


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    slurm = ["--engine", "slurm"]

    def line(*options: str) -> str:
        assert prepare(tmp_path / "out", corpus, *options) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        return line

    assert "needs --engine ray" in line("--address", "x:1")
    assert "needs --engine slurm" in line("--share", "1", "2")
    # A task on a host that does not see the folder must not begin again.
    assert "plan.json on this host; all hosts must share the disk" in line(*slurm, "--share", "1", "2")  # fmt: skip
    assert not (tmp_path / "out").exists()
    assert "invalid choice: 'dask' (choose from" in line("--engine", "dask")
    assert prepare(tmp_path / "out", corpus, *slurm) == 0
    capsys.readouterr()
    assert "other options" in line(*slurm, "--no-bos")
    assert "other options" in line("--no-bos")  # nor does one host go on with them
    assert "other options" in line(*slurm, "--no-bos", "--share", "1", "2")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'titan-pretrain[ray]'" in line("--engine", "ray")


def test_text_that_is_a_stream_and_a_large_array(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", make_texts(2))
    stream = sources.Documents(name="c4 (en)", identity=[], read=lambda: iter(["text"]))
    monkeypatch.setattr("titan.tools.prepare.open_documents", lambda _: stream)
    assert prepare(tmp_path / "out", corpus, "--engine", "slurm") == 2
    assert "c4 (en) is read as one stream, which hosts cannot share" in capsys.readouterr().err
    monkeypatch.undo()
    (many := tmp_path / "many").mkdir()
    for number in range(_MAX_ARRAY + 1):
        write_jsonl(many / f"{number}.jsonl", ["text"])
    monkeypatch.setattr(parts, "UNIT_BYTES", 1)
    assert prepare(tmp_path / "out", many, "--engine", "slurm") == 0
    assert "--array=1-1000 " in (tmp_path / "out/slurm/prepare.sbatch").read_text()


class Nodes:
    """A Ray cluster of three nodes on this machine, with a core each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        self.others = [self.cluster.add_node(num_cpus=1) for _ in range(2)]
        self.options: list = ["--engine", "ray", "--address", self.cluster.address]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()


def units_done(folder: Path) -> int:
    return len([*(folder / "parts").glob("*.npy")])


def wait_for(folder: Path, units: int) -> None:
    deadline = time.monotonic() + 900
    while units_done(folder) < units:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """200 units that take a while."""
    monkeypatch.setattr(parts, "UNIT_BYTES", 1)
    write_files(tmp_path / "corpus", make_texts(40_000), files=2, group=200)
    assert prepare(tmp_path / "one", tmp_path / "corpus", "--shard-tokens", "100000") == 0
    return tmp_path / "corpus"


def test_ray_after_its_driver_was_killed(
    nodes: Nodes, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, large = tmp_path / "ray", ["--shard-tokens", "100000"]
    words = ["--input", str(corpus), "--output", str(folder), *OPTIONS, *large, *nodes.options]
    code = "import sys; from titan.contrib.prepare_hosts import parts; parts.UNIT_BYTES = 1; from titan.cli import main; main(['prepare', *sys.argv[1:]])"
    driver = subprocess.Popen([sys.executable, "-c", code, *words], start_new_session=True)
    wait_for(folder, 5)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    done = units_done(folder)
    assert 5 <= done < 200
    missing: list[list[int]] = []
    real = parts.Parts.missing
    monkeypatch.setattr(parts.Parts, "missing", lambda self: missing.append(real(self)) or missing[-1])  # fmt: skip
    assert main(words) == 0
    assert len(missing[0]) <= 200 - done, "finished units are done again"
    assert content_of(folder) == content_of(tmp_path / "one")


def test_ray_and_its_mistakes(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    write_jsonl(corpus / "0.jsonl", make_texts(20))
    # A folder that each process sees elsewhere, as on hosts with disks of their own.
    (tmp_path / "disk").mkdir()
    descriptor = os.dup2(os.open(tmp_path / "disk", os.O_RDONLY), 777, inheritable=False)
    try:
        assert prepare(Path(f"/proc/self/fd/{descriptor}/out"), corpus, *nodes.options) == 2
    finally:
        os.close(descriptor)
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "host " in line and "all hosts must share the disk of --output" in line
    # What is wrong with the text is said as one process says it.
    (corpus / "1.jsonl").write_text('{"text": "fine"}\n' * 9 + '{"no": 1}\n')
    assert prepare(tmp_path / "out", corpus, *nodes.options) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert f"{corpus}/1.jsonl:10: no text under 'text'" in line
    assert (
        prepare(tmp_path / "out2", corpus, "--engine", "ray", "--address", "127.0.0.1:1") == 2
    )
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "no Ray cluster answers at '127.0.0.1:1'" in line


def test_ray_while_a_node_dies(nodes: Nodes, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    at: list[int] = []

    def kill() -> None:
        wait_for(folder, 20)
        nodes.cluster.remove_node(nodes.others[0], allow_graceful=False)
        at.append(units_done(folder))

    thread = threading.Thread(target=kill)
    thread.start()
    code = prepare(folder, corpus, "--shard-tokens", "100000", *nodes.options)
    thread.join()
    assert code == 0 and 20 <= at[0] < 200
    assert content_of(folder) == content_of(tmp_path / "one")
