"""Commands apart from the run. Only titan/cli.py imports them."""
