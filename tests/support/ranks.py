"""The pool of warm ranks, where most tests look for it."""

from titan.numerics.certify.ranks import Pool, RankFailed

__all__ = ["Pool", "RankFailed"]
