"""Find an implementation by name: a built-in one, or `module:attribute`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from harness.case import DTYPES, MAX_BLOCK_SIZE, MAX_HEAD_SIZE
from harness.contract import Implementation, Info
from harness.run_guard import ours_to_raise

BUILTIN = {
    "reference": "harness.adapters.reference:eager",
    "reference-triton": "harness.adapters.reference_triton:triton",
    "vllm": "harness.adapters.vllm:vllm",
}


class UsageError(Exception):
    """Bad input to the command line: one line, exit code 3."""


def check_name(name: str) -> None:
    """Refuse what cannot be the name of an implementation, without importing anything.

    Raises:
        UsageError: it is neither a built-in name nor module:attribute.
    """
    module_name, _, attribute = BUILTIN.get(name, name).partition(":")
    parts = [*module_name.split("."), *attribute.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"no implementation {name!r}: give module:attribute or one of {', '.join(BUILTIN)}")


def load_implementation(name: str) -> Implementation:
    """Return the implementation `name`.

    An attribute that is a class or a function is called without arguments.

    Raises:
        UsageError: there is none, or it is no implementation; the reason in one line.
    """
    check_name(name)
    module_name, _, attribute = BUILTIN.get(name, name).partition(":")
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
    except BaseException as error:
        if ours_to_raise(error):
            raise
        raise UsageError(f"{name} is no implementation: its `info` raised {_short(error)}") from error
    if type(info) is not Info:
        raise UsageError(
            f"{name} is no implementation: `info` is {type(info).__name__}, but should be harness.contract.Info"
        )
    if not callable(getattr(found, "build", None)):
        raise UsageError(f"{name} is no implementation: it has no method `build`")
    problem = declaration_problem(info)
    if problem is not None:
        raise UsageError(f"{name} declares {problem}")
    return found  # type: ignore[return-value]


def declaration_problem(info: Info) -> str | None:
    """Return what is wrong with a declaration; None when nothing is."""
    for what in ("name", "version", "device"):
        value = getattr(info, what)
        if type(value) is not str or not value.isprintable() or not value:
            return f"{what}={value!r:.80}, but should declare a printable string"
    for what in ("kv_sharing", "batch_invariant", "rounds_scores", "slow", "strict"):
        if type(getattr(info, what)) is not bool:
            return f"{what}={getattr(info, what)!r:.80}, but should declare True or False"
    if type(info.dtypes) is not tuple or not info.dtypes or not set(map(str, info.dtypes)) <= set(DTYPES):
        return f"dtypes={info.dtypes!r:.80}, but should declare a tuple of some of {', '.join(DTYPES)}"
    for what, largest in (("head_sizes", MAX_HEAD_SIZE), ("block_sizes", MAX_BLOCK_SIZE)):
        sizes = getattr(info, what)
        if sizes is None:
            continue
        if type(sizes) is not tuple or not sizes or any(type(n) is not int or not 1 <= n <= largest for n in sizes):
            return f"{what}={sizes!r:.80}, but should declare None or a tuple of numbers from 1 to {largest}"
    if not isinstance(info.dialects, Mapping) or not all(
        type(text) is str for item in info.dialects.items() for text in item
    ):
        return f"dialects={info.dialects!r:.80}, but should declare a dict from str to str"
    if type(info.notes) is not tuple or not all(type(note) is str for note in info.notes):
        return f"notes={info.notes!r:.80}, but should declare a tuple of str"
    return None


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
