"""Shares of `titan prepare`, on many hosts."""
