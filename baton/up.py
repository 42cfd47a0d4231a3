"""``baton up``: start a cluster, say how far it is, keep it running, stop it without a trace."""

import asyncio
import json
import tempfile
import time
from pathlib import Path

import httpx

from baton.status import table
from baton.stop_signals import StopSignals
from core.config import ClusterConfig
from core.credentials import open_credentials
from core.errors import ConfigError
from core.made_certificates import make_certificates
from core.security_config import Identity
from deploy.cluster import Cluster, resolve_ports
from deploy.launcher import EXIT_CONFIG, ComponentEvent, ComponentState, Launcher, LaunchError
from deploy.process import ProcessLauncher
from modelfiles.model import open_model

READY_POLL_S = 0.2
SAY_AGAIN_S = 10.0
MAX_REASON_CHARS = 300
ESSENTIAL = ("router", "gateway")
"""Without one of these the cluster serves nothing; a pool can do without a worker for a while."""


def up(config: ClusterConfig, *, log_dir: str | None) -> int:
    """Returns once the cluster was told to stop and has stopped. Raises ConfigError and LaunchError.

    From the first line that is printed until the end of the process a stop signal, at whatever moment, ends with
    everything stopped and exit code 0; before it nothing was started, and it interrupts as usual.
    """
    for model in config.models:
        open_model(model.path)  # a missing or broken model is told, a remote one fetched, before anything is started
    config = resolve_ports(config)
    if config.security.tls == "auto":
        make_certificates(Path(config.security.folder).expanduser(), domain=config.security.domain)
    for identity in Identity:
        open_credentials(config.security, identity)  # a bad certificate is told before anything is started
    with StopSignals() as signals:
        asyncio.run(_run(config, signals, log_dir))
    return 0


async def _run(config: ClusterConfig, signals: StopSignals, log_dir: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="baton-") as run_dir:
        logs = _make_log_dir(Path(log_dir) if log_dir is not None else Path(run_dir) / "logs")
        launcher = make_launcher(config, run_dir=Path(run_dir), log_dir=logs)
        run = UpRun(config, launcher, logs)
        try:
            await signals.attach(hurry=launcher.kill)
            async with launcher:
                try:
                    await run.serve()
                finally:
                    signals.begin_stop()
                    run.say("stopping")
        except asyncio.CancelledError:
            if not signals.was_told_to_stop:
                raise
        finally:
            signals.detach()
    run.say("stopped")


def make_launcher(config: ClusterConfig, *, run_dir: Path, log_dir: Path) -> Launcher:
    """The launcher that the configuration names. Ray's is imported only if it is the one. Raises ConfigError."""
    if config.launcher.kind == "kubernetes":
        raise ConfigError("launcher.kind is kubernetes, which starts processes itself: say ray or process")
    if config.launcher.kind == "process":
        return ProcessLauncher(log_dir=log_dir)
    from deploy.ray_launcher import RayLauncher

    print(f"starting Ray ({config.launcher.ray.address})", flush=True)
    return RayLauncher(
        run_dir=run_dir, log_dir=log_dir, address=config.launcher.ray.address, stop_s=config.launcher.stop_s
    )


class UpRun:
    """The progress of one ``baton up``, from the first process to the table of endpoints and on."""

    def __init__(self, config: ClusterConfig, launcher: Launcher, logs: Path) -> None:
        self._config = config
        self._launcher = launcher
        self._logs = logs
        self._started_at = time.monotonic()
        self._ready: dict[str, ComponentEvent] = {}
        self._cluster = Cluster(config, launcher, say=self.say)
        self._names: tuple[str, ...] = ()
        self._is_up = False
        self._waiting_for = ""

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started_at:6.1f} s] {text}", flush=True)

    async def serve(self) -> None:
        """Start everything, show the endpoints, follow events until cancelled. Raises LaunchError."""
        self._names = await self._cluster.start()
        self.say(f"starting {', '.join(self._names)}")
        following = asyncio.create_task(self._follow(), name="up/events")
        waiting = asyncio.create_task(self._wait_until_ready(), name="up/ready")
        tasks = [following, waiting]
        try:
            timeout_s = self._config.launcher.start_timeout_s
            await asyncio.wait({following, waiting}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            if not waiting.done():
                raise LaunchError(
                    f"not up after {timeout_s:g} s: {self._waiting_for}; run again with --log-dir to keep the logs, "
                    "or allow more time: --set launcher.start_timeout_s=600"
                )
            waiting.result()
            self._is_up = True
            print(self._endpoints(), flush=True)
            keeping = asyncio.create_task(self._cluster.keep(), name="up/pools")
            tasks.append(keeping)
            await asyncio.wait({following, keeping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (following, keeping):
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        async for event in self._launcher.events():
            self._cluster.note(event)
            match event.state:
                case ComponentState.READY:
                    self._ready[event.component] = event
                    self.say(f"{event.component} is ready, pid {event.pid}")
                case ComponentState.WAITING:
                    self.say(event.message)
                case ComponentState.EXITED if event.exit_code != EXIT_CONFIG:  # else FAILED follows, with the reason
                    self.say(f"{event.component} ended with exit code {event.exit_code}{_reason(event)}")
                case ComponentState.FAILED:
                    self._fail(event)
                case _:
                    pass

    def _fail(self, event: ComponentEvent) -> None:
        if self._is_up and event.component.partition("-")[0] not in ESSENTIAL:
            return  # whoever keeps the pools says it, and tries again
        if event.exit_code == EXIT_CONFIG:
            raise ConfigError(f"{event.component}: {event.message}")
        raise LaunchError(f"{event.component}: {event.message}{_reason(event)}; --log-dir DIR keeps the whole log")

    async def _wait_until_ready(self) -> None:
        """Until the gateway says that every model can be served, and every component has said that it serves."""
        said_at = time.monotonic()
        # Our own child on this machine, asked for nothing secret: its certificate need not name a loopback address.
        async with httpx.AsyncClient(timeout=5, trust_env=False, verify=False) as client:
            while True:
                missing = [name for name in self._names if name not in self._ready]
                self._waiting_for = f"waiting for {', '.join(missing)}" if missing else await self._ask_gateway(client)
                if not self._waiting_for:
                    return
                if time.monotonic() - said_at >= SAY_AGAIN_S:
                    said_at = time.monotonic()
                    self.say(self._waiting_for)
                await asyncio.sleep(READY_POLL_S)

    async def _ask_gateway(self, client: httpx.AsyncClient) -> str:
        """Why the gateway is not ready, in its own words; empty when it is."""
        try:
            answer = await client.get(self._ready_url())
            return "" if answer.status_code == httpx.codes.OK else str(answer.json()["error"]["message"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return "the gateway does not answer"

    def _ready_url(self) -> str:
        return f"{self._config.gateway.url}/ready"

    def _endpoints(self) -> str:
        gateway = self._config.gateway.url
        rows = [
            (name, str(event.pid), event.addresses.get("grpc", "-"), event.addresses.get("http", "-"))
            for name, event in ((name, self._ready[name]) for name in self._names)
        ]
        question = {
            "model": self._config.models[0].name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        has_keys = self._config.gateway.access.has_keys
        authorization = '    -H "Authorization: Bearer $BATON_API_KEY" \\\n' if has_keys else ""
        note = (
            "" if has_keys else "There are no API keys: only this machine is served, and nobody is asked for one.\n\n"
        )
        return (
            f"\nBaton is up. OpenAI API: {gateway}/v1   logs: {self._logs}\n\n"
            f"{table(('COMPONENT', 'PID', 'GRPC', 'HTTP (probes, /metrics)'), rows)}\n\n"
            f"  curl {gateway}/v1/chat/completions -H 'Content-Type: application/json' \\\n{authorization}"
            f"    -d '{json.dumps(question)}'\n\n"
            f"{note}Ctrl-C stops everything."
        )


def _reason(event: ComponentEvent) -> str:
    """``: why``, the last thing that the component wrote and that is not a log record."""
    plain = [line for line in event.tail if not line.startswith("{")]
    return f": {plain[-1][:MAX_REASON_CHARS]}" if plain else ""


def _make_log_dir(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write logs to {path}: {error.strerror}; choose another --log-dir") from None
    return path
