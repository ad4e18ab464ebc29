"""Optional parts of titan, one folder each. The core knows none of them: pyproject.toml registers them as entry points."""
