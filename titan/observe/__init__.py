"""Measurements of a run: metrics, memory, traces, time, and the console."""
