"""Runs that fail on purpose, as in tests/health."""

from tests.health.conftest import start

__all__ = ["start"]
