"""TorchSim: prediction of a run's time and memory, without a GPU. docs/simulator.md describes it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .script import simulate_step as simulate_step


def __getattr__(name: str) -> Any:
    """Return `simulate_step`, imported on first use."""
    if name != "simulate_step":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from . import script  # when asked for: every command imports this package

    return script.simulate_step
