"""A Hugging Face hub on loopback: the part of its protocol that downloads use, over one folder of files."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Files of repositories by "models/OWNER/NAME" or "datasets/OWNER/NAME", and how the server misbehaves.

    large: stored by SHA-256, as the hub stores weights. cut: end connections after so many bytes of a file, once.
    spoil: send other bytes than were hashed. gated: repositories that want this token.
    """

    repos: dict[str, dict[str, bytes]]
    large: tuple[str, ...] = (".safetensors",)
    cut: int | None = None
    spoil: bool = False
    gated: dict[str, str] = field(default_factory=dict)
    url: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            repo = "/".join(parts[1:4])
            return self.describe(repo, tree="tree" in parts[4:5])
        prefix = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if parts[0] == "datasets" else parts
        repo, name = f"{prefix}/{parts[0]}/{parts[1]}", "/".join(parts[4:])
        self.file(repo, name, body=body)

    def refused(self, repo: str) -> bool:
        token = self.hub.gated.get(repo)
        if repo not in self.hub.repos:
            self.fail(404, "RepoNotFound")
        elif token and self.headers.get("Authorization") != f"Bearer {token}":
            self.fail(403, "GatedRepo")
        else:
            return False
        return True

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def describe(self, repo: str, *, tree: bool) -> None:
        if self.refused(repo):
            return
        siblings, entries = [], []
        for name, content in self.hub.repos[repo].items():
            oid, size = git_hash(content), len(content)
            siblings.append({"rfilename": name, "size": size, "blobId": oid})
            entries.append({"type": "file", "path": name, "size": size, "oid": oid})
            if name.endswith(self.hub.large):
                sha = hashlib.sha256(content).hexdigest()
                siblings[-1]["lfs"] = {"sha256": sha, "size": size, "pointerSize": 134}
                entries[-1]["lfs"] = {"oid": sha, "size": size, "pointerSize": 134}
        answer = {"id": repo.split("/", 1)[1], "sha": COMMIT, "siblings": siblings}
        answer |= {"private": False, "tags": [], "downloads": 0, "likes": 0}
        text = json.dumps(entries if tree else answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def file(self, repo: str, name: str, *, body: bool) -> None:
        if self.refused(repo):
            return
        content = self.hub.repos[repo].get(name)
        if content is None:
            return self.fail(404, "EntryNotFound")
        is_large = name.endswith(self.hub.large)
        etag = hashlib.sha256(content).hexdigest() if is_large else git_hash(content)
        if self.hub.spoil:
            content = bytes(len(content))
        first = 0
        if (wanted := self.headers.get("Range", "")).startswith("bytes="):
            first = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body and self.hub.cut is not None and len(content) > self.hub.cut:
            self.wfile.write(content[first : first + self.hub.cut])
            self.hub.cut = None
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif body:
            self.wfile.write(content[first:])


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # connections are kept alive
    Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
