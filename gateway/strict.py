"""How every part of a body is parsed: strictly, but deaf to members that are not ours."""

from pydantic import ConfigDict

STRICT = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, protected_namespaces=())
