"""The list of mutants matches the code; tests/mutants/run.py runs the mutants."""

import ast
import re
import shutil

from tests.mutants.run import ROOT, Code, load

MUTANTS = load()
CODE = Code(ROOT)


def test_names_are_in_kebab_case():
    assert [each.name for each in MUTANTS if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", each.name)] == []


def test_every_mutant_applies(tmp_path):
    shutil.copytree(ROOT / "sparkkeras" / "parameter", tmp_path / "sparkkeras" / "parameter")
    small = Code(tmp_path)  # to draw from the whole package takes seconds
    for code, mutants in ((CODE, MUTANTS), (small, small.drawn(20, seed=1))):
        for mutant in mutants:
            file, text = mutant.apply(code)
            assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(code.texts[file])), mutant.name


def test_the_tests_of_every_mutant_exist():
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for named in mutant.tests:
            file, *inside = named.partition("[")[0].split("::")
            text = (ROOT / file).read_text()
            for part in inside:
                assert re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE), f"{mutant.name}: {named}"
