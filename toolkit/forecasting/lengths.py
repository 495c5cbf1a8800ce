"""A trace between cached lengths: every size of it is a polynomial of the tokens of a row, up to the square.

The polynomial goes through the three nearest cached lengths and is checked against another. Kernels change at some lengths (a
sliding window, the workspace of an embedding's gradient): where they change between the three, no check passes, and the model is
traced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from toolkit.engines.traces import Trace

TRACED_LENGTHS = tuple(2**power for power in range(7, 18))
"""Tokens of a row, 128 to 131,072, with traces of their own: most requests name one of them."""

FIT_LENGTHS, CHECK_LENGTHS = 3, 2
"""Lengths for the polynomial, and the next ones, of which one has to confirm it."""

FIT_TOLERANCE = 1e-3
"""Highest difference between the check's bytes, and its operations, and what the three others give for them."""


def interpolated(recalled: Callable[[int], Trace | None], seq_len: int) -> Trace | None:
    """Return the trace of a length from those of the nearest lengths of `TRACED_LENGTHS`, or None where they do not give it.

    Args:
        recalled: takes a length, and returns its cached trace.
        seq_len: between two lengths of `TRACED_LENGTHS`.
    """
    if not TRACED_LENGTHS[0] < seq_len < TRACED_LENGTHS[-1]:
        return None
    nearest = sorted(TRACED_LENGTHS, key=lambda length: abs(math.log(length / seq_len)))
    cached = ((length, trace) for length in nearest if (trace := recalled(length)) is not None)
    known = list(itertools.islice(cached, FIT_LENGTHS + CHECK_LENGTHS))
    points, checks = known[:FIT_LENGTHS], known[FIT_LENGTHS:]
    own = [length for length, _ in points]
    if not checks or not min(own) < seq_len < max(own) or not all(points[0][1].alike(trace) for _, trace in points):
        return None
    confirmed = any(_close(_at(points, length), trace) for length, trace in checks)
    return _at(points, seq_len) if confirmed else None


def _at(points: list[tuple[int, Trace]], seq_len: int) -> Trace:
    """Return the trace at a length, by Lagrange's formula for each event."""
    weights = [
        math.prod((Fraction(seq_len - other, own - other) for other, _ in points if other != own), start=Fraction(1))
        for own, _ in points
    ]
    # In whole numbers: sizes of operations exceed the 53 bits of a float.
    common = math.lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * common) for weight in weights]
    events = tuple(
        (
            what,
            max(0, round(Fraction(sum(share * event[1] for share, event in zip(shares, same, strict=True)), common))),
            name,
        )
        for same in zip(*(trace.events for _, trace in points), strict=True)
        for what, _, name in same[:1]
    )
    return replace(points[0][1], events=events)


def _close(expected: Trace, real: Trace) -> bool:
    """Return whether sizes of each kind of event agree in sum."""
    if not expected.alike(real):
        return False
    apart: dict[str, int] = {}
    total: dict[str, int] = {}
    for (what, size, _), (_, own, _) in zip(expected.events, real.events, strict=True):
        apart[what] = apart.get(what, 0) + abs(size - own)
        total[what] = total.get(what, 0) + own
    return all(apart[what] <= FIT_TOLERANCE * total[what] for what in total)
