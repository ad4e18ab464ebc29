"""titan: PyTorch-native LLM pretraining with its own simulator. Importing this package imports no torch."""

__version__ = "0.1.0"
