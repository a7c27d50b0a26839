"""A step in which a rank was lost begins again as it began: survivors leave what the script held then.

The scripts train on two ranks, of which one is killed within a step; the launcher starts the next generation by itself.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lockstep
from campaign_marks import combinations

SOURCE = str(Path(lockstep.__file__).parents[1])
SCRIPT = """
    import copy, functools, json, os, random, signal, sys
    import torch, lockstep
    from lockstep.testing import state_hash
    from torch import nn
    from torch.nn import functional as F

    X, Y = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3

    class Trainer:
        def __init__(self, run, how):
            self.run, self.how = run, how
            self.model = run.model(nn.Linear(4, 3))
            self.optimizer = run.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            self.batches = run.loader((X, Y), global_batch=16, micro_batch=4, workers=0)
            self.updates, self.rng = 0, random.Random(3)
            if how in ("teacher", "kept"):
                self.teacher = copy.deepcopy(self.model)
            self.best, self.hard, self.seen, self.shown = 1e9, 1.0, 0, []
            if how == "kept":
                run.keep(teacher=self.teacher)

        def loss(self, x, y):
            n, out = len(x), self.model(x)  # another variable of this name than that of `train`
            loss = F.cross_entropy(out, y, reduction="none")
            loss = (loss * (loss.detach() < self.hard)).mean() if self.how == "multiplied" else loss.mean()
            if self.how in ("teacher", "kept"):
                loss = loss + F.mse_loss(out, self.teacher(x).detach())
            return loss * 4 / n

        def after_step(self):
            if self.how in ("teacher", "kept"):
                with torch.no_grad():
                    for mean, p in zip(self.teacher.parameters(), self.model.parameters()):
                        mean.lerp_(p, 0.1)
            self.updates += 1
            if self.how in ("count", "recorded"):
                self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.updates)

        def train(self, die):
            n = 2
            for epoch in self.run.epochs(3):
                drawn = self.rng.random() if self.how == "generator" else 1.0
                for x, y in self.run.train(self.batches):
                    if self.how == "noted":
                        self.seen += n
                    dies_now = die and self.run.progress.step == 4 and self.run.rank == 1
                    if dies_now and self.how != "recorded":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if self.run.step(self.loss(x, y) * drawn):
                        if dies_now:  # the step after a save, which the ranks record together
                            os.kill(os.getpid(), signal.SIGKILL)
                        self.after_step()
                self.hard *= 1.5
                if self.how == "noted":
                    self.shown.append(self.seen)
            return state_hash(self.model)

    def main(how, dies):
        with lockstep.Run(seed=0, save_every="4 steps" if how == "recorded" else None) as run:
            return Trainer(run, how).train(dies and os.environ["LOCKSTEP_GENERATION"] == "0")

    if __name__ == "__main__":
        found = {}
        for name in sys.argv[1:]:
            case, _, dies = name.partition("-")
            try:
                task = functools.partial(main, case, dies == "True")
                ranks = 2 if dies == "True" else 1
                found[name] = lockstep.launch(task, ranks=ranks, run_dir=name, max_restarts=1)[0]
            except lockstep.LockstepError as error:
                found[name] = str(error)
        print("found", json.dumps(found))
"""
#: By what the script keeps for itself: the words of the error, which names what has begun anew.
LOST = {
    "teacher": "self held other weights when it began",
    "count": "self.updates, which self.optimizer.param_groups[0]['lr'] depends on",
    "recorded": "self.updates, which self.optimizer.param_groups[0]['lr'] depends on",
    "multiplied": "self.hard, which ",
    "generator": "self.rng, which ",
}
#: For `make campaign`: that these decide is found as with "count", and tests of what decides look for the like of them.
MORE = ("multiplied", "generator")
GOES_ON = ("kept", "noted")


pytestmark = pytest.mark.together  # what they look at is trained once


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    asked = {item.callspec.params["how"] for item in request.session.items if item.path == request.path}
    names = [f"{how}-{dies}" for how in sorted(asked) for dies in ([False, True] if how in GOES_ON else [True])]
    place = tmp_path_factory.mktemp("interrupted")
    (place / "train.py").write_text(textwrap.dedent(SCRIPT))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
    ran = subprocess.run(
        [sys.executable, "train.py", *names],
        cwd=place,
        env={**clean, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.rpartition("found ")[2]), place


def log_of(place, name):
    return (place / name / "logs" / "rank-0000.log").read_text()


@pytest.mark.parametrize("how", combinations(LOST, campaign=lambda how: how in MORE))
def test_what_is_in_no_checkpoint_and_decides_is_refused(ended, how):
    found, place = ended
    assert "the step in which a rank was lost does not begin again as it began then" in found[f"{how}-True"]
    assert LOST[how] in found[f"{how}-True"]
    step = "[45]" if how == "recorded" else "4"
    assert re.search(rf"goes on from step {step} \(state of rank 0\)", log_of(place, f"{how}-True"))


@pytest.mark.parametrize("how", GOES_ON)
def test_what_is_kept_or_only_noted_goes_on_with_the_bits_of_a_run_that_was_left_alone(ended, how):
    found, place = ended
    assert found[f"{how}-True"] == found[f"{how}-False"]
    log = log_of(place, f"{how}-True")
    assert "goes on from step 4 (state of rank 0)" in log
    line = next(line for line in log.splitlines() if "variables of the script have begun anew" in line)
    assert ("self.seen (" in line) == (how == "noted")
    assert not re.search(r"\b(x|y|n|loss|out)\b \(", line), "what a body sets anew was not there when the step began"
