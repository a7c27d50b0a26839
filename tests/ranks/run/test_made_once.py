"""Values that a body makes once, and later bodies compute with, are those of all ranks; caches may differ in size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.errors import MismatchError
from lockstep.run import Run
from worlds import on_world


class Balance:
    def __init__(self):
        self.first = None

    def __call__(self, losses):
        if self.first is None:
            self.first = [loss.item() for loss in losses]
        return sum(loss / first for loss, first in zip(losses, self.first, strict=True))


def trained(how):
    """A script of several ranks that keeps something made by its first bodies, ``how``; the message that ends it.

    Steps that compute with values of other ranks show it by themselves; these values decide in steps that never come.
    """
    try:
        with Run(seed=0) as run:
            x, y = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 2
            model = run.model(nn.Linear(3, 2))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = run.loader((x, y, torch.arange(24)), global_batch=8, micro_batch=2)
            anchors, initial, masks, rows, work, outputs, balance = {}, {}, {}, {}, {}, {}, Balance()
            stored = [None] * 24
            model.register_forward_hook(lambda module, inputs, output: outputs.update(last=output.detach()))
            for _ in run.epochs(3):
                for part, labels, numbers in run.train(batches):
                    out = model(part)
                    loss = F.cross_entropy(out, labels)
                    if how == "by label":
                        for row, label in zip(part, labels.tolist(), strict=True):
                            if label not in anchors:
                                anchors[label] = row
                        if run.progress.step > 1e9:
                            loss = loss + sum(anchors[label].sum() for label in labels.tolist())
                    if how == "by name":
                        for name in ("task", "other"):
                            initial.setdefault(name, loss.item())
                            if run.progress.step > 1e9:
                                loss = loss / initial[name]
                    if how == "list":
                        balanced = balance([loss, out.square().mean()])
                        loss = balanced if run.progress.step > 1e9 else loss
                    if how == "mask":
                        if len(part) not in masks:
                            masks[len(part)] = torch.tril(torch.ones(len(part), len(part)))
                        loss = loss + (masks[len(part)] @ out).mean()
                    if how == "samples":
                        for row, number in zip(part, numbers.tolist(), strict=True):
                            if number not in rows:
                                rows[number] = row.square()
                        loss = (
                            loss + (torch.stack([rows[number] for number in numbers.tolist()]) @ model.weight.T).mean()
                        )
                    if how == "prepared list":
                        for row, number in zip(part, numbers.tolist(), strict=True):
                            if stored[number] is None:
                                stored[number] = row.square()
                        loss = loss + (torch.stack([stored[n] for n in numbers.tolist()]) @ model.weight.T).mean()
                    if how == "workspace":
                        if "part" not in work:
                            work["part"] = torch.empty(2, 3)
                        work["part"].copy_(part)
                        loss = loss + model(work["part"]).square().mean()
                    if how == "hook":
                        loss = loss + (outputs["last"] * out).mean()
                    run.step(loss)
        return "trained"
    except MismatchError as error:
        return str(error)


OWN = {"by label": "anchors[", "by name": "initial['task']", "list": "balance.first[0]"}
EQUAL = ("mask", "samples", "prepared list", "workspace", "hook")


pytestmark = pytest.mark.together  # what they look at is trained once


@pytest.fixture(scope="module")
def ended():
    return dict(zip((*OWN, *EQUAL), on_world(2, [(trained, how) for how in (*OWN, *EQUAL)]), strict=True))


@pytest.mark.parametrize("how", OWN)
def test_what_is_of_the_first_bodies_of_each_rank_is_refused(ended, how):
    for told in ended[how]:
        assert told.startswith("ranks hold different values after step ")
        assert f": {OWN[how]}" in told
        assert ", which a body has made once and run.step(...) is computed from, on rank 1" in told


@pytest.mark.parametrize("how", EQUAL)
def test_caches_and_what_each_body_sets_anew_go_on(ended, how):
    assert ended[how] == ["trained", "trained"]
