"""Embeddings on servers: the bits of one rank, only rows that travel, and one checkpoint for all strategies."""

import contextlib
import io
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lockstep.collectives import Mailbox
from lockstep.errors import SettingError, UsageError
from lockstep.launch_contract import RESUME
from lockstep.memory_use import host_memory
from lockstep.run import Run
from lockstep.strategies.parameter_server import table_construction
from lockstep.strategies.parameter_server.embedding_tables import ServedTable
from lockstep.strategies.parameter_server.row_division import WHOLE_BYTES, RowDivision
from lockstep.testing import run_ranks, state_hash
from parameter_server_loops import classify
from worlds import on_world

WORDS, LARGE = 40, 2500


class Net(nn.Module):
    """Its tables are looked up once, twice, three times and never; servers divide the rows of the large ones."""

    def __init__(self, *, sparse=False):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 8, mode="mean", sparse=sparse)
        self.pair = nn.Embedding(WORDS, 8, sparse=sparse)
        self.three = nn.Embedding(4, 8, padding_idx=1)  # so few rows that one gets gradients from all three
        nn.init.normal_(self.three.weight, std=0.01)  # so small that the last bit of a gradient shows in the sum
        self.never = nn.Embedding(5, 2)
        self.large = nn.Embedding(LARGE, 8, padding_idx=LARGE - 2, scale_grad_by_freq=not sparse, sparse=sparse)
        self.low = nn.Embedding(LARGE, 8)  # of which only rows of the first server are looked up
        self.bags = nn.EmbeddingBag(LARGE, 8, mode="sum", padding_idx=1)
        self.norm = nn.BatchNorm1d(40)
        self.noise = nn.Dropout(0.2)
        self.out = nn.Linear(40, 4)

    def forward(self, x):
        pair = self.pair(x[:, 0]) - self.pair(x[:, 1])
        few = x % 4
        three = self.three(few[:, 2]) + self.three(few[:, 3]).tanh() * self.three(few[:, 4])
        # Neighbours of where the rows of two servers meet, and rows of both; in some micro-batches those of one only.
        wide = (x * 37 + LARGE // 2 - 700) % LARGE
        large = self.large(wide[:, :2].flip(1)).sum(1) * self.low(x[:, 3])
        bags = self.bags(
            wide.flatten(), torch.arange(0, wide.numel(), 5), per_sample_weights=(wide % 3).flatten() + 0.5
        )
        found = [self.bag(x), pair, three, large, bags]
        return self.out(self.noise(torch.relu(self.norm(torch.cat(found, 1)))))


def held(net):
    """The hash of each tensor that this rank holds: a table that lies elsewhere shows no numbers."""
    return {n: state_hash(t) for n, t in net.state_dict().items() if not t.is_meta}


def learn(word, optimizer="sgd", epochs=2, *, sparse=False, counted=False, **settings):
    """What this rank holds in the end, and what was measured."""
    with Run(seed=3, strategy=word, **settings) as run:
        generator = torch.Generator().manual_seed(5)
        x = torch.randint(0, WORDS, (60, 5), generator=generator)
        y = x.sum(1) % 4
        net = Net(sparse=sparse)
        model = run.model(net, find_unused_parameters=True)
        make = {
            "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            "plain": lambda p: torch.optim.SGD(p, 0.1),
            "adamw": lambda p: torch.optim.AdamW(p, 0.02),
            "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
        }
        run.optimizer(make[optimizer](model.parameters()))
        told = classify(run, model, x, y, epochs, counted=counted)
        whole = run.state_dict(model)
        return held(net), told, whole and {name: state_hash(tensor) for name, tensor in whole.items()}


CASES = [
    ("sgd", {"clip_norm": 0.5}),
    ("adagrad", {"precision": "bf16"}),
    ("adamw", {"counted": True}),
]


def trained(word, optimizer, case):
    return learn(word, optimizer, **case)


DIVIDED = {"large.weight", "low.weight", "bags.weight"}


@pytest.mark.parametrize(
    ("ranks", "servers"),
    [
        pytest.param(2, 1, marks=pytest.mark.campaign),
        pytest.param(4, 2, marks=pytest.mark.campaign),
        pytest.param(4, 3, marks=pytest.mark.long),
    ],
)
def test_the_bits_are_those_of_one_rank(ranks, servers):
    found = on_world(ranks, [(trained, f"hybrid:servers={servers}", optimizer, case) for optimizer, case in CASES])
    for results, (optimizer, case) in zip(found, CASES, strict=True):
        alone, told, whole = learn("none", optimizer, **case)
        assert [metrics for _, metrics, _ in results] == [told] * ranks, (optimizer, case)
        assert results[0][2] == whole, (optimizer, case)
        dense = {name: value for name, value in alone.items() if name.startswith(("norm", "out"))}
        assert [one for one, *_ in results[:-servers]] == [dense] * (ranks - servers)
        tables = [name for one, *_ in results[-servers:] for name in one if name not in dense]
        assert sorted(tables) == sorted(alone.keys() - dense.keys() - (DIVIDED if servers > 1 else set()))


def late_server(word):
    """Metrics of a script that changes a table by hand, on a server that comes to it after workers could ask."""
    looked_up = threading.Event()
    read = ServedTable.read

    def reading(self, rows):
        looked_up.set()
        return read(self, rows)

    ServedTable.read = reading
    with Run(seed=3, strategy=word) as run:
        net = nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(20, 4))
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        x = torch.randint(0, WORDS, (16, 5), generator=torch.Generator().manual_seed(5))
        batches = run.loader((x, x.sum(1) % 4), global_batch=8, micro_batch=4)

        def shrink():
            if not net[0].weight.is_meta:
                looked_up.clear()
                if run.world_size > 1:
                    looked_up.wait(0.5)  # the time in which a worker that does not wait would look up
                with torch.no_grad():
                    net[0].weight.mul_(0.5)

        told = []
        for _ in run.epochs(2):
            shrink()
            for a, b in run.train(batches):
                run.step(F.cross_entropy, a, b)
            told.append(run.metrics["loss"])
            shrink()
            for a, b in run.evaluate(batches):
                run.measure(held_out=F.cross_entropy(model(a), b))
            told.append(run.metrics["held_out"])
        return told


def test_workers_wait_for_what_the_script_does_on_a_server():
    (found,) = on_world(2, [(late_server, "hybrid")])
    assert found == [late_server("none")] * 2


def test_sparse_gradients_are_the_same_for_any_number_of_ranks():
    (two,), (four,) = (on_world(n, [(sparse, f"hybrid:servers={n // 2}")]) for n in (2, 4))
    assert four == [two[0]] * 4
    for here, there in zip(two[0], sparse("none"), strict=True):
        assert here == pytest.approx(there, rel=1e-5)


def sparse(word):
    return learn(word, "plain", sparse=True)[1]


def some_served():
    """Bytes of tables here, the rows that were asked for, and the strategy's word for what is served."""
    asked = []
    ask = Mailbox.ask

    def asking(self, questions, what):
        asked.extend(rows.tolist() for _, rows in questions.values())
        return ask(self, questions, what)

    Mailbox.ask = asking
    with Run(strategy="hybrid:served=pair+bag", replay=False) as run:
        net = Net()
        model = run.model(net)
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.arange(40).view(8, 5),), global_batch=8, micro_batch=2)):
            run.step(model(x).mean())
    Mailbox.ask = ask
    message = None
    if run.rank < 2:
        with pytest.raises(UsageError, match="looked up after the run was closed") as caught:
            net.pair(torch.tensor([1]))
        message = str(caught.value)
    held = [0 if table.weight.is_meta else table.weight.untyped_storage().nbytes() for table in (net.pair, net.never)]
    return *held, asked, message


def test_workers_hold_no_row_of_a_served_table_and_ask_only_for_those_they_need():
    whole, never = WORDS * 8 * 4, 5 * 2 * 4
    *workers, server = on_world(3, [(some_served,)])[0]
    assert server == (whole, never, [], None)
    for served, own, asked, message in workers:
        assert (served, own) == (0, never)
        # In each of two micro-batches of two samples of five words: the pair, and what is in the bags.
        assert [len(rows) for rows in asked] == [2, 2, 10] * 2
        assert all(rows == sorted(set(rows)) for rows in asked)
        assert message is not None


def leave(word, at):
    """What this rank holds after two epochs, of which the first one's loop is left."""
    with Run(seed=3, strategy=word, replay=False) as run:  # the script counts micro-batches
        x = torch.randint(0, WORDS, (60, 5), generator=torch.Generator().manual_seed(5))
        net = Net()
        model = run.model(net, find_unused_parameters=True)
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        batches = run.loader((x, x.sum(1) % 4), global_batch=24, micro_batch=3)
        for epoch in run.epochs(2):
            seen = -1  # micro-batches since the step at which to leave
            for a, b in run.train(batches):
                seen += epoch == 0 and run.progress.step == at[0]
                if seen == at[1] > 0:
                    break
                run.step(F.cross_entropy(model(a), b))
                if epoch == at[1] == 0 and run.progress.step == at[0]:
                    break
        whole = run.state_dict(model)
        return held(net), run.metrics, run.progress, whole and state_hash(whole)


#: After how many steps, and how many micro-batches of the next one; the third step is the epoch's last.
LEFT = [(1, 0), (2, 0), (2, 1), (1, 3), (3, 0)]


def test_servers_leave_the_loop_with_the_workers():
    found = on_world(3, [(leave, "hybrid", at) for at in LEFT])
    for at, results in zip(LEFT, found, strict=True):
        alone, *rest, whole = leave("none", at)
        assert [one[1:3] for one in results] == [tuple(rest)] * 3, at
        assert results[0][3] == whole
        dense = {name for name in alone if name.startswith(("norm", "out"))}
        server = results[-1][0]
        assert all(server[name] == alone[name] for name in alone.keys() - dense), at
        assert [one for one, *_ in results[:-1]] == [{n: alone[n] for n in dense}] * 2


def resumed(word, place, epochs):
    return learn(word, "adagrad", epochs, checkpoint=place)


def test_it_goes_on_from_any_strategy_and_any_from_it(tmp_path):
    place, whole = str(tmp_path), learn("none", "adagrad", 4)
    run_ranks(resumed, 1, "none", place, 1)
    run_ranks(resumed, 3, "hybrid:servers=2", place, 2, env={RESUME: "1"})
    run_ranks(resumed, 4, "hybrid:servers=3", place, 3, env={RESUME: "1"})
    (end,) = run_ranks(resumed, 1, "none", place, 4, env={RESUME: "1"})
    assert end[1:] == (whole[1][3:], whole[2])


# ---- where rows lie --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([1, 64, 4000])), min_size=1, max_size=6), st.integers(1, 5)
)
def test_each_row_lies_on_one_server_and_servers_hold_about_as_much(tables, servers):
    division, held = RowDivision(range(3, 3 + servers)), dict.fromkeys(range(3, 3 + servers), 0)
    for rows, row_bytes in tables:
        parts = division.place(rows, row_bytes)
        assert list(parts) == sorted(parts)
        assert [row for part in parts.values() for row in part] == list(range(rows))
        assert len(parts) == 1 or rows * row_bytes >= WHOLE_BYTES
        for server, part in parts.items():
            held[server] += len(part) * row_bytes
    assert max(held.values()) - min(held.values()) <= max(WHOLE_BYTES, *(row_bytes for _, row_bytes in tables))


class Given(nn.Module):
    """Tables that are initialised in several ways, and what is drawn behind them."""

    def __init__(self, dtype=None):
        super().__init__()
        self.plain = nn.Embedding(LARGE + 1, 9, padding_idx=LARGE - 3, dtype=dtype)
        self.normal = nn.Embedding(LARGE, 8)
        nn.init.normal_(self.normal.weight, std=0.1)
        self.truncated = nn.EmbeddingBag(LARGE, 8)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        self.uniform, self.copied = nn.Embedding(LARGE, 7), nn.Embedding(LARGE, 8)
        nn.init.xavier_uniform_(self.uniform.weight)
        with torch.no_grad():
            self.uniform.weight.mul_(3.0).add_(0.5)
            self.uniform.weight[7].zero_()
            self.uniform.weight.data.clamp_(max=0.51)
            self.copied.weight.copy_(torch.randn(LARGE, 8))
        self.small = nn.Embedding(7, 2)
        self.ready = nn.Embedding.from_pretrained(torch.randn(LARGE, 8), freeze=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.normal(x) + self.truncated(x[:, None]) + self.ready(x))


def constructed(word, block_bytes):
    """What each rank has of a model after it was made, and the whole."""
    table_construction._BLOCK_BYTES = block_bytes
    with Run(seed=5, strategy=word) as run:
        model = run.model(Given, find_unused_parameters=True)
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.arange(8),), global_batch=8, micro_batch=2)):
            run.step(model(x).mean())
        held = {n: 0 if p.is_meta else len(p) for n, p in model.named_parameters() if n != "out.bias"}
        whole = run.state_dict(model)
        return held, whole and {name: state_hash(tensor) for name, tensor in whole.items()}


def test_tables_are_made_where_they_lie_with_the_values_of_one_rank():
    calls = [(constructed, "hybrid:servers=3", block_bytes) for block_bytes in (1 << 10, 1 << 24)]
    for worker, *servers in on_world(4, calls):
        assert worker[1] == constructed("none", 1 << 24)[1]
        assert all(rows == 0 for name, rows in worker[0].items() if name != "out.weight")
        assert sorted(held["plain.weight"] for held, _ in servers) == [833, 834, 834]
        assert sorted(held["small.weight"] for held, _ in servers) == [0, 0, 7]
        assert sum(held["ready.weight"] for held, _ in servers) == LARGE


def partly_served():
    with Run(seed=5, strategy="hybrid:servers=2,served=normal") as run:
        model = run.model(Given, find_unused_parameters=True)
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.arange(8),), global_batch=8, micro_batch=2)):
            run.step(model(x).mean())
        whole = run.state_dict(model)
        return len(model.truncated.weight), whole and {name: state_hash(tensor) for name, tensor in whole.items()}


def test_a_table_that_is_not_served_is_whole_again():
    found = on_world(3, [(partly_served,)])[0]
    assert [rows for rows, _ in found] == [LARGE] * 3
    assert found[0][1] == constructed("none", 1 << 24)[1]


def grown():
    """By how much the memory of this rank has grown at most while tables of 192 MB were made, one of them on meta."""

    def make():
        tables = [nn.Embedding(1_000_000, 24, device=device) for device in ("cpu", "meta")]
        return nn.Sequential(*tables, nn.Linear(24, 2))

    with Run(strategy="hybrid:servers=2") as run:
        before = host_memory().host
        run.model(make)
        return host_memory().host_peak - before


def test_no_rank_holds_a_table_whole():
    worker, *servers = on_world(3, [(grown,)])[0]
    assert worker < 70e6, "a block of 17 MB, and what libraries take"
    assert max(servers) < 160e6, "half of the table beside that"


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(LARGE, 8)
        with torch.no_grad():
            self.table.weight[torch.tensor([1, 2])] = 0.0


def made_by_index():
    with Run(strategy="hybrid") as run, pytest.raises(UsageError, match="may be initialised by normal_, uniform_"):
        run.model(Indexed)


def test_what_cannot_be_done_to_rows_alone_is_refused():
    assert on_world(2, [(made_by_index,)]) == [[None, None]]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.words(x))


def refused(word, make):
    with Run(strategy=word) as run:
        model = run.model(make())
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.arange(8),), global_batch=8, micro_batch=2)):
            run.step(model(x).mean())


def bounded():
    return nn.Embedding(9, 2, max_norm=1.0)


def plain():
    return nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("word", "make", "kind", "says"),
    [
        ("hybrid", bounded, UsageError, "has max_norm=1.0: its forward pass scales the rows"),
        ("hybrid", Tied, UsageError, r"words\.weight and out\.weight are one tensor, of which only look-ups"),
        ("hybrid:served=1", plain, UsageError, "served=1 is a Linear; give an embedding"),
        ("hybrid:served=words", plain, SettingError, "served=words is in no model of this run"),
        ("hybrid:servers=2", plain, SettingError, "servers=2 of 2 ranks"),
    ],
)
def test_what_cannot_be_served_is_refused(word, make, kind, says):
    with pytest.raises(kind, match=says):
        run_ranks(refused, 2, word, make)


def tables_alone(word):
    with Run(seed=3, strategy=word) as run:
        model = run.model(nn.EmbeddingBag(9, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.arange(32).view(16, 2) % 9,), global_batch=8, micro_batch=1)):
            run.step(model(x).square().mean())
        whole = run.state_dict(model)
        return whole and state_hash(whole)


def test_a_model_may_be_tables_alone():
    assert on_world(3, [(tables_alone, "hybrid:servers=2")])[0][0] == tables_alone("none")


def without_tables():
    with contextlib.redirect_stderr(io.StringIO()) as heard, Run(strategy="hybrid") as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for (x,) in run.train(run.loader((torch.ones(8, 3),), global_batch=8, micro_batch=2)):
            run.step(model(x).mean())
    return heard.getvalue()


def test_a_model_without_embeddings_is_told():
    assert "Linear has no embedding to serve" in on_world(2, [(without_tables,)])[0][0]


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * self.weight.shape[1] ** 0.5


class Positions(nn.Embedding):
    def forward(self, ids):
        return F.embedding(torch.arange(ids.shape[-1]) + 2, self.weight, self.padding_idx) + ids[..., None]


class Whole(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) - self.weight.mean()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, Scaled, Positions])
def test_a_table_is_looked_up_as_its_class_does_it(kind):
    torch.manual_seed(0)
    module, ids = kind(9, 4, padding_idx=-7), torch.tensor([[3, 2, 8], [2, 2, 0]])
    expected, weight = module(ids), module.weight.detach().clone()
    table = ServedTable(module, {1: range(5), 2: range(5, 9)}, 0)
    table.keep(None)
    assert torch.equal(table.look_up(lambda rows: weight[rows], (ids,), {}), expected)
    with pytest.raises(IndexError, match="row 9 of 9"):
        table.look_up(lambda rows: weight[rows], (torch.full((1, 8), 9),), {})


def test_a_table_that_is_not_only_looked_up_is_refused():
    table = ServedTable(Whole(9, 4), {1: range(9)}, 0)
    table.keep(None)
    with pytest.raises(UsageError, match="Whole reads its weight by mean, and servers answer look-ups only"):
        table.look_up(lambda rows: torch.zeros(len(rows), 4), (torch.tensor([3]),), {})
