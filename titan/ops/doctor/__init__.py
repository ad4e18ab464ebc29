"""Diagnosis of a run, in words (`titan doctor RUN_DIR`). Imports no torch."""
