"""TorchSim: predict what a run costs in time and memory, without a GPU. docs/simulator.md says how."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .script import simulate_step

__all__ = ["simulate_step"]


def __getattr__(name: str) -> Any:
    # When asked for: every command imports this package.
    if name == "simulate_step":
        from .script import simulate_step

        return simulate_step
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
