"""What a failing rank says about itself."""

import json

import pytest

from lockstep.launch.diagnosis.error_record import Failure


def caught(deed):
    try:
        deed()
    except Exception as error:  # noqa: BLE001 - whatever it raises is looked at
        return error
    pytest.fail("it did not raise")


def record(error):
    return Failure.of(error, rank=3, host="n1", now_s=1.5, log_bytes=10)


def test_the_blame_is_on_the_users_line_and_not_inside_a_library():
    failure = record(caught(lambda: json.loads("{")))
    assert failure.file == __file__
    assert failure.source == 'failure = record(caught(lambda: json.loads("{")))'
    assert failure.kind == "json.decoder.JSONDecodeError"
    assert "Expecting property name" in failure.message


def test_a_syntax_error_is_blamed_on_its_own_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("x = 1\nif x\n")
    failure = record(caught(lambda: compile(script.read_text(), str(script), "exec")))
    assert (failure.file, failure.line, failure.source) == (str(script), 2, "if x")


def test_a_record_is_read_as_it_was_written_whatever_it_says(tmp_path):
    failure = record(caught(lambda: (_ for _ in ()).throw(ValueError("Größe \ud800 \x1b[31m"))))
    failure.write(tmp_path / "deep" / "failure.json")
    assert Failure.read(tmp_path / "deep" / "failure.json") == failure
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["failure.json"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"rank": 1}'])
def test_what_is_no_record_is_none(tmp_path, text):
    if text is not None:
        (tmp_path / "failure.json").write_text(text)
    assert Failure.read(tmp_path / "failure.json") is None
