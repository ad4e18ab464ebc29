"""Commands beside the run. Nothing but titan/cli.py imports them."""
