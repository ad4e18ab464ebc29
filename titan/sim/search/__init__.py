"""Choose settings by simulating them."""
