"""Program of one rank: `torchrun -m titan.train JOB.toml`. The name stays for good; the code is in titan/run/train.py."""

from titan.run.train import before_start, import_all, main, run_rank

__all__ = ["before_start", "import_all", "main", "run_rank"]

if __name__ == "__main__":
    run_rank()
