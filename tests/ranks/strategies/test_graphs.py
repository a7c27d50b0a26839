"""Models of which not every parameter is used in every forward pass, or some more than once."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UsageError
from lockstep.run import Run
from lockstep.testing import state_hash
from worlds import on_world


class Block(nn.Module):
    """Three layers: which are used, how often, and how they are checkpointed."""

    def __init__(self, order, reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.order, self.reentrant = order, reentrant

    def forward(self, x):
        if self.reentrant is not None:
            x = x.clone().requires_grad_()
        for number in self.order:
            layer = self.layers[number]
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def learn(order, reentrant=None, told=None, reduction="exact", strategy="ddp"):
    """The hash of the model, and which of its layers have moved; or what was raised."""
    with Run(seed=0, strategy=strategy, reduction=reduction) as run:
        block = Block(order, reentrant)
        before = [p.detach().clone() for p in block.parameters()]
        model = run.model(block, **(told or {}))
        # Without gradient, not even weight decay moves a parameter.
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
        data = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))  # the last step: one micro-batch
        batches = run.loader(data, global_batch=16, micro_batch=4)
        try:
            for _ in run.epochs(3):
                for batch in run.train(batches):
                    run.step(model(batch).square().mean())
        except UsageError as error:
            return str(error)
        moved = [not torch.equal(p, b) for p, b in zip(block.parameters(), before, strict=True)]
        return state_hash(block), [all(moved[i : i + 2]) for i in range(0, 6, 2)]


def changes_its_graph(told):
    """A static graph that is none: a layer that was used is not any more, or the other way round."""
    with Run(seed=0) as run:
        block = Block((0, 1))
        model = run.model(block, static_graph=True)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(torch.ones(8, 4), global_batch=8, micro_batch=2)
        try:
            for epoch in run.epochs(4):
                for batch in run.train(batches):
                    run.step(model(batch).square().mean())
                if epoch == 1:
                    block.order = told
        except (UsageError, RuntimeError) as error:
            return f"in epoch {epoch}: {error}"


def one_sided(when):
    """Two models, of which the second has a part in the loss of the first half of micro-batches only, or of none."""
    hashes = []
    with Run(seed=0) as run:
        pair = [run.model(nn.Linear(4, 4), find_unused_parameters=True) for _ in range(2)]
        run.optimizer(torch.optim.SGD([p for m in pair for p in m.parameters()], lr=0.1, weight_decay=0.1))
        # Each micro-batch is told by its data, no matter which rank computes it.
        batches = run.loader(torch.arange(8.0)[:, None].expand(8, 4), global_batch=8, micro_batch=2, shuffle=False)
        for epoch in run.epochs(3):
            for batch in run.train(batches):
                loss = pair[0](batch).square().mean()
                if batch[0, 0] < 4 and (when == "always" or epoch > 0):
                    loss = loss + pair[1](batch).square().mean() + pair[0](batch).mean()
                run.step(loss)
            hashes.append(state_hash(*pair))
    return hashes


def left_out():
    """A second model that has no part in any loss, and nothing was said of it."""
    with Run(seed=0) as run:
        pair = [run.model(nn.Linear(4, 4)) for _ in range(2)]
        run.optimizer(torch.optim.SGD([p for m in pair for p in m.parameters()], lr=0.1))
        batches = run.loader(torch.ones(8, 4), global_batch=8, micro_batch=2)
        try:
            for batch in run.train(batches):
                run.step(pair[0](batch).square().mean())
        except UsageError as error:
            return str(error)


ALL, SPARSE, TWICE = (0, 1, 2), (0, 2), (0, 1, 1, 2, 0)
STATIC, FIND = {"static_graph": True}, {"find_unused_parameters": True}


class Deep(nn.Module):
    """Larger than DDP's first bucket, of 1 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(400, 400) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compiled_graphs(strategy):
    """The numbers of calls in the graphs into which the compiler cuts a model that is larger than a bucket."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    with Run(seed=0, strategy=strategy, replay=False) as run:
        model = run.model(Deep())
        model.compile(backend=backend)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x in run.train(run.loader(torch.ones(8, 400), global_batch=4, micro_batch=2)):
            run.step(model(x).square().mean())
    return graphs


def test_on_two_ranks():
    calls = [
        *((learn, SPARSE, None, told) for told in (STATIC, FIND)),
        *((learn, order, True, STATIC) for order in (ALL, SPARSE, TWICE)),
        *((learn, order, False, STATIC) for order in (SPARSE, TWICE)),
        *((learn, order, reentrant) for order, reentrant in ((ALL, True), (ALL, False), (TWICE, False))),
        (learn, TWICE, True, STATIC, "fast"),
        (learn, SPARSE, None, STATIC, "fast", "ddp:compress=bf16"),
        *((one_sided, when) for when in ("always", "later")),
    ]
    refused = {
        (learn, TWICE, True): "parameters got more gradient after theirs was sent, among them some of layers.",
        (learn, TWICE, True, None, "fast"): "parameters got more gradient after theirs was sent",
        (left_out,): "2 of 4 parameters had no part in the loss: weight, bias. ",
        (changes_its_graph, (0, 1, 2)): "in epoch 2: Your training graph has changed in this iteration",
        (changes_its_graph, (0,)): "parameters had no part in the loss: layers.1.weight, layers.1.bias",
    }
    found = on_world(2, [*calls, *refused])
    for (function, *told), ranks in zip(calls, found, strict=False):
        alone = function(*told)
        if "fast" in told:
            assert [layers for _, layers in ranks] == [alone[1]] * 2, (told, ranks)
        else:
            assert ranks == [alone] * 2, (function, told, ranks)
    for (call, says), ranks in zip(refused.items(), found[len(calls) :], strict=True):
        assert all(says in told and "Traceback" not in told for told in ranks), (call, ranks)


def test_a_compiled_model_is_cut_alike_on_any_world():
    ((alone,),) = on_world(1, [(compiled_graphs, "none")])
    in_ddp, in_zero = on_world(2, [(compiled_graphs, "ddp"), (compiled_graphs, "zero")])
    assert alone
    assert in_ddp == in_zero == [alone] * 2
