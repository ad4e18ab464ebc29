"""Optional capabilities behind entry points. The core imports none of them."""
