"""A run around the training step: the loop, its hooks, and the program of a rank."""
