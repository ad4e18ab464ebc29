"""Set a run beside its simulation."""
