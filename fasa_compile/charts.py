"""Pictures as SVG text, without a plotting library: lines over a logarithmic axis, and maps of numbers between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#6b7280", "#2563eb", "#0a7d3c", "#d97706", "#9333ea", "#dc2626")
_INK, _FAINT = "#374151", "#e5e7eb"
#: Light to dark: what a map's numbers from 0 to 1 are painted with.
_SHADES = ("#f3f4f6", "#d1ead9", "#a3d5b5", "#6bbb8c", "#329e63", "#0a7d3c", "#065127")


def shade(value: float) -> str:
    """The colour of a number between 0 and 1."""
    return _SHADES[min(len(_SHADES) - 1, max(0, round(value * (len(_SHADES) - 1))))]


def _steps(low: float, high: float) -> list[float]:
    """Round numbers, at most a handful, from below ``low`` to above ``high``."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    for factor in (1.0, 2.0, 5.0, 10.0):
        if (high - low) / (step * factor) <= 5:
            step *= factor
            break
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil(high / step) + 1)]


def tokens(n: float) -> str:
    """A number of tokens for an axis: 512, 4k, 128k."""
    return f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:g}"


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str,
    y_label: str,
    width: int = 640,
    height: int = 340,
    zero: bool = True,
) -> str:
    """An SVG with one line per name over a base-2 logarithmic x axis: ``series[name]`` are ``(x, y)`` points, x > 0.

    ``zero`` has the y axis start at 0. Names stand beside the lines' last points, apart.
    """
    points = [p for line in series.values() for p in line]
    left, right, top, bottom = 62, 150, 40, 52
    if not points:
        return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 40"><text y="20">no data</text></svg>'
    xs = sorted({x for x, _ in points})
    ticks = _steps(0.0 if zero else min(y for _, y in points), max(y for _, y in points))
    low, high = ticks[0], ticks[-1]
    a, b = math.log2(xs[0]), math.log2(xs[-1])

    def px(x: float) -> float:
        return left + (width - left - right) * ((math.log2(x) - a) / (b - a) if b > a else 0.5)

    def py(y: float) -> float:
        return height - bottom - (height - top - bottom) * (y - low) / ((high - low) or 1.0)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-size="12" '
        f'font-family="system-ui,sans-serif" fill="{_INK}" role="img" aria-label="{escape(title, quote=True)}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{left}" y="20" font-size="13" font-weight="600">{escape(title)}</text>',
    ]
    for y in ticks:
        out.append(
            f'<line x1="{left}" x2="{width - right}" y1="{py(y):.1f}" y2="{py(y):.1f}" stroke="{_FAINT}"/>'
            f'<text x="{left - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    last = -math.inf
    for x in xs:
        if px(x) - last >= 34:  # labels that would touch are left out
            out.append(f'<text x="{px(x):.1f}" y="{height - bottom + 18}" text-anchor="middle">{tokens(x)}</text>')
            last = px(x)
    out.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(14 {(top + height - bottom) / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    labels: list[tuple[float, str, str]] = []
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = sorted(line)
        if not line:
            continue
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [
            f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{colour}"><title>{escape(name)}: {x:g}, {y:.4g}</title></circle>'
            for x, y in line
        ]
        labels.append((py(line[-1][1]), name, colour))
    floor = -math.inf
    for y, name, colour in sorted(labels):
        floor = max(y, floor + 15)
        out.append(f'<text x="{width - right + 10}" y="{floor + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join(out) + "</svg>\n"


def heat_map(
    rows: Sequence[tuple[str, Sequence[float]]], *, x_label: str, cell: int = 9, label: str = "", most: str = "1"
) -> str:
    """An SVG map: a row per name, a cell per number between 0 and 1, light to dark; ``most`` is what 1 stands for."""
    if not rows:
        return ""
    columns, name_width = max(len(row) for _, row in rows), 8 + 6.4 * max(len(name) for name, _ in rows)
    tall = max(cell, 11)
    width, height = name_width + max(columns * cell, 5.6 * len(x_label)) + 10, len(rows) * tall + 46
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" font-size="10" '
        f'font-family="system-ui,sans-serif" fill="{_INK}" role="img" aria-label="{escape(label or x_label, quote=True)}">'
    ]
    for i, (name, row) in enumerate(rows):
        y = i * tall
        out.append(f'<text x="{name_width - 6:.0f}" y="{y + tall - 2}" text-anchor="end">{escape(name)}</text>')
        out += [
            f'<rect x="{name_width + j * cell:.1f}" y="{y}" width="{cell - 1}" height="{tall - 1}" fill="{shade(value)}">'
            f"<title>{escape(name)}, {j}: {value:.3g}</title></rect>"
            for j, value in enumerate(row)
        ]
    floor = len(rows) * tall
    out.append(f'<text x="{name_width:.0f}" y="{floor + 14}">{escape(x_label)}</text>')
    out += [
        f'<rect x="{name_width + 14 + i * 14:.0f}" y="{floor + 24}" width="14" height="10" fill="{colour}"/>'
        for i, colour in enumerate(_SHADES)
    ]
    end = name_width + 14 + 14 * len(_SHADES)
    out.append(
        f'<text x="{name_width:.0f}" y="{floor + 33}">0</text><text x="{end + 5:.0f}" y="{floor + 33}">{escape(most)}</text></svg>'
    )
    return "".join(out)
