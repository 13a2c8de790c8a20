"""Find an implementation by name: a built-in one, or `module:attribute`."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from harness.contract import Implementation, Info
from harness.run_guard import ours_to_raise

BUILTIN = {
    "reference": "harness.adapters.reference:eager",
    "reference-triton": "harness.adapters.reference_triton:triton",
    "vllm": "harness.adapters.vllm:vllm",
}


class UsageError(Exception):
    """Bad input to the command line: one line, exit code 3."""


def load_implementation(name: str) -> Implementation:
    """Return the implementation `name`.

    An attribute that is a class or a function is called without arguments.

    Raises:
        UsageError: there is none, or it is no implementation; the reason in one line.
    """
    path = BUILTIN.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise UsageError(f"no implementation {name!r}: give module:attribute or one of {', '.join(BUILTIN)}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        if ours_to_raise(error):
            raise
        raise UsageError(f"cannot load {name}: {_import_problem(name, error)}") from error
    try:
        found = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise UsageError(f"cannot load {name}: module {module_name} has no attribute {attribute!r}") from None
    if isinstance(found, type) or (callable(found) and not hasattr(found, "build")):
        try:
            found = found()
        except BaseException as error:
            if ours_to_raise(error):
                raise
            raise UsageError(f"cannot load {name}: calling it raised {_short(error)}") from error
    return check_implementation(found, name)


def check_implementation(found: object, name: str) -> Implementation:
    """Return `found` if it is an implementation.

    Raises:
        UsageError: it lacks `info` or `build`, or declares what means nothing.
    """
    try:
        info = getattr(found, "info", None)
    except Exception as error:
        raise UsageError(f"{name} is no implementation: its `info` raised {_short(error)}") from error
    if not isinstance(info, Info):
        raise UsageError(
            f"{name} is no implementation: `info` is {type(info).__name__}, but should be harness.contract.Info"
        )
    if not callable(getattr(found, "build", None)):
        raise UsageError(f"{name} is no implementation: it has no method `build`")
    for what in ("dtypes", "head_sizes", "block_sizes"):
        declared = getattr(info, what)
        if declared is not None and not declared:
            raise UsageError(f"{name} declares no {what}: there is nothing to judge")
    return found  # type: ignore[return-value]


def _import_problem(name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "vllm" and name == "vllm":
        return "vllm is not installed; `nox -s peers` installs and judges it"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    at = (
        f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and not isinstance(error, ModuleNotFoundError) else ""
    )
    return f"importing it raised {_short(error)}{at}"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
