"""Comparison of a run with its simulation."""
