"""Job files: typed sections, loading, file and line of every problem, and rules across sections. Imports no torch."""
