"""Logs that cannot be written: the training goes on, and what was printed meanwhile is there in the end."""

import errno
import os
import resource
import signal
from contextlib import contextmanager

from lockstep.launch.workers import log_stream
from lockstep.launch.workers.log_stream import LogStream
from lockstep.report import MetricsFile

FULL = os.strerror(errno.EFBIG)

#: Its leader's log takes nothing more after the second epoch, until the fifth: the kernel itself refuses it.
FULL_LOG = """
    import os, resource, sys, torch, lockstep

    def room(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))

    with lockstep.Run() as run:
        model = run.model(torch.nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(torch.ones(8, 2), global_batch=4, micro_batch=2, workers=0)
        for epoch in run.epochs(6):
            if epoch == 2 and run.leads:
                room(os.fstat(1).st_size + 7)  # in the middle of a line
            for batch in run.train(batches):
                run.step(model(batch).square().mean())
            print("printed in", epoch, "by", run.rank)
            print("complained in", epoch, "by", run.rank, file=sys.stderr)
            run.log(epoch=epoch + 1)
            if epoch == 4:
                room(resource.RLIM_INFINITY)
"""


@contextmanager
def room_for(num_bytes):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_log_that_is_full_for_a_while_has_every_line_in_the_end(workshop):
    script = workshop.script(FULL_LOG)
    ended = workshop.run("--nproc-per-node", 2, "--run-dir", "r", script)
    assert ended.code == 0, ended.err
    log = (workshop.here / "r" / "logs" / "rank-0000.log").read_text()
    for lines in (log.splitlines(), ended.out.splitlines()):
        assert [line for line in lines if line.startswith("printed")] == [f"printed in {n} by 0" for n in range(6)]
        assert [line for line in lines if line.startswith("compl")] == [f"complained in {n} by 0" for n in range(6)]
        assert sum(line.startswith("step ") and "epoch" in line for line in lines) == 6
    assert ended.err.count(f"logs cannot be written ({FULL}): training goes on") == 1
    assert "run failed" not in ended.err
    assert [row["epoch"] for row in MetricsFile.read(workshop.here / "r" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert f"metrics.jsonl: {FULL}" in ended.out


def stream_to(path, told, missing=""):
    descriptor = os.open(path if not missing else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return LogStream(descriptor, str(missing), told.append)


def test_of_too_much_the_last_whole_lines_are_kept_and_the_loss_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(log_stream, "_MOST_BYTES", 30)
    told = []
    stream = stream_to(tmp_path / "log", told)
    with room_for(4):
        for number in range(10):
            assert stream.write(b"line %d \n" % number) == 8
    assert (tmp_path / "log").read_bytes() == b"line"
    stream.write(b"the last\n")
    text = (tmp_path / "log").read_text()
    assert text == "line--- 52 bytes could not be written here, and are lost ---\nline 7 \nline 8 \nline 9 \nthe last\n"
    assert len(told) == 1
    assert told[0].startswith(f"logs cannot be written ({FULL})")


def test_a_log_that_could_not_be_opened_is_opened_later(tmp_path):
    told = []
    log = tmp_path / "logs" / "rank-0.log"
    stream = stream_to(log, told, missing=log)
    stream.write(b"early\n")
    assert told[0].startswith(f"logs cannot be written ({os.strerror(errno.ENOENT)})")
    log.parent.mkdir()
    stream.write(b"late\n")
    assert log.read_text() == "early\nlate\n"
    assert len(told) == 1


def test_a_copy_of_the_rank_does_not_write_what_the_rank_keeps(tmp_path):
    stream = stream_to(tmp_path / "log", [])
    with room_for(0):
        stream.write(b"of the rank\n")
    copy = os.fork()
    if not copy:
        stream.write(b"of the copy\n")
        os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    stream.write(b"again\n")
    assert (tmp_path / "log").read_text() == "of the copy\nof the rank\nagain\n"
