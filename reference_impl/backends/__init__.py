"""Attention backends: `base` is the interface, `eager` the plain one, `triton` the fast one."""

from __future__ import annotations

from importlib import import_module

from reference_impl.backends.base import AttentionBackend
from reference_impl.errors import UnsupportedLayerError

BACKENDS = {
    "eager": "reference_impl.backends.eager:EagerBackend",
    "triton": "reference_impl.backends.triton.backend:TritonBackend",
}
"""Name to "module:class"; a backend is imported when it is first used."""


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of this name: one of `BACKENDS`, or "module:class" of somebody's own.

    Raises:
        UnsupportedLayerError: there is none.
    """
    path = BACKENDS.get(name, name)
    module_name, separator, class_name = path.partition(":")
    if not separator:
        raise UnsupportedLayerError(f"no attention backend named {name!r}; there are {', '.join(BACKENDS)}")
    backend: type[AttentionBackend] = getattr(import_module(module_name), class_name)
    return backend
