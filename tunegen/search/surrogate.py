# SPDX-License-Identifier: Apache-2.0
"""A Gaussian process over the configurations of a space: what is known of them, and how surely.

Its covariance falls exponentially with a distance that adds up over the parameters: so much for
being different (a category), and so much for every step between two values (a quantity). How much
is learned for each parameter, by climbing the marginal likelihood. The mean is linear in the log
of the performance model's time, where there is one, with a slope that is learned as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Until there are so many outcomes they are few.
FEW = 25

# What is believed before there are data, in units of log time: how many units of distance a space
# as a whole is wide by its categories, and by its quantities, evenly shared among parameters. Few
# outcomes say something of the rest only where the space is smooth, values nearby are alike and
# a category changes little. A search that goes on believing so overlooks an optimum that stands
# alone (as in Berkenkamp, Schoellig, Krause, "No-Regret Bayesian Optimization with Unknown
# Hyperparameters", JMLR 20, 2019). On recorded spaces the first belief was ahead at 25 and at 50
# outcomes; so were a quarter of a unit for categories, two and eight for quantities, and thirty
# outcomes for few; twenty were less ahead at 50.
_CATEGORY_OF_FEW, _QUANTITY_OF_FEW = 0.5, 4.0
_CATEGORY, _QUANTITY = 2.0, 1.0
_VARIANCE, _NOISE = 0.2, 0.0025
_MEAN_VARIANCE = 1.0
_SLOPE, _SLOPE_VARIANCE = 0.7, 0.25

# Standard deviations of the logarithms of those: of each distance, of variance and noise; and how
# far from what was believed they may end at all.
_DISTANCE_SPREAD, _VARIANCE_SPREAD, _NOISE_SPREAD = 1.0, 1.0, 1.5
_FARTHEST = 4.0

# Steps of one climb, which starts where the last one ended. Their lengths adapt by sign (Rprop).
_STEPS = 8
_FIRST_STEP, _LEAST_STEP, _LONGEST_STEP = 0.3, 0.01, 0.8
_LONGER, _SHORTER = 1.3, 0.5

_LEAST_VARIANCE = 1e-10

# Up to so many multiplications OpenBLAS, which NumPy's wheels bring along, stays on one core; and
# up to this size its factorisations do.
_BLOCK, _SMALL = 1 << 18, 32


class Encoding:
    """Configurations as rows of zeros and ones, whose squared differences count distances.

    A parameter has a column per value, one of them set, and a column between each two neighbouring
    values, set where the value is above. ``group`` says to which distance a column adds.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes`` are the numbers of values of the parameters, in the order of a table."""
        self._sizes = [(position, size) for position, size in enumerate(sizes) if size > 1]
        # Between two values there is one step: a category and a quantity are the same.
        self._steps = [(position, size) for position, size in self._sizes if size > 2]
        self.categories, self.quantities = len(self._sizes), len(self._steps)
        groups = [*(size for _, size in self._sizes), *(size - 1 for _, size in self._steps)]
        self.group = np.repeat(np.arange(len(groups)), groups)
        # Two columns change with a category; the whole range of a quantity is one.
        shares = [*(0.5 for _ in self._sizes), *(1 / (size - 1) for _, size in self._steps)]
        self.share = np.repeat(np.array(shares, dtype=np.float64), groups)

    def __call__(self, indices: NDArray[np.integer]) -> Floats:
        """``indices``: (parameters, configurations), as in a table; (configurations, columns)."""
        columns = [indices[p][:, None] == np.arange(size) for p, size in self._sizes]
        columns += [indices[p][:, None] > np.arange(size - 1) for p, size in self._steps]
        if not columns:
            return np.zeros((indices.shape[1], 0))
        return np.concatenate(columns, axis=1).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Points:
    """Encoded configurations, with the log of the model's time of each (0 without a model)."""

    columns: Floats  # (points, columns)
    model: Floats  # (points,)

    def __add__(self, other: Points) -> Points:
        return Points(
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.model, other.model]),
        )

    def without_model(self) -> Points:
        return Points(self.columns, np.zeros(len(self.model)))


class Scales:
    """What is learned: the logs of each group's distance, of the variance, and of the noise's."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._believed = _believed(encoding, 0)
        self._spread = np.full(len(self._believed), _DISTANCE_SPREAD)
        self._spread[-2:] = _VARIANCE_SPREAD, _NOISE_SPREAD
        self._logs = self._believed

    @property
    def weights(self) -> Floats:
        """Of each column of the encoding, the distance that it adds."""
        weights: Floats = np.exp(self._logs[:-2])[self._encoding.group] * self._encoding.share
        return weights

    @property
    def variance(self) -> float:
        return math.exp(self._logs[-2])

    @property
    def noise(self) -> float:
        return math.exp(self._logs[-1])

    def learn(self, points: Points, values: Floats) -> None:
        """Climb from here towards the most likely scales, given the log times at some points."""
        self._believed = _believed(self._encoding, len(values))
        lengths = np.full(len(self._logs), _FIRST_STEP)
        last = np.zeros(len(self._logs))
        for _ in range(_STEPS):
            slopes = self._slopes(points, values)
            turned = np.sign(slopes) * last
            lengths = lengths * np.where(turned > 0, _LONGER, np.where(turned < 0, _SHORTER, 1.0))
            lengths = np.clip(lengths, _LEAST_STEP, _LONGEST_STEP)
            last = np.sign(slopes)
            self._logs = np.clip(
                self._logs + last * lengths,
                self._believed - _FARTHEST,
                self._believed + _FARTHEST,
            )
        # Other processors and libraries round sums otherwise: they end on the same scales.
        self._logs = np.round(self._logs, 3)

    def _slopes(self, points: Points, values: Floats) -> Floats:
        """Derivatives of the log of the posterior density of the scales, for each of them."""
        encoded, weights = points.columns, self.weights
        scaled = encoded * np.sqrt(weights)
        covariance = self.variance * likeness(scaled, scaled)
        whiten = _inverse_root(
            covariance + _of_mean(points, points) + self.noise * np.eye(len(values))
        )
        inverse = _product(whiten.T, whiten)
        residues = inverse @ (values - _SLOPE * points.model)
        slopes = 0.5 * (np.outer(residues, residues) - inverse)  # by each covariance
        noise = self.noise * np.trace(slopes)
        slopes *= covariance  # by the log of each
        # Columns hold zeros and ones: the sum over pairs of squared differences, without pairs.
        alike = (encoded * _product(slopes, encoded)).sum(axis=0)
        differing = 2 * (slopes.sum(axis=1) @ encoded - alike)
        distances = np.bincount(
            self._encoding.group, weights * differing, minlength=len(self._logs) - 2
        )
        likelihood = np.concatenate([-distances, [slopes.sum(), noise]])
        pull: Floats = (self._logs - self._believed) / self._spread**2
        return likelihood - pull


def _believed(encoding: Encoding, outcomes: int) -> Floats:
    """The logs of the scales that are believed where so many outcomes are known."""
    few = outcomes < FEW
    category = _CATEGORY_OF_FEW if few else _CATEGORY
    quantity = _QUANTITY_OF_FEW if few else _QUANTITY
    count = max(encoding.categories, 1)
    believed: Floats = np.log(
        [
            *([category / count] * encoding.categories),
            *([quantity / count] * encoding.quantities),
            _VARIANCE,
            _NOISE,
        ]
    )
    return believed


class Surrogate:
    """The process, given log times at some points. Constant in what it was given."""

    def __init__(self, scales: Scales, points: Points, values: Floats) -> None:
        self._points = points
        self._roots = np.sqrt(scales.weights)
        self._variance = scales.variance
        self._scaled = points.columns * self._roots
        covariance = self._variance * likeness(self._scaled, self._scaled)
        covariance += _of_mean(points, points) + scales.noise * np.eye(len(values))
        self._whiten = _inverse_root(covariance)
        self._weights = self._whiten.T @ (self._whiten @ (values - _SLOPE * points.model))

    def predict(self, points: Points) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log time at each point, noise aside."""
        covariance = self._variance * likeness(points.columns * self._roots, self._scaled)
        covariance += _of_mean(points, self._points)
        mean = _SLOPE * points.model + covariance @ self._weights
        known = (_product(covariance, self._whiten.T) ** 2).sum(axis=1)
        variance = self._variance + _MEAN_VARIANCE + _SLOPE_VARIANCE * points.model**2 - known
        return mean, np.sqrt(np.maximum(variance, _LEAST_VARIANCE))


def likeness(left: Floats, right: Floats) -> Floats:
    """The exponential of minus the squared distance of each row to each: (left, right)."""
    distances = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)
    distances -= 2 * _product(left, right.T)
    alike: Floats = np.exp(-np.maximum(distances, 0.0))
    return alike


def _of_mean(left: Points, right: Points) -> Floats:
    """What the unknown mean and the unknown slope add to a covariance: (left, right)."""
    added: Floats = _MEAN_VARIANCE + _SLOPE_VARIANCE * np.outer(left.model, right.model)
    return added


def _product(left: Floats, right: Floats) -> Floats:
    """The matrix product, in blocks so small that the library does not use threads for it: the
    kernels being compiled meanwhile take all cores, and threads that wait for one another on
    busy cores made a proposal five times as slow."""
    rows = max(_BLOCK // max(right.size, 1), 1)
    even = len(left) // rows * rows
    product = np.empty((len(left), right.shape[1]))
    if even:
        blocks = left[:even].reshape(-1, rows, left.shape[1])
        product[:even] = np.matmul(blocks, right).reshape(even, -1)
    product[even:] = left[even:] @ right
    return product


def _inverse_root(covariance: Floats) -> Floats:
    """The inverse of the lower Cholesky factor, from those of its quarters."""
    half = len(covariance) // 2
    if half <= _SMALL:
        root: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
        return root
    first = _inverse_root(covariance[:half, :half])
    below = _product(covariance[half:, :half], first.T)
    second = _inverse_root(covariance[half:, half:] - _product(below, below.T))
    root = np.zeros_like(covariance)
    root[:half, :half], root[half:, half:] = first, second
    root[half:, :half] = -_product(_product(second, below), first)
    return root


def log_expected_improvement(best: float, mean: Floats, deviation: Floats) -> Floats:
    """The log of how far below ``best`` a normal variable lies on average, counting 0 above."""
    gap = (best - mean) / deviation
    density = np.exp(-(gap**2) / 2) / math.sqrt(2 * math.pi)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Far above the best, the two terms cancel: there their series is taken.
        series = -(gap**2) / 2 - math.log(math.sqrt(2 * math.pi)) - 2 * np.log(np.abs(gap))
        exact = np.log(np.maximum(density + gap * normal_below(gap), np.finfo(np.float64).tiny))
    result: Floats = np.log(deviation) + np.where(gap > -5, exact, series)
    return result


def normal_below(limits: Floats) -> Floats:
    """The probability that a standard normal variable is below each limit."""
    return np.array([0.5 * math.erfc(-limit / math.sqrt(2)) for limit in limits.tolist()])
