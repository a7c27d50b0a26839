"""P1, P2 and P4 for scripts that nobody has thought of: see `random_scripts`.

`LOCKSTEP_RANDOM_SCRIPTS=1000 pytest tests/promises/test_random_scripts.py` is the campaign: other scripts each time,
ranks are killed, too, and all ways in which the law was broken are told at the end, each by its simplest script.
"""

import collections
import functools
import os
from random import Random, SystemRandom

import pytest

from random_scripts import Broken, Recipe, Worlds, judge, random_recipe, simplest

USUAL = 8
SCRIPTS = int(os.environ.get("LOCKSTEP_RANDOM_SCRIPTS", USUAL))
CAMPAIGN = SCRIPTS != USUAL
SEED = int(os.environ.get("LOCKSTEP_RANDOM_SEED", SystemRandom().getrandbits(32) if CAMPAIGN else 1))
SIMPLIFIED = 3  # scripts that broke the law in the same words; more tell nothing new


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad
@pytest.mark.timeout(90 + 5 * SCRIPTS)
def test_every_world_trains_the_same_or_the_script_is_refused():
    tally: collections.Counter[str] = collections.Counter()
    first: dict[str, Recipe] = {}  # that came to a verdict
    broken: dict[tuple[str, str], str] = {}  # by how, and the simplest script
    with Worlds() as worlds:

        def breaks(words, recipe):
            try:
                judge(recipe, worlds)
            except Broken as error:
                return error.args[0] == words
            return False

        # Not by hypothesis: of its first thirty recipes nine came twice, and one field in two kept its first value.
        random = Random(SEED)
        for _ in range(SCRIPTS):
            recipe = random_recipe(random, kills=CAMPAIGN)
            try:
                verdict = judge(recipe, worlds)
            except Broken as error:
                words, details = error.args
                tally[f"broken: {words}"] += 1
                if tally[f"broken: {words}"] <= SIMPLIFIED:
                    found = str(simplest(recipe, functools.partial(breaks, words)))
                    broken[words, found] = details
                    print(f"{words}\n    {found}", flush=True)
            else:
                tally[verdict] += 1
                first.setdefault(verdict, recipe)
    told = "\n".join(f"{n:5} {what}, such as {first.get(what)}" for what, n in tally.most_common())
    print(told)
    ways = "\n".join(f"\n{words}\n{recipe}\n{details}" for (words, recipe), details in broken.items())
    assert not broken, f"{told}\n{ways}\nthe same scripts again: LOCKSTEP_RANDOM_SEED={SEED}"
    trained = {what: n for what, n in tally.items() if what.startswith("trained")}
    assert sum(trained.values()) > SCRIPTS // 3, f"most scripts were refused:\n{told}"
    assert any("resumed" in what for what in trained), f"none was resumed:\n{told}"
