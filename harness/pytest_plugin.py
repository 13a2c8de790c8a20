"""pytest: one test for each check and implementation.

    pytest --pyargs harness.suite --proptable-impl mypkg.adapter:impl

Imports neither torch nor the checks before tests are collected.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from harness.session import Result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the group proptable."""
    group = parser.getgroup("proptable")
    group.addoption(
        "--proptable-impl",
        action="append",
        default=[],
        metavar="IMPL",
        help="Implementation that harness.suite judges: a built-in name or module:attribute. May be repeated.",
    )
    group.addoption("--proptable-profile", default="quick", help="How many cases: quick, default or nightly.")
    group.addoption("--proptable-seed", type=int, default=0, help="Decides which cases are generated.")
    group.addoption("--proptable-require-gpu", action="store_true", help="Fail, rather than skip, without a device.")
    group.addoption(
        "--proptable-xfails",
        type=Path,
        metavar="FILE",
        help="Lines `check  reason`: these checks must fail. One that passes, or names no check, fails the run.",
    )


def read_xfails(path: Path) -> dict[str, str]:
    """Return check to reason.

    Raises:
        pytest.UsageError: a line without a reason, or of a check that does not exist.
    """
    from harness.checks import CHECKS

    expected = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(f"--proptable-xfails {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        name, _, reason = text.partition(" ")
        if name not in CHECKS:
            raise pytest.UsageError(f"{path}:{number}: no check named {name!r}")
        if not reason.strip():
            raise pytest.UsageError(f"{path}:{number}: {name} needs a reason")
        expected[name] = reason.strip()
    return expected


def pytest_configure(config: pytest.Config) -> None:
    """Check the options early, and register the markers."""
    for marker in (
        "gpu: needs a CUDA or ROCm device",
        "slow: runs only in a session of its own",
        "peer: judges an implementation that nobody here wrote; needs its extra",
    ):
        config.addinivalue_line("markers", marker)
    path = config.getoption("--proptable-xfails")
    if path is not None:
        config.stash[_XFAILS] = read_xfails(path)


_XFAILS: pytest.StashKey[dict[str, str]] = pytest.StashKey()
_RESULTS: pytest.StashKey[dict[str, Result]] = pytest.StashKey()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the checks that must fail; skip what needs a device where there is none."""
    expected = config.stash.get(_XFAILS, {})
    for item in items:
        check = getattr(item, "callspec", None) and item.callspec.params.get("proptable_check")  # type: ignore[attr-defined]
        if check in expected:
            item.add_marker(pytest.mark.xfail(reason=expected[check], strict=True))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_device():
        if config.getoption("--proptable-require-gpu"):
            raise pytest.UsageError("--proptable-require-gpu: there is no CUDA or ROCm device")
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA or ROCm device"))


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each implementation and check."""
    if {"proptable_implementation", "proptable_check"} <= set(metafunc.fixturenames):
        from harness.checks import CHECKS

        names = metafunc.config.getoption("--proptable-impl")
        if not names:
            raise pytest.UsageError("harness.suite needs --proptable-impl IMPL")
        metafunc.parametrize("proptable_implementation", names, scope="session")
        metafunc.parametrize("proptable_check", list(CHECKS))


@pytest.fixture
def proptable_result(request: pytest.FixtureRequest, proptable_implementation: str) -> Result:
    """Judge an implementation once in a session, in a process of its own."""
    from harness.load import UsageError
    from harness.session import Session

    results = request.config.stash.setdefault(_RESULTS, {})
    if proptable_implementation not in results:
        option = request.config.getoption
        session = Session(option("--proptable-profile"), option("--proptable-seed"))
        try:
            results[proptable_implementation] = session.run(proptable_implementation)
        except UsageError as error:
            pytest.exit(f"--proptable-impl: {error}", returncode=pytest.ExitCode.USAGE_ERROR)
    return results[proptable_implementation]
