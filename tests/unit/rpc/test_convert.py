"""Core types to messages and back: total, equal, and strict about what a peer may leave out."""

import dataclasses
import types
import typing
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import handoff, kv
from core import types as core_types
from core.errors import InvalidRequest
from rpc.convert import TO_HOLDER, TO_READER, WORKER_MESSAGE, from_pb, to_pb
from rpc.pb import common_pb2, decode_pb2, handoff_pb2, router_pb2

LOCAL_ONLY = {"MemoryRegion"}
WIRE_TYPES = [
    cls
    for module in (core_types, handoff, kv)
    for name, cls in sorted(vars(module).items())
    if dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__ and name not in LOCAL_ONLY
]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, as it could cross the wire."""
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = next(a for a in typing.get_args(hint) if a is not type(None))
        # "" and None are one on the wire for optional text
        return st.none() | (
            values(inner).filter(bool) if getattr(inner, "__supertype__", inner) is str else values(inner)
        )
    if typing.get_origin(hint) is tuple:
        arguments = typing.get_args(hint)
        if arguments[-1] is Ellipsis:
            return st.lists(values(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*[values(argument) for argument in arguments])
    if dataclasses.is_dataclass(hint):
        return instances(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    return {
        int: st.integers(0, 2**31 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
    }[hint]


def instances(cls: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in dataclasses.fields(cls)})


@pytest.mark.parametrize("cls", WIRE_TYPES, ids=lambda cls: cls.__name__)
def test_every_type_survives_the_round_trip(cls: Any) -> None:
    @settings(max_examples=15, deadline=None, database=None)
    @given(instances(cls))
    def round_trip(value: Any) -> None:
        message = to_pb(value)
        again = type(message).FromString(message.SerializeToString())
        assert from_pb(cls, again) == value

    round_trip()


@pytest.mark.parametrize(("union", "members"), [(TO_HOLDER, handoff.ToHolder), (TO_READER, handoff.ToReader)])
def test_every_member_of_a_union_is_carried(union: Any, members: Any) -> None:
    @settings(max_examples=40, deadline=None, database=None)
    @given(st.one_of([instances(cls) for cls in typing.get_args(members)]))
    def round_trip(value: Any) -> None:
        assert union.decode(union.encode(value)) == value

    round_trip()


def test_a_message_kind_of_a_newer_peer_is_skipped() -> None:
    assert TO_HOLDER.decode(handoff_pb2.ToHolder()) is None
    assert WORKER_MESSAGE.decode(router_pb2.WorkerMessage()) is None


def test_what_a_peer_left_out_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"AdmitRequest\.request is missing"):
        from_pb(core_types.AdmitRequest, decode_pb2.AdmitRequest(handoff_id="h"))


def test_an_unset_enum_is_refused_where_a_value_is_needed() -> None:
    message = decode_pb2.AdmitRequest(
        request=common_pb2.GenerateRequest(sampling=common_pb2.SamplingParams()), handoff_id="h"
    )
    with pytest.raises(InvalidRequest, match="mode"):
        from_pb(core_types.AdmitRequest, message)


def test_zero_logprobs_is_not_no_logprobs() -> None:
    for asked in (None, 0, 5):
        params = core_types.SamplingParams(logprobs=asked)
        assert from_pb(core_types.SamplingParams, to_pb(params)).logprobs == asked
