"""Measurements of a run: metrics, memory, norms, traces, time, and the console."""
