"""Send a run's alerts to a webhook, and its metrics to MLflow. Both read the files that rank 0 writes, and never stop a run.

TITAN_ALERT_URL: gets a POST of {"text": ...}, which Slack, Mattermost and Teams take, at a spike, a decision and the end of the run.
MLFLOW_TRACKING_URI: gets the numbers of each logged step, and the job's keys as parameters.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from titan.run.hook import Hook
from titan.run.progress import RunProgress

# The events that are sent, with the fields that are said.
_FACTS = {
    "spike": ("what", "value", "z"),
    "decision": ("text",),
    "rewind": ("at",),
    "end": ("state",),
}


class NewRows:
    """Read the rows that are added to a file of JSON lines from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self.offset += len(whole + end)
        yield from map(json.loads, whole.splitlines())


class Alerts(Hook):
    """Post what happens to the run. One thread sends, so that a slow server delays no step."""

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        url = os.environ.get("TITAN_ALERT_URL", "") if trainer.rank == 0 else ""
        # urllib opens files, too.
        self.url = url if url.startswith(("https://", "http://")) else ""
        self.sender = ThreadPoolExecutor(1)

    def start(self) -> None:
        self.events = NewRows(self.trainer.events.path)

    def step_end(self) -> None:
        if self.url and self.trainer.logs_this_step:
            self._send()

    def failed(self, error: Exception) -> None:
        if self.url:
            self._post(f"failed at step {self.trainer.step}: {type(error).__name__}: {error}")

    def close(self) -> None:
        if self.url and hasattr(self, "events"):
            self._send()
        self.sender.shutdown()

    def _send(self) -> None:
        for event in self.events:
            if facts := _FACTS.get(event["event"]):
                said = ", ".join(str(event[key]) for key in facts if key in event)
                self._post(f"{event['event']} at step {event['step']}: {said}")

    def _post(self, text: str) -> None:
        body = json.dumps({"text": f"{self.trainer.run_dir.name}: {text}"}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        self.sender.submit(_open, request)


def _open(request: urllib.request.Request) -> None:
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except OSError as error:
        print(f"TITAN_ALERT_URL: {error}", flush=True)


class MLflow(Hook):
    """Log rows of metrics.jsonl. A row is sent at the next logged step, the last one at the end."""

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.is_on = trainer.rank == 0 and "MLFLOW_TRACKING_URI" in os.environ

    def start(self) -> None:
        if not self.is_on:
            return
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=self.trainer.run_dir.name)
        sections = self.trainer.config.model_dump(mode="json", exclude_defaults=True).items()
        for section, keys in sections:
            if isinstance(keys, dict):
                mlflow.log_params({f"{section}.{key}": value for key, value in keys.items()})
        self.rows = NewRows(self.trainer.run_dir / "metrics.jsonl")

    def step_end(self) -> None:
        if self.is_on and self.trainer.logs_this_step:
            self._log()

    def close(self) -> None:
        if self.is_on and hasattr(self, "rows"):
            self._log()
            self.mlflow.end_run()

    def _log(self) -> None:
        for row in self.rows:
            numbers = {
                key: value for key, value in row.items() if isinstance(value, int | float)
            }
            self.mlflow.log_metrics(numbers, step=row["step"])
