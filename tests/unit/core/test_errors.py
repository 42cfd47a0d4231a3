"""The error tree: every class crosses the wire by its slug and keeps its meaning."""

import pytest

from core.errors import ERRORS_BY_SLUG, CapacityError, InternalError, Recovery, RequestError, error_from_slug


@pytest.mark.parametrize("slug", sorted(ERRORS_BY_SLUG))
def test_an_error_is_rebuilt_from_its_slug(slug: str) -> None:
    error = error_from_slug(slug, "text", param="prompt", worker_id="w")
    assert type(error) is ERRORS_BY_SLUG[slug]
    assert (error.message, error.param, error.worker_id, error.code) == ("text", "prompt", "w", slug)


def test_a_slug_of_a_newer_peer_is_an_internal_error() -> None:
    assert type(error_from_slug("from_the_future", "text")) is InternalError


def test_request_errors_are_never_retried_and_are_the_callers() -> None:
    for cls in ERRORS_BY_SLUG.values():
        if issubclass(cls, RequestError):
            assert cls.recovery is Recovery.NONE
            assert 400 <= cls.http_status < 500
        if issubclass(cls, CapacityError):
            assert cls.http_status in (429, 503)
