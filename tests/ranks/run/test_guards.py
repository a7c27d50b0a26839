"""A loop that would train something else than it says is refused, with what, the values and the way out."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import (
    CheckpointError,
    DataError,
    MismatchError,
    NonFiniteError,
    PlanError,
    SettingError,
    UsageError,
)
from lockstep.run import Run
from worlds import on_world

DATA = torch.arange(32.0).view(16, 2)
SIZES = {"global_batch": 8, "micro_batch": 2}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")


def opened(**settings):
    """A run with a model, an optimizer and batches."""
    run = Run(**settings)
    model = run.model(nn.Linear(2, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    return run, model, optimizer, run.loader(DATA, **SIZES)


def refused(match, kind=UsageError):
    return pytest.raises(kind, match=match)


def test_a_forgotten_step():
    run, _, _, batches = opened()
    with refused(r"a micro-batch went by without run\.step\(loss\)"), run:
        for _ in run.train(batches):
            pass


def test_a_forgotten_update():
    run, model, _, batches = opened()
    with refused(r"a step ended without run\.update\(\)"), run:
        for batch in run.train(batches):
            run.backward(model(batch).mean())


def test_an_update_where_the_gradient_is_there():
    run, model, _, batches = opened()
    with run:
        for batch in run.train(batches):
            if run.backward(model(batch).square().mean()):
                assert all(p.grad is not None for p in model.parameters())
                assert run.update()
    assert run.progress.step == 2


def test_a_count_for_some_micro_batches_of_a_step_only():
    run, model, _, batches = opened()
    with refused(r"count=\.\.\.\) for some micro-batches .* a 0 where a micro-batch holds no item"), run:
        for number, batch in enumerate(run.train(batches)):
            run.step(model(batch).mean(), count=(2 - number) or None)


def test_a_mean_over_no_item():
    run, model, _, batches = opened()
    with refused(r"the loss is nan .*, whose count is 0: give the sum.*count=n, loss_is='sum'", NonFiniteError), run:
        for batch in run.train(batches):
            chosen = model(batch)[: run.micro_batch.index % 2]
            run.step(chosen.mean(), count=len(chosen))
    run, model, _, batches = opened()
    with run:
        for batch in run.train(batches):
            chosen = model(batch)[: run.micro_batch.index % 2]
            run.step(chosen.sum(), count=len(chosen), loss_is="sum")
    assert run.progress.step == 2


def test_a_kept_module_that_a_forward_pass_changes():
    run, model, _, batches = opened()
    target = nn.BatchNorm1d(2)
    run.keep(target=target)
    with refused(r"keep\(target=BatchNorm1d\) was changed .*: call target\.eval\(\).*run\.model\(target\)"), run:
        for batch in run.train(batches):
            run.step(model(target(batch)).mean())


def test_two_steps_in_one_micro_batch():
    run, model, _, batches = opened()
    with refused(r"a second run\.step\(loss\) for the same parameters in one micro-batch: add the losses up"), run:
        for batch in run.train(batches):
            run.step(model(batch).mean())
            run.step(model(batch).square().mean())


def test_two_steps_that_share_parameters_in_one_micro_batch():
    run = Run()
    first, second = run.model(nn.Linear(2, 1)), run.model(nn.Linear(2, 1))
    one, two = (run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01)) for model in (first, second))
    with refused(r"a second run\.step\(loss\) for the same parameters"), run:
        for batch in run.train(run.loader(DATA, **SIZES)):
            run.step(first(batch).mean(), optimizer=one)
            run.step((first(batch) + second(batch)).mean(), optimizer=[one, two])


def test_a_step_after_the_step():
    run, model, _, _ = opened()
    with refused(r"a second run\.step\(loss\) for the same parameters"), run:
        for batch in run.train(run.loader(DATA, global_batch=8, micro_batch=8)):
            run.step(model(batch).mean())
            run.step(model(batch).square().mean())


def test_a_step_outside_of_train():
    run, model, _, batches = opened()
    with run:
        with refused(
            r"run\.step\(\.\.\.\) .*outside of `for batch in run\.train\(loader\)`.* not over the loader itself"
        ):
            run.step(model(DATA).mean())
        for batch in run.train(batches):
            run.step(model(batch).mean())
        with refused("there is no micro-batch"):
            run.step(model(DATA).mean())


def test_a_step_in_another_thread_than_that_of_the_loop():
    run, model, _, batches = opened()
    with refused(r"another thread than the one that iterates over run\.train.* reads ahead by itself"), run:
        iterator = iter(run.train(batches))
        with ThreadPoolExecutor(1) as pool:
            batch = pool.submit(next, iterator).result()
        run.step(model(batch).mean())


def test_an_update_without_a_gradient():
    run, *_ = opened()
    with refused(r"run\.update\(\) before run\.backward\(loss\)"), run:
        for _ in run.train(run.loader(DATA, global_batch=8, micro_batch=8)):
            run.update()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda outputs: outputs, r"step\(tensor of shape.*the loss must be a tensor of no dimension"),
        (lambda outputs: outputs.mean().detach(), "do not detach it"),
        (lambda outputs: outputs.mean().item(), r"step\(float\): the loss must be a tensor"),
    ],
)
def test_a_loss_that_is_none(make, says):
    run, model, _, batches = opened()
    with refused(says), run:
        for batch in run.train(batches):
            run.step(make(model(batch)))


def test_an_optimizer_made_before_the_model_or_for_another():
    with Run() as run:
        stranger = nn.Linear(2, 1)
        with refused("SGD holds 2 of 2 parameters that belong to no model of this run; make it after"):
            run.optimizer(torch.optim.SGD(stranger.parameters(), lr=0.1))
        run.model(stranger)
        run.optimizer(torch.optim.SGD(stranger.parameters(), lr=0.1))


def test_a_scheduler_of_an_unknown_optimizer():
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with refused(r"StepLR belongs to no optimizer of this run; call run\.optimizer"):
            run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))


def alone(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def in_sequence(optimizer):
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [alone(optimizer), alone(optimizer)], milestones=[1])


def chained(optimizer):
    return torch.optim.lr_scheduler.ChainedScheduler([alone(optimizer), alone(optimizer)])


@pytest.mark.parametrize("kind", [alone, in_sequence, chained])
def test_a_scheduler_that_the_script_steps_too(kind):
    run, model, optimizer, batches = opened()
    with run:
        scheduler = run.scheduler(kind(optimizer))
        with refused(r"was stepped by the script, too: its last_epoch is .*run\.keep\(scheduler=scheduler\)"):
            for batch in run.train(batches):
                if run.step(model(batch).mean()):
                    scheduler.step()


def test_a_metric_that_is_not_there_yet():
    with pytest.raises(KeyError) as caught, Run() as run:
        print(run.metrics["accuracy"])
    (note,) = caught.value.__notes__
    assert note.startswith("nothing is in run.metrics yet; accuracy is there from the end of the loop of run.train")
    run, model, _, batches = opened()

    def train():
        with run:
            for batch in run.train(batches):
                run.step(model(batch).mean())
            print(run.metrics["accuracy"])

    with pytest.raises(KeyError) as caught:
        train()
    assert caught.value.__notes__[0].startswith("run.metrics has loss; accuracy is there")
    with pytest.raises(KeyError) as caught, Run():
        print({}["accuracy"])
    assert not getattr(caught.value, "__notes__", ()), "no metric"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("save_evry", "did you mean save_every?"),
        ("num_gpus", "lockstep run --nproc-per-node 4"),
        ("qqqq", "it takes seed, strategy, "),
    ],
)
def test_a_misspelt_argument(given, says):
    with refused(rf"Run\({given}=\.\.\.\): there is no such argument; .*{says}", SettingError):
        Run(**{given: 1})


def test_a_misspelt_attribute_and_what_is_said_whatever_is_shown(monkeypatch, capfd):
    monkeypatch.setenv("LOCKSTEP_VIEW", "silent")
    with Run() as run:
        run.say("epoch", 1, 0.5)
        for name, meant in (
            ("epoch", "run.epochs(n)"),
            ("ranks", "run.world_size"),
            ("metrcs", "did you mean metrics?"),
        ):
            with pytest.raises(AttributeError) as caught:
                getattr(run, name)
            assert meant in str(caught.value)
        assert not hasattr(run, "qqqq")
    assert capfd.readouterr().out == "epoch 1 0.5\n"


def test_what_is_said_too_late():
    run, model, optimizer, batches = opened()
    with run:
        for batch in run.train(batches):
            run.step(model(batch).mean())
        for call in (
            lambda: run.model(nn.Linear(1, 1)),
            lambda: run.optimizer(optimizer),
            lambda: run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1)),
            lambda: run.keep(extra=optimizer),
        ):
            with refused(r"after the training began: call it before run\.epochs"):
                call()


def test_no_model_yet():
    with Run() as run, refused(r"no model yet: call `model = run\.model\(model\)`"):
        next(iter(run.epochs(1)))


def test_several_optimizers_must_be_named():
    run, model, optimizer, batches = opened()
    second = run.optimizer(torch.optim.SGD(run.model(nn.Linear(2, 1)).parameters(), lr=0.1))
    with run:
        for batch in run.train(batches):
            loss = model(batch).mean()
            with refused(r"the run has 2 optimizers; say run\.step\(loss, optimizer=\.\.\.\)"):
                run.step(loss)
            with refused(r"give what run\.optimizer\(\.\.\.\) returned"):
                run.step(loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            with refused(r"give what run\.optimizer\(\.\.\.\) returned"):
                run.step(loss, optimizer=[optimizer, second, None])
            break


def test_no_optimizer():
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        with refused(r"the run has 0 optimizers; call run\.optimizer\(optimizer\) first"):
            for batch in run.train(run.loader(DATA, **SIZES)):
                run.step(model(batch).mean())


def test_optimizers_that_share_a_model_and_step_apart():
    with Run() as run:
        model = run.model(nn.Linear(2, 1))
        first = run.optimizer(torch.optim.SGD([model.weight], lr=0.1))
        run.optimizer(torch.optim.SGD([model.bias], lr=0.1))
        with refused(r"Linear is shared by optimizers that step apart; .* optimizer=\[first, second\]"):
            for batch in run.train(run.loader(DATA, **SIZES)):
                run.step(model(batch).mean(), optimizer=first)


def test_a_second_train_without_epochs():
    run, model, _, batches = opened()
    with run:
        for batch in run.train(batches):
            run.step(model(batch).mean())
        with refused(r"outside of epochs: write `for epoch in run\.epochs\(n\):` around it"):
            next(iter(run.train(batches)))


def test_loops_within_loops():
    run, model, _, batches = opened()
    with run:
        for batch in run.train(batches):
            with refused(r"run\.train\(\.\.\.\) inside of run\.train\(\.\.\.\): leave that loop first"):
                next(iter(run.train(batches)))
            with refused(
                r"run\.evaluate\(\.\.\.\) in the middle of step 1, on micro-batch 0 of 4, .*: write `if run\.step"
            ):
                next(iter(run.evaluate(batches)))
            run.step(model(batch).mean())
            break
        for _ in run.evaluate(batches):
            with refused(r"run\.evaluate\(\.\.\.\) inside of run\.evaluate\(\.\.\.\): leave that loop first"):
                next(iter(run.evaluate(batches)))


def test_an_evaluation_in_the_body_that_does_not_end_with_it():
    run, model, _, batches = opened()
    with refused(r"run\.evaluate\(\.\.\.\) was not finished when the body of the loop around it ended"), run:
        for batch in run.train(batches):
            if run.step(model(batch).mean()):
                held = iter(run.evaluate(batches))
                next(held)


def test_next_that_counts_micro_batches():
    run, model, _, batches = opened()
    with (
        refused(r"the iterator over run\.train\(\.\.\.\) was left in the middle of step 2, .* go on until run\.step"),
        run,
    ):
        iterator = iter(run.train(batches))
        for _ in range(6):
            run.step(model(next(iterator)).mean())


def test_a_micro_batch_outside_of_the_loops():
    run, model, _, batches = opened()
    with run:
        with refused(r"run\.micro_batch outside of run\.train"):
            print(run.micro_batch)
        for batch in run.train(batches):
            run.step(model(batch).mean())
        with refused(r"run\.micro_batch outside of run\.train"):
            print(run.micro_batch)


def test_a_stretch_without_a_step():
    run, _, _, _ = opened()
    with refused(r"run\.steps\(\.\.\.\) gave 0, and no step followed: train with"), run:
        for _ in run.steps(3):
            pass
    run, *_ = opened()
    with refused(r"run\.steps\(0, every=None\): both count steps; give numbers from 1"), run:
        list(run.steps(0))


def test_loaders_whose_steps_differ():
    run, model, _, batches = opened()
    with run:
        with refused(r"loaders whose steps differ: 8 samples/step = 4 .*, and 4 samples/step = 2"):
            next(run.train(batches, run.loader(DATA, global_batch=4, micro_batch=2)))
        short = run.loader(DATA[:10], **SIZES)
        with refused(r"in a step the first one has 4 micro-batches and another one 1.* drop_last=True"):
            for batch, _ in run.train(batches, short):
                run.step(model(batch).mean())
        with refused(r"run\.train\(\): give what run\.loader"):
            next(run.train())


def test_an_epoch_without_a_step():
    run, *_ = opened()
    empty = run.loader(DATA[:3], drop_last=True, **SIZES)
    with (
        refused(
            "an epoch of the data set has no step: drop_last=True leaves out a step of fewer than global_batch=8",
            DataError,
        ),
        run,
    ):
        for _ in run.steps(2):
            next(run.train(empty))


def test_early_stopping_that_cannot_be():
    run, *_ = opened()
    with run:
        with refused(r"run\.early_stopping\('loss', mode='less'\): give 'min' or 'max'"):
            run.early_stopping("loss", patience=1, mode="less")
        with refused(r"patience=0, min_delta=0\.0\): give a patience from 1"):
            run.early_stopping("loss", patience=0)
        stopper = run.early_stopping("loss", patience=1)
        with refused(r"run\.early_stopping\('loss'\) a second time"):
            run.early_stopping("loss", patience=2)
        with refused(r"run\.early_stopping\('loss'\): run\.metrics has nothing yet; ask after the loop"):
            stopper.should_stop()


def test_a_loader_from_elsewhere():
    run, *_ = opened()
    with run:
        for loop in (run.train, run.evaluate):
            with refused(r"\(DataLoader\): give what run\.loader\(dataset, global_batch=\.\.\.\) returned"):
                next(iter(loop(DataLoader(TensorDataset(DATA)))))
        with refused(r"run.loader\(DataLoader\(...\), global_batch=...\): the DataLoader says it already"):
            run.loader(DataLoader(TensorDataset(DATA)), **SIZES)
        with refused("a DataLoader was passed", DataError):
            run.loader(type("Other", (DataLoader,), {})(TensorDataset(DATA)), **SIZES)


def test_counts_of_nothing():
    run, model, _, batches = opened()
    with refused("counts of all micro-batches of the step add up to 0"), run:
        for batch in run.train(batches):
            run.step(model(batch).mean(), count=0)


def test_counts_that_are_no_whole_numbers():
    run, model, _, batches = opened()
    with refused(r"the counts of this rank's micro-batches add up to [\d.]+; give whole numbers"), run:
        for batch in run.train(batches):
            run.step(model(batch).mean(), count=torch.tensor(0.3))


def test_an_update_that_comes_only_now_and_then():
    with Run() as run:
        first, second = (run.model(nn.Linear(2, 1)) for _ in range(2))
        one, other = (run.optimizer(torch.optim.SGD(m.parameters(), lr=0.01)) for m in (first, second))
        with refused(r"run\.backward\(loss, optimizer=\.\.\.\) without run\.update\(\.\.\.\) in the same step"):
            for batch in run.train(run.loader(DATA, **SIZES)):
                run.step(first(batch).mean(), optimizer=one)
                run.backward(second(batch).mean(), optimizer=other)


def test_a_measure_that_is_none():
    run, model, _, batches = opened()
    with run:
        with refused(r"run\.measure\(\.\.\.\) outside of run\.train"):
            run.measure(a=1)
        for _ in run.evaluate(batches):
            with refused(r"measure\(word='good'\): give a tensor with one number per sample, or one number"):
                run.measure(word="good")
            with refused("one number per sample"):
                run.measure(numbers=[1, 2])
    assert model is not None


def test_kept_things_need_a_state_and_a_name_of_their_own():
    with Run() as run:
        with refused(r"keep\(thing\['a'\]\[1\]=set\): it has no state_dict\(\) and load_state_dict\(\)"):
            run.keep(thing={"a": [1, {2}]})
        with refused(r"keep\(thing=...\) has the key 0.5, which cannot be saved"):
            run.keep(thing={0.5: 1})
        run.keep(thing=nn.Linear(1, 1))
        with refused(r"keep\(thing=\.\.\.\): something is kept under that name already"):
            run.keep(thing=nn.Linear(1, 1))


def test_settings_that_cannot_be():
    with refused("precision='fp8': give one of fp32, bf16, fp16", SettingError):
        Run(precision="fp8")
    with refused("strategy='horovod'", SettingError):
        Run(strategy="horovod")
    with refused("there is no directory for checkpoints", SettingError):
        Run(save_every="1 epoch")
    with Run() as run, refused("micro_batch=9 is larger than global_batch=8", PlanError):
        run.loader(DATA, global_batch=8, micro_batch=9)


def trained(directory, monkeypatch, resume="", **sizes):
    monkeypatch.setenv("LOCKSTEP_RESUME", resume)
    with Run(checkpoint=directory) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        batches = run.loader(DATA, **(SIZES | sizes))
        for _ in run.epochs(2 if resume else 1):
            for batch in run.train(batches):
                run.step(model(batch).mean())


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path, monkeypatch):
    trained(tmp_path, monkeypatch)
    with refused(r"holds a run that got to step 2\. To continue it: .*LOCKSTEP_RESUME=1 python", SettingError):
        trained(tmp_path, monkeypatch)


def test_to_resume_without_a_checkpoint_begins_and_says_so(tmp_path, monkeypatch, capfd):
    trained(tmp_path, monkeypatch, resume="1")
    assert f"no checkpoint in {tmp_path}: training begins at the first step" in capfd.readouterr().err


def test_other_batch_sizes_at_resume(tmp_path, monkeypatch):
    trained(tmp_path, monkeypatch)
    says = r"trained with global_batch=8, micro_batch=2, and this script says 8, 4: its steps would hold other samples"
    with refused(says, CheckpointError):
        trained(tmp_path, monkeypatch, resume="1", micro_batch=4)


def test_other_objects_at_resume(tmp_path, monkeypatch):
    trained(tmp_path, monkeypatch)
    monkeypatch.setenv("LOCKSTEP_RESUME", "1")
    with Run(checkpoint=tmp_path) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        with refused("the model of the checkpoint does not fit this script's Linear", CheckpointError):
            next(iter(run.epochs(1)))
    with Run(checkpoint=tmp_path) as run:
        run.model(nn.Linear(2, 1))
        with refused("holds 1 optimizers and this script made 0", CheckpointError):
            next(iter(run.epochs(1)))


# ---- ranks that differ -----------------------------------------------------------------------------------------------


def told(kind, call, *args, **options):
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)


def differing_seeds():
    import os

    return told(MismatchError, Run, seed=int(os.environ["RANK"]) // 2)


def differing_data():
    with Run() as run:
        return told(MismatchError, run.loader, DATA[: 16 - run.rank], **SIZES)


def opened_by(run):
    run.optimizer(torch.optim.SGD(run.model(nn.Linear(2, 1)).parameters(), lr=0.01))
    return run


def differing_steps():
    with Run() as run:
        return told(MismatchError, next, opened_by(run).steps(4 + run.rank // 2))


def differing_epochs():
    with Run() as run:
        # Rank 2 has no epoch to do: it would leave the loop, and the others would wait.
        return told(MismatchError, list, opened_by(run).epochs(2 - 2 * (run.rank // 2)))


def inside_leads():
    with Run() as run:
        if run.leads:
            return told(MismatchError, run.sum, 1)
        return told(MismatchError, run.barrier)


def differing_shapes():
    with Run() as run:
        return told(UsageError, run.sum, torch.ones(1 + run.rank))


def too_many_ranks():
    with Run() as run:
        run.model(nn.Linear(2, 1))
        return told(PlanError, next, run.train(run.loader(DATA, global_batch=2, micro_batch=1)))


def uneven_sync_batchnorm():
    with Run(sync_batchnorm=True) as run:
        run.model(nn.BatchNorm1d(2))
        batches = run.loader(DATA, global_batch=4, micro_batch=1)
        return told(UsageError, next, run.train(batches))


RANKS = {
    differing_seeds: "what Run(...) was given differs between ranks: rank 2: ",
    differing_data: "length and plan of a data set differs between ranks: ",
    differing_steps: "the length given to run.steps(...) differs between ranks: rank 2: (5, None); ranks 0, 1: (4, ",
    differing_epochs: "the length given to run.epochs(...) differs between ranks: rank 2: 0; ranks 0, 1: 2. ",
    inside_leads: "ranks make different calls: rank 0: sum at test_guards.py:",
    differing_shapes: "sum at test_guards.py:",
    too_many_ranks: "3 ranks for 2 micro-batches (global_batch=2, micro_batch=1)",
    uneven_sync_batchnorm: "sync_batchnorm=True needs ranks that hold equally many micro-batches in every step: 4 ",
}


def test_ranks_that_differ_are_told():
    # Runs that fail as they open leave their group behind, so those come last.
    cases = sorted(RANKS, key=lambda case: case is differing_seeds)
    for case, messages in zip(cases, on_world(3, [(case,) for case in cases]), strict=True):
        assert len(messages) == 3
        for message in messages:
            assert message.startswith(RANKS[case]), message


def test_a_data_set_of_other_length_within_an_epoch(tmp_path, monkeypatch):
    with Run(checkpoint=tmp_path) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for batch in run.train(run.loader(torch.cat([DATA, DATA]), **SIZES)):
            run.step(model(batch).mean())
            if run.progress.step == 1:
                break
    with refused(r"within an epoch of 32 samples, and this script's data set has 16", CheckpointError):
        trained(tmp_path, monkeypatch, resume="1")
