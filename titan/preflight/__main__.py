"""One rank: `torchrun ... -m titan.preflight JOB.toml`."""

from __future__ import annotations

import os
import sys

from titan.config.problems import ConfigError
from titan.preflight.cli import main

if __name__ == "__main__":
    try:
        code = main()
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) == 0:  # every rank reads the same file
            print(error, file=sys.stderr)
        code = 2
    sys.stdout.flush()
    # As in titan/train.py: gloo's threads may be at work while the interpreter is torn down.
    os._exit(code)
