"""Hold the model zoo, installed as `titan.models`: one folder per family. docs/architecture.md says
what a folder holds."""
