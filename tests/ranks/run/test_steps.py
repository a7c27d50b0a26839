"""`Run.steps` by hand, evaluation in the loop's body, the place of a micro-batch, and early stopping at its end."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.launch_contract import RESUME
from lockstep.run import Run
from lockstep.testing import run_ranks, state_hash
from worlds import on_world

X = torch.sin(torch.arange(80.0)).view(40, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


def test_the_length_of_a_pass_is_that_of_this_rank_and_may_be_shown(capfd):
    """As by a progress bar; a schedule made from it is refused (test_training_inputs.py)."""
    with Run(replay=False) as run:
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for micro_batch in (4, 2, 2):
            passed = run.train(run.loader(torch.ones(8, 1), global_batch=4, micro_batch=micro_batch))
            assert len(passed) == 8 // micro_batch
            for x in passed:
                run.step(model(x).mean())
    assert "len(" not in capfd.readouterr().err


def test_by_hand_it_is_sgd_through_one_shuffled_epoch_after_another():
    """In float64, on the samples that the loop says it has handed out."""
    data = TensorDataset(torch.arange(21), torch.sin(torch.arange(42.0).double()).view(21, 2))
    by_hand, seen, losses, begun = nn.Linear(2, 1).double(), [], [], []
    with Run(replay=False) as run:
        model = run.model(nn.Linear(2, 1).double())
        by_hand.load_state_dict(model.state_dict())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(data, global_batch=4, micro_batch=2)
        for step in run.steps(15, every=7):
            begun.append(step)
            assert len(run.train(batches)) == {0: 13, 7: 13, 14: 2}[step]
            for numbers, x in run.train(batches):
                if run.micro_batch.index == 0:
                    seen.append([])
                assert run.micro_batch.of == len(range(0, run.micro_batch.step_samples, 2))
                seen[-1] += numbers.tolist()
                run.step((model(x) - 1).square().mean())
            losses.append(run.metrics["loss"])
        assert (run.progress.epoch, run.progress.step) == (2, 15)
    assert begun == [0, 7, 14]
    # An epoch has 5 steps of 4 samples, and one of a single sample.
    epochs = [[number for step in seen[first : first + 6] for number in step] for first in (0, 6)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(21))
    assert epochs[0] != epochs[1]
    optimizer, means = torch.optim.SGD(by_hand.parameters(), lr=0.1), []
    for numbers in seen:
        loss = (by_hand(data.tensors[1][numbers]) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        means.append((loss.item(), len(numbers)))
    for mine, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    for loss, part in zip(losses, (means[:7], means[7:14], means[14:]), strict=True):
        assert loss == pytest.approx(sum(mean * n for mean, n in part) / sum(n for _, n in part))


def evaluated(strategy, in_body):
    """What was measured in the bodies, and all that the training came to."""
    with Run(seed=1, strategy=strategy, replay=strategy == "ddp") as run:
        module = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 1))
        model = run.model(module)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        batches, held_out = (run.loader(data, **SIZES) for data in (X, X[:10]))
        held, draws, bodies = [], [], 0
        for _ in run.epochs(2):
            for batch in run.train(batches):
                bodies += 1
                if run.step(lambda out, x: (out - x[:, :1]).square().mean(), batch, batch):
                    if in_body and run.progress.step % 2 == 0:
                        for part in run.evaluate(held_out):
                            assert not torch.is_grad_enabled()
                            out = model(part)
                            run.measure(held=out.squeeze(1) if out is not None and out.dim() else part[:, 0])
                        assert module.training
                        held.append(run.metrics["held"])
                    draws.append(torch.rand(()).item())
                run.measure(samples=run.micro_batch.samples)
        return held, draws if not in_body else len(draws), run.metrics["loss"], run.metrics["samples"]


STRATEGIES = ("ddp", "zero", "fsdp", "local-sgd:period=3", "diloco:period=3", "pipeline")


def test_an_evaluation_in_the_body_leaves_the_training_as_it_is():
    calls = [(evaluated, strategy, in_body) for strategy in STRATEGIES for in_body in (False, True)]
    results = on_world(2, calls)
    for strategy, without, with_it in zip(STRATEGIES, results[::2], results[1::2], strict=True):
        assert len(with_it[0][0]) == 5, (strategy, with_it)
        for one, other in zip(without, with_it, strict=True):
            assert one[2:] == other[2:], strategy
            assert len(one[1]) == other[1]
            assert other[0] == with_it[0][0], "the same on all ranks"
    assert results[1][0][0] == results[3][0][0] == results[5][0][0] == evaluated("none", in_body=True)[0]
    assert results[0][0][1] == results[0][1][1], "what is drawn in the body is drawn alike"


def test_servers_run_no_body_to_evaluate_in():
    ((worker, _),) = on_world(
        2, [(evaluated, "parameter-server:servers=1", True)], env={"LOCKSTEP_PEER_TIMEOUT_S": "3"}
    )
    assert "UsageError: run.evaluate(...) in the body of run.train(...): under this strategy some ranks serve" in worker


def test_an_evaluation_that_is_left_says_what_it_measured_for_nothing(capfd, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(run.evaluate(run.loader(X[:10], **SIZES))):
            if number == 2:
                break
            run.measure(held=model(batch).squeeze(1))
        next(iter(run.evaluate(run.loader(X[:10], **SIZES))))
        assert "held" not in run.metrics
    said = capfd.readouterr().err
    assert said.count("left before its end, so held is not in run.metrics") == 1
    assert said.count("left before its end") == 1


def served(strategy, directory, stop=False):
    """Stretches through several epochs; one is left by break where an epoch ends, and perhaps stopped after that."""
    os.environ[RESUME] = "1"
    try:
        with Run(seed=3, strategy=strategy, checkpoint=directory) as run:
            model = run.model(nn.Linear(2, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            order = lambda epoch, generator: torch.randperm(40, generator=generator)  # noqa: E731
            batches, held_out, measured = run.loader(X, order=order, **SIZES), run.loader(X[:10], **SIZES), []
            for begun in run.steps(13, every=6):
                for batch in run.train(batches):
                    if run.step((model(batch) - 1).square().mean()) and run.progress.step == 10:
                        break
                for batch in run.evaluate(held_out):
                    run.measure(held=model(batch).squeeze(1))
                    if stop and run.progress.step == 10:
                        os.kill(os.getpid(), signal.SIGTERM)
                measured.append((begun, run.metrics["held"]))
        return run.progress, measured
    except SystemExit as ended:
        return ended.code
    finally:
        os.environ.pop(RESUME, None)


def test_ranks_that_serve_follow_through_stretches_a_break_and_a_resume(tmp_path):
    """A server reads nothing and runs no body: it must learn where the others go on and where they do not."""
    calls = [
        (served, "ddp", tmp_path / "ddp"),
        *((served, f"parameter-server:mode={mode}", tmp_path / mode) for mode in ("sync", "async,staleness=0")),
        (served, "parameter-server", tmp_path / "stopped", True),
        (served, "parameter-server", tmp_path / "stopped"),
    ]
    whole, sync, asynchronous, stopped, resumed = on_world(3, calls)
    assert whole[0][0].epoch == 2
    assert [begun for begun, _ in whole[0][1]] == [0, 6, 10, 12]
    assert sync == whole
    assert [progress for progress, _ in asynchronous] == [progress for progress, _ in whole]
    assert stopped == [75] * 3
    assert resumed == [(progress, measured[1:]) for progress, measured in whole], "it does not train on after its break"


def left_within_a_step():
    """A pass that is left within its third step, and taken up again: the step is made and measured once."""
    with Run(log_every="5 steps") as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches, begun = run.loader(X, **SIZES), 0
        while not run.metrics:
            begun += 1
            for batch in run.train(batches):
                run.measure(before=batch[:, 0])
                if begun == 1 and run.progress.step == 2:
                    break
                done = run.step(model(batch).square().mean())
                run.measure(after=batch[:, 0])
                if done and begun == 2 and run.progress.step == 4:
                    break
        return run.metrics


def test_what_a_discarded_step_measured_counts_for_nothing():
    ((alone,),) = on_world(1, [(left_within_a_step,)])
    assert alone["before"] == alone["after"] == pytest.approx(X[:, 0].double().mean().item(), abs=1e-7)
    assert on_world(3, [(left_within_a_step,)]) == [[alone] * 3]


def stopping(directory, patience, resume):
    """Early stopping in the body, at step 6 with a patience of 2; how many steps this leg made."""
    if resume:
        os.environ[RESUME] = "1"
    try:
        with Run(checkpoint=directory, save_every="1 step") as run:
            model = run.model(nn.Linear(2, 1))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            stopper = run.early_stopping("worse", patience=patience, mode="min", min_delta=0.5)
            made = 0
            for _ in run.epochs(4):
                for batch in run.train(run.loader(X, **SIZES)):
                    if run.step(model(batch).square().mean()):
                        made += 1
                        if run.progress.step % 2 == 0:
                            for part in run.evaluate(run.loader(X[:10], **SIZES)):
                                run.measure(worse=torch.full((len(part),), 0.25 * run.progress.step))
                        if run.progress.step > 1 and stopper.should_stop():
                            break
                if stopper.stopped:
                    break
        return made, run.progress.step, stopper.should_stop(), state_hash(model)
    finally:
        os.environ.pop(RESUME, None)


def test_a_run_that_was_stopped_early_is_finished_unless_it_is_given_more_patience(tmp_path):
    ended, again = on_world(2, [(stopping, tmp_path, 2, False), (stopping, tmp_path, 2, True)])
    assert [one[:3] for one in ended] == [(6, 6, True)] * 2
    assert again == [(0, *ended[0][1:])] * 2
    assert stopping(tmp_path, 4, resume=True)[:3] == (4, 10, True)


def weights_in_the_body():
    """In bf16: what a model gives after the step, by an evaluation in the body, by hand there, and after the loop."""
    x = torch.linspace(-1, 1, 16).view(8, 2)
    with Run(seed=1, precision="bf16") as run:
        model = run.model(torch.nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        batches = run.loader(x, global_batch=8, micro_batch=4, shuffle=False)
        for batch in run.train(batches):
            if run.step(model(batch).square().mean()):
                for inputs in run.evaluate(batches):
                    run.measure(mean=model(inputs).float().squeeze(1))
                with torch.no_grad():
                    by_hand = model(x).float().mean().item()
        with torch.no_grad(), torch.autocast(run.device.type, torch.bfloat16):
            return run.metrics["mean"], by_hand, model(x).float().mean().item()


def test_in_the_body_forward_passes_after_the_step_see_its_weights():
    (found,) = on_world(2, [(weights_in_the_body,)])
    for measured, by_hand, afterwards in found:
        assert measured == pytest.approx(afterwards, abs=1e-6)
        assert by_hand == afterwards


class Labelled(torch.utils.data.Dataset):
    def __init__(self):
        self.samples, self.labels = torch.sin(torch.arange(96.0)).view(48, 2), torch.zeros(48)

    def __len__(self):
        return 48

    def __getitem__(self, place):
        return self.samples[place], self.labels[place]


def relabelled(workers, how):
    """What a model learns whose labels change between two parts of an epoch, while loader processes read ahead."""
    torch.manual_seed(0)
    with Run(seed=3) as run:
        model, dataset = run.model(nn.Linear(2, 1)), Labelled()
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = run.loader(dataset, global_batch=4, micro_batch=2, workers=workers)
        for _ in run.steps(12, every=3) if how == "steps" else run.epochs(1):
            for _ in range(1 if how == "steps" else 4):
                for x, y in run.train(batches):
                    is_done = run.step(nn.functional.mse_loss(model(x)[:, 0], y))
                    if how == "break" and is_done and run.progress.step % 3 == 0:
                        break
                dataset.labels += 1
        return state_hash(model)


@pytest.mark.parametrize("how", ["steps", "break"])
def test_a_data_set_that_changes_between_two_parts_of_an_epoch_is_read_again(how):
    worlds = ((1, 0), (1, 2), (2, 1))
    assert len({learned for ranks, workers in worlds for learned in run_ranks(relabelled, ranks, workers, how)}) == 1


def test_in_half_precision_the_rest_of_a_body_computes_with_the_weights_that_the_step_has_left():
    with Run(precision="bf16", replay=False) as run:
        model = run.model(nn.Linear(2, 1, bias=False))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        for batch in run.train(run.loader(torch.ones(6, 2), global_batch=2, micro_batch=1)):
            before = model(batch).item()
            if run.step(model(batch).mean()):
                assert model(batch).item() == pytest.approx(before - 2, abs=0.05)
