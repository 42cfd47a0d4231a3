"""Who may reach whom by a set of NetworkPolicies: an evaluator of what they mean, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

Labels = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A pod, or with an address something outside of the cluster."""

    name: str
    labels: Labels = field(default_factory=dict)
    namespace: str = ""
    namespace_labels: Labels = field(default_factory=dict)
    address: str = ""


def may_reach(
    policies: Sequence[Mapping[str, Any]], source: Endpoint, target: Endpoint, port: int, protocol: str = "TCP"
) -> bool:
    """A connection must be let out where it begins and let in where it ends. Who is selected by no policy is free."""
    return _is_let(policies, "Egress", "to", source, target, port, protocol) and _is_let(
        policies, "Ingress", "from", target, source, port, protocol
    )


def _is_let(
    policies: Iterable[Mapping[str, Any]], kind: str, key: str, own: Endpoint, other: Endpoint, port: int, protocol: str
) -> bool:
    if own.address:
        return True
    mine = [one for one in policies if kind in one["spec"]["policyTypes"] and _selects(one, own)]
    if not mine:
        return True
    rules = [rule for one in mine for rule in one["spec"].get(kind.lower()) or ()]
    return any(_has_port(rule.get("ports"), port, protocol) and _has_peer(rule.get(key), own, other) for rule in rules)


def _selects(policy: Mapping[str, Any], pod: Endpoint) -> bool:
    is_here = policy["metadata"]["namespace"] == pod.namespace
    return is_here and _matches(policy["spec"]["podSelector"], pod.labels)


def _has_port(ports: Sequence[Mapping[str, Any]] | None, port: int, protocol: str) -> bool:
    if not ports:
        return True
    for one in ports:
        if one.get("protocol", "TCP") != protocol:
            continue
        if "port" not in one or one["port"] <= port <= one.get("endPort", one["port"]):
            return True
    return False


def _has_peer(peers: Sequence[Mapping[str, Any]] | None, own: Endpoint, other: Endpoint) -> bool:
    if not peers:
        return True
    return any(_is_peer(peer, own, other) for peer in peers)


def _is_peer(peer: Mapping[str, Any], own: Endpoint, other: Endpoint) -> bool:
    if "ipBlock" in peer:
        if not other.address:
            return False
        address, block = ip_address(other.address), peer["ipBlock"]
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(one) for one in block.get("except", ())
        )
    if other.address:
        return False
    if "namespaceSelector" in peer:
        is_there = _matches(peer["namespaceSelector"], other.namespace_labels)
    else:
        is_there = other.namespace == own.namespace
    return is_there and _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Mapping[str, Any], labels: Labels) -> bool:
    assert set(selector) <= {"matchLabels"}, "no other selectors are used"
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
