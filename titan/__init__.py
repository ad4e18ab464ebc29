"""titan: PyTorch-native LLM pretraining with its own simulator. Importing this package imports no torch."""

from pathlib import Path

__version__ = "0.1.0"

# The model zoo lies beside titan/ and an installation puts it inside. In a clone that is not installed, find it where it lies.
_here = Path(__file__).parent
if not (_here / "models").exists() and (_here.parent / "models" / "llama3").exists():
    __path__.append(str(_here.parent))
