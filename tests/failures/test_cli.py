"""The command line: bad input is one line and exit code 3; a bad implementation gets a verdict."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from harness.report.jsonl import SCHEMA

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def proptable(*arguments: str, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


BAD_MODULES = {
    "raising.py": "raise ValueError('two\\nlines')",
    "leaving.py": "import sys\nsys.exit(0)",
    "dying.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hollow.py": "number = 1\nclass Empty: pass\ndef raises(): raise KeyError('q')",
    "undeclared.py": (
        "from harness.contract import Info\n"
        "class I:\n  info = Info('x', '1', dtypes=())\n  def build(self): pass\n"
        "class Text(I): info = Info('x', '1', dtypes='float32')\n"
        "class Unknown(I): info = Info('x', '1', dtypes=('float32', 'complex64'))\n"
        "class Negative(I): info = Info('x', '1', head_sizes=(64, -1))\n"
        "class Number(I): info = Info('x', '1', block_sizes=16)\n"
        "class Escape(I): info = Info('x\\x1b[31m', '1')\n"
        "class Slow(I): info = Info('x', '1', slow='yes')\n"
    ),
    "cut.json": '{"steps": [[1',
    "list.json": "[1, 2]",
    "field.json": '{"steps": [[1]], "colour": 3}',
    "type.json": '{"steps": [["a"]]}',
    "version.json": '{"version": 99, "steps": [[1]]}',
    "digits.json": '{"steps": [[' + "9" * 5000 + "]]}",
    "interrupting.py": "raise KeyboardInterrupt",
    "huge.json": '{"steps": [[999999999]]}',
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "-i", "nobody"), "no implementation 'nobody'"),
        (("check", "-i", "nobody.here:x"), "No module named"),
        (("check", "-i", "raising:x"), "ValueError: two lines (.*raising.py:1)"),
        (("check", "-i", "leaving:x"), "SystemExit: 0"),
        (("check", "-i", "dying:x"), "died of SIGSEGV"),
        (("check", "-i", "interrupting:x"), "KeyboardInterrupt"),
        (("replay", "-i", "reference", "digits.json"), "neither"),
        (("check", "-i", "hollow:number"), "`info` is NoneType"),
        (("check", "-i", "hollow:Empty"), "`info` is NoneType"),
        (("check", "-i", "hollow:raises"), "KeyError"),
        (("check", "-i", "hollow:absent"), "has no attribute 'absent'"),
        (("check", "-i", "undeclared:I"), r"declares dtypes=\(\), but should declare"),
        (("check", "-i", "undeclared:Text"), "declares dtypes='float32'"),
        (("check", "-i", "undeclared:Unknown"), "complex64"),
        (("check", "-i", "undeclared:Negative"), r"head_sizes=\(64, -1\)"),
        (("check", "-i", "undeclared:Number"), "block_sizes=16"),
        (("check", "-i", "undeclared:Escape"), "printable"),
        (("check", "-i", "undeclared:Slow"), "slow='yes'"),
        (("replay", "-i", "reference", "/dev/zero"), "no such file"),
        (("replay", "-i", "reference", ""), "without a name"),
        (("check",), "Missing option"),
        (("check", "-i", "reference", "--check", "x"), "no check or clause 'x'"),
        (("check", "-i", "reference", "--check", "GRA-1"), "clause GRA-1 has no check yet"),
        (("check", "-i", "reference", "--budget", "-1"), "no duration"),
        (("check", "-i", "reference", "--seed", "-1"), "seed"),
        (("replay", "-i", "reference", "absent.json"), "cannot read absent.json: no such file"),
        (("replay", "-i", "reference", "cut.json"), "neither"),
        (("replay", "-i", "reference", "list.json"), "not list"),
        (("replay", "-i", "reference", "field.json"), "unknown field 'colour'"),
        (("replay", "-i", "reference", "type.json"), "steps="),
        (("replay", "-i", "reference", "version.json"), "version=99"),
        (("replay", "-i", "reference", "huge.json"), "tokens"),
        (("replay", "-i", "reference", "Case(steps=((1,),), seed=open('x'))"), "literals only"),
        (("replay", "-i", "reference", "Case(steps=((1,),"), "no valid expression"),
        (("replay", "-i", "reference", "Case(steps=((1, 2), (3,)))"), "one query length for each request"),
        (("explain", "XYZ-1"), "no clause, check or fault"),
        (("list", "things"), "things"),
        (("frobnicate",), "No such command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_3(tmp_path, arguments, message):
    for name, text in BAD_MODULES.items():
        (tmp_path / name).write_text(text)
    done = proptable(*arguments, cwd=tmp_path)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 3, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("proptable: ")
    assert re.search(message, lines[0]), lines[0]
    assert not done.stdout


@pytest.mark.parametrize(
    ("subject", "check", "message"),
    [
        ("nan", "output_matches_dense", r"=nan, but should be"),
        ("wrong_shape", "every_step_runs", r"output.shape=\(1, \d+\), but should be \(1, \d+, \d+\)"),
        ("wrong_dtype", "every_step_runs", r"output.dtype=torch.float64, but should be"),
        ("no_tensor", "every_step_runs", r"attend returned NoneType"),
        ("mutates", "inputs_are_unchanged", r"value changed by the call"),
        ("raises", "every_step_runs", r"RuntimeError: first line second line"),
        ("dies", "every_step_runs", r"died of SIGSEGV on this case"),
        ("leaves", "every_step_runs", r"exited with code 0 on this case"),
        ("interrupts", "every_step_runs", r"KeyboardInterrupt"),
        ("dies_of_a_nameless_signal", "every_step_runs", r"died of signal 40"),
        ("remembers", "output_matches_dense", r"but should be"),
        ("wrong_head", "output_matches_dense", r"output\[\d+, \d+, \d+\]="),
    ],
)
def test_bad_implementation_fails_with_a_line_that_replays_it(tmp_path, subject, check, message):
    name = f"subjects:subject_{subject}"
    done = proptable("check", "-i", name, "--profile", "quick", "--budget", "5s", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    verdicts = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    for line in verdicts:
        jsonschema.validate(line, SCHEMA)
    (failure,) = [line for line in verdicts if line.get("check") == check]
    assert failure["status"] == "FAIL"
    assert re.search(message, failure["message"]), failure["message"]
    again = proptable(*shlex.split(failure["replay"])[1:])
    assert again.returncode == 1, again.stdout + again.stderr
    assert check in again.stdout


def test_report_names_layer_request_head_and_step():
    done = proptable("check", "-i", "subjects:subject_wrong_head", "--profile", "quick", "--check", "ATT-1")
    assert re.search(r"step \d+ of \d+ · model\.layers\.\d+\.self_attn\.attn · request \d+ · head \d+", done.stdout)


def test_what_an_implementation_prints_is_not_in_the_report():
    done = proptable("check", "-i", "subjects:subject_talks", "--profile", "quick", "--check", "WRT-1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "what the implementation prints" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("info", "-i", "reference"), ["float32, float16, bfloat16", "any"]),
        (("smoke", "-i", "reference"), ["ok    one token", "rows of padding"]),
        (("explain", "CTX-2"), ["restored", "previous_context_is_restored", "reference_impl/context.py"]),
        (("explain", "output_matches_dense"), ["ATT-1", "faults that it catches", "real bug"]),
        (("list", "checks"), ["output_matches_dense"]),
        (("list", "clauses"), ["GRA-6"]),
        (("list", "faults"), ["output_matches_dense"]),
        (("list", "implementations"), ["reference-triton", "vllm"]),
        (("replay", "-i", "reference", "Case(steps=((3, 16), (1, 2)))"), ["conforms"]),
        (("--version",), ["0.1.0"]),
    ],
)
def test_command_prints(arguments, words):
    done = proptable(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in words:
        assert word in done.stdout


def test_smoke_stops_at_the_first_case_that_fails():
    done = proptable("smoke", "-i", "subjects:subject_nan")
    assert done.returncode == 1
    assert "FAIL  one token" in done.stdout
    assert "two requests" not in done.stdout
