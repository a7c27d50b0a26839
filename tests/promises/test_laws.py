"""The conformance suite: every strategy keeps the same laws, each as far as it promises."""

from pathlib import Path

import pytest

from campaign_marks import combinations
from lockstep.strategy_kinds import BUILT_IN
from lockstep.testing import StrategyLaws


def near(tolerance: float, **more: object) -> dict[str, object]:
    """For a strategy that computes something else, and how far it may come from one rank on this problem."""
    return {"bits": False, "tolerance": tolerance, **more}


#: What each strategy promises: the reference's bits on 2 and 3 ranks, where nothing else is said. See `StrategyLaws`.
PROMISES = {
    "ddp": {},
    "zero": {},
    "fsdp": {},
    "fsdp:tensor=2": near(0.1, worlds=(2, 4), worlds_agree=True),
    "hsdp:shard=2": {"worlds": (2, 4)},
    "auto": {},
    "local-sgd:period=2": near(0.8),
    "diloco:period=2": near(1.1),
    "parameter-server:servers=1": {},
    "hybrid:servers=1": {},
    "pipeline:stages=2": {"worlds": (2, 4)},
    "dp": near(1e-4, worlds=(1,), dropout=0.0, batchnorm=False, rehearse=True),
}
#: The same for options that change what is computed, or how.
OPTIONS = {
    "ddp:compress=fp16": near(0.1),
    "ddp:compress=bf16": near(0.1),
    "ddp:compress=powersgd,rank=2": near(0.9),
    "fsdp:wrap=Linear,checkpoint_activations,ignored_modules=Embedding": {},
    "zero:stage=2": {},
    "diloco:period=4,fragments=2,overlap=1": near(0.9),
    # Two workers make twice the updates, and momentum adds them up: 2.8 to 3.0 times as far.
    "parameter-server:servers=1,mode=async": near(2.5, repeats=False),
    "pipeline:stages=2,schedule=interleaved": {"worlds": (2, 4)},
    "pipeline:stages=2,schedule=zero-bubble": {"worlds": (2, 4)},
    "hybrid:servers=2": {"worlds": (3, 4)},
}
#: The laws that an option could break by itself.
TOUCHED = ("equals_the_reference", "survives_a_killed_rank", "moves_between_strategies")


def test_every_strategy_has_a_row_here():
    assert {word.partition(":")[0] for word in PROMISES} | {"none"} == set(BUILT_IN)


#: Strategies of a family of which another one keeps all laws in the suite; their other laws run in `make campaign`.
LIKE_OTHERS = ("zero", "diloco:period=2", "hybrid:servers=1")
#: These are put together from others, and tests of their own compare bits; their laws run in `make campaign`.
OF_OTHERS = ("fsdp:tensor=2", "hsdp:shard=2", "auto")
#: Laws about code that strategies share: kept in the suite by one of them.
SHARED = ("respects_count", "clips_alike", "evaluates_exactly_once", "replays_leave_no_trace")


def is_campaigns(word: str, law: str) -> bool:
    if word in OF_OTHERS:
        return True
    if word in LIKE_OTHERS:
        return law != "equals_the_reference"
    if law == "survives_a_killed_rank":
        return word in ("local-sgd:period=2", "dp", "pipeline:stages=2")
    if law == "moves_between_worlds":
        return word not in ("ddp", "fsdp")
    if law == "moves_between_strategies":
        return word not in ("ddp", "fsdp", "pipeline:stages=2")
    return law in SHARED and word != "ddp"


def is_campaigns_with_options(word: str, law: str) -> bool:
    like_others = ("ddp:compress=bf16", "fsdp:wrap", "hybrid", "pipeline:stages=2,schedule=zero-bubble", "zero")
    return law != "equals_the_reference" or word.startswith(like_others)


@pytest.mark.together(by="word")
@pytest.mark.parametrize(("word", "law"), combinations(PROMISES, StrategyLaws.ALL, campaign=is_campaigns))
def test_law(word: str, law: str, tmp_path: Path):
    getattr(StrategyLaws(word, tmp_path, **PROMISES[word]), law)()


@pytest.mark.parametrize(("word", "law"), combinations(OPTIONS, TOUCHED, campaign=is_campaigns_with_options))
def test_law_with_options(word: str, law: str, tmp_path: Path):
    getattr(StrategyLaws(word, tmp_path, **OPTIONS[word]), law)()
