"""Scaling law of the loss, L(N, D) = E + A / N^a + B / D^b (Hoffmann et al. 2022, arXiv:2203.15556).

The fit is their approach 3: the Huber loss of the differences between logarithms is least, over many starts. Intervals come from a
bootstrap: the law is fitted again to losses that differ from it as the runs do (normally distributed).

    exponents a, b and constants E, A, B    fitted
    N    parameters
    D    tokens
    L    loss, nats per token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from titan.base.untrusted import Finite, parse_json, read_bytes

Array = NDArray[np.float64]
HUBER = 1e-3  # Hoffmann et al., of the logarithm of the loss
LEVEL = 0.9  # of intervals
_KEPT_STARTS = 12
LEAST_SHARE, _MOST_EXPONENT = 0.01, 3.0  # of the smallest loss that E is; of either exponent
Constant = Annotated[Finite, Field(ge=0)]
Amount = Annotated[float, Field(gt=0, lt=1e18)]
# Without it, an interval of 90% holds Hoffmann's constants in 87 of 100 simulated fits.
_WIDER = 1.1


class Run(NamedTuple):
    """A finished run: its name, parameters, tokens and final loss."""

    name: str
    params: Amount
    tokens: Amount
    loss: Finite

    @property
    def flops(self) -> float:
        """Return the training's FLOPs by the rule 6 N D."""
        return 6 * self.params * self.tokens


class Law(NamedTuple):
    """Constants of the law."""

    E: Annotated[Finite, Field(gt=0)]
    A: Constant
    B: Constant
    a: Constant
    b: Constant

    def loss(self, params: Array | float, tokens: Array | float) -> Array:
        """Return the loss, in nats per token."""
        return self.E + self.A / np.power(params, self.a) + self.B / np.power(tokens, self.b)

    def best_params(self, flops: Array | float) -> Array | float:
        """Return the compute-optimal parameters for training FLOPs 6 N D."""
        share = (self.a * self.A / (self.b * self.B)) ** (1 / (self.a + self.b))
        return share * (flops / 6) ** (self.b / (self.a + self.b))


@dataclass(frozen=True)
class Fit:
    """A law with what is needed for intervals, as `titan scaling --output` writes it.

    Attributes:
        format: version of the file.
        law: the best constants.
        draws: constants fitted to each draw of the bootstrap.
        errors: logarithm of each run's loss less that of the law.
        runs: runs that the law was fitted to.
    """

    format: Literal[1] = field(default=1, kw_only=True)
    law: Law
    draws: Annotated[list[Law], Field(min_length=1)]
    errors: Annotated[list[Finite], Field(min_length=1)]
    runs: Annotated[Sequence[Run], Field(min_length=1)]

    def times(self, params: float, tokens: float) -> float:
        """Return the FLOPs of a run over those of the largest run that the law was fitted to."""
        return 6 * params * tokens / max(run.flops for run in self.runs)

    def interval(self, constant: str) -> tuple[float, float]:
        """Return the interval of a constant."""
        return _interval(np.array([getattr(law, constant) for law in self.draws]))

    def slope(self, tokens: float) -> tuple[float, float, float]:
        """Return by how much the loss falls near some tokens for a factor of e in tokens, and its interval."""
        nats = np.array([law.b * law.B / tokens**law.b for law in (self.law, *self.draws)])
        return float(nats[0]), *_interval(nats)

    def predict(self, params: float, tokens: float) -> tuple[float, float, float]:
        """Return the expected loss of a run, and the interval in which its loss lies, noise of a run included."""
        # Each draw meets each error of a run.
        losses = np.array([law.loss(params, tokens) for law in self.draws])
        noisy = losses[:, None] * np.exp(_widened(np.array(self.errors)))
        return float(self.law.loss(params, tokens)), *_interval(noisy)


def load_law(file: Path) -> Fit:
    """Return the law of a file of `titan scaling --output`.

    Raises:
        InputError: The file is wrong.
    """
    return parse_json(read_bytes(file), Fit, name=f"{file}: no law of titan scaling")


# The corrected fit to Chinchilla's runs (Besiroglu et al. 2024, arXiv:2404.10102, table 1). The
# constants that Hoffmann et al. printed are rounded, and their best sizes are not those of the
# paper's other two approaches. The runs are the bounds of Hoffmann et al.: 70 million to 16 billion
# parameters, 5 billion tokens or more, and at most 3e21 FLOPs.
CHINCHILLA = load_law(Path(__file__).with_name("chinchilla.json"))


def fit(runs: Sequence[Run], *, draws: int = 400, seed: int = 0) -> Fit:
    """Fit the law to runs.

    Args:
        runs: at least six runs.
        draws: number of draws of the bootstrap.
        seed: seed of the draws.
    """
    *x, losses = np.log([run[1:] for run in runs]).T
    found = [_minimize(start, x, losses) for start in _starts(x, losses)]
    best = min(found, key=lambda pair: pair[1])[0]
    expected = _log_loss(best, x)
    errors = losses - expected
    # A fit of five constants is closer to the runs than the truth is.
    spread = _WIDER * _widened(errors).std()
    # The spread itself is known from few runs only.
    freedom, generator = max(1, len(errors) - len(Law._fields)), np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        drawn_spread = spread * np.sqrt(freedom / generator.chisquare(freedom))
        noise = drawn_spread * generator.standard_normal(len(errors))
        drawn.append(_law(_minimize(best, x, expected + noise)[0]))
    return Fit(_law(best), drawn, errors.tolist(), runs)


def _widened(errors: Array) -> Array:
    """Return errors with the mean zero and the spread of runs about the true law."""
    spread = np.sqrt(len(errors) / max(1, len(errors) - len(Law._fields)))
    return (errors - errors.mean()) * spread


def _interval(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _law(theta: Array) -> Law:
    return Law(*map(float, (*np.exp(theta[:3]), *theta[3:])))


def _terms(theta: Array, x: Sequence[Array]) -> Array:
    """Return the logarithms of the three terms, (3, runs). x: logarithms of parameters and tokens."""
    e, a, b, alpha, beta = theta
    return np.stack([np.full_like(x[0], e), a - alpha * x[0], b - beta * x[1]])


def _log_loss(theta: Array, x: Sequence[Array]) -> Array:
    return np.logaddexp.reduce(_terms(theta, x))


def _starts(x: Sequence[Array], losses: Array) -> list[Array]:
    """Return the best of a grid of starts.

    Each exponent is tried with the shares of the loss of the middle run that its terms may have.
    """
    params, tokens, loss = (float(np.median(each)) for each in (*x, losses))
    exponents, shares = (0.1, 0.2, 0.35, 0.5, 0.8, 1.2), (0.03, 0.1, 0.25, 0.45)
    grid = []
    for alpha, beta, share_n, share_d in product(exponents, exponents, shares, shares):
        e = loss + np.log(1 - share_n - share_d)
        a = loss + np.log(share_n) + alpha * params
        b = loss + np.log(share_d) + beta * tokens
        grid.append(np.array([e, a, b, alpha, beta]))
    grid.sort(key=lambda theta: np.abs(_log_loss(theta, x) - losses).sum())
    return grid[:_KEPT_STARTS]


def _minimize(start: Array, x: Sequence[Array], losses: Array) -> tuple[Array, float]:
    """Return the constants of the least Huber loss from a start, and that loss."""
    from scipy.optimize import least_squares

    def errors(theta: Array) -> Array:
        return _log_loss(theta, x) - losses

    def jacobian(theta: Array) -> Array:
        terms = _terms(theta, x)
        e, a, b = np.exp(terms - np.logaddexp.reduce(terms))
        return np.stack([e, a, b, -a * x[0], -b * x[1]], axis=1)

    # Without a bound, an E that goes to zero would leave its logarithm without a gradient, and the search without steps.
    least, none = losses.min(), np.inf
    low = np.array([least + np.log(LEAST_SHARE), -none, -none, 0, 0])
    high = np.array([least, none, none, _MOST_EXPONENT, _MOST_EXPONENT])
    inside = np.clip(start, low + 1e-3, high - 1e-3)
    inside[0] = max(inside[0], least + np.log(0.1))
    # From wide scales to the Huber loss's: with its narrow one alone, steps far from the minimum are so short that they seem to have arrived.
    for scale in (1000 * HUBER, 30 * HUBER, 5 * HUBER, HUBER):
        found = least_squares(
            errors,
            inside,
            jacobian,
            bounds=(low, high),
            xtol=1e-9,
            ftol=1e-10,
            x_scale="jac",
            loss="huber",
            f_scale=scale,
            max_nfev=300,
        )
        inside = np.clip(found.x, low + 1e-9, high - 1e-9)
    return found.x, float(found.cost)
