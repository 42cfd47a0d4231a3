"""The Grafana dashboards, as tables; ``python -m deploy.dashboards`` writes deploy/observability/grafana/*.json.

Every query returns data on a running cluster, zero included: where a series exists only once something has happened,
the query says ``or vector(0)``. A test runs each of them against a real Prometheus.
"""

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("observability") / "grafana"
WIDTH, HEIGHT = 8, 8
"""Of a panel, on Grafana's grid of 24 columns."""
RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    """(legend, expression)"""
    about: str = ""
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    panels: tuple[Panel, ...]


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """The median and the 95th and 99th percentile; zero where nothing was measured."""
    return tuple(
        (
            f"p{100 * share:.0f}{f' {{{{{by}}}}}' if by else ''}",
            f"histogram_quantile({share}, sum by ({f'{by}, ' if by else ''}le) (rate({metric}_bucket[{RATE}]))) >= 0"
            " or vector(0)",
        )
        for share in (0.5, 0.95, 0.99)
    )


def _sum(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    return ((f"{{{{{by.split(', ')[-1]}}}}}", f"sum by ({by}) ({metric}) or vector(0)"),)


def _rate(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    return _sum(f"rate({metric}[{RATE}])", by)


SERVICE = Dashboard(
    uid="baton-service",
    title="Baton / Service",
    panels=(
        Panel(title="Requests ended", unit="reqps", queries=_rate("baton_gateway_requests_total", "outcome")),
        Panel(
            title="Failed, of those not cancelled",
            unit="percentunit",
            queries=(("5 min", "baton:failed_ratio:rate5m"), ("1 h", "baton:failed_ratio:rate1h")),
            about="What alerts go by. The objective is 0.5 %.",
        ),
        Panel(
            title="First tokens later than 2 s",
            unit="percentunit",
            queries=(("late", "baton:first_token_late_ratio:rate5m"),),
        ),
        Panel(title="Time to first token", unit="s", queries=_quantiles("baton_gateway_time_to_first_token_seconds")),
        Panel(
            title="Time per output token", unit="s", queries=_quantiles("baton_gateway_time_per_output_token_seconds")
        ),
        Panel(title="End to end", unit="s", queries=_quantiles("baton_gateway_e2e_request_latency_seconds")),
        Panel(
            title="Where the time goes",
            unit="percentunit",
            queries=(
                (
                    "{{stage}}",
                    f"sum by (stage) (rate(baton_gateway_stage_seconds_total[{RATE}]))"
                    f" / scalar(sum(rate(baton_gateway_stage_seconds_total[{RATE}])) > 0) >= 0 or vector(0)",
                ),
            ),
            is_stacked=True,
        ),
        Panel(
            title="Tokens",
            unit="short",
            queries=(
                ("answer", f"sum(rate(baton_gateway_generation_tokens_total[{RATE}])) or vector(0)"),
                ("prompt", f"sum(rate(baton_gateway_prompt_tokens_total[{RATE}])) or vector(0)"),
            ),
        ),
        Panel(title="HTTP answers", unit="reqps", queries=_rate("baton_gateway_http_responses_total", "status")),
        Panel(title="Refused room", unit="reqps", queries=_rate("baton_router_queue_refusals_total", "reason")),
        Panel(
            title="Refused by keys and limits",
            unit="reqps",
            queries=_rate("baton_gateway_access_refusals_total", "reason"),
        ),
        Panel(title="Clients that left", unit="reqps", queries=_rate("baton_gateway_client_aborts_total", "reason")),
    ),
)
BALANCE = Dashboard(
    uid="baton-balance",
    title="Baton / Prefill and decode",
    panels=(
        Panel(title="Busy", unit="percentunit", queries=(("{{model}} {{role}}", "baton:busy:rate5m"),)),
        Panel(
            title="Waiting at the router", unit="short", queries=_sum("baton_router_queue_length", "model, priority")
        ),
        Panel(
            title="Wait for room",
            unit="s",
            queries=_quantiles("baton_router_queue_wait_seconds"),
            about="Until it is placed.",
        ),
        Panel(title="Waiting in workers", unit="short", queries=_sum("baton_requests_waiting", "model, role")),
        Panel(title="Running in workers", unit="short", queries=_sum("baton_requests_running", "model, role")),
        Panel(title="Held for decode", unit="bytes", queries=_sum("baton_kv_held_bytes", "instance")),
        Panel(
            title="KV in use",
            unit="percentunit",
            queries=(
                (
                    "{{role}} {{instance}}",
                    'sum by (role, instance) (baton_kv_blocks{kind=~"in_use|leased|custody"})'
                    ' / sum by (role, instance) (baton_kv_blocks{kind!="reserved"})',
                ),
            ),
        ),
        Panel(title="Placements", unit="reqps", queries=_rate("baton_router_placements_total", "mode, reason")),
        Panel(title="Fallbacks", unit="reqps", queries=_rate("baton_router_fallbacks_total", "reason")),
        Panel(
            title="Prompt tokens",
            unit="short",
            queries=(
                ("computed {{role}}", f"sum by (role) (rate(baton_prompt_tokens_computed_total[{RATE}]))"),
                ("cached {{role}}", f"sum by (role) (rate(baton_prompt_tokens_cached_total[{RATE}]))"),
                ("fetched again", f"sum(rate(baton_prompt_tokens_refetched_total[{RATE}]))"),
            ),
        ),
        Panel(title="Tokens made", unit="short", queries=_rate("baton_tokens_generated_total", "instance")),
        Panel(title="Preemptions", unit="short", queries=_rate("baton_preemptions_total", "instance")),
    ),
)
TRANSFERS = Dashboard(
    uid="baton-transfers",
    title="Baton / KV transfers",
    panels=(
        Panel(title="KV received", unit="Bps", queries=_rate("baton_kv_received_bytes_total", "backend")),
        Panel(title="KV released as arrived", unit="Bps", queries=_rate("baton_kv_sent_bytes_total", "backend")),
        Panel(
            title="Bytes by pair",
            unit="Bps",
            queries=(
                (
                    "{{peer}} to {{instance}}",
                    f'sum by (peer, instance) (rate(baton_kv_pair_bytes_total{{role="decode"}}[{RATE}])) or vector(0)',
                ),
            ),
        ),
        Panel(
            title="Hand-offs",
            unit="ops",
            queries=(
                ("begun", f'sum(rate(baton_kv_pair_handoffs_total{{role="decode"}}[{RATE}])) or vector(0)'),
                ("again", f'sum(rate(baton_kv_pair_retries_total{{role="decode"}}[{RATE}])) or vector(0)'),
            ),
        ),
        Panel(title="Failures", unit="ops", queries=_rate("baton_kv_pair_failures_total", "slug")),
        Panel(title="Transfers by outcome", unit="ops", queries=_rate("baton_kv_transfers_total", "outcome")),
        Panel(
            title="Time of a hand-off",
            unit="s",
            queries=(
                (
                    "posting",
                    f"sum(rate(baton_kv_pair_post_seconds_total[{RATE}]))"
                    f" / (sum(rate(baton_kv_pair_handoffs_total[{RATE}])) > 0) or vector(0)",
                ),
                (
                    "moving",
                    f"sum(rate(baton_kv_pair_move_seconds_total[{RATE}]))"
                    f" / (sum(rate(baton_kv_pair_handoffs_total[{RATE}])) > 0) or vector(0)",
                ),
            ),
            about="Means. Post is the copy itself where the transport copies while posting.",
        ),
        Panel(
            title="Bandwidth of the link in use",
            unit="Bps",
            queries=(
                (
                    "{{peer}} to {{instance}} {{backend}} {{mode}}",
                    "baton_kv_pair_bytes_per_second"
                    " and on (instance, peer, backend, mode) baton_kv_pair_link_used == 1",
                ),
            ),
            about="As the last handshake measured it.",
        ),
        Panel(
            title="Latency of the link",
            unit="s",
            queries=(("{{peer}} to {{instance}} {{backend}} {{mode}}", "baton_kv_pair_latency_seconds"),),
        ),
        Panel(
            title="Pairs not closed",
            unit="short",
            queries=(("{{state}}", 'sum by (state) (baton_kv_pair_circuit{state!="closed"}) or vector(0)'),),
        ),
        Panel(title="Leases by end", unit="ops", queries=_rate("baton_kv_leases_total", "outcome")),
        Panel(
            title="Quarantined blocks",
            unit="short",
            queries=(
                ("{{instance}}", "baton_kv_quarantine_blocks"),
                ("age {{instance}}", "baton_kv_quarantine_age_seconds"),
            ),
        ),
    ),
)
WORKERS = Dashboard(
    uid="baton-workers",
    title="Baton / Workers",
    panels=(
        Panel(title="Workers by state", unit="short", queries=_sum("baton_router_workers", "model, role, state")),
        Panel(
            title="Ready, of those wanted",
            unit="short",
            queries=(
                ("ready {{role}}", 'sum by (role) (baton_router_workers{state="ready"})'),
                ("wanted {{role}}", "sum by (role) (baton_router_pool_size)"),
            ),
        ),
        Panel(title="Changes of state", unit="ops", queries=_rate("baton_router_worker_transitions_total", "to")),
        Panel(
            title="Lives begun in an hour",
            unit="short",
            queries=(
                ("{{model}} {{role}}", "sum by (model, role) (increase(baton_router_worker_incarnations_total[1h]))"),
            ),
        ),
        Panel(title="Gateways", unit="short", queries=(("gateways", "baton_router_gateways"),)),
        Panel(title="Placements open", unit="short", queries=(("open", "baton_router_open_placements"),)),
        Panel(title="Step time", unit="s", queries=_quantiles("baton_step_seconds", "role")),
        Panel(
            title="Steps",
            unit="ops",
            queries=(("{{instance}}", f"sum by (instance) (rate(baton_step_seconds_count[{RATE}]))"),),
        ),
        Panel(
            title="Busy by worker",
            unit="percentunit",
            queries=(("{{instance}}", f"sum by (instance) (rate(baton_step_seconds_sum[{RATE}]))"),),
        ),
        Panel(
            title="KV blocks",
            unit="short",
            queries=_sum('baton_kv_blocks{kind!="reserved"}', "role, kind"),
            is_stacked=True,
        ),
        Panel(title="KV memory touched", unit="bytes", queries=(("{{instance}}", "baton_kv_prefault_bytes"),)),
        Panel(title="Answers Prometheus", unit="short", queries=(("{{job}} {{instance}}", 'up{job=~"baton-.*"}'),)),
    ),
)
AUTOSCALER = Dashboard(
    uid="baton-autoscaler",
    title="Baton / Autoscaler",
    panels=(
        Panel(
            title="Sizes",
            unit="short",
            queries=(("{{model}} {{role}} {{kind}}", "baton_router_autoscaler_workers"),),
            about="Target: what the size would be without guards.",
        ),
        Panel(title="Sizes asked for", unit="short", queries=(("{{model}} {{role}}", "baton_router_pool_size"),)),
        Panel(
            title="Decisions",
            unit="ops",
            queries=_rate("baton_router_autoscaler_decisions_total", "model, mode, action"),
        ),
        Panel(
            title="Demand",
            unit="short",
            queries=(
                ("prompt tokens", f"sum(rate(baton_gateway_prompt_tokens_total[{RATE}])) or vector(0)"),
                ("answer tokens", f"sum(rate(baton_gateway_generation_tokens_total[{RATE}])) or vector(0)"),
            ),
        ),
        Panel(title="Busy", unit="percentunit", queries=(("{{model}} {{role}}", "baton:busy:rate5m"),)),
        Panel(title="Wait for room", unit="s", queries=_quantiles("baton_router_queue_wait_seconds")),
    ),
)
DASHBOARDS = (SERVICE, BALANCE, TRANSFERS, WORKERS, AUTOSCALER)


def to_json(dashboard: Dashboard) -> dict[str, object]:
    """As Grafana imports it."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "links": [{"title": "Baton", "type": "dashboards", "tags": ["baton"], "asDropdown": True}],
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${source}"}
    columns = 24 // WIDTH
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"x": WIDTH * (number % columns), "y": HEIGHT * (number // columns), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 40 if panel.is_stacked else 0,
                    "lineWidth": 1,
                    "stacking": {"mode": "normal" if panel.is_stacked else "none"},
                },
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.queries)
        ],
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        text = json.dumps(to_json(dashboard), indent=2)
        (folder / f"{dashboard.uid}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
