"""Job files: typed sections, loading with file and line of every problem, cross-field rules. Imports no torch."""
