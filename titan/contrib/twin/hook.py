"""Hook that compares a run with its simulation, and names the part that is responsible if it drifts (`simulator.twin`).

The job is simulated once, in a separate process on rank 0's machine with the lowest priority, so
that the run neither waits for it nor slows down. If it cannot be simulated, a warning gives the
reason, and the run is compared with its own first steps.

Most measurements exist already: RankTimes times ranks, the step timer waits and saves, torch's
allocator counts its retries. This hook adds the phases of a step, and the links, which titan.ops.bench
measures when a step has become slow without another explanation. The ranks exchange their
measurements in the trainer's one all-reduce. titan/contrib/twin/drift.py decides. titan/contrib/twin/README.md defines
the columns.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch.distributed as dist

from titan.data.packing import Batch
from titan.observe.clock import Window
from titan.observe.memory import allocator_retries
from titan.ops import bench
from titan.ops.rank_times import RankTimes
from titan.ops.ranks import PhaseClock
from titan.run.hook import Hook, StepResult
from titan.run.progress import RunProgress
from titan.step.train_step import StepReport

from .drift import Drift, DriftWatch, RowTimes, SlowLink

_LOG = logging.getLogger("titan")
_MESSAGE_BYTES = {"cpu": 2**19, "other": 2**25}
_ROUNDS = 10
_FASTER = 0.9  # of a step's time: faster steps need new measurements of links
# Phases of a step, each with the simulator's phases that it consists of.
_PHASES = {
    "forward": ("forward",),
    "backward": ("recompute", "backward"),
    "update": ("clip", "optimizer"),
}
_CHILD_PROGRAM = (
    "import os, sys; from titan.base.signals import die_with_parent; die_with_parent(); os.nice(19); "
    "from titan.cli import main; sys.exit(main(sys.argv[1:]))"
)
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


class Twin(Hook):
    """Hook that writes predicted and measured times at logged steps, and reports drifts."""

    priority = 130

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer, config = trainer, trainer.config
        self.clock = PhaseClock(device=trainer.device)
        trainer.train_step.call_on_event(self.clock.mark)
        self.shares_cores = is_cpu = trainer.device.type == "cpu"
        self.watch = DriftWatch(
            log_freq=config.metrics.log_freq,
            shares_cores=is_cpu,
            same_work=trainer.layout.pp == 1,
        )
        self.message_bytes = _MESSAGE_BYTES["cpu" if is_cpu else "other"]
        self.prediction = Prediction(trainer) if trainer.rank == 0 else None
        # A CPU's profile is an order of magnitude: its times are scaled to the run's.
        section: Any = config.simulator
        self.is_scaled = is_cpu and section.twin_hardware == "auto"
        self.first_links: dict[tuple[str, int, int], float] = {}
        self.wants_links = self.measures_links = False
        self.rows_since_links, self.links_at_s = (
            0,
            inf,
        )  # a step's time when links were measured
        self.since_step = self.retries = 0
        self.host_s = self.own_host_s = self._spent_s = 0.0
        self._host_since_s: float | None = None

    def start(self) -> None:
        """Start the simulation."""
        self.rewound()
        if self.prediction is not None:
            self.prediction.start()

    def rewound(self) -> None:
        """Restart the measurements at the current step."""
        self.since_step, self._host_since_s = self.trainer.step, None

    # ---- measuring -----------------------------------------------------------------------------

    def before_forward(self, batches: Sequence[Batch]) -> None:
        """Begin to time the phases of a step."""
        self._leave_host()
        self.clock.begin()

    def updated(self, report: StepReport) -> None:
        """End the phases of a step."""
        self.clock.end("update")
        self._enter_host()

    def flags(self) -> Sequence[float]:
        """Return whether to measure links, and at logged steps slots for each rank: its data wait, its host's time, its retries."""
        self._leave_host()  # the all-reduce waits for other ranks
        trainer, wants_links = self.trainer, self.wants_links
        self.wants_links = False
        if not trainer.logs_this_step:
            return (wants_links,)
        num_steps = max(trainer.step - self.since_step, 1)
        self.since_step = trainer.step
        self.own_host_s, self.host_s = self.host_s / num_steps, 0.0
        retries, self.retries = allocator_retries() - self.retries, allocator_retries()
        own = (trainer.timer.data_wait_s / num_steps, self.own_host_s, retries)
        slots = [[0.0] * trainer.world_size for _ in own]
        for of_ranks, value in zip(slots, own, strict=True):
            of_ranks[trainer.rank] = value
        return [wants_links, *(value for of_ranks in slots for value in of_ranks)]

    def result(self, result: StepResult) -> None:
        """Take the decision to measure links, which is the same on all ranks."""
        self._enter_host()
        # All ranks take the decision in the same step, so that they measure at the same time.
        self.measures_links |= result.flags[self][0] > 0

    def step_end(self) -> None:
        """Measure links if the ranks have decided so."""
        if self.measures_links:
            self.measures_links = False
            with self.trainer.timer.pause("profiling"):
                self._measure_links()

    def _enter_host(self) -> None:
        """Begin to time the host's work between steps."""
        self._host_since_s, self._spent_s = time.perf_counter(), self._out_of_step_s()

    def _leave_host(self) -> None:
        """End to time the host's work between steps."""
        if self._host_since_s is not None:
            pauses_s = self._out_of_step_s() - self._spent_s
            self.host_s += max(0.0, time.perf_counter() - self._host_since_s - pauses_s)
        self._host_since_s = None

    def _out_of_step_s(self) -> float:
        """Return the seconds that the step timer has counted as pauses and as waiting for data."""
        return sum(self.trainer.timer.total_s.values())

    def _measure_links(self) -> None:
        """Measure the links between neighbours on each axis of the mesh.

        All ranks call this at the same time.
        """
        trainer, mine = self.trainer, dict[tuple[str, int, int], float]()
        for axis in trainer.mesh.mesh_dim_names or ():
            group = trainer.mesh.get_group(axis)
            links = bench.links_s(
                trainer.device, self.message_bytes, group=group, rounds=_ROUNDS
            )
            # Both ends have measured it; one of them reports.
            mine |= {(axis, trainer.rank, p): s for p, s in links.items() if p > trainer.rank}
        all_links = [mine] * trainer.world_size
        dist.all_gather_object(all_links, mine)
        links = {key: s for of_rank in all_links for key, s in of_rank.items()}
        first = self.first_links
        # Measured as the run settled, and again when it got faster.
        if not self.watch.suspects_link:
            self.first_links = {key: min(s, first.get(key, s)) for key, s in links.items()}
        elif first:
            slow = []
            for (axis, a, b), now_s in links.items():
                first_s = first[axis, a, b]
                # There and back.
                cost_s = (
                    (now_s - first_s) * self._bytes_per_step(axis) / (2 * self.message_bytes)
                )
                slow.append(
                    SlowLink(axis=axis, ranks=(a, b), ratio=now_s / first_s, cost_s=cost_s)
                )
            self.watch.measured_links(slow)

    def _bytes_per_step(self, axis: str) -> float:
        """Return the approximate bytes that a rank sends along an axis in a step.

        They come from the simulation, or from the sizes of FSDP's parameters and gradients.
        """
        if self.prediction is not None and (facts := self.prediction.poll()):
            by_axis = facts["comm"]["by_axis"]
            return sum(row["bytes"] for axes, row in by_axis.items() if axis in axes.split("+"))
        parts = self.trainer.train_step.model_parts
        return 3.0 * sum(
            p.numel() * p.element_size() for part in parts for p in part.parameters()
        )

    # ---- deciding ------------------------------------------------------------------------------

    def columns(self, window: Window, result: StepResult) -> dict[str, Any]:
        """Return the columns of a logged row."""
        trainer = self.trainer
        phases, times = self.clock.take(window.num_steps), trainer.hook(RankTimes)
        slots = result.flags[self][1:]
        if not slots or times is None:  # a row of a validation between logged steps
            return {}
        columns: dict[str, Any] = {f"measured/{phase}_s": s for phase, s in phases.items()}
        columns["measured/host_s"] = self.own_host_s
        # Rank 0 judges, with the measurements of all ranks.
        if self.prediction is not None:
            facts = self.prediction.poll()
            # Where the simulation takes cores from the ranks, the run settles after it.
            if not (self.prediction.is_running and self.shares_cores):
                world = trainer.world_size
                data_s, host_s, retries = (slots[n * world : (n + 1) * world] for n in range(3))
                own_s = [
                    own - data for own, data in zip(result.flags[times], data_s, strict=True)
                ]
                row = RowTimes(
                    step_s=window.step_s,
                    own_s=own_s,
                    data_s=data_s,
                    host_s=host_s,
                    retries=retries,
                    save_s=window.paused_s.get("checkpoint", 0.0),
                    num_steps=window.num_steps,
                )
                columns |= self._judge(row)
            columns |= self._predicted(facts) if facts else {}
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in columns.items()}

    def _judge(self, row: RowTimes) -> dict[str, Any]:
        """Return the columns about drift."""
        watch, before = self.watch, self.watch.current
        drift = watch.add(row)
        self._ask_for_links()
        self._report(before, drift)
        if not (expected_s := watch.expected_s):
            return {}
        if drift is None:
            none = {"drift/cost_s": 0.0, "drift/part": "", "drift/text": ""}
            return {"drift/ratio": row.step_s / expected_s, **none}
        facts = {"drift/cost_s": drift.cost_s, "drift/part": drift.part}
        return {"drift/ratio": drift.ratio, **facts, "drift/text": self._where(drift)}

    def _predicted(self, facts: Mapping[str, Any]) -> dict[str, float]:
        """Return the columns of the prediction; none of a scaled prediction until the run has settled."""
        scale, memory = 1.0, facts["per_rank"][0]
        if self.is_scaled:
            if not self.watch.expected_s:
                return {}
            scale = self.watch.expected_s / facts["step_time_s"]
        spans = facts["time"]["span_s"]
        by_phase = {
            phase: sum(spans.get(name, 0.0) for name in names)
            for phase, names in _PHASES.items()
        }
        if self.trainer.layout.pp > 1:  # measured together
            by_phase["backward"] += by_phase.pop("forward")
        by_phase |= {"step": facts["step_time_s"], "exposed": facts["comm"]["exposed_s"]}
        columns = {f"predicted/{name}_s": scale * s for name, s in by_phase.items()}
        columns["predicted/memory_gib"] = memory["peak_reserved_gib"]
        columns["predicted/memory_active_gib"] = memory["peak_active_gib"]
        return columns | {"predicted/scale": scale}

    def _ask_for_links(self) -> None:
        """Request a measurement of links when the run has settled or got faster, and again when links are suspected."""
        self.rows_since_links += 1
        watch = self.watch
        is_faster = watch.expected_s < _FASTER * self.links_at_s
        # Twice for each window of rows that are judged together.
        is_due = (
            watch.suspects_link or is_faster
        ) and self.rows_since_links > watch.num_rows // 2
        if watch.expected_s and self.trainer.world_size > 1 and is_due:
            self.wants_links, self.rows_since_links = True, 0
            if not watch.suspects_link:
                self.links_at_s = watch.expected_s

    def _report(self, before: Drift | None, drift: Drift | None) -> None:
        """Log the beginning and the end of a drift."""
        trainer = self.trainer
        if (before and (before.part, before.ranks)) == (drift and (drift.part, drift.ranks)):
            return
        if drift is None:
            text = "the run is as fast as it was again"
            _LOG.info(f"step {trainer.step}: {text}")
            trainer.events.write("drift_over", step=trainer.step, text=text)
            return
        text = f"{self._where(drift)}; it costs {drift.cost_s * 1e3:,.0f} ms of each step"
        if drift.ratio > 1:
            text += f", which takes {drift.ratio:.2f} times as long as it did"
        _LOG.warning(f"step {trainer.step}: {text}")
        facts = {
            "part": drift.part,
            "ranks": list(drift.ranks),
            "cost_s": round(drift.cost_s, 6),
        }
        trainer.events.write("drift", step=trainer.step, text=text, **facts)

    def _where(self, drift: Drift) -> str:
        """Return the slow part, with the hosts."""
        times = self.trainer.hook(RankTimes)
        hosts = dict.fromkeys(times.hosts[rank] for rank in drift.ranks) if times else ()
        return drift.text + (f", on {' and '.join(hosts)}" if hosts else "")

    def close(self) -> None:
        """End the simulation."""
        if self.prediction is not None:
            self.prediction.stop()


class Prediction:
    """Simulation of the job in a separate process."""

    def __init__(self, trainer: RunProgress) -> None:
        self.trainer = trainer
        self.file = trainer.run_dir / "twin.json"
        self.messages = trainer.run_dir / "logs" / "twin.txt"
        self.process: subprocess.Popen[bytes] | None = None
        self.facts: Mapping[str, Any] = {}

    def start(self) -> None:
        """Start the process. It reads the run's resolved config, which has been written."""
        trainer = self.trainer
        self.file.unlink(missing_ok=True)
        section: Any = trainer.config.simulator
        name = section.twin_hardware
        if name == "auto" and trainer.device.type == "cpu":
            name = "cpu"
        elif name == "auto":
            name = trainer.hardware.name if trainer.hardware else ""
        if not name:
            return self._warn(
                "the device is not known; name its profile in simulator.twin_hardware"
            )
        job = [str(trainer.run_dir / "config.toml"), "--world-size", str(trainer.world_size)]
        options = ["--hardware", name, "--json", str(self.file), "--processes", "1"]
        # As a laptop would run it: not as a rank, and without a device.
        environment = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            self.messages.parent.mkdir(
                exist_ok=True
            )  # the first line of a log would make it later
            with self.messages.open("wb") as messages:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _CHILD_PROGRAM, "sim", *job, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    env=environment,
                    start_new_session=True,  # with the processes that trace
                )
        except OSError as error:
            self._warn(str(error))

    def poll(self) -> Mapping[str, Any]:
        """Return the simulation's facts, or an empty dict if there are none yet or at all."""
        if self.process is not None and (code := self.process.poll()) is not None:
            self.process = None
            try:
                if code:
                    lines = self.messages.read_text(errors="replace").strip().splitlines()
                    # Mistakes in the job are counted in the line after them.
                    said = [
                        line for line in lines if not line.endswith(("problem", "problems"))
                    ]
                    raise ValueError(said[-1] if said else f"exit code {code}")
                self.facts = json.loads(self.file.read_text())
            except (OSError, ValueError) as error:
                self._warn(str(error))
        return self.facts

    @property
    def is_running(self) -> bool:
        """Whether the job is still being simulated."""
        return self.process is not None

    def stop(self) -> None:
        """End the process, if it still runs."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _warn(self, why: str) -> None:
        """Log the reason why there is no simulation."""
        _LOG.warning(
            f"twin: the job is not simulated: {why}; the run is compared with its own first steps"
        )
