"""Explain what happened to a run, in words (`titan doctor RUN_DIR`). Imports no torch."""
