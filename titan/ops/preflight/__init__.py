"""Checks before a run (`titan preflight`): all is there, equal and fast enough, and a step of the job runs."""
