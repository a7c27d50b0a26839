"""P1, P2 and P4 for scripts that nobody has thought of: see `random_scripts`.

`LOCKSTEP_RANDOM_SCRIPTS=1000 pytest tests/test_random_scripts.py` is the campaign: other scripts each time, ranks are
killed, too, and all ways in which the law was broken are told at the end, each by its simplest script.
"""

import collections
import os

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from random_scripts import Broken, Worlds, judge, recipes, simplest

USUAL = 30
SCRIPTS = int(os.environ.get("LOCKSTEP_RANDOM_SCRIPTS", USUAL))
CAMPAIGN = SCRIPTS != USUAL
SIMPLIFIED = 3  # scripts that broke the law in the same words; more tell nothing new


@pytest.mark.timeout(90 + 5 * SCRIPTS)
def test_every_world_trains_the_same_or_the_script_is_refused():
    tally: collections.Counter[str] = collections.Counter()
    broken: dict[tuple[str, str], str] = {}  # by how, and the simplest script
    with Worlds() as worlds:

        def breaks(recipe, words):
            try:
                judge(recipe, worlds)
            except Broken as error:
                return error.args[0] == words
            return False

        @hypothesis.settings(
            max_examples=SCRIPTS,
            derandomize=not CAMPAIGN,
            database=None,
            phases=[Phase.generate],  # `simplest` is quicker than to shrink
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(recipes(kills=CAMPAIGN))
        def look(recipe):
            try:
                verdict = judge(recipe, worlds)
            except Broken as error:
                words, details = error.args
                tally[f"broken: {words}"] += 1
                if tally[f"broken: {words}"] <= SIMPLIFIED:
                    broken[words, str(simplest(recipe, lambda simpler: breaks(simpler, words)))] = details
            else:
                tally[verdict] += 1

        look()
    told = "\n".join(f"{n:5} {what}" for what, n in tally.most_common())
    print(told)
    ways = "\n".join(f"\n{words}\n{recipe}\n{details}" for (words, recipe), details in broken.items())
    assert not broken, f"{told}\n{ways}"
    trained = {what: n for what, n in tally.items() if what.startswith("trained")}
    assert sum(trained.values()) > SCRIPTS // 3, f"most scripts were refused:\n{told}"
    assert any("resumed" in what for what in trained), f"none was resumed:\n{told}"
