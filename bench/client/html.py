"""A report as one HTML file that needs nothing else: tables, definitions, plots."""

from collections.abc import Sequence
from html import escape

from bench.client.figures import DEFINITIONS, PERCENTILES, Figures
from bench.client.player import Run
from bench.client.svg import Series, distribution, plot
from bench.client.tables import Facts, spreads, totals

_STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 2em 1em 0;display:inline-table;vertical-align:top}"
    "td,th{border-bottom:1px solid #ddd;padding:3px 10px;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
    "dt{font-weight:bold}svg{margin:4px}"
)


def html_report(
    title: str, facts: Facts, found: Figures, run: Run, *, sweep: Sequence[tuple[float, Figures]] = ()
) -> str:
    latencies = [
        [
            name.upper(),
            *(f"{1e3 * value:.1f}" for value in (spread.mean, *(spread.percentiles[p] for p in PERCENTILES))),
        ]
        for name, spread in spreads(found).items()
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        _table([], list(map(list, facts.items()))),
        _table(["ms", "mean", *(f"p{p}" for p in PERCENTILES)], latencies),
        _table([], [list(row) for row in totals(found)]),
        "<div>",
        *plots(found, run, sweep=sweep),
        "</div><h2>Definitions</h2><dl>",
        *(f"<dt>{name}</dt><dd>{escape(meaning)}</dd>" for name, meaning in DEFINITIONS.items()),
        "</dl>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def plots(found: Figures, run: Run, *, sweep: Sequence[tuple[float, Figures]] = ()) -> list[str]:
    good = [record for record in run.records if record.is_ok]
    by_time = sorted(good, key=lambda record: record.sent_at)
    gaps = [1e3 * gap for record in good for gap in record.itl_s]
    sent = [(record.sent_at - run.started_at, record) for record in by_time]
    drawn = [
        plot(
            "TTFT of each request",
            [Series(name="TTFT", points=[(at, 1e3 * record.ttft_s) for at, record in sent], is_dots=True)],
            x_label="sent at (s)",
            y_label="ms",
        ),
        plot(
            "TPOT of each request",
            [Series(name="TPOT", points=[(at, 1e3 * (r.tpot_s or 0.0)) for at, r in sent], is_dots=True)],
            x_label="sent at (s)",
            y_label="ms",
        ),
        plot(
            "TTFT: share of requests not above",
            [Series(name="TTFT", points=distribution([1e3 * record.ttft_s for record in good]))],
            x_label="ms",
            y_label="share",
        ),
        plot(
            "ITL: share of gaps not above",
            [Series(name="ITL", points=distribution([gap for gap in gaps if gap > 0.01]))],
            x_label="ms",
            y_label="share",
            is_x_log=True,
        ),
        plot("Running requests", [Series(name="running", points=_running(run))], x_label="s", y_label="requests"),
    ]
    if sweep:
        rates = sorted(sweep, key=lambda pair: pair[0])
        drawn.append(
            plot(
                "Attainment and goodput over the rate",
                [
                    Series(name="attainment", points=[(rate, each.attainment) for rate, each in rates]),
                    Series(name="goodput / rate", points=[(rate, each.goodput / rate) for rate, each in rates]),
                ],
                x_label="requests a second",
                y_label="share",
            )
        )
    return drawn


def _running(run: Run) -> list[tuple[float, float]]:
    changes = sorted(
        [(record.sent_at, 1) for record in run.records] + [(record.ended_at, -1) for record in run.records]
    )
    number, points = 0, []
    for at, change in changes:
        number += change
        points.append((at - run.started_at, float(number)))
    return points[:: max(1, len(points) // 500)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>" if head else ""
    cells = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{heads}{''.join(cells)}</table>"
