"""`titan watch RUN [RUN ...] [--port P] [--host H] [--once FILE.html]`."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from titan.observe.rows import MAX_ROWS
from titan.watch.reading import RunReader, WatchError, read_all
from titan.watch.server import LOOPBACK, Server, page

PORT = 6060
_ALL_ROWS = 20_000  # of all runs together, so that many runs make no larger page


def main(argv: list[str] | None = None) -> int:
    """The command; 2 for the user's mistakes."""
    parser = argparse.ArgumentParser(
        prog="titan watch", description="A live page of runs: curves, throughput, ranks, events."
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", type=Path, help="run folder (job.dump_folder)")
    add("--port", type=int, default=PORT, metavar="P", help=f"default: {PORT}; 0: a free one")
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on; default: 127.0.0.1")
    add("--once", type=Path, metavar="FILE.html", help="write the page as it is now, and end")
    arguments = parser.parse_args(argv)
    try:
        readers = open_runs(arguments.runs)
        if arguments.once:
            arguments.once.write_text(page(read_all(readers)), encoding="utf-8")
            print(f"wrote {arguments.once}")
            return 0
        server = Server(readers, host=arguments.host, port=arguments.port)
    except (WatchError, OSError, OverflowError) as error:
        print(f"titan watch: {_told(error, arguments)}", file=sys.stderr)
        return 2
    url = f"http://{_in_url(arguments.host)}:{server.server_port}/"
    print(f"watching {', '.join(map(str, arguments.runs))} at {url} (Ctrl-C ends)", flush=True)
    if arguments.host in LOOPBACK:
        port = server.server_port
        print(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}")
    else:
        print(
            "anyone who reaches this port can read these runs; 127.0.0.1 and an ssh tunnel are safer"
        )
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        server.server_close()
    return 0


def open_runs(paths: list[Path]) -> list[RunReader]:
    """Readers; names are as long as they must be to tell the runs apart. Raises WatchError."""
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    limit = max(min(MAX_ROWS, _ALL_ROWS // len(paths)), 40)
    return [
        RunReader(path, name=name, limit=limit) for path, name in zip(paths, names, strict=True)
    ]


def _told(error: Exception, arguments: argparse.Namespace) -> str:
    if isinstance(error, WatchError) or arguments.once:
        return str(error)
    return f"cannot listen on {arguments.host} port {arguments.port} ({error}); --port 0 takes a free one"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
