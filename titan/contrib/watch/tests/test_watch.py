"""The page's server over HTTP: what a poll says, what is refused; the page in a browser (slow)."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell, finished
from titan.contrib.watch import server
from titan.contrib.watch.cli import open_runs
from titan.contrib.watch.reading import COLUMNS, RunReader, read_all
from titan.contrib.watch.server import Server
from titan.tools.plot import mark, read_metrics, read_starts
from titan.tools.row_files import MAX_ROWS

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"alert(1)\"> & <!--"
)
PAGE = Path(__file__).parents[1] / "page.html"
Get = Callable[..., tuple[int, str]]


def metrics(folder: Path, steps: range, mode: str = "a", **values: Any) -> None:
    rows = (
        {"step": s, "loss": 8 / s, "unix_s": 100.0 + s, "tokens_per_s": 50.0} for s in steps
    )
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(row | values) + "\n" for row in rows)


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with two ranks, of which one is slow; every text of it is hostile."""
    folder = tmp_path / "run"
    folder.mkdir()
    metrics(folder, range(1, 4))
    lines(
        folder / "events.jsonl",
        {"event": "straggler", "unix_s": 1.0, "step": 1, "rank": 0, "host": "n0"},
        {"event": "resume", "unix_s": 2.0, "step": 1, "host": HOSTILE, "world_size": 2},
        {"event": "straggler", "unix_s": 3.0, "step": 2, "rank": 1, "host": HOSTILE},
        {
            "event": HOSTILE,
            "unix_s": 4.0,
            "step": 3,
            "text": HOSTILE,
            "restarts": 2,
            "lost_steps": 7,
            "seconds": {"trained": 3.0, "down": 1.0},
        },
    )
    table = {"step": 3, "layers": [0, HOSTILE], "loads": [[4, 0], [2, HOSTILE]]}
    lines(folder / "experts.json", table | {HOSTILE: HOSTILE})
    for rank in range(2):
        row = {"step_s": 1.0, "data_wait_s": 0.1, "unix_s": 103.0, "host": HOSTILE}
        path = folder / "logs" / f"rank-{rank}.times.jsonl"
        lines(path, {"step": 2, "own_s": 9.0} | row, {"step": 3, "own_s": rank + 0.5} | row)
    (folder / "status.json").write_text(json.dumps({"state": "failed", "reason": HOSTILE}))
    text = f"[job]\ndescription = {json.dumps(HOSTILE)}\n[model]\nname='llama3'\nflavor='x'\n"
    (folder / "config.toml").write_text(text + "[training]\nsteps = 30\n")
    return folder


@pytest.fixture
def port(run_dir: Path) -> Iterator[int]:
    """A server of the run."""
    with Server(open_runs([run_dir]), host="127.0.0.1", port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def get(port: int) -> Get:
    def get(path: str, host: str = "localhost") -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode() + str(answer.headers)

    return get


def poll(get: Get, at: str = "") -> dict[str, Any]:
    status, text = get(f"/data?at={at}")
    assert status == 200
    answer = json.loads(text[: text.rindex("}") + 1])
    [run] = answer["runs"]
    assert tuple(answer["columns"]) == COLUMNS
    return run


def steps(run: dict[str, Any]) -> list[int]:
    return [row[COLUMNS.index("step")] for row in run["rows"]]


def test_a_poll_says_what_the_folder_holds(get: Get) -> None:
    run = poll(get)
    assert (run["name"], run["total"], run["since"], steps(run)) == ("run", 3, 0, [1, 2, 3])
    assert [row[COLUMNS.index("loss")] for row in run["rows"]] == [8, 4, 8 / 3]
    assert [(r["rank"], r["step"], r["own_s"]) for r in run["ranks"]] == [
        (0, 3, 0.5),
        (1, 3, 1.5),
    ]
    assert run["experts"] == {"step": 3, "layers": [0, None], "loads": [[4, 0], [2, None]]}
    assert run["starts"] == [[1, "resume", 2.0]]
    assert run["stragglers"] == [1]  # rank 0 was one before the restart
    assert (run["restarts"], run["lost_steps"]) == (2, 7)
    assert run["seconds"] == {"trained": 3.0, "down": 1.0}
    assert (run["facts"]["steps"], run["facts"]["description"]) == (30, HOSTILE)
    assert run["status"]["state"] == "failed" and len(run["events"]) == 4


def test_the_account_of_time_is_the_newest(get: Get, run_dir: Path) -> None:
    """While a run trains, status.json has it: the newest event may be hours old."""
    for seconds, newest in (
        ({"trained": 9.0}, 9.0),
        ({"trained": 1.0}, 3.0),
        ({"x": "y"}, 3.0),
    ):
        lines(run_dir / "status.json", {"state": "running", "seconds": seconds})
        os.utime(run_dir / "status.json", (newest, sum(map(len, seconds)) + newest))
        assert poll(get)["seconds"]["trained"] == newest


def test_a_drift_is_shown_until_it_is_over(get: Get, run_dir: Path) -> None:
    drift = {"event": "drift", "unix_s": 5.0, "step": 3, "part": "link", "text": HOSTILE}
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps(drift) + "\n")
    assert poll(get)["drift"] == HOSTILE
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "drift_over", "unix_s": 6.0, "step": 3}) + "\n")
    assert poll(get)["drift"] == ""


def test_later_polls_get_what_is_new(get: Get, run_dir: Path) -> None:
    first = poll(get)
    metrics(run_dir, range(4, 6))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    second = poll(get, f"{first['generation']}.3")
    assert (second["since"], second["total"], steps(second)) == (3, 5, [4, 5])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.5}\n')
    assert steps(poll(get, f"{second['generation']}.5")) == [6]
    # A resume cuts rows away by putting another file there.
    (run_dir / "new").mkdir()
    metrics(run_dir / "new", range(1, 3))
    (run_dir / "new" / "metrics.jsonl").replace(run_dir / "metrics.jsonl")
    after = poll(get, f"{second['generation']}.6")
    assert (after["since"], steps(after)) == (0, [1, 2])
    assert after["generation"] != second["generation"]


def test_evaluations_and_samples(get: Get, run_dir: Path) -> None:
    metrics(run_dir, range(4, 5), "a", **{"source_loss/x": 2.0, "eval/b/acc": 0.5})
    first = poll(get)
    named = ["source_loss/x", "eval/b/acc"]
    assert first["tasks"] == named and first["rows"][-1][-2:] == [2.0, 0.5]
    metrics(run_dir, range(5, 6), "a", **{"eval/a/acc": 0.25, "eval/b/acc": HOSTILE})
    lines(run_dir / "samples.json", {"step": 4, "texts": [["Once", HOSTILE], [1, None]]})
    second = poll(get, f"{first['generation']}.4")
    # New tasks come behind, so that the rows that a client has keep their columns.
    assert second["tasks"] == [*named, "eval/a/acc"]
    assert second["rows"][-1][-2:] == [None, 0.25]
    assert second["samples"] == {"step": 4, "texts": [["Once", HOSTILE], ["1", "None"]]}
    lines(run_dir / "samples.json", {"step": 4, "texts": [["Once"]], "more": 1})
    assert poll(get)["problems"] == ["samples.json cannot be read (no pairs of texts)"]


@pytest.mark.parametrize(
    "at", ["x", "1", "-1.-5", "9.1,9.1", "1.99999999999999999999999999", "%00"]
)
def test_whatever_a_client_says_it_has(get: Get, at: str) -> None:
    assert steps(poll(get, at)) == [1, 2, 3]


def test_the_server_gives_nothing_else_away(get: Get, run_dir: Path) -> None:
    (run_dir / "secret").write_text("secret")
    for path in ("/secret", "/../run/secret", "/status.json", "/logs/", "//etc/passwd"):
        assert get(path)[0] == 404
    assert get("/data", host="evil.example")[0] == 403
    assert get("/", host="evil.example:6060")[0] == 403
    assert get("/", host="[::1")[0] == get("http://[x/data")[0] == 400
    status, page = get("/")
    assert status == 200 and "script-src 'sha256-" in page and "const STATIC = null" in page


def test_a_hundred_thousand_rows(tmp_path: Path) -> None:
    tmp_path.joinpath("status.json").write_text("{}")
    metrics(tmp_path, range(1, 100_001))
    metrics(tmp_path, range(100_001, 100_002), loss=99.0)
    metrics(tmp_path, range(100_002, 110_000), validation_loss=None)
    run = RunReader(tmp_path, name="big").data()
    assert run["total"] == 109_999 and len(run["rows"]) <= MAX_ROWS
    kept = steps(run)
    assert kept == sorted(set(kept)) and 100_001 in kept and kept[-1] == 109_999


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\x00" * 999,
        b"[" * 99_999,
        b'{"a": NaN}',
        b'{"layers": [1], "loads": [{}]}',
        b'{"layers": [1], "loads": [[1], [1]]}',
        b"[1]",
        b"x\n" * 99,
        b'{"step": {}, "event": 3, "rank": "x"}\n',
    ],
)
def test_a_damaged_file_costs_that_file(run_dir: Path, content: bytes) -> None:
    """And a pipe does not hang the page, nor is a link followed."""
    good = RunReader(run_dir, name="run").data()
    secret = run_dir.parent / "secret.json"
    secret.write_text('{"state": "secret", "step": 1}')
    changing = {"status.json": "status", "events.jsonl": "events", "environment.json": "facts"}
    changing |= {"metrics.jsonl": "rows", "config.toml": "facts", "experts.json": "experts"}
    for name, key in changing.items():
        path = run_dir / name
        before = path.read_bytes() if path.exists() else None
        reader = RunReader(run_dir, name="run")
        for damage in (
            path.write_bytes,
            lambda _, path=path: os.mkfifo(path),
            lambda _, path=path: path.symlink_to(secret),
        ):
            path.unlink(missing_ok=True)
            damage(content)
            data = reader.data()
            assert "secret" not in json.dumps(data, allow_nan=False)
            untouched = set(good) - {key, "problems", "generation", "total", "since"}
            if name == "events.jsonl":
                untouched -= {"stragglers", "starts", "seconds", "restarts", "lost_steps"}
            assert {k: data[k] for k in untouched} == {k: good[k] for k in untouched}
            assert all(p.count("\n") == 0 and name in p for p in data["problems"])
        path.unlink()
        if before is not None:
            path.write_bytes(before)


def test_many_runs_make_no_larger_page(tmp_path: Path) -> None:
    folders = [tmp_path / f"run-{n}" for n in range(60)]
    for folder in folders:
        folder.mkdir()
        metrics(folder, range(1, 1001))
        lines(
            folder / "events.jsonl",
            *({"event": "save", "unix_s": 1.0, "step": n} for n in range(300)),
        )
    answer = read_all(open_runs(folders))
    assert sum(len(run["rows"]) for run in answer["runs"]) <= 20_000
    assert all(len(run["rows"]) > 100 and run["rows"][-1][0] == 1000 for run in answer["runs"])
    assert sum(len(run["events"]) for run in answer["runs"]) <= 2500


def test_once_writes_a_page_that_no_text_can_break(
    run_dir: Path, tmp_path: Path, shell: Shell
) -> None:
    file = tmp_path / "page.html"
    shell(f"watch {run_dir} {run_dir.parent}/run/. --once {file}")
    page = file.read_text()
    assert page.count("<script>") == page.count("</script>") == 1 and "<img" not in page
    text = page.partition("const STATIC = ")[2].partition(";\n")[0]
    assert json.loads(text)["runs"][1]["status"]["reason"] == HOSTILE


def test_mistakes_are_one_line(tmp_path: Path, run_dir: Path, shell: Shell) -> None:
    assert shell.refuse(f"watch {tmp_path}/no") == (
        f"{tmp_path}/no: not the folder of a run; runs near it: {run_dir}\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = shell.refuse(f"watch {run_dir} --port {port}")
    assert f"cannot listen on 127.0.0.1 port {port}" in said
    assert shell.refuse(f"watch {run_dir} --once {tmp_path}/no/x.html").count("\n") == 1


def test_no_torch_is_imported(run_dir: Path, tmp_path: Path) -> None:
    code = "import sys; from titan.contrib.watch.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, *f"{run_dir} --once {tmp_path}/x.html".split()]
    assert subprocess.check_output(command, text=True).endswith("False\n")


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_charts_have_a_legend_marks_of_restarts_zoom_and_a_log_axis(
    run_dir: Path, tmp_path: Path, shell: Shell
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for step in range(10, 100, 10):
        metrics(
            other, range(step, step + 1), tokens=100 * step, time_s=50.0 + step, loss_mean=2.0
        )
    again = [
        ("start", 0, 40.0),
        ("resume", 15, 3700.0),
        ("rewind", 40, 141.5),
        ("resume", 95, 0),
    ]
    rows = [{"event": event, "step": step, "unix_s": unix_s} for event, step, unix_s in again]
    lines(other / "events.jsonl", *rows)
    file = tmp_path / "page.html"
    shell(f"watch {run_dir} {other} --once {file}")
    command = ["node", str(Path(__file__).with_name("page.js")), str(file)]
    shown = subprocess.check_output(command, text=True, timeout=60).splitlines()
    assert (
        '"legend":"run|other|faint: each logged step, thin: mean since the last row, b'
        in shown[0]
    )
    assert "dashes: restart, dotted: rewind" in shown[0] and json.loads(shown[0])["dashes"] > 0
    # Curves of 3 and 9 rows are dots: three of the loss, one of the throughput.
    assert json.loads(shown[0])["dots"] == 4 * (3 + 9)
    # Of two layers and two experts, the last one is damaged.
    assert json.loads(shown[0])["cells"] == 3
    assert shown[1].startswith("log [") and shown[2].startswith("zoom step ")
    assert "other  loss  " in shown[3] and "other  loss_mean  2" in shown[3]
    assert shown[4] == "zoom drag over a chart to zoom"
    # By step, tokens and hours, of the two runs. By the first two `titan plot` puts them there, too. The first run has no tokens.
    rows = read_metrics(other / "metrics.jsonl")
    starts = read_starts(other)
    for axis, places in zip(("step", "tokens"), json.loads(shown[5])[:2], strict=True):
        assert places[1] == pytest.approx([mark(start, rows, axis) for start in starts])
    assert json.loads(shown[5])[0] == [[1], [15, 40, 95]]
    assert json.loads(shown[5])[1][1] == [1500, 4000, 9000]
    assert json.loads(shown[5])[2][1] == pytest.approx([3650 / 3600, 91.5 / 3600, -50 / 3600])


def test_tracks_of_a_grid_may_be_narrower_than_their_content() -> None:
    """A track of "1fr" is as wide as its widest legend, which makes a telephone's page wider than the telephone."""
    style = PAGE.read_text().partition("</style>")[0]
    tracks = re.findall(r"grid-template-columns: ([^;]+);", style)
    assert len(tracks) == 3 and all("1fr" not in t or "minmax(" in t for t in tracks)
    assert "initial-scale=1" in style


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium, to lay a page out")
def test_the_page_is_no_wider_than_a_telephone(
    run_dir: Path, tmp_path: Path, shell: Shell
) -> None:
    other = tmp_path / "a_run_with_a_name_that_is_wider_than_others"
    shutil.copytree(run_dir, other)
    page, frame = tmp_path / "page.html", tmp_path / "frame.html"
    shell(f"watch {run_dir} {other} --once {page}")
    # A window cannot be this narrow, but a frame in it can.
    measure = "document.title = frames[0].document.documentElement.scrollWidth + ' px'"
    frame.write_text(
        f'<iframe src="{page.name}" style="width: 390px; border: 0" onload="{measure}"></iframe>'
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    command += ["--allow-file-access-from-files", "--hide-scrollbars", frame.as_uri()]
    shown = finished(command, timeout=120, code=None).stdout
    assert "<title>390 px</title>" in shown


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_in_a_browser(port: int) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"http://127.0.0.1:{port}/"]
    dom = finished(command, timeout=120, code=None).stdout
    body = dom.partition("<body>")[2].partition("<script>")[0]
    assert "<title>run 3, titan watch</title>" in dom  # not "owned"
    assert "<img" not in body and "&lt;img src=x" in body  # shown as text
    assert "2.6667" in body and "75.0 % (3.0 s)" in body and "2 restarts, 7 steps lost" in body
    assert body.count('<div class="slow">') == 1
    assert body.count("<canvas") == 11  # ten charts, and a heat map


def test_idle_connections_end(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread, so that their number is bounded, too."""
    assert 0 < (server._Handler.timeout or 0) < 60  # None by default: for ever
    monkeypatch.setattr(server._Handler, "timeout", 4)
    monkeypatch.setattr(server, "_MOST", 3)
    before = threading.active_count()
    with Server([], host="127.0.0.1", port=0) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        idle = [socket.create_connection(("127.0.0.1", served.server_port)) for _ in range(9)]
        for number, each in enumerate(idle):
            each.settimeout(2 if number >= 3 else 20)  # those without a thread end at once
        assert [each.recv(1) for each in reversed(idle)] == [b""] * 9
        assert threading.active_count() - before <= 4
        served.shutdown()
