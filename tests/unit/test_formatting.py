import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.formatting import acts, command_line, count, duration, grouped, harmless, size, some_of


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0"),
        (8.5, "8.5"),
        (64.0, "64.0"),
        (64, "64"),
        (99.96, "100"),
        (100.4, "100"),
        (2140, "2 140"),
        (1234567.8, "1 234 568"),
    ],
)
def test_counts(number, words):
    assert count(number) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 m 00 s"),
        (725, "12 m 05 s"),
        (3599.7, "1 h 00 m"),
        (4340, "1 h 12 m"),
        (86399.9, "1 d 00 h"),
        (3 * 86400 + 4 * 3600 + 1, "3 d 04 h"),
        (float("inf"), "unknown"),
        (float("nan"), "unknown"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (12.34 * 1024, "12.3 KiB"),
        (999.6 * 1024, "0.98 MiB"),
        (98 * 1024**3, "98.0 GiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_sizes(num_bytes, words):
    assert size(num_bytes) == words


@given(st.floats(0, 1e9))
def test_words_are_short_and_ascii(number):
    for words in (count(number), duration(number), size(number)):
        assert words.isascii()
        assert len(words) <= 13


def test_what_has_one_key_is_together_in_the_order_in_which_it_comes():
    assert list(grouped([("b", 2), ("a", 1), ("b", 0)]).items()) == [("b", [2, 0]), ("a", [1])]


@pytest.mark.parametrize(
    ("most", "words"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c"), (4, "a, b, c")]
)
def test_of_many_names_some_are_said_and_the_others_counted(most, words):
    assert some_of(["a", "b", "c"], most) == words


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("--token x --lr 1", "--token '***' --lr 1"),
        ("--api-key=y PASSWORD=z tokens.txt", "'--api-key=***' 'PASSWORD=***' tokens.txt"),
        ("--auth -v", "--auth -v"),
        ("--auth-tokens a b -v", "--auth-tokens '***' '***' -v"),
        ("--pw x --pwd=y", "--pw '***' '--pwd=***'"),
        ("--set=token=x model.api_key=y", "'--set=token=***' 'model.api_key=***'"),
        ("""'{"token": "x"}'""", """'{"token": ***'"""),
        ("--data https://me:x@host/a", "--data 'https://***@host/a'"),
        (
            "--tokenizer bert --author me --max-tokens 512 --tokens=9",
            "--tokenizer bert --author me --max-tokens 512 --tokens=9",
        ),
        ("--authorization x --hf-token=x", "--authorization '***' '--hf-token=***'"),
    ],
)
def test_a_command_line_shows_no_secret(given, shown):
    assert command_line(shlex.split(given)) == shown


@given(st.text())
def test_what_is_shown_acts_on_nothing(text):
    shown = harmless(text)
    assert not acts(shown)
    shown.encode()
    assert harmless(shown) == shown
    assert shown == text or acts(text)


def test_colours_and_titles_of_a_terminal_become_text():
    assert harmless("a\x1b]0;owned\x07\n\x9b1m\u202e") == r"a\x1b]0;owned\x07\n\x9b1m\u202e"
    assert harmless("a\nb\x1b", keep="\n") == "a\nb\\x1b"
