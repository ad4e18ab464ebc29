"""The model zoo, installed as `titan.models`. One folder per family; see docs/architecture.md for what it holds."""
