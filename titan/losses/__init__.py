"""The loss: cross-entropy in chunks, over a vocabulary that may be sharded."""
