"""What the README says works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from harness.conformance import run_conformance_test

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def adapter_source() -> str:
    (source,) = [text for language, text in BLOCKS if language == "python" and "class Implementation" in text]
    return source


def test_adapter_of_the_readme_conforms():
    namespace: dict = {}
    exec(compile(adapter_source(), "README.md", "exec"), namespace)
    run_conformance_test(namespace["Implementation"](), num_cases=50)


def test_commands_of_the_readme_run(tmp_path):
    (tmp_path / "my_adapter.py").write_text(adapter_source())
    commands = [line for _, text in BLOCKS for line in text.splitlines() if line.startswith("proptable ")]
    assert len(commands) == 3
    for command in commands:
        arguments = command.split()[1:] + (["--profile", "quick", "--budget", "5s"] if " check " in command else [])
        done = subprocess.run(
            [sys.executable, "-m", "harness", *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_pytest_suite_judges_the_adapter(tmp_path):
    (tmp_path / "my_adapter.py").write_text(
        adapter_source().replace("seq_len - query_len + 1)", "seq_len - query_len)")
    )
    (tmp_path / "xfails.txt").write_text("output_matches_dense  the newest token is hidden\n")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "harness.suite"]
    if (
        "proptable"
        not in subprocess.run(
            [sys.executable, "-m", "pytest", "--help"], capture_output=True, text=True, check=False, cwd=tmp_path
        ).stdout
    ):
        command += ["-p", "harness.pytest_plugin"]
    command += ["--proptable-impl", "my_adapter:Implementation", "-k", "dense or slots_hold"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "replay: proptable replay -i my_adapter:Implementation" in done.stdout
    command += ["--proptable-xfails", "xfails.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "xfails.txt").write_text("output_matches_dense\n")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "needs a reason" in done.stdout + done.stderr
    assert done.returncode == 4
