"""Check before a run (`titan preflight`) that everything is there, equal and fast enough, and that
a step of the job runs."""
