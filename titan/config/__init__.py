"""Load and check job files: typed sections, file and line of every problem, cross-field rules.
Imports no torch."""
