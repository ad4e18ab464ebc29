"""The pieces of scripts/drill.py. They import tests.support, and scripts/pieces.py."""

import sys
from pathlib import Path

sys.path += [str(folder) for folder in Path(__file__).parents[1:3]]
