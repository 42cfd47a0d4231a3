"""Plots as SVG, written out by hand: no library, no script, no font of anybody."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_COLOURS = ("#1f6fb4", "#d1603d", "#3b8f5a", "#8a5fb0", "#b08a2e", "#5a6672")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    is_dots: bool = False
    """Dots and not a line."""


def plot(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    width: int = 560,
    height: int = 320,
    is_x_log: bool = False,
) -> str:
    """A plot of its own, from zero upwards. Points that are not finite are left out."""
    shown = [
        Series(name=each.name, points=[p for p in each.points if all(map(math.isfinite, p))], is_dots=each.is_dots)
        for each in series
    ]
    xs = [math.log10(x) if is_x_log else x for each in shown for x, _ in each.points] or [0.0]
    ys = [y for each in shown for _, y in each.points] or [0.0]
    low, high, top = min(xs), max(xs), _ceiling(max(ys))
    span = (high - low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = ((math.log10(x) if is_x_log else x) - low) / span
        return _LEFT + across * (width - _LEFT - _RIGHT), height - _BOTTOM - y / top * (height - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="18" font-size="13" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(width + _LEFT) / 2}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(13 {height / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for step in range(5):
        y = top * step / 4
        _, down = at(10**low if is_x_log else low, y)
        parts.append(f'<path d="M{_LEFT} {down:.1f}H{width - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{y:.4g}</text>')
        x = low + span * step / 4
        x = 10**x if is_x_log else x
        parts.append(f'<text x="{at(x, 0)[0]:.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">{x:.4g}</text>')
    for number, each in enumerate(shown):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [at(x, y) for x, y in each.points]
        if each.is_dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{colour}" opacity="0.6"/>' for x, y in places]
        elif places:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        right, down = width - _RIGHT - 130, _TOP + 4 + 15 * number
        parts.append(f'<rect x="{right}" y="{down - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{right + 15}" y="{down + 1}">{escape(each.name)}</text>')
    return "\n".join([*parts, "</svg>"])


def distribution(values: Sequence[float], *, points: int = 200) -> list[tuple[float, float]]:
    """(value, share of all values that are not above it), thinned out."""
    ordered = sorted(value for value in values if math.isfinite(value))
    chosen = range(0, len(ordered), max(1, len(ordered) // points))
    return [(ordered[index], (index + 1) / len(ordered)) for index in (*chosen, len(ordered) - 1)] if ordered else []


def _ceiling(value: float) -> float:
    """A round number not below it."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(factor * unit for factor in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if factor * unit >= value)
