"""`torchrun -m titan.train JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`: one rank of a run.

The config is read and checked before torch is imported, so that a mistake in it is told within a second. So is what
else can be known by then: that the run is finished, or goes on already in another process.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from titan.config.environment import check_environment
from titan.config.errors import ConfigError
from titan.config.rules import load_to_run
from titan.config.schema import JobConfig
from titan.health import flight_recorder
from titan.health.flight_recorder import FlightRecorder
from titan.health.monitor import Failure, Heartbeat
from titan.health.run_lock import RunLock, RunLocked
from titan.health.signals import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_USER_ERROR,
    StopRequest,
    die_with_parent,
    for_agent,
    has_agent,
)
from titan.health.stacks import main_thread, stacks_file, where_failed
from titan.observe.runinfo import read_status, write_status

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code (docs/architecture.md lists them)."""
    stop = StopRequest().install()
    try:
        code = _train(sys.argv[1:] if argv is None else argv, stop)
    finally:
        stop.disarm()
    return for_agent(code) if stop.requested else code


def before_start(config: JobConfig) -> int | None:
    """An exit code, where there is nothing to start: the run is finished, which changes no file, or goes on elsewhere."""
    rank = int(os.environ.get("RANK", 0))
    if is_finished(config):
        if rank == 0:
            print(f"nothing to do: all {config.training.steps:,} steps are done")
        return EXIT_DONE
    folder = Path(config.job.dump_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:  # a full disk still makes folders
            probe.write(bytes(4096))
        RunLock(folder).require_free()
    except RunLocked as error:
        return _refuse(error)
    except (OSError, ValueError) as error:
        problem = config.source_map.problem("job.dump_folder", f"cannot be written: {error}")
        return _refuse(ConfigError([problem]))
    return None


def is_finished(config: JobConfig) -> bool:
    """Whether this run ended well, and its last checkpoint is there."""
    run_dir, section = Path(config.job.dump_folder), config.checkpoint
    status = read_status(run_dir)
    step = status.get("step")
    if status.get("state") != "done" or not isinstance(step, int) or step < config.training.steps:
        return False
    last = run_dir / section.folder / f"step-{step}"
    return section.enable and section.load_step == -1 and last.is_dir()


def _refuse(error: ConfigError | RunLocked) -> int:
    """Report on rank 0, for every rank reads the same file; others give it the time, as torchrun ends it with the first rank
    that leaves. Each rank has an environment of its own, though."""
    if os.environ.get("RANK", "0") == "0" or check_environment(os.environ):
        print(error, file=sys.stderr)
    else:
        time.sleep(2)
    return EXIT_USER_ERROR


def _train(argv: Sequence[str], stop: StopRequest) -> int:
    try:
        config, _ = load_to_run(argv, world_size=None, here=True)
    except ConfigError as error:
        return _refuse(error)
    rank = int(os.environ.get("RANK", 0))
    if (code := before_start(config)) is not None:
        return code
    lock = RunLock(Path(config.job.dump_folder))
    try:
        if rank == 0:
            lock.acquire()
        return _train_alone(config, stop)
    except RunLocked as error:
        return _refuse(error)
    finally:
        lock.release()


def _train_alone(config: JobConfig, stop: StopRequest) -> int:
    """One rank of the only run in its folder."""
    rank, folder = int(os.environ.get("RANK", 0)), Path(config.job.dump_folder)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if rank == 0 and restarts:
        allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print(f"started again by torchrun, {restarts} of {allowed} times", file=sys.stderr)
    _set_compile_cache(config.compile.cache_folder)
    trainer = None

    def too_late() -> None:
        at, stacks = main_thread(), stacks_file(folder, rank)
        reason = (
            f"{stop.seen} asked rank {rank} to stop, but the fault_tolerance.grace_seconds = "
            f"{config.fault_tolerance.grace_seconds} are over: it is in {at.text}. "
        )
        saved = stop.exit_code is not None
        reason += "All is saved" if saved else "The last checkpoint is from before"
        if not saved:
            step = trainer.step if trainer else None
            write_status(folder, state="failed", exit_code=EXIT_FAILED, step=step, reason=reason)
        print(f"{reason}. Stacks of all threads: {stacks}", file=sys.stderr, flush=True)
        flight_recorder.dump(reason)  # the longest, and there is not much time

    stop.allow(config.fault_tolerance.grace_seconds, report=too_late)
    this = {
        "run_dir": folder,
        "rank": rank,
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "step": lambda: trainer.step if trainer else 0,
    }
    flight_recorder.install(FlightRecorder(config.comm, **this))
    heartbeat = Heartbeat(config.comm.heartbeat_timeout_seconds, **this)
    from titan.checkpoint import SaveFailed
    from titan.health.errors import describe_error, describe_failure
    from titan.health.recovery import NonFiniteError, SpikeError
    from titan.hooks import standard_hooks
    from titan.observe.sinks import MissingExtra
    from titan.parallel.activation import KeepError
    from titan.parallel.float8 import Float8Error
    from titan.parallel.replicas import ReplicaError
    from titan.trainer import Trainer
    from titan.untrusted import InputError

    def connected() -> None:
        flight_recorder.begin()
        heartbeat.start()

    def asked() -> None:
        flight_recorder.dump(f"SIGUSR2 in step {this['step']()}")
        print(f"[rank {rank}] stacks of all threads: {stacks_file(folder, rank)}", file=sys.stderr)

    def terminated(reason: str) -> None:
        heartbeat.tell(Failure(reason, step=this["step"](), rank=rank))
        flight_recorder.dump(reason)

    def fail(error: Exception, code: int, *, expected: bool = True) -> int:
        step = this["step"]()
        reason = describe_failure(error, rank=rank, step=step)
        expected = expected and reason is None
        if reason is None:
            reason = str(error) if expected else describe_error(error, rank=rank, step=step)
        run = heartbeat.tell(Failure(reason, step=step, exit_code=code, rank=rank))
        if not expected:
            flight_recorder.dump(reason, at=where_failed(error))
        said = {"exit_code": run.exit_code, "step": run.step or None, "reason": run.reason}
        with suppress(OSError):  # the disk may be what failed
            write_status(folder, state=run.state, **said)
        logging.getLogger("titan").error(reason, extra={"last_words": True})
        print(f"{'' if rank == 0 else f'[rank {rank}] '}{reason}", file=sys.stderr)
        if rank == 0 and run.reason != reason:
            print(run.reason, file=sys.stderr)
        heartbeat.linger()
        return code

    stop.on_ask = asked
    flight_recorder.catch_terminate(terminated)
    try:
        hooks = partial(standard_hooks, agree=heartbeat.tell)
        trainer = Trainer(config, hooks=hooks, stop=stop, connected=connected)
        return trainer.run()
    except (InputError, MissingExtra, Float8Error, KeepError) as error:
        return fail(error, EXIT_USER_ERROR)
    except (NonFiniteError, SpikeError, SaveFailed, ReplicaError) as error:
        return fail(error, EXIT_FAILED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return fail(error, EXIT_FAILED)
        traceback.print_exc()
        return fail(error, EXIT_FAILED, expected=False)
    finally:
        heartbeat.close()
        if trainer:
            trainer.close()
        flight_recorder.close()


def _set_compile_cache(folder: str) -> None:
    """Where inductor keeps programs; it reads this once, when it is imported. Its own default lies in /tmp, which a restart may
    find empty."""
    from titan.data.cache import default_cache_folder

    if folder or "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        path = Path(folder) if folder else default_cache_folder() / "compile"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path.absolute())


if __name__ == "__main__":
    faulthandler.enable()
    if has_agent():
        die_with_parent()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads may still free a work object while the interpreter is torn down, and abort a
    # run that has ended well.
    os._exit(code)
