"""A pickle that shows that it was run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)
