"""Supervision of runs, which the core does without."""
