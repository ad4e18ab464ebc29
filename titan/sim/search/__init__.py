"""Search for settings of a job by simulation."""
