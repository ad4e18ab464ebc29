"""Server of the live page and of the JSON that it polls: the addresses / and /data. Neither takes a path, and nothing is written.

The content of a run's files reaches the page as JSON and is shown as text, never as markup. The page's policy allows only its
own script. The server refuses requests for the name of another host, so no web page can read a run through the browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .reading import RunReader, read_all

_MOST = 64  # connections at once, each with a thread
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def page(data: Any = None) -> str:
    """Return the page. A page with data is static and polls nothing."""
    # A "<" in the text of a run must not begin a tag, such as </script>.
    text = json.dumps(data).replace("<", "\\u003c")
    return _template().replace("/*DATA*/null", text)


@cache
def _template() -> str:
    return (files("titan.contrib.watch") / "page.html").read_text(encoding="utf-8")


def _policy(text: str) -> str:
    """Return the Content-Security-Policy that allows only the script of this page."""
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Server(ThreadingHTTPServer):
    """HTTP server of the live page of some runs.

    Attributes:
        readers: readers of the runs.
        host: address that the server listens on.
        lock: lock of the readers, since each request has its own thread.
    """

    # An open connection must not keep the process alive.
    daemon_threads = True

    def __init__(self, readers: Sequence[RunReader], *, host: str, port: int) -> None:
        """Listen on an address.

        Args:
            readers: readers of the runs.
            host: address to listen on.
            port: port to listen on. 0 takes a free port, `server_port`.

        Raises:
            OSError: The port is taken.
        """
        self.readers, self.host = readers, host
        self.lock = threading.Lock()
        self._room = threading.Semaphore(_MOST)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, or close it if there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()


class _Handler(BaseHTTPRequestHandler):
    """Handler of the page's requests."""

    timeout = 10  # seconds without a request
    server: Server

    def do_GET(self) -> None:
        # Against DNS rebinding: a web page may point its own name at 127.0.0.1.
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            address = urlsplit(self.path)
        except ValueError:  # a bracket without its partner
            return self.send_error(400)
        if self.server.host in LOOPBACK and name not in LOOPBACK:
            return self.send_error(403, "this page is for this machine only")
        if address.path == "/":
            text = page()
            return self._answer("text/html", text, {"Content-Security-Policy": _policy(text)})
        # No other path exists, so no file of this machine can be asked for.
        if address.path != "/data":
            return self.send_error(404)
        with self.server.lock:  # each request has its own thread, and readers are shared
            answer = read_all(self.server.readers, _positions(address.query))
        self._answer("application/json", json.dumps(answer), {})

    def _answer(self, kind: str, text: str, headers: dict[str, str]) -> None:
        body = text.encode()
        headers |= {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",  # the next poll must reach the server
            "X-Content-Type-Options": "nosniff",
        }
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page polls every two seconds."""


def _positions(query: str) -> list[tuple[int, int]]:
    """Parse at=GENERATION.ROWS,... A malformed entry counts as a client without rows."""
    texts = parse_qs(query).get("at", [""])[0].split(",")
    # int() of a very long text would take long.
    found = (re.fullmatch(r"(\d{1,15})\.(\d{1,15})", text) for text in texts)
    return [(int(match[1]), int(match[2])) if match else (0, 0) for match in found]
