"""Columns of the metrics for models with experts, and for multi-token prediction."""
