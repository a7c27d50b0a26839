"""Files that several ranks open for writing are told, once for each line of the script; others are not."""

import builtins
import contextlib
import io
import json
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.run import Run
from worlds import on_world


def by_all(run, epoch):
    with open("log.csv", "a") as file:
        file.write(f"{epoch}\n")


def by_a_path(run, epoch):
    Path(f"text-{epoch}.txt").write_text("the same")


def by_a_package(run, epoch):
    np.savetxt("numbers.csv", [epoch])


def by_the_leader(run, epoch):
    if run.leads:
        Path("leader.json").write_text(json.dumps(epoch))


def by_each(run, epoch):
    with open(f"rank-{run.rank}.txt", "w") as file:
        file.write("own")


def read(run, epoch):
    Path(__file__).read_text()
    with open(os.devnull, "w") as file:
        file.write("nothing")


def by_lockstep(run, epoch):
    run.log(epoch=epoch)
    run.save(MODELS[-1], "model.safetensors")


def by_a_logger(run, epoch):
    if not logging.getLogger("mine").handlers:
        logging.getLogger("mine").addHandler(logging.FileHandler("mine.log"))
    logging.getLogger("mine").warning("epoch %s", epoch)


MODELS = []
TOLD = {by_all: "log.csv", by_a_path: "text-0.txt", by_a_package: "numbers.csv", by_a_logger: "mine.log"}
SILENT = (by_the_leader, by_each, read, by_lockstep)


def lines_of(write, directory):
    os.makedirs(directory, exist_ok=True)
    os.chdir(directory)
    own, said = builtins.open, io.StringIO()
    with contextlib.redirect_stderr(said), Run() as run:
        MODELS.append(run.model(nn.Linear(3, 1)))
        run.optimizer(torch.optim.SGD(MODELS[-1].parameters(), lr=0.1))
        data = run.loader(torch.ones(8, 3), global_batch=4, micro_batch=2)
        for epoch in run.epochs(3):
            for batch in run.train(data):
                run.step(MODELS[-1](batch).mean())
            write(run, epoch)
    assert builtins.open is own
    assert io.open is own
    return [line for line in said.getvalue().splitlines() if "for writing" in line]


def test_each_line_of_the_script_that_opens_one_on_several_ranks_is_told_once(tmp_path):
    calls = [(lines_of, write, str(tmp_path / write.__name__)) for write in (*TOLD, *SILENT)]
    found = dict(zip((*TOLD, *SILENT), on_world(2, calls), strict=True))
    for write, name in TOLD.items():
        (line,) = found[write][0]
        assert line.startswith(("ranks 0, 1 have opened ", "ranks 0-1 have opened "))
        assert f"/{name} (test_written_files.py:" in line
    assert {write: found[write] for write in SILENT} == {write: [[], []] for write in SILENT}


def test_one_rank_writes_as_it_likes(tmp_path):
    assert on_world(1, [(lines_of, by_all, str(tmp_path))]) == [[[]]]


@pytest.mark.parametrize("mode", ["w", "a", "x", "r+"])
def test_every_mode_that_writes_counts(tmp_path, mode):
    from lockstep.run.checks.written_files import WrittenFiles

    path = tmp_path / "file"
    if mode == "r+":
        path.write_text("")
    files = WrittenFiles()
    try:
        with open(path, mode):
            pass
        with open(path) as read_only:
            read_only.read()
        assert [name for name, _ in files.take()] == [str(path)]
        assert files.take() == {}
        assert pickle.loads(pickle.dumps(open)) is open
    finally:
        files.close()
