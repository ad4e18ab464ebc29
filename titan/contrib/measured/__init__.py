"""Measured kernels of the package aiconfigurator-core, in place of the shorter tables that titan ships."""
