"""Prices of kernels and transfers on some hardware."""
