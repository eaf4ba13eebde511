"""Deterministic arithmetic of every number that enters a verdict. Standard library only, pure.

Sums use `math.fsum`; results that are saved go through `round9`, so that the last bits of a
platform's libm never show. +infinity (a failed request) is kept, never dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

# The sample maximum of n values is an upper bound of the q-quantile with 95 % confidence from
# these n on: 1 - q**n >= 0.95 (docs/protocol.md, section 5).
MIN_UNITS = {0.5: 6, 0.9: 29, 0.95: 59, 0.99: 299}


def round9(value: float) -> float:
    """Rounds to 9 significant digits; infinities pass through."""
    if not math.isfinite(value) or value == 0:
        return value
    return float(f"{value:.9g}")


def percentile(values: Sequence[float], q: float) -> float:
    """The ceil(q * n)-th smallest (nearest rank). Raises ValueError on no values or a bad q."""
    if not values:
        raise ValueError("percentile of no values")
    if not 0 < q <= 1:
        raise ValueError(f"q must be in (0, 1], found {q}")
    # q * n in floating point may lie a hair above an integer (0.95 * 60); 12 digits are far below
    # 1/n.
    rank = math.ceil(round(q * len(values), 12))
    return sorted(values)[rank - 1]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; +infinity if any value is. Raises ValueError on no values."""
    if not values:
        raise ValueError("mean of no values")
    if any(math.isinf(value) for value in values):
        return math.inf
    return math.fsum(values) / len(values)


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean of logarithms. +infinity if any is; ValueError on none or one not above 0."""
    if any(not value > 0 for value in values):
        raise ValueError("geometric mean of a value that is not positive")
    return math.exp(mean([math.log(value) for value in values]))


def wave_statistic(values: Sequence[float]) -> tuple[float, str]:
    """The one number of a wave and its estimator: p50 of six or more requests, else the mean."""
    if len(values) >= MIN_UNITS[0.5]:
        return percentile(values, 0.5), "p50"
    return mean(values), "mean"


@dataclass(frozen=True)
class Effect:
    """Candidate against baseline over paired repetitions. Ratios are candidate / baseline.

    ``ratio`` is exp(mean of ln ratio_k); ``low``/``high`` its Student t interval, None below two
    repetitions or when a ratio is infinite or zero.
    """

    ratio: float
    ratios: tuple[float, ...]
    low: float | None
    high: float | None
    confidence: float


def paired_effect(
    candidate: Sequence[float], baseline: Sequence[float], confidence: float = 0.95
) -> Effect:
    """Effect of docs/protocol.md section 5. Raises ValueError on unequal lengths, baseline <= 0.

    A candidate of +infinity (a failed wave) makes the ratio +infinity. A baseline of +infinity says
    nothing about the candidate: ValueError.
    """
    if len(candidate) != len(baseline) or not candidate:
        raise ValueError(f"{len(candidate)} candidate and {len(baseline)} baseline repetitions")
    if any(not (0 < value < math.inf) for value in baseline):
        raise ValueError("a baseline repetition is not a positive finite number")
    if any(not value > 0 for value in candidate):
        raise ValueError("a candidate repetition is not positive")
    return ratio_effect(
        [c / b for c, b in zip(candidate, baseline, strict=True)], confidence=confidence
    )


def ratio_effect(values: Sequence[float], *, confidence: float = 0.95) -> Effect:
    """Effect of the ratios of paired repetitions, all above 0. Raises ValueError on none."""
    if not values or any(not value > 0 for value in values):
        raise ValueError(f"{len(values)} ratios, or one that is not positive")
    ratios = tuple(values)
    if any(math.isinf(ratio) for ratio in ratios):
        return Effect(math.inf, ratios, None, None, confidence)
    logs = [math.log(ratio) for ratio in ratios]
    centre = mean(logs)
    if len(logs) < 2:
        return Effect(math.exp(centre), ratios, None, None, confidence)
    variance = math.fsum((value - centre) ** 2 for value in logs) / (len(logs) - 1)
    half = t_quantile(0.5 + confidence / 2, len(logs) - 1) * math.sqrt(variance / len(logs))
    return Effect(
        math.exp(centre), ratios, math.exp(centre - half), math.exp(centre + half), confidence
    )


@functools.lru_cache(maxsize=1024)
def t_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t for 0.5 <= p < 1, by bisection on the distribution function.

    The distribution function is the regularised incomplete beta function (Abramowitz and Stegun
    26.7.1).
    """
    if not 0.5 <= p < 1 or degrees < 1:
        raise ValueError(f"t_quantile({p}, {degrees})")
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if _t_cdf(middle, degrees) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    return 1 - 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Lentz), as in A&S 26.5.8."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = a * math.log(x) + b * math.log1p(-x) - math.log(a)
    log_front += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    fraction = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction
