"""Import of TorchTitan's job files: their old names, and the settings that mean something else there."""
