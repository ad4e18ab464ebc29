"""Runs on clusters: `titan slurm` writes a job's script (slurm.py, train.sbatch); each node runs node.py."""
