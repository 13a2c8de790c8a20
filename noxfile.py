"""The project's tasks: `nox -l` lists them."""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True


def install(session: nox.Session) -> None:
    session.install("-q", "-c", "constraints.txt", "-e", ".[dev]")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests that need neither a GPU nor a peer."""
    install(session)
    session.run("pytest", "-n", "2", *session.posargs, env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types."""
    install(session)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
