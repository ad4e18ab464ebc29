"""Command `titan watch RUN [RUN ...] [--port P] [--host H] [--once FILE.html]`."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path

from titan.base.run_folder import RunFolder
from titan.base.untrusted import InputError
from titan.config.options import table_parser
from titan.config.toml import table_beside
from titan.tools.row_files import MAX_ROWS, run_names

from .reading import RunReader, read_all
from .server import LOOPBACK, Server, page

_ALL_ROWS = 20_000  # of all runs together: many runs must not make the page slow


def main(argv: list[str]) -> int:
    """Run the command and return its exit code.

    Args:
        argv: arguments.

    Raises:
        InputError: A mistake of the user, which titan.cli reports.
    """
    parser = table_parser("watch", table_beside(__file__, "command.toml"))
    arguments = parser.parse_args(argv)
    readers, host = open_runs(RunFolder.find(arguments.runs)), arguments.host
    if arguments.once:
        try:
            arguments.once.write_text(page(read_all(readers)), encoding="utf-8")
        except OSError as error:
            raise InputError(str(error)) from None
        print(f"wrote {arguments.once}")
        return 0
    try:
        server = Server(readers, host=host, port=arguments.port)
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        raise InputError(
            f"cannot listen on {host} port {arguments.port} ({error}); --port 0 takes a free one"
        ) from None
    port = server.server_port
    # An IPv6 address needs brackets in a URL.
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    print(f"watching {', '.join(map(str, arguments.runs))} at {url} (Ctrl-C ends)")
    # Most machines that train have no browser.
    if host in LOOPBACK:
        print(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}")
    else:
        print(
            "anyone who reaches this port can read these runs; 127.0.0.1 and an ssh tunnel are safer"
        )
    sys.stdout.flush()
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    print()
    return 0


def open_runs(paths: list[Path]) -> list[RunReader]:
    """Return a reader for each run.

    Args:
        paths: folders of runs.

    Raises:
        InputError: A folder is not the folder of a run.
    """
    # Forty rows still show the course of a run.
    limit = max(min(MAX_ROWS, _ALL_ROWS // len(paths)), 40)
    names = run_names(paths)
    return [RunReader(p, name=n, limit=limit) for p, n in zip(paths, names, strict=True)]
