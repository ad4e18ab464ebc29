"""A source whose text comes only as far as a file says, for tests of text that is read while it is tokenised."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.data.conftest import make_texts
from titan.config.base import DocumentOptions
from titan.data import DataError, writer
from titan.data.sources import Documents


class GatedSource(DocumentOptions):
    """400 documents. Before each, reading waits until the file `gate` allows it, and a file of the process's id is there."""

    gate: str
    damaged_at: int = 400
    num_bytes: int | None = 2**30

    def documents(self) -> Documents:
        identity: list[object] = ["gated", self.damaged_at]
        return Documents(name="gated", identity=identity, read=self.read, num_bytes=self.num_bytes)

    def read(self) -> Iterator[str]:
        gate, writer._CHUNK_PIECES = Path(self.gate), 4  # or it would read all before it writes
        (gate.parent / f"reader-{os.getpid()}").touch()
        for number, text in enumerate(make_texts(400)):
            while number >= int(gate.read_text() or "0"):
                time.sleep(0.01)
            if number == self.damaged_at:
                raise DataError(f"line {number} is damaged")
            yield text
