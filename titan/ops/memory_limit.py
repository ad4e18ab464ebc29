"""One line about a process whose memory was not enough, such as under `ulimit -v`. Imports no torch.

titan.run.supervisor.explain and the supervisor of a run call it. Python, the loader of libraries, torch's allocator and C++ report a
shortage as five kinds of exceptions, which differ in their words only.
"""

from __future__ import annotations

import errno
import re

from titan.base.failure import RunFailure
from titan.base.untrusted import InputError

_SHORTAGE = re.compile(
    r"can(no|')t allocate memory|bad_alloc|failed to map segment|can't start new thread",
    re.IGNORECASE,
)
# torch's libraries alone are 0.9 GiB of addresses. With less, C++ ends the process while they are loaded.
LEAST_BYTES = 2**30


class HostMemoryError(RunFailure):
    """Error: the host's memory was not enough. The message is one line for the user."""

    kind = "out_of_host_memory"


def out_of_memory(error: BaseException | None) -> HostMemoryError | None:
    """Return an error that explains an exception, or None if its cause is no shortage of host memory."""
    while error is not None:
        lacks = isinstance(error, OSError) and error.errno == errno.ENOMEM
        if lacks or isinstance(error, MemoryError) or _SHORTAGE.search(str(error)):
            line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            return HostMemoryError(f"out of memory: {line}; {_advice()}")
        error = error.__cause__ or error.__context__
    return None


def require_address_space() -> None:
    """Check that torch fits into this process's limit of address space.

    Raises:
        InputError: It does not.
    """
    limit = _limit()
    if limit is not None and limit < LEAST_BYTES:
        raise InputError(
            f"out of memory: torch needs {LEAST_BYTES >> 30} GiB at least; {_advice()}"
        )


def _limit() -> int | None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _advice() -> str:
    if (limit := _limit()) is None:
        return "free memory on this machine, or raise the limit of the job or container"
    return f"this process may have {limit / 2**30:.2f} GiB of addresses: raise that, as by `ulimit -v unlimited`"
