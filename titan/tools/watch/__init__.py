"""Serve a live page of runs (`titan watch`)."""
