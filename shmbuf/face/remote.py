"""Methods that take a `torch.distributed.rpc` RRef in place of ``self``."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def _for_rref(cls: type, name: str, method: F) -> F:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kw: Any) -> Any:
        if not isinstance(self, cls) and hasattr(self, "local_value"):
            self = self.local_value()
        return method(self, *args, **kw)

    call.__module__, call.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"  # so it is pickled
    return call  # type: ignore[return-value]


class TakesRRefs(type):
    """``rpc_sync(rref.owner(), Class.method, (rref, …))`` works; ``object.method(…)`` is the method itself and pays nothing for it."""

    def __getattribute__(cls, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or type(value) is not types.FunctionType:
            return value
        made = super().__getattribute__("__dict__").get("_for_rrefs")
        if made is None:
            made = {}
            type.__setattr__(cls, "_for_rrefs", made)
        if name not in made or made[name].__wrapped__ is not value:
            made[name] = _for_rref(cls, name, value)
        return made[name]
