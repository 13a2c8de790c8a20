"""One function for each property, grouped by clause family. `CHECKS` is the registry, in the order of the contract."""

from __future__ import annotations

from harness.checks import binding, context, errors, kv_sharing, numerics, ops, registration, writes
from harness.checks.base import Check, Kind

CHECKS: dict[str, Check] = {
    check.name: check
    for module in (registration, kv_sharing, binding, context, ops, numerics, writes, errors)
    for check in module.__dict__.values()
    if isinstance(check, Check)
}

__all__ = ["CHECKS", "Check", "Kind"]
