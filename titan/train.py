"""`torchrun -m titan.train JOB.toml [OVERLAY.toml ...] [--section.key=value ...]`: one rank of a run.

The config is read and checked before torch is imported, so that a mistake in it is told within a second.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

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

    from titan.trainer import Trainer, UserError

    trainer = None
    try:
        trainer = Trainer(config, stop=stop)
        return trainer.run()
    except UserError as error:
        print(f"{'' if rank == 0 else f'[rank {rank}] '}{error}", file=sys.stderr)
        return trainer.fail(str(error), EXIT_USER_ERROR) if trainer else EXIT_USER_ERROR
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        return trainer.fail(reason, EXIT_FAILED) if trainer else EXIT_FAILED
    finally:
        if trainer:
            trainer.close()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads may still free a work object while the interpreter is torn down, and abort a
    # run that has ended well.
    os._exit(code)
