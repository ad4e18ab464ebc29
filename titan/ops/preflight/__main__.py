"""Entry point of one rank: `torchrun ... -m titan.ops.preflight JOB.toml`."""

from __future__ import annotations

import os
import sys

from titan.base.signals import die_with_launcher

if __name__ == "__main__":
    die_with_launcher()  # before the other imports, which take seconds
    from titan.checks.environment import check_environment
    from titan.config.errors import ConfigError

    from .cli import main

    try:
        code = main()
    except ConfigError as error:
        # Every rank reads the same file, but has its own environment.
        if os.environ.get("RANK", "0") == "0" or check_environment(os.environ):
            print(error, file=sys.stderr)
        code = 2
    sys.stdout.flush()
    # As in titan/run/train.py: gloo's threads may be at work while the interpreter is torn down.
    os._exit(code)
