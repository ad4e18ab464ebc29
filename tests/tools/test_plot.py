"""`titan plot`: a picture with something in it, and errors in a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Shell
from titan.cli import main
from titan.tools.plot import loss_curves, panels, points, read_metrics, running_mean
from titan.tools.row_files import run_names


def write_run(folder: Path, *, slope: float) -> Path:
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 101):
            row = {"step": step, "loss": slope / step, "tokens": 10 * step, "tokens_per_s": 5.0}
            row |= {"time_s": 36.0 * step} | (
                {"validation_loss": 1.0} if step % 50 == 0 else {}
            )
            file.write(json.dumps(row) + "\n")
        file.write('{"step": 101, "lo')  # a run that is being written
    return folder


@pytest.mark.parametrize("x", ["step", "tokens", "time"])
def test_picture(tmp_path: Path, shell: Shell, x: str) -> None:
    image = pytest.importorskip("matplotlib.image")
    first = write_run(tmp_path / "first", slope=5.0)
    second = write_run(tmp_path / "second", slope=9.0)
    output = tmp_path / "new" / "picture.png"
    assert shell(f"plot {first} {second} --output {output} --x {x}").out == f"wrote {output}\n"
    assert output.read_bytes().startswith(b"\x89PNG")
    pixels = image.imread(output)
    height, width = pixels.shape[:2]
    assert 600 < height < 1500 and 900 < width < 2000
    inked = (pixels[..., :3].min(axis=-1) < 0.9).mean()
    assert 0.01 < inked < 0.3


def test_default_output_lies_in_the_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run", slope=5.0)
    assert main(["plot", str(run / "metrics.jsonl")]) == 0
    assert (run / "curves.png").stat().st_size > 10_000


def test_points_and_names(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / a / "run", slope=5.0) for a in "ab"]
    assert run_names(paths) == [str(path) for path in paths]
    rows = read_metrics(paths[0] / "metrics.jsonl")
    assert points(rows, "time", "validation_loss") == ([0.5, 1.0], [1.0, 1.0])
    assert len(points(rows, "step", "loss")[0]) == 100


def test_mistakes_are_one_line(tmp_path: Path, shell: Shell) -> None:
    pytest.importorskip("matplotlib")
    near = write_run(tmp_path / "demo", slope=1.0)
    (tmp_path / "metrics.jsonl").touch()
    for folder, message in {"dmeo": f"runs near it: {near}", ".": "no step was logged"}.items():
        error = shell.refuse(f"plot {tmp_path / folder}")
        assert error.count("\n") == 1 and message in error


def test_curves_and_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the picture: steps, means, where the run went on; the names of what occurs."""
    figure = pytest.importorskip("matplotlib.figure")
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"step": s, "loss": 9.0 / s, "loss_mean": 10.0 / s} for s in range(10, 60, 10)]
    rows = [row | {"tokens": 8 * row["step"], "tokens_per_s": 1.0} for row in rows]
    rows = [row | {"time_s": 36.0 * row["step"]} for row in rows]
    events = [("start", 0), ("resume", 25), ("save", 30), ("rewind", 40), ("resume", 45)]
    for name, content in (
        ("metrics", rows),
        ("events", [{"event": e, "step": s} for e, s in events]),
    ):
        text = "".join(json.dumps(row) + "\n" for row in content)
        (run / f"{name}.jsonl").write_text(text)
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    for x, starts in {
        "step": [25, 40, 45],
        "tokens": [200, 320, 360],
        "time": [0.25, 0.4, 0.45],
    }.items():
        assert main(["plot", str(run), "--x", x]) == 0
        upper, lower = drawn[-1].axes
        own, mean, _, *marks = upper.lines
        assert {own.get_marker(), lower.lines[0].get_marker()} == {"."}  # of five rows
        assert list(own.get_ydata()) == [9.0 / s for s in range(10, 60, 10)]
        assert list(mean.get_ydata()) == [10.0 / s for s in range(10, 60, 10)]
        assert [line.get_xdata()[0] for line in marks] == pytest.approx(starts)
        assert [line.get_xdata()[0] for line in lower.lines[1:]] == pytest.approx(starts)
        assert [line.get_linestyle() for line in marks] == ["--", ":", "--"]
        names = [text.get_text() for text in upper.get_legend().get_texts()]
        assert names == [
            "run",
            "each logged step",
            "mean since the last row",
            "running mean",
            "restart",
            "rewind",
        ]


def test_panels_of_what_was_evaluated() -> None:
    rows = [
        {"step": 1, "bits_per_byte": 4.0},
        {"step": 2, "eval/t/acc": 0.5, "eval/t/nats": 1.0, "source_loss/x": 1.0},
    ]
    by_source = ("loss by source", ["source_loss/x"])
    expected = [by_source, ("bits per byte", ["bits_per_byte"]), ("accuracy", ["eval/t/acc"])]
    assert [*panels({"run": rows})] == expected
    assert [*panels({"run": [{"step": 1, "loss": 2.0}]})] == []


def test_recall_of_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    # Rows of a stage without a choice, of two layers, and of a file that someone else wrote.
    tables = [None, {"layer": [0, 3], "recall": [0.2, 0.4]}, {"layer": [0], "recall": ["?"]}]
    rows = [{"step": n, "loss": 1.0, "indexer": table} for n, table in enumerate(tables)]
    rows[1]["indexer_loss"] = 0.5
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["plot", str(tmp_path)]) == 0
    _, of_loss, of_recall, _ = drawn[0].axes
    assert [list(line.get_ydata()) for line in of_loss.lines] == [[0.5]]
    assert [line.get_ydata()[0] for line in of_recall.lines] == pytest.approx([0.3, 0.2, 0.4])
    assert [text.get_text() for text in of_recall.texts] == ["0", "3"]


def test_curves_of_a_long_run() -> None:
    rows = [{"step": s, "loss": float(s % 7), "loss_mean": float(s % 2)} for s in range(100)]
    names = [name for name, *_ in loss_curves(rows, "step")]
    assert names == ["each logged step", "mean since the last row", "running mean"]
    assert loss_curves(rows, "step")[2][3] == running_mean([float(s % 2) for s in range(100)])
    # Without means, the running one is of the losses.
    curves = loss_curves([row | {"loss_mean": None} for row in rows], "step")
    assert curves[0][3] == [row["loss"] for row in rows]
    assert [name for name, *_ in curves] == ["each logged step", "running mean"]


def test_running_mean_is_centred() -> None:
    line = [float(i) for i in range(300)]
    assert running_mean(line) == pytest.approx(line)  # no lag, no bent ends
    noisy = [float(i % 2) for i in range(300)]
    assert max(abs(value - 0.5) for value in running_mean(noisy)[20:280]) < 0.1
