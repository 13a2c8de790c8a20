"""Judge the judge: broken variants of the reference, one or more for each check. `FAULTS` is the registry."""

from __future__ import annotations

from harness.faults import binding, context, kv_sharing, numerics, ops, registration, surroundings, writes
from harness.faults.base import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for module in (registration, kv_sharing, binding, context, ops, numerics, writes, surroundings)
    for fault in module.__dict__.values()
    if isinstance(fault, Fault)
}

__all__ = ["FAULTS", "Fault"]
