"""Documents of a step, worst first (`titan audit --rows`)."""
