"""The rotary embedding, proven by what it computes.

Every lane of a rotated head is read as a linear form (``forms.py``); the proof is about those forms only, so one proof serves
every spelling: rotate-half ``x * cos + cat(-hi, lo) * sin`` (either sign), halves ``cat(a*c - b*s, b*c + a*s)``, interleaved
``stack(-odd, even)``, de-interleaving ``cat(even, odd)``, complex products, a matrix, rolls, writes into slices; full, first-part,
last-part or scattered partial rotation; tables computed, gathered or given; a norm before or after; a magnitude (YaRN); a
scaled query.

A head is rotary when its lanes fall into planes: two lanes made of the same two atoms by a rotation times a magnitude that all
planes share, every other lane being one atom of its own. Queries and keys must fall into the same planes, turned by the same
angles at the same position, and the angles must move with the position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from fasa_compile.patterns.forms import Form
from fasa_compile.patterns.graph import Unreadable
from fasa_compile.sites import Rope


class NotProven(Exception):
    """``reason`` is one of ``sites.REASONS``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Turn:
    """What happens to the lanes of one head at one position."""

    pairs: tuple[tuple[int, int], ...]
    angles: np.ndarray  # [len(pairs)], radians
    magnitude: float  # common to all planes
    passing: float  # common factor of the lanes that are not turned; equals magnitude where there are none


def tolerance(precision: torch.dtype) -> float:
    """Allowed relative error of a coefficient, by the coarsest dtype that a table was rounded to."""
    return max(8 * torch.finfo(precision).eps, 2e-6)


def _lanes(form: Form) -> list[dict[tuple[int, int], float]]:
    """Per lane its terms, {(atom, factor): coefficient}; of lanes with more than two, those that are not zero."""
    lanes = []
    for c, a, f in zip(form.coefficient, form.atom, form.factor, strict=True):
        terms: dict[tuple[int, int], float] = {}
        for coefficient, atom, factor in zip(c.tolist(), a.tolist(), f.tolist(), strict=True):
            if atom or coefficient:
                terms[atom, factor] = terms.get((atom, factor), 0.0) + coefficient
        if len(terms) > 2:
            largest = max(abs(x) for x in terms.values())
            terms = {k: x for k, x in terms.items() if abs(x) > 1e-9 * largest}
        lanes.append(terms)
    return lanes


def turn(form: Form, who: str, tol: float) -> Turn:
    """Reads the planes and angles off the D lanes of one head. Raises ``NotProven`` where they are no plane rotations."""
    if np.iscomplexobj(form.coefficient):
        if np.abs(form.coefficient.imag).max() > 0:
            raise NotProven("rope-not-proven", f"{who}: the lanes are complex")
        form = form.real()
    if not np.isfinite(form.coefficient).all():
        raise NotProven("rope-not-proven", f"{who}: a table holds a value that is not finite")
    lanes = _lanes(form)
    readers: dict[int, list[int]] = {}
    planes: dict[frozenset[tuple[int, int]], list[int]] = {}
    for i, terms in enumerate(lanes):
        if len(terms) > 2:
            raise NotProven("rope-not-proven", f"{who}: dim {i} is made of {len(terms)} dims, a rotation mixes two")
        for atom, _ in terms:
            readers.setdefault(atom, []).append(i)
        if len(terms) == 2:
            planes.setdefault(frozenset(terms), []).append(i)
    if not planes:
        return Turn((), np.zeros(0), 1.0, 1.0)
    blocks = []
    for atoms, dims in planes.items():
        if len(dims) != 2 or any(sorted(readers[a]) != dims for a, _ in atoms):
            raise NotProven("rope-not-proven", f"{who}: dim {dims[0]} is mixed with a dim that does not turn with it")
        if len({factor for _, factor in atoms}) != 1:
            raise NotProven("rope-not-proven", f"{who}: dims {dims[0]} and {dims[1]} are mixed at different scales")
        blocks.append(_block(lanes, dims, list(atoms), who, tol))
    blocks.sort()
    magnitudes = np.array([b[3] for b in blocks])
    magnitude = float(magnitudes.mean())
    if np.abs(magnitudes - magnitude).max() > tol * magnitude:
        raise NotProven(
            "rope-not-proven",
            f"{who}: planes are scaled unequally (by {magnitudes.min():.6g} to {magnitudes.max():.6g}; expected one factor for all)",
        )
    rest = np.array([abs(x) for terms in lanes if len(terms) == 1 for (a, _), x in terms.items() if a])
    passing = float(rest.mean()) if len(rest) else magnitude
    if len(rest) and np.abs(rest - passing).max() > tol * passing:
        raise NotProven("rope-not-proven", f"{who}: dims that are not turned are scaled unequally")
    return Turn(tuple((b[0], b[1]) for b in blocks), np.array([b[2] for b in blocks]), magnitude, passing)


def _block(
    lanes: list[dict[tuple[int, int], float]], dims: list[int], atoms: list[tuple[int, int]], who: str, tol: float
) -> tuple[int, int, float, float]:
    """(dim, dim, angle, magnitude) of one plane: the 2 x 2 block must be m * [[cos, -sin], [sin, cos]]."""
    i, j = dims
    m = np.array([[lanes[i][atoms[0]], lanes[i][atoms[1]]], [lanes[j][atoms[0]], lanes[j][atoms[1]]]])
    det = m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0]
    if (
        det < 0
    ):  # which of the two atoms belongs to dim i is a matter of naming: take the names that make it no reflection
        m, det = m[:, ::-1], -det
    magnitude = math.sqrt(det)
    if abs(m[0, 0] - m[1, 1]) > tol * magnitude or abs(m[0, 1] + m[1, 0]) > tol * magnitude or magnitude == 0.0:
        found = np.array2string(m, precision=4, separator=", ").replace("\n", "")
        raise NotProven("rope-not-proven", f"{who}: dims {i} and {j} are mixed by {found}, which is no rotation")
    return i, j, math.atan2(m[1, 0], m[0, 0]), magnitude


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference of angles, modulo a full turn."""
    return float(np.abs((a - b + math.pi) % (2 * math.pi) - math.pi).max()) if len(a) else 0.0


def agree(q: Turn, k: Turn, tol: float) -> None:
    """Queries and keys at one position: the same planes and angles. Raises ``NotProven``."""
    if not q.pairs and not k.pairs:
        raise NotProven("no-rope", "neither queries nor keys are rotated")
    if not q.pairs or not k.pairs:
        bare, turned = ("queries", "keys") if not q.pairs else ("keys", "queries")
        raise NotProven("rope-mismatch", f"the {turned} are rotated, the {bare} are not")
    if q.pairs != k.pairs:
        one, other = next((a, b) for a, b in zip((*q.pairs, None), (*k.pairs, None), strict=False) if a != b)
        raise NotProven("rope-mismatch", f"queries turn dims {one} together, keys {other}")
    if (apart := _apart(q.angles, k.angles)) > 4 * tol:
        raise NotProven("rope-mismatch", f"queries and keys at one position are turned by angles {apart:.3g} rad apart")
    if abs(q.magnitude / q.passing - k.magnitude / k.passing) > 4 * tol * (k.magnitude / k.passing):
        raise NotProven("rope-mismatch", "queries and keys scale their turned dims differently")


def moves(before: Turn, after: Turn, tol: float) -> bool:
    """Whether the angles differ between two positions."""
    return before.pairs == after.pairs and _apart(before.angles, after.angles) > 4 * tol


def steps_alike(here: Turn, ahead: Turn, before: Turn, shift: int, tol: float) -> None:
    """Queries that moved by ``shift`` positions must have turned by as much as keys turn from one row to the next.

    Raises ``NotProven``.
    """
    if not here.pairs == ahead.pairs == before.pairs:
        raise NotProven("rope-mismatch", "other dims are turned at another position")
    if _apart(shift * (ahead.angles - here.angles), here.angles - before.angles) > 8 * tol:
        raise NotProven("rope-mismatch", "queries and keys turn by different angles from one position to the next")


def starts_unturned(here: Turn, there: Turn, steps: int, largest: int, tol: float) -> None:
    """Refuses a turn that is not the identity at position 0, such as one with cos and sin exchanged.

    The slowest plane tells: it turns by so little a position that it can have come only so far in ``largest`` positions. (Where
    it may have come round, nothing is told. In tables of half precision a slow plane may seem to stand still between two
    positions: what a step is known to is ``tol``.) Raises ``NotProven``.
    """
    step = np.abs((there.angles - here.angles + math.pi) % (2 * math.pi) - math.pi) / steps
    slowest = int(np.argmin(step))
    far = 2 * (step[slowest] + 4 * tol / steps) * largest + 0.1
    if far < 1.0 and abs(here.angles[slowest]) > far:
        raise NotProven(
            "rope-not-proven",
            f"dims {here.pairs[slowest]} turn by {step[slowest]:.2g} rad a position, but stand at {here.angles[slowest]:.3g} rad: "
            "the rotation is not the identity at position 0",
        )


def rope(k: Turn, head_dim: int, precision: torch.dtype) -> Rope:
    """The proven embedding as data. The magnitude is that of the keys, relative to the dims that are not turned.

    ``precision``: the coarsest dtype that a table was rounded to, and with it the magnitude of each plane.
    """
    if not k.pairs:
        raise Unreadable("no planes")
    return Rope(
        pairs=k.pairs,
        head_dim=head_dim,
        magnitude=round(k.magnitude, 6),
        error=torch.finfo(precision).eps * k.magnitude,
    )
