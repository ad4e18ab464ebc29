"""The run around the training step."""
