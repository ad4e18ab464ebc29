"""Reports of a simulation."""
