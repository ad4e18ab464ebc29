"""A page on loopback, and the JSON that it polls. Two addresses, / and /data; neither takes a path, and nothing is written.

Whatever a run's files say reaches the page as JSON and is set as text, never as markup; the page's own script is the only one that
its policy lets run. Requests for another host's name are refused, so that no web page can read a run through the browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from titan.watch.reading import RunReader, read_all

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def page(data: Any = None) -> str:
    """The page; with data a static one, which polls nothing."""
    # No "<" of a run's text may be the beginning of a tag.
    text = json.dumps(data).replace("<", "\\u003c")
    return _template().replace("/*DATA*/null", text)


@cache
def _template() -> str:
    return (files("titan.watch") / "page.html").read_text(encoding="utf-8")


def _policy(text: str) -> str:
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class Server(ThreadingHTTPServer):
    """Serves until `shutdown`. Raises OSError where the port is taken; port 0: a free one, `server_port` says which."""

    daemon_threads = True

    def __init__(self, readers: Sequence[RunReader], *, host: str, port: int) -> None:
        self.readers, self.host = readers, host
        self.lock = threading.Lock()
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.server.host in LOOPBACK and name not in LOOPBACK:
            return self.send_error(403, "this page is for this machine only")
        address = urlsplit(self.path)
        if address.path == "/":
            text = page()
            return self._answer("text/html", text, {"Content-Security-Policy": _policy(text)})
        if address.path != "/data":
            return self.send_error(404)
        with self.server.lock:
            answer = read_all(self.server.readers, _positions(address.query))
        self._answer("application/json", json.dumps(answer), {})

    def _answer(self, kind: str, text: str, headers: dict[str, str]) -> None:
        body = text.encode()
        self.send_response(200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A poll every two seconds is no news."""


def _positions(query: str) -> list[tuple[int, int]]:
    """at=GENERATION.ROWS,... ; whatever is something else counts as nothing known."""
    found = []
    for text in parse_qs(query).get("at", [""])[0].split(","):
        generation, _, rows = text.partition(".")
        known = generation.isdecimal() and rows.isdecimal() and len(text) < 30
        found.append((int(generation), int(rows)) if known else (0, 0))
    return found
