"""Parts that model families share. A family imports from here, and not from another family."""
