"""Paired tests of the same documents under two methods, and their correction for their number.

Two methods answer the same questions, so most of what makes a question hard cancels in the
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from capmoe_eval.lazy import np
from capmoe_eval.paper.pairing import Floats, Integers

DRAWS: Final = 10_000
"""Sums that the sign-flip test draws where it is not exact."""
LATTICE: Final = 200_000
"""Values of a sum of differences up to which the sign-flip test is exact."""
_SEED = 20260101
_DENOMINATOR = 1000  # scores are means over fewer runs
_PART = 4_000_000  # signs that are drawn at once, so that memory does not grow with documents
_NOTHING = 1e-24  # the smallest term of a transform that can change its digits


def sign_flip(tasks: Sequence[Floats]) -> float:
    """Return the two-sided p of so large a mean difference if the documents' signs were random.

    Tasks count equally. What counts of the documents is how many differ by how much: of n
    differences of one size, the number with a positive sign is binomial. Where all are of one size,
    this is McNemar's exact test. It is also exact where the sizes are multiples of one step and
    their sum has at most :data:`LATTICE` values, as for means of few right and wrong answers.
    Otherwise :data:`DRAWS` sums are drawn, from one seed. Neither the order of tasks and
    documents, nor the sides, nor the unit plays a part.

    Args:
        tasks: Of each, its differences [documents]; none of either is a ValueError.
    """
    if not tasks or any(not len(values) for values in tasks):
        raise ValueError("every task needs documents")
    moved = _moved(tasks)
    if not moved:
        return 1.0
    gained, lost = (np.array([signs[side] for signs in moved.values()]) for side in (0, 1))
    if len(moved) == 1:
        return mcnemar(int(gained[0]), int(lost[0]))
    counts = gained + lost
    # Sizes as multiples of the largest number that divides all of them.
    common = math.lcm(*(size.denominator for size in moved))
    multiples = [int(size * common) for size in moved]
    divisor = math.gcd(*multiples)
    whole = [multiple // divisor for multiple in multiples]
    span = sum(step * int(count) for step, count in zip(whole, counts, strict=True))
    if span < LATTICE:
        steps = np.array(whole)
        chances = _chances(steps, counts, span)
        beyond = np.abs(2 * np.arange(span + 1) - span) >= abs(int(steps @ (gained - lost)))
        # The transform's digits end there.
        return float(np.clip(chances[beyond].sum(), 1e-12, 1.0))
    sizes = np.array([float(size) for size in moved])
    # Equal sums, zero among them, may differ in their last digits; ties count.
    observed = abs(float(sizes @ (gained - lost))) - 1e-9 * float(sizes.max())
    # The observed signs are one of the possible ones, so p is never 0.
    return (1 + int((np.abs(_drawn(sizes, counts)) >= observed).sum())) / (1 + DRAWS)


def _moved(tasks: Sequence[Floats]) -> dict[Fraction, list[int]]:
    """Return the sizes of differences in the mean, how often one is positive and how often not."""
    moved: dict[Fraction, list[int]] = {}
    for values in tasks:
        distinct, times = np.unique(values[values != 0].round(12), return_counts=True)
        for value, count in zip(distinct.tolist(), times.tolist(), strict=True):
            size = Fraction(abs(value))
            near = size.limit_denominator(_DENOMINATOR)  # such as 2/3, whose last digits are lost
            size = near if math.isclose(near, size, rel_tol=1e-9) else size
            moved.setdefault(size / len(values), [0, 0])[value < 0] += count
    return dict(sorted(moved.items()))


def _chances(steps: Integers, counts: Integers, span: int) -> Floats:
    """Return the probability that the positive differences sum to 0, 1, … ``span`` steps.

    The transform of a sum's distribution is the product of the transforms of its parts:
    (1 + exp(-iθs)) / 2 for each difference of s steps, here with all phases taken out together.
    """
    frequencies = np.arange((span + 1) // 2 + 1)
    transform, product = np.zeros(len(frequencies), np.complex128), np.ones(len(frequencies))
    for number in np.argsort(-counts):  # after the most frequent few, hardly a product is left
        step, count = int(steps[number]), int(counts[number])
        product *= np.cos(np.pi * (frequencies * step % (2 * span + 2)) / (span + 1)) ** count
        matters = np.abs(product) > _NOTHING
        frequencies, product = frequencies[matters], product[matters]
    phase = np.exp(-1j * np.pi * (frequencies * span % (2 * span + 2)) / (span + 1))
    transform[frequencies] = product * phase
    return np.fft.irfft(transform, span + 1)


def _drawn(sizes: Floats, counts: Integers) -> Floats:
    """Return the sums under random signs, seeded, drawn in parts of bounded memory."""
    rng = np.random.default_rng(_SEED)
    sums = np.zeros(DRAWS)
    width = max(1, _PART // DRAWS)
    for start in range(0, len(sizes), width):
        part = slice(start, start + width)
        positive = rng.binomial(counts[part], 0.5, size=(DRAWS, len(counts[part])))
        sums += (2.0 * positive - counts[part]) @ sizes[part]
    return sums


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test: documents that one method alone has right."""
    fewer, more = sorted((gained, lost))
    return 1.0 if more - fewer <= 1 else 2 * binomial_tail(more, gained + lost, 0.5)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the mean of some values and the ends of its 95 % t interval; None without two."""
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return None
    mean = float(np.mean(values))
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """Return the probability of at least so many successes."""
    from scipy.special import betainc  # scipy.stats takes four times as long to import

    # The tail is an incomplete beta function.
    return float(betainc(successes, trials - successes + 1, chance)) if successes else 1.0


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm 1979), in the order given."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    corrected, least = [0.0] * len(ps), 0.0
    for place, index in enumerate(order):
        least = max(least, min(1.0, (len(ps) - place) * ps[index]))
        corrected[index] = least
    return corrected
