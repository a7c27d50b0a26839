"""The word embeddings at a small size: learned from a real text, and the same with their table on a server."""

from example_scripts import example
from lockstep.testing import run_ranks


def play(**options):
    """On a rank: what the example's ``main`` returns."""
    return example("embedding").main(**options)


def small():
    return play(epochs=2, places=12000)


def test_words_are_guessed_better_than_by_the_commonest_and_alike_on_a_server():
    (alone,) = run_ranks(small, 1)
    accuracy, commonest = alone
    assert accuracy > 1.5 * commonest
    assert run_ranks(small, 3, env={"LOCKSTEP_STRATEGY": "hybrid"}) == [alone] * 3
