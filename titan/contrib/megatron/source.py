"""The data source "megatron". titan.config imports this module, so it imports nothing of titan.data."""

from __future__ import annotations

from typing import Any, Literal

from titan.config.base import TokenFiles


class MegatronSource(TokenFiles):
    """Token files that Megatron-LM's preprocess_data.py wrote."""

    type: Literal["megatron"] = "megatron"
    path: str
    """Prefix of the files, as in Megatron's --data-path: without .bin and .idx."""

    def open(self, options: Any) -> Any:
        """Return the tokens of a split (`TokenFiles.open`)."""
        from .data import MegatronTokens

        return MegatronTokens(self.path, options)

    def documents(self) -> Any:
        """Return the files' sizes. They hold no text."""
        from .data import describe

        return describe(self.path)
