"""Checks of a job's settings against each other, its ranks and its machine, before torch is imported."""
