"""All ranks leave a loop, and the run, after the same step: where one of them does not, it is told with its line."""

import inspect
import itertools
import sys
import threading

import torch
from torch.nn import functional as F

import lockstep
from lockstep.collectives import Group
from worlds import on_world

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3


def trained(leaves, strategy="ddp"):
    """What came of three epochs of 8 steps, each of which `leaves` may leave; and what an error says, notes and all."""
    try:
        with lockstep.Run(strategy=strategy) as run:
            model = run.model(torch.nn.Linear(6, 3))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = run.loader((X, Y), global_batch=8, micro_batch=2)
            held_out = run.loader((X[:12], Y[:12]), global_batch=4, micro_batch=2, shuffle=False)
            for _ in run.epochs(3):
                leaves(run, model, batches)
                for x, y in run.evaluate(held_out):
                    run.measure(held=F.cross_entropy(model(x), y, reduction="none"))
                    if leaves is evaluation and run.rank == 1:
                        break
        return run.progress.step, float(sum(p.detach().double().sum() for p in model.parameters()))
    except (lockstep.LockstepError, RuntimeError) as error:
        return f"{type(error).__name__}: {error} | {' '.join(getattr(error, '__notes__', []))}"


def by_break(run, model, batches):
    for x, y in run.train(batches):
        if run.step(F.cross_entropy(model(x), y)) and run.rank == 1 and run.progress.step == 3:
            break


def by_exit(run, model, batches):
    for x, y in run.train(batches):
        if run.step(F.cross_entropy(model(x), y)) and run.rank == 1 and run.progress.step == 3:
            sys.exit(0)


def within_a_step(run, model, batches):
    for x, y in run.train(batches):
        if run.rank == 1 and run.progress.step == 3:
            break
        run.step(F.cross_entropy(model(x), y))


def after_a_pass(run, model, batches):
    for x, y in run.train(batches):
        run.step(F.cross_entropy(model(x), y))
    if run.rank == 1 and run.progress.step == 8:
        sys.exit()


def at_the_last_step(run, model, batches):
    for x, y in run.train(batches):
        if run.step(F.cross_entropy(model(x), y)) and run.rank == 1 and run.progress.step == 8:
            break


def evaluation(run, model, batches):
    for x, y in run.train(batches):
        run.step(F.cross_entropy(model(x), y))


def alike(run, model, batches):
    """By break, at the top of a body and in the middle of a step, by an iterator that is dropped, and by return."""
    for x, y in run.train(batches):
        if run.step(F.cross_entropy(model(x), y)) and run.progress.step % 3 == 0:
            break
    for x, y in run.train(batches):
        if run.progress.step % 3 == 2:
            break
        run.step(F.cross_entropy(model(x), y))
    several = iter(run.train(batches))
    while not run.step(F.cross_entropy(model((pair := next(several))[0]), pair[1])):
        pass
    del several
    for x, y in run.train(batches):
        if run.step(F.cross_entropy(model(x), y)) and any(run.gather(run.progress.step % 7 == 0)):
            return


PARTED = [
    (by_break, "ddp"),
    (by_exit, "ddp"),
    (within_a_step, "ddp"),
    (by_break, "local-sgd:period=4"),
    (by_break, "zero"),
]


def test_ranks_that_leave_alike_are_left_alone():
    expected = trained(alike)
    for ranks in (2, 3):
        assert on_world(ranks, [(trained, alike)]) == [[expected] * ranks]


def test_a_rank_that_leaves_alone_is_told_at_once_with_its_line():
    others = [after_a_pass, at_the_last_step, evaluation]
    told = on_world(2, [(trained, *case) for case in PARTED] + [(trained, case) for case in others])
    for (case, strategy), (waits, left) in zip(PARTED, told, strict=False):
        line = line_of(case, "sys.exit" if case is by_exit else "break")
        on = line_of(case, "run.step" if case is within_a_step else "if run.step")
        said = (
            f"rank 1 left the loop over run.train(...) after step 3 (test_leaves.py:{line}), and rank 0 went on after"
        )
        assert left.startswith(f"UsageError: ranks have parted ways: {said}"), (strategy, left)
        assert waits.startswith("PeerLost"), waits
        assert f"{said} step 3 (test_leaves.py:{on})" in waits or strategy.startswith("local"), waits
    for case, both in zip(others, told[len(PARTED) :], strict=True):
        assert any(f"rank 1 {'ended' if case is after_a_pass else 'left'} the " in one for one in both), both
        assert both[0].startswith("DifferentCalls: ranks make different calls"), both
        assert "and not all ranks did" in both[1] or case is after_a_pass, both


def ends_before_it_trains():
    try:
        with lockstep.Run() as run:
            model = run.model(torch.nn.Linear(6, 3))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            if run.rank == 1:
                sys.exit()
            for _ in run.epochs(1):
                pass
    except (lockstep.LockstepError, RuntimeError) as error:
        return f"{type(error).__name__}: {error} | {' '.join(getattr(error, '__notes__', []))}"


def test_a_rank_that_ends_the_run_before_the_others_train_is_told():
    (told,) = on_world(2, [(ends_before_it_trains,)])
    line = line_of(ends_before_it_trains, "sys.exit")
    said = f"rank 1 ended the run before its first step (test_leaves.py:{line}), and not all ranks did"
    assert told[1].startswith(f"UsageError: ranks have parted ways: {said}"), told
    assert said.partition(",")[0] in told[0], told


def by_islice(run, model, batches):
    for x, y in itertools.islice(run.train(batches), 8):
        run.step(F.cross_entropy(model(x), y))


def by_zip(run, model, batches):
    for _, (x, y) in zip(range(8), run.train(batches), strict=False):
        run.step(F.cross_entropy(model(x), y))


def by_enumerate(run, model, batches):
    for _, (x, y) in enumerate(run.train(batches)):
        run.step(F.cross_entropy(model(x), y))


def test_a_pass_that_ends_after_a_number_of_micro_batches_is_refused():
    for _ in range(2):
        for script in (by_islice, by_zip):
            assert "itertools.islice(run.train(...), n), or zip(range(n), run.train(...)), counts" in trained(script)
    assert trained(by_enumerate) == trained(evaluation)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if line.strip().startswith(text))


def connecting_threads():
    """Which threads have connected to the store in a training."""
    own, names = Group.store, []

    def store(self, name):
        names.append(threading.current_thread().name)
        return own(self, name)

    Group.store = store
    try:
        trained(lambda run, model, batches: None)
    finally:
        Group.store = own
    return set(names)


def test_only_the_main_thread_connects_for_a_loader_process_may_be_forked_meanwhile():
    # Such a process inherits locks of the C library that the connecting thread held, and hangs: 3 in 1,000 forks.
    assert on_world(2, [(connecting_threads,)])[0] == [{"MainThread"}] * 2
