import threading

from hypothesis import given
from hypothesis import strategies as st

from lockstep.report import Status, StatusFile

statuses = st.builds(
    Status,
    step=st.integers(0, 10**9),
    steps_total=st.none() | st.integers(1, 10**9),
    epoch=st.integers(0, 1000),
    epochs=st.none() | st.integers(1, 1000),
    samples_per_s=st.none() | st.floats(0, 1e9),
    loss=st.none() | st.floats(allow_nan=False),
    eta_s=st.none() | st.floats(0, 1e9),
    last_saved_step=st.none() | st.integers(0, 10**9),
    world_size=st.integers(1, 4096),
    generation=st.integers(0, 100),
    state=st.sampled_from(["training", "evaluating", "saving", "done", "stopped"]),
)


@given(statuses)
def test_a_status_comes_back_as_it_was(tmp_path_factory, status):
    path = tmp_path_factory.mktemp("s") / "status"
    StatusFile(path).write(status)
    assert StatusFile.read(path) == status


def test_a_loss_that_is_nan_comes_back_as_nan(tmp_path):
    StatusFile(tmp_path / "s").write(Status(step=1, loss=float("nan")))
    status = StatusFile.read(tmp_path / "s")
    assert status.loss != status.loss


@given(statuses)
def test_words_are_short_and_ascii(status):
    for words in status.words().values():
        assert words.isascii()
        assert "\n" not in words
        assert len(words) < 40


def test_what_is_not_known_is_left_out():
    assert set(Status(step=0).words()) == {"state", "step", "epoch", "ranks"}


def test_no_status_is_none(tmp_path):
    assert StatusFile.read(tmp_path / "none") is None
    for content in ("", "{", "[1]", '{"step": 1}', '{"else": 2}', "nan"):
        (tmp_path / "s").write_text(content)
        assert StatusFile.read(tmp_path / "s") is None


def test_a_reader_never_sees_part_of_a_status(tmp_path):
    path, done = tmp_path / "s", threading.Event()

    def write():
        file = StatusFile(path)
        for step in range(500):
            file.write(Status(step=step, loss=step / 3))
        done.set()

    StatusFile(path).write(Status(step=0, loss=0.0))
    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        seen.append(StatusFile.read(path))
    writer.join()
    assert None not in seen
    assert all(status.loss == status.step / 3 for status in seen)
    assert len({status.step for status in seen}) > 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_status_that_cannot_be_written_is_dropped(tmp_path):
    StatusFile(tmp_path / "gone" / "s").write(Status(step=1))
    assert not (tmp_path / "gone").exists()
