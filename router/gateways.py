"""The gateways of the cell: which incarnations report, so that a dead one's estimates do not linger."""

from dataclasses import dataclass

from core.clock import Clock
from core.ids import GatewayId, Incarnation
from core.types import GatewayReport, GatewayStatus


@dataclass(frozen=True, slots=True)
class _Heard:
    report: GatewayReport
    at: float


class GatewayBook:
    """The last report of each gateway. A new incarnation replaces the old one; silence ends it.

    ::

        report --> present --- silent for timeout_s, or a new incarnation of the id --> gone
    """

    def __init__(self, clock: Clock, *, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._heard: dict[GatewayId, _Heard] = {}

    def __contains__(self, gateway_id: GatewayId) -> bool:
        return gateway_id in self._heard

    def report(self, report: GatewayReport) -> tuple[GatewayId, Incarnation] | None:
        """Note a heartbeat. Returns the incarnation that it replaced, if any."""
        before = self._heard.get(report.gateway_id)
        self._heard[report.gateway_id] = _Heard(report, self._clock.now())
        if before is None or before.report.incarnation == report.incarnation:
            return None
        return report.gateway_id, before.report.incarnation

    def sweep(self) -> list[tuple[GatewayId, Incarnation]]:
        """Forget the gateways that fell silent, and name them."""
        now = self._clock.now()
        gone = [h.report for h in self._heard.values() if now - h.at >= self._timeout_s]
        for report in gone:
            del self._heard[report.gateway_id]
        return [(report.gateway_id, report.incarnation) for report in gone]

    def statuses(self) -> tuple[GatewayStatus, ...]:
        now = self._clock.now()
        return tuple(
            GatewayStatus(
                gateway_id=gateway_id,
                incarnation=heard.report.incarnation,
                http_address=heard.report.http_address,
                pid=heard.report.pid,
                num_requests=heard.report.num_requests,
                heartbeat_age_s=now - heard.at,
            )
            for gateway_id, heard in sorted(self._heard.items())
        )
