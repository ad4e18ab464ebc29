"""Show a simulation: text, page, traces."""
