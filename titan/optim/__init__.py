"""Optimizers, learning-rate schedules, gradient clipping."""
