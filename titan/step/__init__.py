"""The program of a training step, the same for the trainer, the tests and the simulator."""
