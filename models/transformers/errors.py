"""Error of the family."""


class UnsupportedModelError(ValueError):
    """Model that titan cannot run or lay out. The message names the module and the reason."""
