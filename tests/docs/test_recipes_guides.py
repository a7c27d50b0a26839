"""Recipes after PyTorch's guides, and that every example ends well with smaller arguments than its page says."""

import math
import runpy
import sys

import pytest
import torch

import lockstep
from by_hand import seed_everything, seed_of
from example_scripts import EXAMPLES, example
from lockstep.testing import run_ranks, state_hash
from tiny_voc import write_voc
from worlds import on_world

SMALLER = {
    "contrastive": ["--epochs", "1"],
    "digits": ["--epochs", "1"],
    "embedding": ["--epochs", "1"],
    "gan": ["--epochs", "1"],
    "gpt": ["--quick", "--epochs", "1"],
    "hogwild": ["--epochs", "1"],
    "reinforcement": ["--epochs", "1"],
    "rnn_rpc": ["--steps", "2"],
    "uneven": [],
    "vit": ["--epochs", "1"],
}


def play(name, **options):
    """On a rank: what the example's ``main`` returns."""
    return example(name).main(**options)


def as_script(name, *arguments):
    """On a rank: "ended", where the example does, with these words after its name."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.campaign
def test_examples_end_well_with_smaller_arguments(tmp_path):
    data = str(write_voc(tmp_path, train=8, val=4))
    sizes = ["--crop", "33", "--canvas", "72", "--global-batch", "4", "--micro-batch", "2", "--epochs", "1"]
    arguments = SMALLER | {"segmentation": ["--data", data, "--backbone", "mobilenet_v3_large", *sizes]}
    results = on_world(2, [(as_script, name, *words) for name, words in arguments.items()])
    assert dict(zip(arguments, results, strict=True)) == {name: [0, 0] for name in arguments}


def test_examples_tell_their_options():
    names = sorted(file.stem for file in EXAMPLES.glob("*.py") if "argparse" in file.read_text())
    results = on_world(1, [(as_script, name, "--help") for name in names if name not in ("finetune", "streaming")])
    assert {result for (result,) in results} == {0}


# ---- contrastive -----------------------------------------------------------------------------------------------------


def contrast(epochs):
    """On a rank: the accuracy, and the trained model."""
    made, make = [], lockstep.Run.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep.Run, "model", lambda run, net, **options: made.append(net) or make(run, net, **options))
        accuracy = play("contrastive", epochs=epochs)
    return accuracy, state_hash(made[0]), made[0].state_dict()


def contrast_by_hand(epochs):
    """The trained state, with each step's images in one batch and one loss over all of it."""
    module = example("contrastive")
    seed_everything(seed_of(0, "init"))
    model = module.encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    raw = module.load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    train = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[module.HELD_OUT :]
    for epoch in range(epochs):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        pairs = module.views(images[shuffled], epoch)
        for step in range(len(train) // module.GLOBAL_BATCH):
            batch = pairs[step * module.GLOBAL_BATCH : (step + 1) * module.GLOBAL_BATCH]
            loss = module.loss_of(model(batch[:, 0]), model(batch[:, 1]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.campaign
def test_contrastive_loss_is_that_of_the_whole_batch_on_any_number_of_ranks():
    [alone], two, three = (run_ranks(contrast, ranks, 1) for ranks in (1, 2, 3))
    assert {each[:2] for each in (*two, *three)} == {alone[:2]}
    direct = contrast_by_hand(1)
    for name, value in alone[2].items():
        assert torch.allclose(value, direct[name], atol=1e-4), name


def test_contrastive_loss_prefers_the_other_view():
    module = example("contrastive")
    first = torch.eye(4)
    n, here = 4, math.exp(1 / module.TEMPERATURE)
    assert module.loss_of(first, first).item() == pytest.approx(-math.log(here / (here + 2 * n - 2)), rel=1e-5)
    assert module.loss_of(first, first.roll(1, 0)) > module.loss_of(first, first)


# ---- plain torch.distributed and rpc ---------------------------------------------------------------------------------


@pytest.mark.campaign
def test_ranks_that_share_one_memory_agree():
    accuracies = run_ranks(play_in_shared_memory, 2)
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.85


def play_in_shared_memory():
    return play("hogwild", epochs=6)


def play_server():
    return play("batched_parameter_server", steps=60)


@pytest.mark.campaign
def test_a_server_answers_all_trainers_at_once():
    accuracy, *nothing = run_ranks(play_server, 3)
    assert nothing == [None, None]
    assert accuracy > 0.8


def play_rnn():
    return play("rnn_rpc", steps=40)


def test_a_recurrent_model_on_two_ranks_learns():
    bits, nothing = run_ranks(play_rnn, 2)
    assert nothing is None
    assert bits < 5.5  # 7 before training


def play_pipeline():
    return play("resnet_pipeline", epochs=1, samples=32)


@pytest.mark.campaign
def test_a_resnet_goes_through_a_pipeline_of_two():
    accuracies = run_ranks(play_pipeline, 2, env={"LOCKSTEP_STRATEGY": "pipeline:cut=layer3"})
    assert len(set(accuracies)) == 1
