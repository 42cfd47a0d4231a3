"""The process that talks to Ray on behalf of :class:`deploy.ray_launcher.RayLauncher`.

Apart from the launcher because a start of Ray cannot be interrupted, writes to the terminal, takes over signals, and
dies with the thread that began it. Here all of that is contained: the launcher ends this process, whatever it is doing.

Orders come in and events go out over one socket, a JSON object a line::

    -> {"order": "start", "spec": ...}   {"order": "stop" | "restart", "name": ...}   {"order": "close"}
    <- {"hello": ...} once Ray is up, {"refused": why} if it is not, {"event": ...}

A worker gets its own placement group; router and gateway ask for nothing. For each component one actor runs the same
:class:`deploy.supervisor.Supervisor` as the process launcher, so a component behaves alike under both. Ray is not in
the data path: it places and supervises, tokens and blocks go from process to process.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from core.tasks import TaskScope
from deploy.launcher import ComponentEvent, ComponentSpec, ComponentState
from deploy.ray_supervisor import SupervisorActor

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Nothing of ours is an object of Ray; its smallest store is about this."""
PLACE_POLL_S = 2.0
UNAVAILABLE_PAUSE_S = 0.2
MAX_LINE_BYTES = 4 << 20


class _Component:
    """One supervised component as the driver sees it, from its placement to its end."""

    def __init__(self, spec: ComponentSpec, driver: "Driver") -> None:
        self.spec = spec
        self._driver = driver
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._is_stopping = False
        self.done = asyncio.Event()

    async def run(self) -> None:
        try:
            if await self._place():
                await self._follow()
        except RayError as error:
            self._say(ComponentState.FAILED, message=f"Ray lost it: {' '.join(str(error).split())}")
        finally:
            self._give_back()
            self.done.set()

    async def stop(self) -> None:
        self._is_stopping = True
        if self._actor is not None:
            self._actor.stop.remote()
        await self.done.wait()

    def restart(self) -> None:
        if self._actor is not None:
            self._actor.restart.remote()

    async def _place(self) -> bool:
        """Get the resources; false if stopped meanwhile, or if they cannot be had."""
        bundle = self.spec.resources.as_bundle()
        if not bundle:
            return True
        self._group = placement_group([bundle], strategy="STRICT_PACK", name=f"baton/{self.spec.name}")
        while not await asyncio.to_thread(self._group.wait, PLACE_POLL_S):
            if self._is_stopping:
                self._say(ComponentState.STOPPED)
                return False
            message = f"{self.spec.name} asks for {_amounts(bundle)}, but {self._driver.describe_room()}"
            if self._driver.is_embedded and not self._driver.has_room(bundle):
                hint = "lower its pool's resources (num_cpus may be a fraction) or replicas"
                self._say(ComponentState.FAILED, message=f"{message}; {hint}")
                return False
            self._say(ComponentState.WAITING, message=message)
        return True

    async def _follow(self) -> None:
        """Start the actor and pass on its events until the component has stopped or failed for good."""
        strategy = None
        if self._group is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        resources = self.spec.resources
        self._actor = (
            ray.remote(SupervisorActor)
            .options(
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                resources={name: amount for name, amount in resources.custom.items() if amount > 0},
                scheduling_strategy=strategy,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=4,
            )
            .remote()
        )
        if not await self._supervise():
            return
        if self._is_stopping:
            self._actor.stop.remote()
        while True:
            try:
                events = [ComponentEvent.from_json(text) for text in await self._actor.next_events.remote()]
            except ActorUnavailableError:
                await asyncio.sleep(UNAVAILABLE_PAUSE_S)
                continue
            except RayActorError:
                if self._is_stopping:
                    self._say(ComponentState.STOPPED)
                    return
                # The actor's process died, its component with it. Ray makes a new one, which knows nothing yet.
                self._say(ComponentState.EXITED, exit_code=137, message="its Ray supervisor died")
                if not await self._supervise():
                    return
                continue
            for event in events:
                self._driver.send_event(event)
                if event.state in (ComponentState.STOPPED, ComponentState.FAILED):
                    return

    async def _supervise(self) -> bool:
        """Tell the actor what to run, as soon as it is there. False if stopped meanwhile."""
        assert self._actor is not None
        while not self._is_stopping:
            try:
                await self._actor.supervise.remote(self.spec.to_json(), self._driver.log_dir)
                return True
            except RayActorError:
                await asyncio.sleep(UNAVAILABLE_PAUSE_S)
        self._say(ComponentState.STOPPED)
        return False

    def _give_back(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)

    def _say(self, state: ComponentState, *, exit_code: int = 0, message: str = "") -> None:
        self._driver.send_event(
            ComponentEvent(component=self.spec.name, state=state, exit_code=exit_code, message=message)
        )


class Driver:
    """Carries out the launcher's orders until it says ``close`` or hangs up."""

    def __init__(self, connection: socket.socket, *, is_embedded: bool, log_dir: str | None) -> None:
        self.is_embedded = is_embedded
        self.log_dir = log_dir
        self._connection = connection
        self._components: dict[str, _Component] = {}
        self._scope = TaskScope("ray-driver")
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=MAX_LINE_BYTES)
        orders = self._scope.spawn(self._obey(reader), name="orders")
        loop.add_signal_handler(signal.SIGTERM, orders.cancel)
        self._send({"hello": self.describe_room()})
        await asyncio.wait([orders])
        await asyncio.gather(*(component.stop() for component in self._components.values()))
        await self._scope.close()
        await self._writer.drain()

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            order = json.loads(line)
            match order["order"]:
                case "start":
                    spec = ComponentSpec.from_json(order["spec"])
                    component = self._components[spec.name] = _Component(spec, self)
                    self._scope.spawn(component.run(), name=spec.name)
                case "stop":
                    self._scope.spawn(self._stop(order["name"]), name=f"stop-{order['name']}")
                case "restart":
                    self._components[order["name"]].restart()
                case "close":
                    return

    async def _stop(self, name: str) -> None:
        component = self._components.get(name)
        if component is not None:
            await component.stop()
            if self._components.get(name) is component:
                del self._components[name]

    def send_event(self, event: ComponentEvent) -> None:
        self._send({"event": event.to_json()})

    def _send(self, message: dict[str, str]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    def has_room(self, bundle: dict[str, float]) -> bool:
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return all(free.get(name, 0) >= amount for name, amount in bundle.items())

    def describe_room(self) -> str:
        """``this machine offers 2 CPUs, of which 0 are free``, in numbers that Ray gives."""
        where = "this machine" if self.is_embedded else "the Ray cluster"
        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        names = [name for name in ("CPU", "GPU") if total.get(name, 0) > 0]
        offered = _amounts({name: total[name] for name in names}) or "nothing"
        return f"{where} offers {offered} ({_amounts({name: free.get(name, 0) for name in names}) or 'nothing'} free)"


def _amounts(bundle: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}{'s' if amount != 1 else ''}" for name, amount in bundle.items())


def connect(address: str, temp_dir: str) -> bool:
    """Join the cluster at ``address``, or start one on this machine. Returns whether it is ours."""
    if address != "local":
        ray.init(address=address, namespace="baton", log_to_driver=False, logging_level=logging.ERROR)
        return False
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        namespace="baton",
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=temp_dir,
    )
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy.ray_driver")
    parser.add_argument("--address", required=True)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--log-dir", default=None)
    parser.add_argument("--fd", type=int, required=True)
    options = parser.parse_args()
    connection = socket.socket(fileno=options.fd)
    try:
        is_embedded = connect(options.address, options.temp_dir)
    except (RayError, OSError, ValueError, RuntimeError) as error:
        refusal = {"refused": f"Ray at {options.address!r} does not start: {' '.join(str(error).split())}"}
        connection.sendall(json.dumps(refusal).encode() + b"\n")
        sys.exit(1)
    driver = Driver(connection, is_embedded=is_embedded, log_dir=options.log_dir if is_embedded else None)
    asyncio.run(driver.run())
    if not is_embedded:
        ray.shutdown()
    # An embedded Ray holds nothing worth saving: the guard ends what is left of it, faster than Ray would.
    os._exit(0)


if __name__ == "__main__":
    main()
