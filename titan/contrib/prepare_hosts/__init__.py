"""`titan prepare` on many hosts: arrays of Slurm, and Ray."""
