"""Two micro-batches side by side: one computes while the other exchanges tokens of experts (README.md)."""
