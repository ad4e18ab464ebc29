"""Simulation of a run beside it, which names the part that is responsible if the run drifts (README.md)."""
