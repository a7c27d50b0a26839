"""What a failing rank says about itself."""

import importlib
import json
import sys

import pytest

from lockstep.errors import MismatchError, PeerLost
from lockstep.heartbeat import is_users
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


LIBRARY = "def layer(x):\n    raise ValueError(x)\n"


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """Write a module into a directory below that of the test, and import it from there by an entry of ``sys.path``."""

    def load(name, text, *entry):
        file = tmp_path.joinpath(*entry, *name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path.joinpath(*entry)))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(
    "entry", [("other", "lib", "python3.12", "site-packages"), ("usr", "lib", "python3", "dist-packages"), ("target",)]
)
def test_wherever_a_package_is_installed_the_blame_is_not_on_its_lines(importable, tmp_path, entry):
    tmp_path.joinpath(*entry, "tensors-1.0.dist-info").mkdir(parents=True)
    library = importable("tensors", LIBRARY, *entry)
    assert not is_users(library.__file__)
    assert record(caught(lambda: library.layer("x"))).file == __file__


def test_what_lies_beside_the_program_is_the_users_whatever_is_installed_there(importable, tmp_path, monkeypatch):
    tmp_path.joinpath("app", "tensors-1.0.dist-info").mkdir(parents=True)
    own = importable("own", LIBRARY, "app")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "app" / "train.py"), raising=False)
    assert is_users(own.__file__)


def test_of_a_program_that_is_installed_itself_the_blame_is_on_its_own_lines(importable):
    importable("tensors", LIBRARY, "lib", "site-packages")
    text = "import tensors\ndef main():\n    tensors.layer(2)\n"
    program = importable("recipes.train", text, "lib", "site-packages")
    error = caught(program.main)
    error.__traceback__ = error.__traceback__.tb_next  # begins in the program, as in a rank
    assert (record(error).file, record(error).line) == (program.__file__, 3)


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


def test_whoever_was_cut_off_from_a_lost_host_is_blamed_for_its_own_errors_only():
    def blamed(error, **more):
        return not Failure.of(error, rank=3, host="n1", now_s=1.5, log_bytes=10, **more).collateral

    for error in (ConnectionResetError("[Errno 104] Connection reset by peer"), KeyError("answer")):
        assert (blamed(error), blamed(error, cut_off=True)) == (True, False)
    assert blamed(MismatchError("ranks 0 and 1 differ"), cut_off=True)
    assert blamed(SystemExit(3), cut_off=True)


def leaves_after(error, code=1, cause=False):
    try:
        raise error
    except (ValueError, PeerLost):
        if cause:
            raise SystemExit(code) from None
        sys.exit(code)


def left(*args, **options):
    with pytest.raises(SystemExit) as ending:
        leaves_after(*args, **options)
    return record(ending.value)


def test_what_a_program_left_for_is_what_it_was_handling():
    failure = left(ValueError("boom"))
    assert (failure.kind, failure.message, failure.source) == ("SystemExit", "after ValueError: boom", "raise error")
    assert left(ValueError("boom"), "no data").message == "no data\nafter ValueError: boom"
    assert left(PeerLost("rank 1 left")).collateral, "as where an entry point of a library hides it"
    assert left(ValueError("boom"), 75).message == "75"
    assert left(ValueError("boom"), cause=True).message == "1"
    inside = left(caught(lambda: json.loads("{")).with_traceback(None), 3)
    assert inside.source == "raise error"
