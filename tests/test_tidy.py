"""The walls between the folders, and other things that must stay tidy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no modules in {folder}"
    return found


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules("reference_impl"), ids=lambda path: str(path.relative_to(ROOT)))
def test_reference_imports_nothing_of_the_harness(path):
    assert not [name for name in imports(path) if name.split(".")[0] == "harness"]


CORE = [path for path in modules("harness") if path.relative_to(ROOT).parts[1] not in ("adapters", "faults")]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_harness_core_imports_nothing_of_any_implementation(path):
    assert not [name for name in imports(path) if name.split(".")[0] in ("reference_impl", "vllm", "triton")]
    assert not [name for name in imports(path) if name.startswith("harness.adapters")]


@pytest.mark.parametrize("name", ["dense", "tolerance"])
def test_oracle_shares_no_paging_code(name):
    forbidden = {"harness.plan", "harness.run", "harness.inputs", "harness.contract", "harness.case"}
    assert not imports(ROOT / "harness" / f"{name}.py") & forbidden


@pytest.mark.parametrize("leaf", ["harness/contract.py", "reference_impl/metadata.py"])
def test_leaf_imports_nothing_of_the_project(leaf):
    assert not [name for name in imports(ROOT / leaf) if name.split(".")[0] in ("harness", "reference_impl")]


def test_importing_the_harness_does_not_import_torch():
    code = (
        "import sys, harness, harness.contract, harness.clauses, harness.case, harness.plan, harness.pytest_plugin\n"
        "import harness.cli\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_clause_of_the_checks_exists_and_every_check_has_a_sentence():
    from harness.checks import CHECKS
    from harness.clauses import CLAUSES

    for check in CHECKS.values():
        assert set(check.clauses) <= set(CLAUSES)
        assert check.sentence


def test_known_bugs_name_checks():
    from harness.checks import CHECKS
    from harness.explain import KNOWN_BUGS, REFERENCE

    assert set(KNOWN_BUGS) <= set(CHECKS)
    assert {check.clauses[0].split("-")[0] for check in CHECKS.values()} <= set(REFERENCE)


def test_paths_in_the_explanations_exist():
    from harness.explain import REFERENCE

    for place in REFERENCE.values():
        assert (ROOT / place.split()[0].rstrip(":")).exists(), place
