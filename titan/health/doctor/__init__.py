"""`titan doctor RUN_DIR`: what happened to a run, in words. Imports no torch."""
