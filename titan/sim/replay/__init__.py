"""Replay of traces: time and memory."""
