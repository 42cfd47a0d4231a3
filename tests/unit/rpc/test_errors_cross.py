"""What an error says is said on the other side too."""

import base64

from core.errors import Overloaded
from rpc.errors import METADATA_KEY, from_status, to_metadata


def test_when_to_come_back_crosses_with_the_error() -> None:
    error = Overloaded("it would wait 9 s, and may wait 4", retry_after_s=5.5)
    ((key, content),) = to_metadata(error)
    assert key == METADATA_KEY
    found = from_status(8, error.message, base64.b64encode(content).rstrip(b"="), worker_id="router")
    assert isinstance(found, Overloaded) and found.message == error.message
    assert found.retry_after_s == 5.5 and found.http_status == 503
