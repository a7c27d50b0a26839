"""What a run may be told: reading, precedence, and words for what cannot be used."""

import inspect
import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import SettingError
from lockstep.run import Run
from lockstep.settings import OPTIONS_VARIABLE, BestMetric, Interval, ResolvedSettings, Settings, StepRange, parse


@given(st.integers(1, 10**6), st.sampled_from(["step", "second", "epoch"]))
def test_a_cadence_is_read_as_it_is_written(every, unit):
    assert Interval.parse(str(Interval(every, unit))) == Interval(every, unit)


@pytest.mark.parametrize(
    ("text", "every", "unit"),
    [
        ("2 steps", 2, "step"),
        ("1 step", 1, "step"),
        ("5 min", 300, "second"),
        ("1.5 h", 5400, "second"),
        ("90 s", 90, "second"),
        ("1 epoch", 1, "epoch"),
        (" 3  epochs ", 3, "epoch"),
    ],
)
def test_a_cadence_is_read(text, every, unit):
    assert Interval.parse(text) == Interval(every, unit)


@pytest.mark.parametrize(
    "text", ["", "5", "min", "0 steps", "-1 s", "1.5 steps", "inf steps", "nan s", "inf s", "2 fortnights", "x steps"]
)
def test_a_cadence_that_is_none(text):
    with pytest.raises(SettingError, match="give a number and a unit"):
        Interval.parse(text)


@pytest.mark.parametrize(
    "text", ["", "10:20", "steps", "steps 10", "steps 20:10", "steps 5:5", "steps -1:3", "epochs 1:2"]
)
def test_a_range_of_steps_that_is_none(text):
    assert str(StepRange.parse(" step 0:3 ")) == "steps 0:3"
    with pytest.raises(SettingError, match=r"give .*'steps \d+:\d+'"):
        StepRange.parse(text)


#: A value for each setting, as a script gives it and as text.
GIVEN = {
    "seed": (7, "7"),
    "strategy": ("none", "none"),
    "rehearse": (True, "true"),
    "reduction": ("fast", "fast"),
    "precision": ("bf16", "bf16"),
    "checkpoint": ("runs/a", "runs/a"),
    "save_every": (Interval(2, "step"), "2 steps"),
    "log_every": (Interval(5, "step"), "5 steps"),
    "track": ("tensorboard", "tensorboard"),
    "profile": (StepRange(10, 20), "steps 10:20"),
    "keep": (5, "5"),
    "resume_options": ("script", "script"),
    "emergency": (False, "no"),
    "mirror": (True, "yes"),
    "best": (BestMetric("max", "accuracy"), "max accuracy"),
    "clip_norm": (0.5, "0.5"),
    "sync_batchnorm": (True, "true"),
    "compile": (True, "1"),
    "threads": (2, "2"),
    "workers": (0, "0"),
    "global_batch": (64, "64"),
    "micro_batch": (8, "8"),
    "bucket_mb": (8.0, "8"),
    "on_nan": ("warn", "warn"),
    "nondeterministic": ("warn", "warn"),
    "replay": (False, "false"),
    "audit": (Interval(200, "step"), "200 steps"),
    "verify_saves": (True, "yes"),
    "check_every": (100, "100"),
    "peer_timeout_s": (30.0, "30"),
}


def test_every_setting_is_tried_here():
    assert set(GIVEN) == {field.name for field in fields(Settings)}


def test_run_takes_every_setting_with_its_default():
    """As text where a script writes text, such as ``save_every="5 min"``."""
    taken = {name: parameter.default for name, parameter in inspect.signature(Run).parameters.items()}
    assert taken == {field.name: field.default for field in fields(Settings)}


def test_every_setting_says_what_it_means():
    assert all(field.metadata["meaning"] for field in fields(Settings))


@pytest.mark.parametrize("name", GIVEN)
def test_each_value_says_where_it_came_from(name):
    value, text = GIVEN[name]
    assert (name, value, "script") in ResolvedSettings.resolve({name: value}, {})
    assert (name, value, "environment") in ResolvedSettings.resolve({}, {f"LOCKSTEP_{name.upper()}": text})
    assert (name, value, "command line") in ResolvedSettings.resolve({}, {OPTIONS_VARIABLE: json.dumps({name: text})})
    assert (name, getattr(Settings(), name), "default") in ResolvedSettings.resolve({}, {})


@given(st.lists(st.integers(0, 99), min_size=3, max_size=3), st.sets(st.sampled_from(["script", "env", "options"])))
def test_the_nearest_to_the_user_wins(values, layers):
    script, by_environment, option = values
    env = {}
    if "env" in layers:
        env["LOCKSTEP_SEED"] = str(by_environment)
    if "options" in layers:
        env[OPTIONS_VARIABLE] = json.dumps({"seed": option})
    told = ResolvedSettings.resolve({"seed": script} if "script" in layers else {}, env)
    expected = next(
        (
            value
            for layer, value in [("options", option), ("env", by_environment), ("script", script)]
            if layer in layers
        ),
        Settings().seed,
    )
    assert told.values.seed == expected


@pytest.mark.parametrize("name", ["checkpoint", "save_every", "best", "clip_norm", "threads", "workers", "bucket_mb"])
def test_what_may_be_absent_can_be_taken_back(name):
    value, _ = GIVEN[name]
    told = ResolvedSettings.resolve({name: value}, {f"LOCKSTEP_{name.upper()}": "none"})
    assert getattr(told.values, name) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sed": 1}, "sed: no such setting; did you mean seed?"),
        ({"xyzzy": 1}, "xyzzy: no such setting; there are seed, strategy"),
        ({"seed": "one"}, "seed='one': give a whole number"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
        ({"seed": True}, "seed=True: give a whole number"),
        ({"keep": None}, "keep=None: give a whole number"),
        ({"emergency": 3}, "emergency=3: give true or false"),
        ({"checkpoint": 3}, "checkpoint=3: give a word"),
        ({"precision": True}, "precision='True': give one of fp32"),
        ({"seed": -1}, "seed=-1: it must be at least 0"),
        ({"keep": 0}, "keep=0: it must be at least 1"),
        ({"threads": 0}, "threads=0: it must be at least 1"),
        ({"clip_norm": 0.0}, "clip_norm=0.0: it must be greater than 0"),
        ({"clip_norm": "nan"}, "clip_norm=nan: it must be greater than 0"),
        ({"precision": "fp8"}, "precision='fp8': give one of fp32, bf16, fp16"),
        ({"reduction": "quick"}, "reduction='quick': give one of exact, fast"),
        ({"compile": "maybe"}, "compile='maybe': give true or false"),
        ({"save_every": 100}, "save_every=100: give a number and a unit"),
        ({"save_every": "often"}, "save_every='often': give a number and a unit"),
    ],
)
def test_what_cannot_be_used(given, words):
    with pytest.raises(SettingError) as refused:
        ResolvedSettings.resolve(given, {})
    assert words in str(refused.value)


def test_plain_values_for_the_record():
    # The mirror needs the one, and an audit the other.
    given = {name: value for name, (value, _) in GIVEN.items() if name not in ("emergency", "replay")}
    told = ResolvedSettings.resolve(given, {})
    assert json.loads(json.dumps(told.as_dict())) == told.as_dict()
    again = ResolvedSettings.resolve(told.as_dict(), {})
    assert again.values == told.values


def test_settings_say_themselves():
    assert (
        "precision = bf16 (environment)"
        in str(ResolvedSettings.resolve({}, {"LOCKSTEP_PRECISION": "bf16"})).splitlines()
    )


def test_a_value_that_is_no_text_is_taken_as_it_is():
    assert parse("clip_norm", 1.0) == 1.0
    assert parse("emergency", 0) is False
