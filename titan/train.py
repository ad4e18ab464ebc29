"""`torchrun -m titan.train JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`: one rank of a run.

The config is read and checked before torch is imported, so that a mistake in it is told within a second.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from titan.config.load import ConfigError, load_from_argv
from titan.config.rules import check_to_run
from titan.signals import EXIT_FAILED, EXIT_USER_ERROR, StopRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit code (docs/architecture.md lists them)."""
    stop = StopRequest().install()
    rank = int(os.environ.get("RANK", 0))
    try:
        config = load_from_argv(sys.argv[1:] if argv is None else argv)
        check_to_run(config, world_size=int(os.environ.get("WORLD_SIZE", 1)))
    except ConfigError as error:
        if rank == 0:  # every rank reads the same file
            print(error, file=sys.stderr)
        return EXIT_USER_ERROR

    _set_compile_cache(config.compile.cache_folder)
    from titan.observe.failure import describe_failure, record_collectives
    from titan.observe.runinfo import write_status
    from titan.trainer import NonFiniteError, SaveFailed, Trainer, UserError

    record_collectives(config.comm.trace_buf_size)
    trainer = None

    def fail(error: Exception, code: int) -> int:
        step = trainer.step if trainer else 0
        reason = describe_failure(error, rank=rank, step=step) or str(error)
        folder = Path(config.job.dump_folder)
        write_status(folder, state="failed", exit_code=code, step=step, reason=reason)
        logging.getLogger("titan").error(reason)
        print(f"{'' if rank == 0 else f'[rank {rank}] '}{reason}", file=sys.stderr)
        return code

    try:
        trainer = Trainer(config, stop=stop)
        return trainer.run()
    except UserError as error:
        return fail(error, EXIT_USER_ERROR)
    except (NonFiniteError, SaveFailed) as error:
        return fail(error, EXIT_FAILED)
    except Exception as error:
        traceback.print_exc()
        return fail(error, EXIT_FAILED)
    finally:
        if trainer:
            trainer.close()


def _set_compile_cache(folder: str) -> None:
    """Where inductor keeps programs; it reads this once, when it is imported. Its own default lies in /tmp, which a restart may
    find empty."""
    from titan.data.cache import default_cache_folder

    if folder or "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        path = Path(folder) if folder else default_cache_folder() / "compile"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path.absolute())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads may still free a work object while the interpreter is torn down, and abort a
    # run that has ended well.
    os._exit(code)
