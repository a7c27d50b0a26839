"""`make mutants` takes long; here is seen that it could run, and that one planted error is caught."""

import pytest

from mutants import MUTANTS, SOURCE, _fails_anyway, _try, broken


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name[:60])
def test_each_error_can_still_be_planted(mutant):
    compile(broken(mutant, (SOURCE / mutant.file).read_text()), mutant.file, "exec")


def test_there_are_enough():
    assert len(MUTANTS) >= 60
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_planted_error_is_caught():
    mutant = next(mutant for mutant in MUTANTS if mutant.file == "progress.py")
    assert _try(mutant)[1].startswith("tests/unit/test_progress.py::")


def test_a_test_that_fails_without_the_error_has_not_noticed_it(monkeypatch):
    _fails_anyway.cache_clear()
    monkeypatch.setattr("mutants._failing", lambda tests, directory: (tests, ": fails everywhere"))
    assert _try(MUTANTS[0])[1] == ""
    _fails_anyway.cache_clear()
