"""A small API server of Kubernetes for a test, enough for real Helm (3 and 4) and kubectl.

Discovery, OpenAPI v3, server-side apply (as a merge), watch, scale and Helm's release Secrets, from memory. Objects are
checked strictly against Kubernetes' schemas. Nothing is scheduled: workloads are ready and Jobs done at once.
"""

from __future__ import annotations

import base64
import copy
import json
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, urlparse

import jsonpatch
import yaml

from tests.support.kube_models import is_known, problems

KINDS = {
    "v1": {
        "pods": "Pod",
        "services": "Service",
        "secrets": "Secret",
        "configmaps": "ConfigMap",
        "serviceaccounts": "ServiceAccount",
        "namespaces": "Namespace",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "events": "Event",
    },
    "apps/v1": {"deployments": "Deployment", "replicasets": "ReplicaSet"},
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "ray.io/v1": {"rayclusters": "RayCluster"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
}
SCALED = ("Deployment", "LeaderWorkerSet")
SHORT = {"deployments": ["deploy"], "services": ["svc"], "pods": ["po"]}
OBJECT = dict[str, Any]


class Place(NamedTuple):
    """What a path names."""

    version: str
    resource: str
    namespace: str | None
    name: str | None
    sub: str | None


class KubeApi:
    """On a free port of loopback. As a context it serves; ``kubeconfig`` leads there."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str | None, str], OBJECT] = {}
        self.lock = threading.RLock()
        self.watchers: list[tuple[Place, queue.Queue[OBJECT]]] = []
        self._revision = 1
        self.objects["v1", "namespaces", None, "llm"] = {
            "kind": "Namespace",
            "apiVersion": "v1",
            "metadata": {"name": "llm", "uid": "x", "resourceVersion": "1"},
        }
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="kube-api", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, path: Path) -> str:
        context = {"cluster": "c", "user": "u", "namespace": "llm"}
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": context}],
        }
        path.write_text(yaml.safe_dump(value))
        return str(path)

    def get(self, kind: str, name: str) -> OBJECT | None:
        return next(
            (one for one in self.objects.values() if one["kind"] == kind and one["metadata"]["name"] == name), None
        )

    def put(self, place: Place, one: OBJECT, *, is_new: bool, is_dry: bool) -> OBJECT:
        assert place.name is not None
        metadata = one["metadata"]
        self._revision += 1
        if is_new:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            metadata.update(uid=str(uuid.uuid4()), creationTimestamp=now, generation=1)
        else:
            metadata["generation"] = metadata.get("generation", 1) + 1
        metadata["resourceVersion"] = str(self._revision)
        if place.namespace is not None:
            metadata["namespace"] = place.namespace
        _be_done(one)
        if not is_dry:
            self.objects[place.version, place.resource, place.namespace, place.name] = one
            self.tell("ADDED" if is_new else "MODIFIED", place, one)
        return one

    def tell(self, what: str, place: Place, one: OBJECT) -> None:
        for watched, changes in list(self.watchers):
            is_same = (watched.version, watched.resource) == (place.version, place.resource)
            if is_same and watched.namespace in (None, place.namespace):
                changes.put({"type": what, "object": one})

    @property
    def revision(self) -> str:
        return str(self._revision)


def _be_done(one: OBJECT) -> None:
    match one["kind"]:
        case "Deployment":
            one["spec"].setdefault("replicas", 1)
            counts = dict.fromkeys(
                ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), one["spec"]["replicas"]
            )
            progress = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
            conditions = [{"type": "Available", "status": "True"}, progress]
            generation = one["metadata"].get("generation", 1)
            one["status"] = {"observedGeneration": generation, **counts, "conditions": conditions}
        case "LeaderWorkerSet":
            one["spec"].setdefault("replicas", 1)
        case "Pod":
            one["status"] = {"phase": "Succeeded", "containerStatuses": [], "conditions": []}
        case "Job":
            one["status"] = {"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}
        case _:
            pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: KubeApi

    def log_message(self, format: str, *_: object) -> None:
        pass

    def _answer(self, code: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, code: int, reason: str, message: str = "") -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        self._answer(code, {**status, "message": message or reason})

    def _body(self) -> OBJECT:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if data.startswith(b"k8s\0"):
            return _from_protobuf(data)
        value = yaml.safe_load(data) if data else {}
        return value if isinstance(value, dict) else {"patch": value}

    def _place(self) -> tuple[Place, dict[str, str]]:
        url = urlparse(self.path)
        parts = url.path.strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        version, rest = (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = None
        if len(rest) >= 3 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        padded = [*rest, None, None, None]
        return Place(version, padded[0] or "", namespace, padded[1], padded[2]), query

    # -- reading ------------------------------------------------------------------------------------------------------

    def do_GET(self) -> None:
        parts = urlparse(self.path).path.strip("/").split("/")
        found = _discovery(parts)
        if found is not None:
            return self._answer(200, found)
        place, query = self._place()
        if KINDS.get(place.version, {}).get(place.resource) is None:
            return self._refuse(404, "NotFound")
        with self.api.lock:
            if place.name is not None:
                one = self.api.objects.get((place.version, place.resource, place.namespace, place.name))
                if place.sub == "log":
                    return self._answer(200, "the answer")
                if one is None:
                    return self._refuse(404, "NotFound", f'{place.resource} "{place.name}" not found')
                return self._answer(200, _scale(one) if place.sub == "scale" else one)
            items = [one for key, one in self.api.objects.items() if _is_in(key, one, place, query)]
            if query.get("watch") not in ("1", "true"):
                kind = KINDS[place.version][place.resource]
                listed = {"kind": f"{kind}List", "apiVersion": place.version, "items": items}
                return self._answer(200, {**listed, "metadata": {"resourceVersion": self.api.revision}})
            changes: queue.Queue[OBJECT] = queue.Queue()
            watcher = (place, changes)
            self.api.watchers.append(watcher)
        self._watch(watcher, items if query.get("sendInitialEvents") == "true" else None)
        return None

    def _watch(self, watcher: tuple[Place, queue.Queue[OBJECT]], items: list[OBJECT] | None) -> None:
        place, changes = watcher
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

        def send(event: OBJECT) -> None:
            data = json.dumps(event).encode() + b"\n"
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        try:
            if items is not None:
                for one in items:
                    send({"type": "ADDED", "object": one})
                marks = {"resourceVersion": self.api.revision, "annotations": {"k8s.io/initial-events-end": "true"}}
                kind = KINDS[place.version][place.resource]
                mark = {"kind": kind, "apiVersion": place.version, "metadata": marks}
                send({"type": "BOOKMARK", "object": mark})
            ends_at = time.monotonic() + 60
            while time.monotonic() < ends_at:
                with suppress(queue.Empty):
                    send(changes.get(timeout=0.5))
        except OSError:
            pass  # who watched has gone
        finally:
            self.api.watchers.remove(watcher)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _store(self, place: Place, one: OBJECT, query: dict[str, str], *, is_new: bool) -> None:
        plain = {name: value for name, value in one.items() if name != "status"}
        wrong = next(problems(plain), None) if is_known(one["kind"]) else None
        if wrong is not None:
            return self._refuse(422, "Invalid", wrong)
        is_dry = query.get("dryRun") == "All"
        return self._answer(201 if is_new else 200, self.api.put(place, one, is_new=is_new, is_dry=is_dry))

    def do_POST(self) -> None:
        one, (place, query) = self._body(), self._place()
        place = place._replace(name=one["metadata"]["name"])
        with self.api.lock:
            if (place.version, place.resource, place.namespace, place.name) in self.api.objects:
                return self._refuse(409, "AlreadyExists", f'{place.resource} "{place.name}" already exists')
            one.setdefault("apiVersion", place.version)
            one.setdefault("kind", KINDS[place.version][place.resource])
            return self._store(place, one, query, is_new=True)

    def do_PUT(self) -> None:
        one, (place, query) = self._body(), self._place()
        with self.api.lock:
            is_new = (place.version, place.resource, place.namespace, place.name) not in self.api.objects
            return self._store(place, one, query, is_new=is_new)

    def do_PATCH(self) -> None:
        given, (place, query) = self._body(), self._place()
        kind = self.headers["content-type"]
        with self.api.lock:
            old = self.api.objects.get((place.version, place.resource, place.namespace, str(place.name)))
            if old is None:
                if "apply-patch" not in kind:
                    return self._refuse(404, "NotFound", f'{place.resource} "{place.name}" not found')
                return self._store(place, given, query, is_new=True)
            one = copy.deepcopy(old)
            if place.sub == "scale":
                one["spec"]["replicas"] = given["spec"]["replicas"]
                self.api.put(place, one, is_new=False, is_dry=False)
                return self._answer(200, _scale(one))
            if "json-patch" in kind:
                one = jsonpatch.apply_patch(one, given["patch"])
            else:
                _merge(one, given, is_strategic="strategic" in kind)
            return self._store(place, one, query, is_new=False)

    def do_DELETE(self) -> None:
        self._body()
        place, _ = self._place()
        with self.api.lock:
            one = self.api.objects.pop((place.version, place.resource, place.namespace, str(place.name)), None)
            if one is None:
                return self._refuse(404, "NotFound", f'{place.resource} "{place.name}" not found')
            self.api.tell("DELETED", place, one)
            return self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})


def _is_in(key: tuple[str, str, str | None, str], one: OBJECT, place: Place, query: dict[str, str]) -> bool:
    if key[:2] != (place.version, place.resource) or place.namespace not in (None, key[2]):
        return False
    labels = one["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        name, _, value = term.replace("==", "=").partition("=")
        if labels.get(name) != value:
            return False
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return not name or "=" in name or one["metadata"]["name"] == name


def _merge(one: OBJECT, given: OBJECT, *, is_strategic: bool = False) -> None:
    """Helm 3 patches strategically: lists of named items are merged by their names."""
    for name, value in given.items():
        if name.startswith("$"):
            continue
        old = one.get(name)
        if value is None:
            one.pop(name, None)
        elif isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value, is_strategic=is_strategic)
        elif is_strategic and isinstance(old, list) and value and isinstance(value[0], dict) and "name" in value[0]:
            by_name = {item["name"]: item for item in old}
            for item in value:
                if item.get("$patch") == "delete":
                    by_name.pop(item["name"], None)
                else:
                    _merge(by_name.setdefault(item["name"], {}), item, is_strategic=True)
            one[name] = list(by_name.values())
        else:
            one[name] = value


def _scale(one: OBJECT) -> OBJECT:
    replicas = one["spec"].get("replicas", 1)
    names = ("name", "namespace", "resourceVersion")
    metadata = {name: one["metadata"].get(name) for name in names}
    counts = {"spec": {"replicas": replicas}, "status": {"replicas": replicas}}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, **counts}


# -- what an API server says of itself ---------------------------------------------------------------------------------


def _discovery(parts: list[str]) -> OBJECT | None:
    match parts:
        case ["version"]:
            return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups: dict[str, list[OBJECT]] = {}
            for version in KINDS:
                group, _, name = version.rpartition("/")
                if group:
                    groups.setdefault(group, []).append({"groupVersion": version, "version": name})
            listed = [{"name": name, "versions": all_, "preferredVersion": all_[0]} for name, all_ in groups.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        case ["openapi", "v3"]:
            paths = {f"{'apis' if '/' in version else 'api'}/{version}": version for version in KINDS}
            return {"paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in paths}}
        case ["openapi", "v3", _, *version]:
            return _openapi("/".join(version))
        case ["api" | "apis", *version] if "/".join(version) in KINDS:
            return _resources("/".join(version))
        case _:
            return None


def _openapi(version: str) -> OBJECT:
    group, _, name = version.rpartition("/")
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {}
    for resource, kind in KINDS[version].items():
        what = {"group": group, "version": name, "kind": kind}
        patch = {"parameters": [parameter], "responses": {}, "x-kubernetes-action": "patch"}
        paths[f"/{resource}/{{name}}"] = {"patch": {**patch, "x-kubernetes-group-version-kind": what}}
    return {
        "openapi": "3.0.0",
        "info": {"title": "k", "version": "1"},
        "components": {"schemas": {}},
        "paths": paths,
    }


def _resources(version: str) -> OBJECT:
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    resources: list[OBJECT] = []
    for name, kind in KINDS[version].items():
        one = {"name": name, "singularName": kind.lower(), "namespaced": name != "namespaces", "kind": kind}
        resources.append({**one, "shortNames": SHORT.get(name, []), "categories": ["all"], "verbs": verbs})
        if kind in SCALED:
            scale = {"name": f"{name}/scale", "singularName": "", "namespaced": True, "kind": "Scale"}
            resources.append({**scale, "group": "autoscaling", "version": "v1", "verbs": ["get", "patch", "update"]})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


# -- Helm's release Secrets come as protobuf ---------------------------------------------------------------------------


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        else:
            assert tag & 7 == 2, "no other wire types occur"
            length = number()
            yield tag >> 3, data[at : at + length]
            at += length


def _from_protobuf(data: bytes) -> OBJECT:
    unknown = dict(_fields(data[4:]))
    kind = dict(_fields(unknown[1]))
    if kind[2] != b"Secret":
        return {"kind": kind[2].decode(), "apiVersion": kind[1].decode()}
    metadata: OBJECT = {"labels": {}}
    secret: OBJECT = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}}
    for field, value in _fields(unknown[2]):
        if field == 1:
            for inner, text in _fields(value):
                if inner in (1, 3, 6):
                    metadata[{1: "name", 3: "namespace", 6: "resourceVersion"}[inner]] = text.decode()
                elif inner == 11:
                    entry = dict(_fields(text))
                    metadata["labels"][entry.get(1, b"").decode()] = entry.get(2, b"").decode()
        elif field == 2:
            entry = dict(_fields(value))
            secret["data"][entry.get(1, b"").decode()] = base64.b64encode(entry.get(2, b"")).decode()
        elif field == 3:
            secret["type"] = value.decode()
    return secret
