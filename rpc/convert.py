"""Core dataclasses to protobuf messages and back, total in both directions.

The rule that makes this one small module: **a message has the name and the field names of its dataclass.** Codecs are
compiled once for each pair from the dataclass's type hints and the message's descriptor:

====================================  ==========================================================
dataclass field                       message field
====================================  ==========================================================
int, float, bool, str, bytes          the scalar
a ``StrEnum``                         the enum value ``CLASS_NAME_MEMBER``, or a string field
a dataclass                           the message
``tuple[X, ...]``                     repeated
``tuple[A, B]`` (a fixed tuple)       a message, fields in order of their numbers
``X | None``                          absent: presence for messages and ``optional``, else "" or enum 0
a union of dataclasses                a message with one ``oneof`` (``TO_HOLDER``, ``TO_READER``, ``WORKER_MESSAGE``)
====================================  ==========================================================

A field without a partner on either side fails at import. An unset enum where a value is needed is a peer's mistake and
raises InvalidRequest. Bad values from a peer never become an internal error.
"""

import operator
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from google.protobuf.message import Message

from core import handoff
from core import types as core_types
from core.errors import InvalidRequest
from rpc.pb import common_pb2, decode_pb2, handoff_pb2, prefill_pb2, router_pb2

_MODULES = (common_pb2, decode_pb2, handoff_pb2, prefill_pb2, router_pb2)
T = typing.TypeVar("T")
Encode = Callable[[Any], Any]
Decode = Callable[[Any], Any]


def message_class(cls: type) -> type[Message]:
    """The generated class that carries ``cls``."""
    for module in _MODULES:
        if hasattr(module, cls.__name__):
            found: type[Message] = getattr(module, cls.__name__)
            return found
    raise TypeError(f"no message for {cls.__name__}")


def to_pb(value: Any) -> Any:
    """Encode a core dataclass."""
    return _codec(type(value))[0](value)


def from_pb(cls: type[T], message: Message) -> T:
    """Decode a message into ``cls``. Raises InvalidRequest when the peer left out what is needed."""
    decoded: T = _codec(cls)[1](message)
    return decoded


def _compile(cls: type) -> tuple[Encode, Decode]:
    """(encode, decode) of a dataclass and its message."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls} is not a dataclass")
    message_type: Any = message_class(cls)
    descriptors = message_type.DESCRIPTOR.fields_by_name
    hints = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    if set(names) != set(descriptors):
        raise TypeError(f"{cls.__name__}: fields differ from the message's: {sorted(set(names) ^ set(descriptors))}")
    codecs = [(name, *_field_codec(hints[name], descriptors[name])) for name in names]
    encoders = [
        (name, encode_field, descriptors[name].has_presence or descriptors[name].enum_type is not None)
        for name, encode_field, _ in codecs
    ]
    values_of = _getter(names)
    plain = [name for name, _, decode_field in codecs if decode_field is None]
    plain_of = _getter(plain)
    decoders = [(name, decode_field) for name, _, decode_field in codecs if decode_field is not None]

    def encode(value: Any) -> Any:
        content = {}
        for (name, encode_field, is_always_said), field in zip(encoders, values_of(value), strict=True):
            # Most fields are zero or empty, which on the wire is their absence.
            if field or (is_always_said and field is not None):
                content[name] = field if encode_field is _identity else encode_field(field)
        return message_type(**content)

    def decode(message: Any) -> Any:
        content = dict(zip(plain, plain_of(message), strict=True))
        for name, decode_field in decoders:
            content[name] = decode_field(message)
        return cls(**content)

    return encode, decode


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """All of these attributes, in one call."""
    if not names:
        return lambda value: ()
    if len(names) == 1:
        get = operator.attrgetter(names[0])
        return lambda value: (get(value),)
    return operator.attrgetter(*names)


_codec: Callable[[Any], tuple[Encode, Decode]] = cache(_compile)


def _field_codec(hint: Any, field: Any) -> tuple[Encode, Decode | None]:
    """(encode the value, read it from the whole message; None: it is the message's attribute)."""
    name = field.name
    hint, is_optional = _strip_optional(hint)
    if field.is_repeated:
        item = typing.get_args(hint)[0]
        encode, decode = _item_codec(item, field)
        if decode is _identity:
            return (_identity, lambda message: tuple(getattr(message, name)[:]))
        return (
            lambda values: [encode(value) for value in values],
            lambda message: tuple([decode(value) for value in values]) if (values := getattr(message, name)) else (),
        )
    encode, decode = _item_codec(hint, field)
    if field.has_presence and (is_optional or field.message_type is not None):
        needed = not is_optional
        owner = field.containing_type.name

        def read(message: Any) -> Any:
            if message.HasField(name):
                return decode(getattr(message, name))
            if needed:
                raise InvalidRequest(f"{owner}.{name} is missing", param=name)
            return None

        return encode, read
    if is_optional:  # "" or enum 0 stands for None
        return encode, lambda message: decode(getattr(message, name)) if getattr(message, name) else None
    if decode is _identity:
        return encode, None
    return encode, lambda message: decode(getattr(message, name))


def _item_codec(hint: Any, field: Any) -> tuple[Encode, Decode]:
    """(encode, decode) of one value of a field."""
    while hasattr(hint, "__supertype__"):  # NewType
        hint = hint.__supertype__
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum_codec(hint, field)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _codec(hint)
    if typing.get_origin(hint) is tuple:
        return _tuple_codec(hint, field)
    return _identity, _identity


def _tuple_codec(hint: Any, field: Any) -> tuple[Encode, Decode]:
    message_type = _generated(field.message_type.name)
    parts = sorted(field.message_type.fields, key=lambda part: part.number)
    arguments = typing.get_args(hint)
    if arguments[-1] is Ellipsis:  # tuple[int, ...] is a message with one repeated field
        part = parts[0].name
        return (lambda value: message_type(**{part: value}), lambda message: tuple(getattr(message, part)[:]))
    assert len(parts) == len(arguments), f"{field.full_name}: {len(arguments)} parts expected"
    codecs = [(part.name, *_field_codec(argument, part)) for part, argument in zip(parts, arguments, strict=True)]
    return (
        lambda value: message_type(**{name: enc(item) for (name, enc, _), item in zip(codecs, value, strict=True)}),
        lambda message: tuple(
            [getattr(message, name) if decode is None else decode(message) for name, _, decode in codecs]
        ),
    )


def _enum_codec(cls: type[Enum], field: Any) -> tuple[Encode, Decode]:
    if field.enum_type is None:  # a string field: kept readable for peers that know more members
        members = {member.value: member for member in cls}

        def read_text(text: str) -> Enum:
            if text not in members:
                raise InvalidRequest(f"{field.full_name}: unknown value {text!r}", param=field.name)
            return members[text]

        return lambda member: member.value, read_text
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).upper()
    numbers = {member: field.enum_type.values_by_name[f"{prefix}_{member.name}"].number for member in cls}
    by_number = {number: member for member, number in numbers.items()}

    def read_number(number: int) -> Enum:
        if number not in by_number:
            raise InvalidRequest(f"{field.full_name}: unset or unknown enum value {number}", param=field.name)
        return by_number[number]

    return numbers.__getitem__, read_number


def _identity(value: Any) -> Any:
    return value


def _strip_optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        assert len(rest) == 1, f"{hint}: only X | None is a field"
        return rest[0], True
    return hint, False


def _generated(name: str) -> type[Message]:
    for module in _MODULES:
        if hasattr(module, name):
            found: type[Message] = getattr(module, name)
            return found
    raise TypeError(f"no message {name}")


# -- unions -----------------------------------------------------------------------------------------------------------


class OneOf:
    """A union of dataclasses in a message with one ``oneof``."""

    def __init__(self, message_type: type[Message], members: dict[type, str]) -> None:
        self._message_type = message_type
        self._field_of = members
        self._class_of = {name: cls for cls, name in members.items()}
        self._oneof = message_type.DESCRIPTOR.oneofs[0].name
        names = {field.name for field in message_type.DESCRIPTOR.fields}
        if names != set(members.values()):
            raise TypeError(f"{message_type.DESCRIPTOR.name}: members differ: {sorted(names ^ set(members.values()))}")

    def encode(self, value: Any) -> Any:
        return self._message_type(**{self._field_of[type(value)]: to_pb(value)})

    def decode(self, message: Message) -> Any:
        """The member, or None for a kind this version does not know (a newer peer's)."""
        name = message.WhichOneof(self._oneof)
        if name is None:
            return None
        return from_pb(self._class_of[name], getattr(message, name))


TO_HOLDER = OneOf(
    handoff_pb2.ToHolder,
    {
        handoff.Hello: "hello",
        handoff.Open: "open",
        handoff.Claim: "claim",
        handoff.Renew: "renew",
        handoff.Release: "release",
        handoff.AbortHandoff: "abort",
        handoff.CanaryRead: "canary",
    },
)
TO_READER = OneOf(
    handoff_pb2.ToReader,
    {
        handoff.Welcome: "welcome",
        handoff.Ready: "ready",
        handoff.Sealed: "sealed",
        handoff.Refused: "refused",
        handoff.Ended: "ended",
    },
)
WORKER_MESSAGE = OneOf(
    router_pb2.WorkerMessage,
    {core_types.WorkerRegistration: "registration", core_types.WorkerLoad: "load"},
)
