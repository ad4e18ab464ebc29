"""The hooks of examples/run_hooks: what a webhook and MLflow get of a run, and that a server that fails stops nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.jobs import ROOT, job
from titan.run.standard_hooks import standard_hooks
from titan.run.trainer import Trainer

spec = importlib.util.spec_from_file_location(
    "titan_run_hooks", ROOT / "examples" / "run_hooks" / "titan_run_hooks.py"
)
assert spec is not None and spec.loader is not None
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)


def train(folder: Path, kind: Any) -> None:
    config = job(
        job={"dump_folder": str(folder)},
        training={"steps": 3, "seq_len": 32, "local_batch_size": 2, "dataset": "synthetic"},
        metrics={"log_freq": 1},
    )
    trainer = Trainer(config, hooks=standard_hooks)
    trainer.hooks.insert(0, kind(trainer))
    try:
        trainer.start()
        trainer.announce("something is odd")
        trainer.run()
    finally:
        trainer.close()


def test_a_webhook_gets_decisions_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            texts.append(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TITAN_ALERT_URL", f"http://127.0.0.1:{server.server_port}/")
    train(tmp_path / "run", hooks.Alerts)
    server.shutdown()
    assert texts == ["run: decision at step 0: something is odd", "run: end at step 3: done"]


def test_a_webhook_that_is_down_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TITAN_ALERT_URL", "http://127.0.0.1:9/")
    train(tmp_path / "run", hooks.Alerts)
    assert "TITAN_ALERT_URL: " in capsys.readouterr().out


def test_mlflow_gets_parameters_and_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    mlflow = SimpleNamespace(
        start_run=lambda run_name: calls.append(("start", run_name)),
        log_params=lambda params: calls.append(("params", params)),
        log_metrics=lambda numbers, step: calls.append(("row", step, numbers)),
        end_run=lambda: calls.append(("end",)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///nowhere")
    train(tmp_path / "run", hooks.MLflow)
    rows = [call for call in calls if call[0] == "row"]
    assert [row[1] for row in rows] == [1, 2, 3] and all(row[2]["loss"] > 0 for row in rows)
    parameters = {
        key: value for call in calls if call[0] == "params" for key, value in call[1].items()
    }
    assert parameters["training.seq_len"] == 32
    assert calls[0] == ("start", "run") and calls[-1] == ("end",)
