"""Clusters: what one node runs (node.py), and what schedulers are told (slurm.py, kubernetes.py, skypilot.py)."""
