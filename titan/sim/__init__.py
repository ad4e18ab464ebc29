"""TorchSim: prediction of a run's time and memory, without a GPU. docs/simulator.md describes it."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return a function of an optional part, such as `simulate_step`, imported on first use.

    Its entry point in the group `titan.extensions` is called python.NAME.
    """
    from titan.config.plug_ins import load_plug_in, plug_ins

    for entry in plug_ins("titan.extensions", of="python"):
        if entry.name == f"python.{name}":
            return load_plug_in(entry)
    raise AttributeError(f"module {__name__} has no attribute {name}")
