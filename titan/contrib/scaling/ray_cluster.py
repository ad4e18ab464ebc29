"""Connection to a Ray cluster, for `titan sweep --ray`."""

from __future__ import annotations

import socket
from typing import Any

from titan.data import DataError, require


def connect(address: str) -> Any:
    """Connect to a Ray cluster. Return the module `ray`.

    Raises:
        DataError: Ray is not installed, or there is no cluster at the address.
    """
    ray = require("ray", purpose="--ray", extra="ray")
    try:
        # Ray itself tries for minutes where nobody listens.
        if ":" in address:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (
        Exception
    ) as error:  # Ray raises many kinds: no cluster, no such address, another version
        raise DataError(
            f"--ray: no Ray cluster answers at '{address}' ({_reason(error)}); start one with `ray start --head`, "
            "or give --address HOST:PORT"
        ) from error
    return ray


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without Ray's report of where it was raised."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines()
    return (lines or [type(error).__name__])[0].rstrip(".")
