"""Builds the gateway out of its parts: an ASGI application, and the tasks that live beside it."""

from collections.abc import Callable, Mapping, Sequence

from fastapi import FastAPI
from starlette.routing import Route

from core.clock import Clock, MonotonicClock
from core.config import ClusterConfig
from core.ids import GatewayId, Incarnation
from core.tasks import TaskScope
from core.telemetry import Telemetry
from core.types import RequestRecord
from gateway.access.assembly import Access, OpenAccess
from gateway.access.gate import Gate
from gateway.console.pages import pages
from gateway.console.routes import ConsoleRoutes
from gateway.cors import Cors
from gateway.edge import Door, Edge, Endpoint, Handle, Table, method_not_allowed, not_found, open_door
from gateway.fields import UnknownFields
from gateway.generation import Generation
from gateway.legs import Peers
from gateway.metrics import GatewayMetrics
from gateway.models import ModelShelf, ServedModel
from gateway.openapi import OPENAPI_PATH, openapi_page
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.ports import ClientFactory, WholeRouterPort
from gateway.reporter import Reporter
from gateway.routes import Routes
from gateway.run import Run
from gateway.token_streams import TokenStreams

ABORT_GRACE_S = 2.0


class Gateway:
    """One gateway process. `asgi` serves; `start` and `close` frame it; make it on the event loop that runs it."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        router: WholeRouterPort,
        clients: ClientFactory,
        models: Sequence[ServedModel],
        telemetry: Telemetry,
        gateway_id: GatewayId,
        incarnation: Incarnation,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        """`access` is closed with the gateway; None: nobody is asked for a key."""
        clock = clock or MonotonicClock()
        self._config = config
        self._router = router
        self._access = access or OpenAccess()
        self._metrics = GatewayMetrics(telemetry.registry, config.models)
        self._shelf = ModelShelf(models)
        self.peers = Peers(clients, TokenStreams(clients, gateway_id, incarnation, clock))
        self.reporter = Reporter(router, clock, gateway_id, incarnation)
        self._metrics.running.set_function(lambda: self.reporter.num_requests)
        self._scope = TaskScope("gateway", on_failure=self._break)
        self._on_broken: Callable[[], None] = lambda: None
        self.is_broken = False
        limits = PipelineLimits(
            max_attempts=config.gateway.limits.max_attempts,
            capacity_patience_s=config.router.placement_wait_s,
        )
        unknown = UnknownFields(
            lambda route, count: self._metrics.unknown_fields.labels(route).inc(count),
            refuse=config.gateway.unknown_fields == "refuse",
        )
        self._generation = Generation(
            shelf=self._shelf,
            pipeline=Pipeline(router, self.peers, limits),
            on_end=self._on_end,
            limits=config.gateway.limits,
            unknown=unknown,
            clock=clock,
            gateway_id=gateway_id,
            incarnation=incarnation,
            on_count=self._on_count,
            block_size=self.reporter.block_size,
            gate=self._access.gate,
            telemetry=telemetry,
        )
        routes = Routes(
            shelf=self._shelf,
            limits=config.gateway.limits,
            unknown=unknown,
            generation=self._generation,
            reporter=self.reporter,
            telemetry=telemetry,
        )
        self._console = ConsoleRoutes(router, self._access.gate, config.gateway.limits)
        app = _application(self._generation, routes, self._access)
        self.paths = tuple(route.path for route in app.routes if isinstance(route, Route))
        """Of the API. The console's are its page's own."""
        _add_console(app, self._console, self._access.gate)
        # The table itself: the middlewares that FastAPI puts before it do what endpoints do here, or nothing.
        self.asgi = Edge(Cors(Table(app.router), config.gateway.cors), self._metrics)

    def start(self, *, on_broken: Callable[[], None] = lambda: None) -> None:
        """Starts the heartbeat to the router. ``on_broken`` is called if that ends by an error."""
        self._on_broken = on_broken
        self._scope.spawn(self.reporter.run(self._config.router.heartbeat_s), name="reporter")
        self._access.start(self._metrics, self._break)

    async def drain(self) -> None:
        """Ready says no, then new requests are refused; running ones finish, at most for the configured time, and then
        end by an error."""
        limits = self._config.gateway.limits
        await self._generation.drain(limits.drain_s, wait_s=limits.drain_wait_s)
        self._console.stop()

    def hurry(self) -> None:
        """A drain ends now: it waits for nobody any more."""
        self._generation.hurry()

    def why_not_ready(self) -> str | None:
        """For probes: a person's reason."""
        return "shutting down" if self._generation.is_draining else self.reporter.why_not_ready()

    async def close(self) -> None:
        """Ends everything this gateway owns. No request may be running any more."""
        await self._scope.close()
        await self.peers.drain(ABORT_GRACE_S)
        await self.peers.close()
        await self._router.close()
        await self._access.close()
        self._shelf.close()

    def _on_count(self, num_running: int) -> None:
        self.reporter.num_requests = num_running

    def _break(self, error: BaseException) -> None:
        self.is_broken = True
        self._on_broken()

    def _on_end(self, run: Run, record: RequestRecord) -> None:
        self._metrics.observe(run, record)
        self.reporter.add(record)


def _application(generation: Generation, routes: Routes, access: Access) -> FastAPI:
    """The route table. Only what stands here is served, and one page that describes it; no redirects. Every route has a
    door, and what is no route has the one of keys: strangers do not learn what exists."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    key, admin = access.gate.check_key, access.gate.check_admin
    table: list[tuple[str, str, Door, Handle]] = [
        ("POST", "/v1/chat/completions", key, generation.chat_completions),
        ("POST", "/v1/completions", key, generation.completions),
        ("POST", "/v1/responses", key, generation.responses),
        ("GET", "/v1/models", key, routes.list_models),
        ("GET", "/v1/models/{name:path}", key, routes.show_model),
        ("POST", "/tokenize", key, routes.tokenize),
        ("POST", "/detokenize", key, routes.detokenize),
        ("GET", "/health", open_door, routes.health),
        ("GET", "/ready", open_door, routes.ready),
        ("GET", "/metrics", open_door if access.are_metrics_open else admin, routes.metrics),
    ]
    if access.routes is not None:
        table.append(("GET", "/v1/usage", key, access.routes.own_usage))
        if access.has_admin:
            table += [
                ("POST", "/admin/keys", admin, access.routes.create_key),
                ("GET", "/admin/keys", admin, access.routes.list_keys),
                ("GET", "/admin/keys/{key_id}", admin, access.routes.show_key),
                ("DELETE", "/admin/keys/{key_id}", admin, access.routes.revoke_key),
                ("GET", "/admin/usage", admin, access.routes.all_usage),
            ]
    served = {(method, path.replace(":path", "")) for method, path, _, _ in table} | {("GET", OPENAPI_PATH)}
    table.append(("GET", OPENAPI_PATH, key, openapi_page(served)))
    _add_routes(app, table, key)
    app.router.default = Endpoint("other", key, not_found)  # a pattern would miss paths with a line break in them
    return app


def _add_console(app: FastAPI, console: ConsoleRoutes, gate: Gate) -> None:
    """The page, which everybody may load, and what it reads, which only operators may."""
    door = gate.check_console
    files = pages()
    table: list[tuple[str, str, Door, Handle]] = [
        *(("GET", path, open_door, page) for path, page in files.items()),
        ("GET", "/console/session", door, console.show_session),
        ("POST", "/console/session", gate.check_admin, console.open_session),
        ("DELETE", "/console/session", open_door, console.end_session),
        ("GET", "/console/feed", door, console.feed),
        ("GET", "/console/requests/{request_id}", door, console.show_request),
    ]
    _add_routes(app, table, gate.check_key, names=dict.fromkeys(files, "/console"))


def _add_routes(
    app: FastAPI, table: Sequence[tuple[str, str, Door, Handle]], key: Door, names: Mapping[str, str] | None = None
) -> None:
    """Every path of the table has an answer to every method. ``names``: what the routes are called in logs and metrics,
    where that is not their path."""
    names = names or {}
    methods: dict[str, list[str]] = {}
    for method, path, door, handle in table:
        app.router.routes.append(Route(path, Endpoint(names.get(path, path), door, handle), methods=[method]))
        methods.setdefault(path, []).append(method)
    for path, allowed in methods.items():
        refuse = method_not_allowed(", ".join(allowed))
        app.router.routes.append(Route(path, Endpoint(names.get(path, path), key, refuse)))
