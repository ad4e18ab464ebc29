"""TorchTitan's job files: their old names, and what differs in TorchTitan."""
