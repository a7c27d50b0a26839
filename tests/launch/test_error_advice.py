"""What is said to errors of Python and torch whose own text does not say what to do."""

import bdb
import io
import os

import pytest
import torch
from torch import nn

import lockstep.run  # the advice on models is for scripts that use it
from lockstep.batch import BatchPlan
from lockstep.data import open_micro_batch_loader
from lockstep.launch.diagnosis.error_advice import advice_for

TERMINAL = "lockstep run --attach RANK"


def caught(deed, *args):
    try:
        deed(*args)
    except Exception as error:  # noqa: BLE001 - whatever it raises is looked at
        return error
    pytest.fail("it did not raise")


def ask_size():
    nothing = ()
    _, columns = nothing  # what `stty size` has to say where there is no terminal
    return columns


def quit_debugger():
    raise bdb.BdbQuit


@pytest.mark.parametrize("deed", [input, quit_debugger, ask_size, lambda: os.get_terminal_size(os.open(os.devnull, 0))])
def test_what_needs_a_terminal_is_told_how_to_get_one(deed, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    error = caught(deed)
    assert TERMINAL in advice_for(error, attached=False)
    assert advice_for(error, attached=True) == "", "it has one"


@pytest.mark.parametrize(
    "error", [EOFError("Ran out of input"), ValueError("bad label"), OSError("stty"), KeyError("x")]
)
def test_what_says_enough_is_left_alone(error):
    def fail():
        raise error

    assert advice_for(caught(fail), attached=False) == ""


@pytest.mark.parametrize(
    ("name", "says"),
    [("module", "leave .module out"), ("no_sync", "accumulates"), ("register_comm_hook", "ddp:compress")],
)
def test_a_script_that_used_ddp_is_told_what_the_model_is_now(name, says):
    assert lockstep.run.Run
    assert says in advice_for(caught(lambda: getattr(nn.Linear(2, 1), name)), attached=False)
    assert advice_for(caught(lambda: getattr(object(), name)), attached=False) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_no_business_of_the_script():
    assert "leave .to(...) and .cuda() out" in advice_for(caught(lambda: torch.ones(1).to("cuda")), attached=False)


def test_an_error_in_the_data_set_or_its_collation_is_placed_there():
    def collate(samples):
        return samples[0]["label"]

    loader = open_micro_batch_loader(
        [{"x": 1}] * 4, BatchPlan(4, 2, 1), 0, seed=0, shuffle=False, drop_last=False, workers=0, collate_fn=collate,
        agree=list,
    )  # fmt: skip
    error = caught(lambda: list(loader.epoch(0, 0, padding="none")))
    assert isinstance(error, KeyError)
    assert "in the data set or its collate function" in advice_for(error, attached=False)
