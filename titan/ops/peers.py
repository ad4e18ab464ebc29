"""Exchange of heartbeats, and of the run's failure, with the other ranks through their store.

A thread, "beats", carries the messages: a request to a store whose host is lost does not return
(docs/architecture.md), so no other thread may wait for a request. All other requests go through
`call_with_timeout`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from titan.base.errors import Failure

from .activity import main_thread
from .heartbeats import Heartbeat, connect
from .run_lock import ProcessId

# Seconds that a failed rank stays, so that others read the reason before its agent or store is gone.
LINGER_S = 3.0
# Heartbeats in the silence after which a rank is lost, and the longest time between two
# heartbeats, in seconds.
BEATS_PER_TIMEOUT, LONGEST_BEAT_S = 20, 1.5
_FAILURE, _GONE = "failure", "gone"  # a key, and the last heartbeat
T = TypeVar("T")


@dataclass(eq=False)
class Peers:
    """The other ranks of the run, as their heartbeats show them.

    Args:
        rank: this rank.
        world_size: number of ranks.
        heartbeat_s: silence after which a rank counts as lost; 0: silence is no failure.
        get_step: returns this rank's step.
        on_failure: called in the thread of messages with the failure that a rank has published.
    """

    rank: int
    world_size: int
    heartbeat_s: float
    get_step: Callable[[], int]
    on_failure: Callable[[Failure], None]

    def __post_init__(self) -> None:
        self.beat_s = min(
            self.heartbeat_s / BEATS_PER_TIMEOUT or LONGEST_BEAT_S, LONGEST_BEAT_S
        )
        # `first` is rank 0, which may hold the store.
        self.me = self.first = ProcessId.this()
        self.store: Any = None
        self.rounds = 0  # of messages that the store has taken
        self.one_is_silent = False
        self.finished = threading.Event()

    def connect(self) -> None:
        """Start to exchange heartbeats. Call it when the process group exists."""
        store = connect(self.heartbeat_s)
        if store is None:
            logging.getLogger("titan").warning(
                "no heartbeat: the ranks' store cannot be shared"
            )
            return
        # Before the thread starts: peers read this rank's heartbeat as soon as they connect.
        store.set(_beat_key(self.rank), self.heartbeat_text())
        self.first = Heartbeat.parse(store.get(_beat_key(0)).decode()).process
        self.store = store
        threading.Thread(target=self._exchange, name="beats", daemon=True).start()

    def compare_beats(self) -> tuple[dict[int, Heartbeat], list[int]]:
        """Return the heartbeats of all ranks that have not ended, and the silent ranks."""
        if self.store is None:
            return {self.rank: Heartbeat.parse(self.heartbeat_text())}, []
        before = self._read_beats()
        time.sleep(3 * self.beat_s)  # a busy machine may delay one or two heartbeats
        after = self._read_beats()
        beats = {rank: Heartbeat.parse(text) for rank, text in after.items() if text != _GONE}
        # A rank is silent if both readings are equal. Ranks that have signed off are left out.
        return beats, [rank for rank in beats if after[rank] == before.get(rank)]

    def processes(self) -> dict[int, ProcessId]:
        """Return the processes of the ranks that have not ended."""
        texts = self._read_beats()
        return {
            rank: Heartbeat.parse(text).process for rank, text in texts.items() if text != _GONE
        }

    def agree(self, mine: Failure) -> Failure | None:
        """Publish a failure. Return the first one that any rank published; None if the store does not answer."""
        if self.store is None:
            return None
        text = json.dumps(asdict(mine))
        # compare_set sets a missing key, and returns the key's value afterwards.
        first = call_with_timeout(LINGER_S, lambda: self.store.compare_set(_FAILURE, "", text))
        # Without a result in time, the store does not answer.
        return _parse_failure(first) if first else None

    def wait(self) -> None:
        """Sign off, after a failure.

        Rank 0, whose process or agent holds the store, waits for all ranks that live, up to
        `LINGER_S`.
        """
        if self.store is None:
            return
        within_s = min(LINGER_S, 3 * self.beat_s)
        deadline = time.monotonic() + within_s

        def wait() -> None:
            self.store.set(f"signed_off/{self.rank}", _GONE)
            if self.rank > 0:  # needs no other rank: it may end at once
                return
            beats = self._read_beats()
            for rank in range(self.world_size):
                while (
                    not self.store.check([f"signed_off/{rank}"])
                    and not _has_ended(beats.get(rank, ""))
                    and time.monotonic() < deadline
                ):
                    time.sleep(0.05)

        call_with_timeout(within_s, wait)

    def leave(self) -> None:
        """Tell the other ranks that this rank has ended well, so that its silence is no failure."""
        if self.store is not None:
            call_with_timeout(LINGER_S, lambda: self.store.set(_beat_key(self.rank), _GONE))

    def _exchange(self) -> None:
        """Send a heartbeat, read the failure, and check the next rank, again and again."""
        # Each rank watches one other rank: a ring notices any silence at a constant cost per rank.
        neighbour, last, unchanged = (self.rank + 1) % self.world_size, b"", 0
        while not self.finished.wait(self.beat_s):
            try:
                self.store.set(_beat_key(self.rank), self.heartbeat_text())
                if self.store.check([_FAILURE]):
                    self.on_failure(_parse_failure(self.store.get(_FAILURE)))
                beat = b""
                if self.store.check([_beat_key(neighbour)]):
                    beat = self.store.get(_beat_key(neighbour))
                self.rounds += 1
            except Exception:  # the connection is lost; the monitor counts
                continue
            # A rank that has signed off is not silent.
            unchanged = unchanged + 1 if beat == last and beat != _GONE.encode() else 0
            last = beat
            if self.heartbeat_s and unchanged * self.beat_s >= self.heartbeat_s:
                # The monitor's thread goes on: to read all heartbeats takes the time of several.
                self.one_is_silent, unchanged = True, 0

    def heartbeat_text(self) -> str:
        activity = main_thread()
        beat = Heartbeat(self.rounds, self.get_step(), activity.text, activity.waits, self.me)
        return json.dumps(asdict(beat))

    def _read_beats(self) -> dict[int, str]:
        keys = {rank: _beat_key(rank) for rank in range(self.world_size)}
        there = [rank for rank, key in keys.items() if self.store.check([key])]
        # Only keys that exist: multi_get would wait for the others.
        texts = self.store.multi_get([keys[rank] for rank in there])
        return {rank: text.decode() for rank, text in zip(there, texts, strict=True)}


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T | None:
    """Call a function in a thread. Return its result; None if it fails or does not return in time."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    # A daemon, since a call that never returns must not keep the process alive.
    thread = threading.Thread(target=run, name="call", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _parse_failure(text: bytes) -> Failure:
    content = json.loads(text)
    return Failure(**(content | {"silent": tuple(content["silent"])}))


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _has_ended(beat: str) -> bool:
    """Return whether the rank of a heartbeat has ended for certain.

    A process of another machine counts as ended only if it has signed off.
    """
    if beat in ("", _GONE):
        return beat == _GONE
    process = Heartbeat.parse(beat).process
    return process.is_here() and not process.is_running()
