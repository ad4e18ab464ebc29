"""Run on clusters: `titan slurm` writes a job's script (slurm.py, train.sbatch); node.py is what each node runs."""
