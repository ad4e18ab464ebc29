"""Supervision of runs, which the core does without: monitor, locks, launch, recovery, stragglers, doctor, preflight, Slurm."""
