"""Scripts of the usual kinds, as they are written for one GPU and as they become: few lines touched, the same figures.

`migrations/before` holds plain torch for one process, `migrations/after` the same scripts with Lockstep.
"""

import difflib
import runpy
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.checkpoint import list_checkpoints
from lockstep.testing import run_ranks
from worlds import on_world

SCRIPTS = Path(__file__).parent / "migrations"
TOUCHED = 1 / 3  #: the greatest part of a script's lines that were touched
#: A figure of the last epoch, and how far plain torch, which draws other random numbers, may be from it.
NEAR = {
    "classifier": ("accuracy", 0.15),
    "gan": ("ink", 0.15),
    "gpt": ("val", 0.1),
    "lstm": ("val_loss", 0.05),
    "vae": ("test_loss", 0.1),
}


class Interrupted(Exception):
    """What ends a training on purpose."""


def lines_of(script):
    return [line.strip() for line in script.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize("name", NEAR)
def test_few_lines_are_touched(name):
    before, after = (lines_of(SCRIPTS / kind / f"{name}.py") for kind in ("before", "after"))
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    touched = sum(max(j - i, m - k) for change, i, j, k, m in changes if change != "equal")
    assert touched / len(before) <= TOUCHED


def figures(kind, name):
    """On a rank: what the script says of each epoch."""
    sys.argv = [name]
    return runpy.run_path(str(SCRIPTS / kind / f"{name}.py"), run_name="__main__")["figures"]


def train(name, home, interrupt_at=None):
    """On a rank: the figures, with checkpoints; ends with an error in step ``interrupt_at``."""
    step = lockstep.Run.step

    def counted(run, *args, **options):
        if run.progress.step == interrupt_at:
            raise Interrupted
        return step(run, *args, **options)

    lockstep.Run.step = counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CHECKPOINT", f"{home}/{name}")
        patch.setenv("LOCKSTEP_SAVE_EVERY", "8 steps")
        patch.setenv("LOCKSTEP_RESUME", "1")
        try:
            return figures("after", name)
        finally:
            lockstep.Run.step = step


pytestmark = pytest.mark.timeout(300)  # the first test waits for what all of them look at


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By script: figures of plain torch, of 1, 2 and 3 ranks, and of 3 that went on where 2 were interrupted."""
    home = str(tmp_path_factory.mktemp("runs"))
    plain, alone = run_ranks(both, 1)[0]
    two = on_world(2, [(figures, "after", name) for name in NEAR] + [(train, name, home, 30) for name in NEAR])
    for name, by_rank in zip(NEAR, two[len(NEAR) :], strict=True):
        assert "Interrupted" in by_rank[0]
        assert list_checkpoints(Path(home, name))
    three = on_world(3, [(figures, "after", name) for name in NEAR] + [(train, name, home) for name in NEAR])
    number = len(NEAR)
    columns = zip(NEAR, plain, alone, two[:number], three[:number], three[number:], strict=True)
    return {name: values for name, *values in columns}


def both():
    return [[figures(kind, name) for name in NEAR] for kind in ("before", "after")]


@pytest.mark.campaign
@pytest.mark.parametrize("name", NEAR)
def test_figures_are_those_of_plain_torch_and_the_same_on_any_number_of_ranks(name, trained):
    plain, alone, two, three, resumed = trained[name]
    figure, distance = NEAR[name]
    assert alone[-1][figure] == pytest.approx(plain[-1][figure], rel=distance)
    assert two == [alone] * 2
    assert three == [alone] * 3
    assert resumed == [alone[len(alone) - len(resumed[0]) :]] * 3
    assert 0 < len(resumed[0]) < len(alone)
