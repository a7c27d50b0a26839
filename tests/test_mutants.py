"""`make mutants` takes long; here is seen that it could run, and that one planted error is caught."""

import pytest

from mutants import MUTANTS, SOURCE, _try, broken


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name[:60])
def test_each_error_can_still_be_planted(mutant):
    compile(broken(mutant, (SOURCE / mutant.file).read_text()), mutant.file, "exec")


def test_there_are_enough():
    assert len(MUTANTS) >= 60
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_planted_error_is_caught():
    mutant = next(mutant for mutant in MUTANTS if mutant.file == "progress.py")
    assert _try(mutant)[1].startswith("tests/test_progress.py::")
