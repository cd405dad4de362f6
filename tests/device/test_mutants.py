"""The faults of mutants.py are still faults of this package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.device.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[one.name for one in MUTANTS])
def test_a_fault_has_its_line_and_its_tests(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    path = shutil.copy(ROOT / "hybrid_kv" / mutant.file, tmp_path / mutant.file)
    before = path.read_text()
    mutant.apply(tmp_path)
    compile(path.read_text(), mutant.file, "exec")
    assert path.read_text() != before
    for test in mutant.tests:
        assert (ROOT / "tests" / test.partition("::")[0]).is_file()


def test_a_fault_whose_line_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, count in (("y = 1", 0), ("x = 1", 2)):
        with pytest.raises(LookupError, match=f"this {count} times, expected once"):
            Mutant("a fault", "a.py", old, "", []).apply(tmp_path)
