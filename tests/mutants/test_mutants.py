"""The list of mutants matches the code; tests/mutants/run.py runs the mutants."""

import ast
import re
from pathlib import Path

from tests.mutants.run import ROOT, load

MUTANTS = load()


def test_every_package_has_mutants():
    assert len(MUTANTS) >= 80
    assert sum(mutant.spark for mutant in MUTANTS) >= 12
    packages = {path.parent.name for path in (ROOT / "sparkkeras").rglob("__init__.py")}
    assert {Path(mutant.file).parent.name for mutant in MUTANTS} == packages


def test_names_are_unique_and_in_kebab_case():
    names = [mutant.name for mutant in MUTANTS]
    assert sorted(set(names)) == sorted(names)
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)] == []


def test_every_mutant_applies():
    """The old text occurs once in the file, and the file with the new text is valid Python."""
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    for mutant in MUTANTS:
        mutated = mutant.apply(texts[mutant.file])
        assert mutated != texts[mutant.file], mutant.name
        ast.parse(mutated, f"{mutant.file} with {mutant.name}")


def test_the_tests_of_every_mutant_exist():
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for named in mutant.tests:
            file, *inside = named.partition("[")[0].split("::")
            text = (ROOT / file).read_text()
            for part in inside:
                assert re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE), f"{mutant.name}: {named}"


def test_a_surviving_mutant_has_a_reason():
    assert [mutant.name for mutant in MUTANTS if mutant.killed == bool(mutant.reason)] == []
