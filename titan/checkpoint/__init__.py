"""Saving, loading and converting checkpoints."""
