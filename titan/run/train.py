"""Program of one rank.

    torchrun -m titan.train JOB.toml [OVERLAY.toml ...] [--section.key=value ...] [--quiet]

The config is read and checked before torch is imported, so that a mistake in it is reported within
a second. The same holds for a run that is finished, or already going on in another process.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from titan.base.errors import explains_itself
from titan.base.failure import RunFailure
from titan.base.run_folder import RunFolder, write_status
from titan.base.signals import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    StopRequest,
    die_with_launcher,
    for_agent,
)
from titan.base.untrusted import InputError, printable, why_not_private
from titan.checkpoint.identity import (
    change_lines,
    changed_settings,
    freedom,
    require_startable,
    step_to_continue,
)
from titan.checks.environment import check_environment
from titan.checks.rules import load_to_run
from titan.config.errors import ConfigError
from titan.config.options import add_quiet
from titan.config.schema import JobConfig
from titan.run.supervisor import Supervisor, explain, supervisor_class

if TYPE_CHECKING:
    from titan.run.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Train. Return the exit code (docs/architecture.md lists them)."""
    stop = StopRequest().install()
    try:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        add_quiet(parser)  # an option of `titan train`, for ranks that torchrun starts
        code = _train(parser.parse_known_args(argv)[1], stop)
    except Exception as error:  # such as one while torch is imported
        failure = explain(error)
        if failure is None:
            raise
        print(failure, file=sys.stderr)
        code = failure.exit_code
    finally:
        stop.disarm()
    return for_agent(code) if stop.requested else code


def before_start(config: JobConfig) -> int | None:
    """Check whether a run may start.

    Returns:
        None if it may; otherwise an exit code: the run is finished, already going on, or
        another job's.
    """
    try:
        saved = require_startable(config)
        finished = is_finished(config)
        if finished:
            _require_same_job(saved, config)
    except InputError as error:
        return _refuse(error)
    if finished:
        if os.environ.get("RANK", "0") == "0":
            print(f"nothing to do: all {config.training.steps:,} steps are done")
        return EXIT_DONE
    folder = Path(config.job.dump_folder)
    try:
        supervisor_class().admit(config)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:  # a full disk still makes folders
            probe.write(bytes(4096))
    except RunFailure as error:
        return _refuse(error)
    except (OSError, ValueError) as error:
        return _refuse_folder(config, error)
    return None


def is_finished(config: JobConfig) -> bool:
    """Return whether this run ended well, and its last checkpoint exists."""
    run_dir, section = Path(config.job.dump_folder), config.checkpoint
    status = RunFolder(run_dir).status
    # The job may ask for more steps than the finished run had.
    if status.state != "done" or status.step < config.training.steps:
        return False
    last = run_dir / section.folder / f"step-{status.step}"
    return section.enable and section.load_step == -1 and last.is_dir()


def _require_same_job(saved: Mapping[str, Any], config: JobConfig) -> None:
    """Raise InputError if a finished run was another job's: "nothing to do" would hide that from the user."""
    changes = changed_settings(saved.get("config") or "", config, sequences=(None, 0))
    changes.pop("training.steps", None)  # a job with fewer steps is finished, too
    if any(freedom(key) != "measured" for key in changes):
        lines = change_lines(changes)
        key, first = lines[0].split(": ", 1)
        also = f" (also {'; '.join(lines[1:5])})" if lines[1:] else ""
        message = (
            f"{first}{also}, but all {config.training.steps:,} steps of {config.job.dump_folder} are done. To train with this, name "
            "another job.dump_folder; to train on, raise training.steps"
        )
        raise InputError(config.source_map.problem(key, message))


def _refuse_folder(config: JobConfig, error: Exception) -> int:
    problem = config.source_map.problem("job.dump_folder", f"cannot be written: {error}")
    return _refuse(ConfigError([problem]))


def _refuse(error: Exception) -> int:
    """Print an error once for all ranks, which read the same file, and return the exit code."""
    # But each rank has its own environment.
    if os.environ.get("RANK", "0") == "0" or check_environment(os.environ):
        print(error, file=sys.stderr)
    else:
        time.sleep(2)  # torchrun ends rank 0 with the first rank that leaves
    return EXIT_USER_ERROR


def _train(argv: Sequence[str], stop: StopRequest) -> int:
    try:
        config, _ = load_to_run(argv, world_size=None, here=True)
    except ConfigError as error:
        return _refuse(error)
    # Refuse before importing torch, which takes seconds.
    if (code := before_start(config)) is not None:
        return code
    supervisor = supervisor_class()(config, stop)
    try:
        try:
            supervisor.begin()
        except RunFailure as error:
            return _refuse(error)
        except OSError as error:
            return _refuse_folder(config, error)
        return _run(config, stop, supervisor)
    finally:
        supervisor.close()


def _run(config: JobConfig, stop: StopRequest, supervisor: Supervisor) -> int:
    """Run the trainer. Return the exit code for any kind of end."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if os.environ.get("RANK", "0") == "0" and restarts:
        allowed = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print(f"started again by torchrun, {restarts} of {allowed} times", file=sys.stderr)
    set_compile_cache(config.compile.cache_folder)
    # Import these after everything that needs no torch.
    from titan.parallel.torch_compat import forget_mesh
    from titan.run.standard_hooks import standard_hooks
    from titan.run.trainer import StartPoint, Trainer

    def build(begin: StartPoint) -> Trainer:
        return Trainer(
            config, hooks=standard_hooks, stop=stop, supervisor=supervisor, begin=begin
        )

    def started() -> Trainer | None:
        return trainer if trainer and trainer.is_started else None

    trainer, failed = None, True
    # Both are called in another thread, which may print while the main thread computes.
    if os.environ.get("RANK", "0") == "0":
        stop.on_stop = lambda name: _answer(name, config, started())
        stop.on_leave = lambda: _say_what_is_lost(config, started())
    else:
        stop.on_leave = lambda: time.sleep(
            1
        )  # torchrun ends all ranks with the first that leaves
    try:
        trainer = build(StartPoint(step=step_to_continue(config)))
        while (code := trainer.run()) is None:
            begin, trainer = trainer.leave(), None  # frees the model
            forget_mesh()
            trainer = build(begin)
        failed = False
        return code
    except Exception as error:
        if stop.is_leaving:  # a peer has left already, which is no failure
            time.sleep(60)  # the thread that knows it ends the process
        failure = explain(error) or error
        if not explains_itself(failure):
            traceback.print_exc()
        return supervisor.fail(failure)
    finally:
        # In this order: first the peers stop expecting heartbeats, then hooks end their threads.
        supervisor.end()
        if trainer:
            trainer.close(failed=failed)


def _answer(signal_name: str, config: JobConfig, trainer: Trainer | None) -> None:
    """Print at once what a signal does, since the running step may take long. None: no trainer has started."""
    text = "stopping after this step and saving"
    if config.checkpoint.why_unsaved:
        text = f"stopping after this step; nothing is saved ({config.checkpoint.why_unsaved})"
    by_hand = signal_name == "SIGINT"
    text += "; Ctrl-C again ends without saving" if by_hand else f" ({signal_name})"
    _say(text, trainer)


def _say_what_is_lost(config: JobConfig, trainer: Trainer | None) -> None:
    """Report the end by a second Ctrl-C on the console and in status.json."""
    step, kept = 0, 0
    if trainer:
        step, kept = trainer.step, trainer.saved_step or trainer.first_step - 1
        if "://" not in config.checkpoint.folder:
            kept = step_to_continue(config)  # a save may be half done
    num, text = step - kept, "ended without saving"
    if num > 0:
        steps = (
            f"{num:,} step{'s' * (num > 1)} since step-{kept}" if kept else f"all {num:,} steps"
        )
        text += f": {steps} {'is' if num == 1 else 'are'} lost"
    folder = Path(config.job.dump_folder)
    write_status(folder, state="stopped", exit_code=EXIT_INTERRUPTED, step=step, reason=text)
    _say(text, trainer)
    if trainer:
        trainer.console.close()  # shows the terminal's cursor again


def _say(text: str, trainer: Trainer | None) -> None:
    """Print a line on rank 0, above the bar."""
    if trainer:
        trainer.console.message(text, always=True)
    else:
        print(text, file=sys.stderr, flush=True)


def set_compile_cache(folder: str) -> None:
    """Set inductor's folder for compiled programs, before inductor is imported.

    Its default is in /tmp, which a restart may find empty. So a single node uses the user's cache
    folder, usually in $HOME. On several nodes that folder is on a network disk, which all ranks
    would write at once: there each node has a folder in its temporary folder. So does a user who
    cannot write into a cache folder. Programs are code: a folder that somebody else owns or can
    write into is not used, and a line says so.
    """
    from titan.checks.machine import why_unwritable
    from titan.data import default_cache_folder

    asked = folder or os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    local = Path(tempfile.gettempdir()) / f"titan-compile-{os.getuid()}"
    usual = default_cache_folder() / "compile"
    ranks = os.environ.get("WORLD_SIZE", "1")
    is_cluster = os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks
    others = [local, usual] if is_cluster or why_unwritable(usual) else [usual, local]
    for path in [*[Path(asked)] * bool(asked), *others]:
        if not (reason := why_not_private(path)):
            break
        if os.environ.get("LOCAL_RANK", "0") == "0":
            text = f"titan: {path} is not used for compiled programs, which run as you do: {reason}"
            print(printable(text), file=sys.stderr)
    else:
        path = Path(tempfile.mkdtemp(prefix="titan-compile-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path.absolute())


def import_all() -> None:
    """Import the modules of `_run`, for a launcher whose forks are the ranks (titan/ops/warm_start.py)."""
    import titan.checkpoint
    import titan.run.trainer  # noqa: F401
    from titan.run.standard_hooks import load_hooks

    load_hooks()
    supervisor_class()


def run_rank() -> NoReturn:
    """Train with the arguments in sys.argv, and end the process with the exit code."""
    faulthandler.enable()
    die_with_launcher()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a file on a full disk
            stream.flush()
    # Not sys.exit: gloo's threads may still free a work object while the interpreter is torn down, and abort a
    # run that has ended well (docs/architecture.md).
    os._exit(code)


if __name__ == "__main__":
    run_rank()
