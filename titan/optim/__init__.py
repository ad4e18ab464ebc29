"""Optimize: optimizers, learning-rate schedules, gradient clipping."""
