"""What a supervised process said, and what becomes of it."""

from pathlib import Path

from deploy.launcher import ComponentEvent, ComponentKind, ComponentSpec, ComponentState, ready_line
from deploy.supervisor import Supervisor, _Run

SPEC = ComponentSpec(name="router", kind=ComponentKind.ROUTER, argv=("x",))


def test_a_log_that_cannot_be_written_ends_and_nothing_else_does() -> None:
    run = _Run(SPEC, Path("/dev/full"))
    assert run.feed(b"one\n") is None
    assert run.feed(ready_line({"grpc": "a:1"}).encode() + b"\n") == {"grpc": "a:1"}
    assert [line for line in run.tail if "log ends" in line] == ["its log ends here: No space left on device"]
    run.close()


def test_a_log_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    events: list[ComponentEvent] = []
    supervisor = Supervisor(SPEC, log_dir=tmp_path / "missing", emit=events.append)
    supervisor.start()
    assert supervisor.join(20)
    assert [event.state for event in events] == [ComponentState.FAILED]
    assert str(tmp_path / "missing" / "router.log") in events[0].message
