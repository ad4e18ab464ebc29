"""Record what the ranks of a job do."""
