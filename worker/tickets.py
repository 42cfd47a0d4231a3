"""A worker's tickets: those it was given to show, and the desk at which it asks others for theirs."""

from core.errors import TicketRefused
from core.handoff import Claim, Open, PeerInfo
from core.ids import Incarnation
from core.tickets import Ticket, TicketDesk
from core.types import WorkerCommand


class Tickets:
    """Without a desk none are asked for. Event loop only."""

    def __init__(self, desk: TicketDesk | None = None) -> None:
        self._desk = desk
        self._to_show: dict[Incarnation, bytes] = {}

    def learn(self, command: WorkerCommand) -> None:
        """What the router sends along with the peers."""
        if command.ticket_key is not None and self._desk is not None:
            self._desk.learn(command.ticket_key)
        if command.tickets:
            peers = (peer.incarnation for peer in command.peers)
            self._to_show = dict(zip(peers, command.tickets, strict=False))

    def to_show(self, holder: Incarnation) -> bytes:
        """By which the router has introduced us to that holder."""
        return self._to_show.get(holder, b"")

    def check_introduction(self, ticket: bytes, reader: PeerInfo) -> None:
        """Raises TicketRefused."""
        if self._desk is not None:
            self._desk.check_introduction(ticket, reader=reader.worker_id, incarnation=reader.incarnation)

    def check_claim(self, message: Open | Claim, reader: PeerInfo) -> Ticket | None:
        """None where none is asked for. Raises TicketRefused."""
        if self._desk is None:
            return None
        return self._desk.check_claim(
            message.ticket,
            reader=reader.worker_id,
            incarnation=reader.incarnation,
            handoff_id=message.handoff_id,
            request_id=message.request_id,
            attempt=message.attempt,
        )


def check_tenant(ticket: Ticket | None, tenant: str) -> None:
    """Of what is held. Raises TicketRefused."""
    if ticket is not None and ticket.tenant != tenant:
        raise TicketRefused("the ticket is another tenant's")
