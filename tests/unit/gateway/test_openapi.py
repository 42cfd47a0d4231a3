"""The OpenAPI page says what is served, member by member."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.fields import ROUTES, Verdict
from gateway.openapi import OPENAPI_PATH, document
from gateway.operations import OPERATIONS
from tests.unit.gateway.conftest import OpenSite

ALL = {(one.method, one.path) for one in OPERATIONS}


async def test_the_page_has_every_route_that_is_served_and_no_other(open_site: OpenSite) -> None:
    async with open_site() as site:
        page = (await site.client.get(OPENAPI_PATH)).json()
        paths = {path.replace(":path", "") for path in site.gateway.paths}
    found = {(method.upper(), path) for path, one in page["paths"].items() for method in one}
    assert {path for _, path in found} == paths
    assert found == {(method, path) for method, path in ALL if not path.startswith("/admin") and path != "/v1/usage"}


def test_each_member_stands_on_the_page_with_what_becomes_of_it() -> None:
    schemas = document(ALL)["components"]["schemas"]
    for operation in OPERATIONS:
        if not operation.route:
            continue
        assert operation.body is not None
        properties = schemas[operation.body.__name__]["properties"]
        assert set(properties) == set(ROUTES[operation.route])
        for name, rule in ROUTES[operation.route].items():
            if rule.verdict is Verdict.REFUSED:
                assert properties[name]["enum"] == [None, *rule.neutral]


def test_every_reference_leads_somewhere() -> None:
    page = document(ALL)
    waiting: list[Any] = [page]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            target = one.get("$ref")
            if isinstance(target, str):
                assert target.removeprefix("#/components/schemas/") in page["components"]["schemas"], target
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_errors_have_one_shape_in_every_route(operation: Any) -> None:
    answers = document(ALL)["paths"][operation.path][operation.method.lower()]["responses"]
    for status in operation.statuses:
        schema = answers[str(status)]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/Error"}
    assert str(operation.status) in answers
