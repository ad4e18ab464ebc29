"""Commands apart from the run. titan/commands.py names them."""
