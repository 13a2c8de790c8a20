"""Exceptions of the reference.

Each subclasses the type that vLLM raises for the same fault and its message begins with vLLM's words, so that a test
written against one implementation also accepts the other.
"""

from __future__ import annotations


class ForwardContextError(Exception):
    """Base of every exception that the reference raises on purpose."""


class DuplicateLayerNameError(ForwardContextError, ValueError):
    """REG-2: a second layer with the same prefix."""


class EmptyLayerNameError(ForwardContextError, ValueError):
    """REG-6: an empty prefix."""


class NoCurrentConfigError(ForwardContextError, AssertionError):
    """REG-5: a layer was built outside `set_current_config`."""


class UnsupportedLayerError(ForwardContextError, ValueError):
    """REG-7: head counts, head size, dtype, block size or feature that the backend does not declare."""


class KVSharingTargetError(ForwardContextError, ValueError):
    """KVS-1..4, KVS-7, KVS-8: a KV-sharing target that is not valid."""


class KVCacheBindingError(ForwardContextError, ValueError):
    """BND-1, BND-3, BND-6: a cache that is missing, or bound twice."""


class UnknownLayerError(ForwardContextError, KeyError):
    """BND-6, CTX-4: a name that no layer, or no entry of the metadata, has."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a sentence should be shown as it is.
        return str(self.args[0]) if self.args else ""


class ForwardContextNotSetError(ForwardContextError, AssertionError):
    """CTX-1: the context was read outside `set_forward_context`."""


class InvalidForwardContextError(ForwardContextError, AssertionError):
    """CTX-5, CTX-8: a field of the context has the wrong type or value."""


class ContextOrderError(ForwardContextError, RuntimeError):
    """CTX-9: a context was left out of order, or in another thread than the one that entered it."""


class KVCacheUpdateUnsupportedError(ForwardContextError, AssertionError):
    """OPS-4: flag False without `do_kv_cache_update`."""
