"""The larger examples at small sizes: what they say is so, and the same on any number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from example_scripts import EXAMPLES, example
from lockstep.strategy_kinds import BUILT_IN
from lockstep.testing import run_ranks, state_hash
from tiny_voc import write_sbd, write_voc
from worlds import on_world


def play(name, options=None, constants=None):
    """On a rank: what the example's ``main`` returns, at the sizes given."""
    module = example(name)
    for constant, value in (constants or {}).items():
        assert hasattr(module, constant)
        setattr(module, constant, value)
    return module.main(**(options or {}))


def launch(tmp_path, ranks, *command):
    """The exit code and the words of an example under the launcher."""
    line = [sys.executable, "-m", "lockstep", "run", "--nproc-per-node", str(ranks), "--run-dir", tmp_path / "run"]
    done = subprocess.run([*line, *command], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout + done.stderr


# ---- segmentation ----------------------------------------------------------------------------------------------------


def segment(data):
    """On a rank: the confusion matrix, the trained state's hash, and the mean IoU by its definition, pixel by pixel."""
    module, made = example("segmentation"), []

    class Seen(module.Network):
        def __init__(self, backbone):
            super().__init__(backbone)
            made.append(self)
            for norm in (m for m in self.modules() if isinstance(m, torch.nn.BatchNorm2d)):
                norm.momentum = 1.0  # with the statistics it was born with, it would say the same of every pixel

    module.Network = Seen
    options = {"backbone": "mobilenet_v3_large", "epochs": 1, "crop": 33, "canvas": 72}
    counts = module.main(data=data, **options, global_batch=4, micro_batch=2)
    return counts, state_hash(made[0]), direct_mean_iou(made[0].eval(), data)


def direct_mean_iou(network, data, canvas=72, together=2):
    home = Path(data, "VOCdevkit", "VOC2012")
    names = (home / "ImageSets" / "Segmentation" / "val.txt").read_text().split()
    images, truth = torch.zeros(len(names), 3, canvas, canvas), np.full((len(names), canvas, canvas), 255)
    for n, name in enumerate(names):
        with Image.open(home / "JPEGImages" / f"{name}.jpg") as image:
            pixels = torch.from_numpy(np.asarray(image).transpose(2, 0, 1) / np.float32(255))
        with Image.open(home / "SegmentationClass" / f"{name}.png") as mask:
            classes = np.asarray(mask)
        height, width = classes.shape
        normal = [(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]
        images[n, :, :height, :width] = torch.stack([(c - m) / s for c, (m, s) in zip(pixels, normal, strict=True)])
        truth[n, :height, :width] = classes
    with torch.no_grad():
        said = torch.cat([network(part)[0].argmax(1) for part in images.split(together)]).numpy()
    said = np.where(truth == 255, 255, said)
    overlaps = [((said == c) & (truth == c), (said == c) | (truth == c)) for c in range(21)]
    return np.mean([both.sum() / either.sum() for both, either in overlaps if either.any()])


@pytest.mark.campaign
def test_segmentation_counts_every_pixel_once_and_ranks_do_not_matter(tmp_path):
    data = str(write_voc(tmp_path, train=9, val=5))
    [alone], together = run_ranks(segment, 1, data), run_ranks(segment, 2, data)
    counts, trained, direct = alone
    masks = [np.asarray(Image.open(file)) for file in tmp_path.rglob("SegmentationClass/*val*.png")]
    pixels = np.bincount(np.concatenate([mask.ravel() for mask in masks]), minlength=256)
    assert counts.sum(1).tolist() == pixels[:21].tolist()
    assert (counts.sum(0) > 0).sum() > 1, "the network says the same of every pixel, which would be easy to count"
    assert example("segmentation").mean_iou(counts) == pytest.approx(direct, rel=1e-12)
    for also_counts, also_trained, _ in together:
        assert torch.equal(also_counts, counts)
        assert also_trained == trained


def test_mean_iou_is_that_of_the_classes_that_occur():
    module = example("segmentation")
    truth, said = torch.tensor([0, 0, 0, 1, 1, 255]), torch.tensor([0, 0, 1, 1, 2, 1])
    counts = module.confusion(said, truth)
    assert counts.sum() == 5
    assert module.mean_iou(counts) == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)
    assert module.of_background(counts) == pytest.approx(3 / 5 / 2)


def test_sbd_adds_the_images_that_voc_has_in_neither_list(tmp_path):
    module = example("segmentation")
    voc = module.torchvision("datasets").VOCSegmentation
    write_voc(tmp_path, train=3, val=2)
    train, test = (voc(tmp_path, image_set=part, transforms=module.cropped(33)) for part in ("train", "val"))
    sbd = write_sbd(tmp_path / "sbd", train=["2008_1", "2012_train00001"], val=["2012_val00000", "2008_2"])
    everything = module.augmented(train, test, str(sbd), 33)
    assert len(everything) == 3 + 2
    pixels, classes = everything[4]
    assert pixels.shape == (3, 33, 33)
    assert set(classes.unique().tolist()) <= {0, 3, 255}


def test_the_backbone_begins_with_the_weights_of_a_classifier(tmp_path):
    module = example("segmentation")
    classifier = module.torchvision("models").mobilenet_v3_large(weights=None)
    torch.save(classifier.state_dict(), tmp_path / "weights.pth")
    network = module.Network("mobilenet_v3_large")
    network.load_backbone(tmp_path / "weights.pth")
    backbone = network.deeplab.backbone.state_dict()
    assert all(torch.equal(backbone[name], weight) for name, weight in classifier.features.state_dict().items())
    slow, fast = network.groups(0.01)
    assert fast["lr"] == 0.1
    assert len(slow["params"]) + len(fast["params"]) == len(list(network.parameters()))
    torch.save({"stem.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="it is of another backbone"):
        network.load_backbone(tmp_path / "other.pth")


# ---- reinforcement learning ------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_reinforcement_learns_the_same_on_any_number_of_ranks():
    returns = [run_ranks(play, ranks, "reinforcement", {"epochs": 1}) for ranks in (1, 2)]
    assert len({won for world in returns for won in world}) == 1
    assert returns[0][0] > 45  # 20 or so before training


def test_reinforcement_with_environments_of_the_ranks_own_plays_others_on_each_rank():
    options, constants = {"epochs": 1, "own_environments": True}, {"STEPS": 2}
    [alone], together = (run_ranks(play, ranks, "reinforcement", options, constants) for ranks in (1, 2))
    assert len(set(together)) == 1
    assert together[0] != alone


def test_rewards_to_come_are_discounted_sums():
    module = example("reinforcement")
    come = module.rewards_to_come(torch.tensor([[1.0, 0.0], [1.0, 2.0], [1.0, 0.0]])) / (1 - 0.99)
    assert come.flatten().tolist() == pytest.approx([1 + 0.99 + 0.99**2, 0.99 * 2, 1 + 0.99, 2, 1, 0])


@pytest.mark.campaign
def test_agent_learns_from_what_observers_ask_by_rpc():
    won, *nothing = run_ranks(play, 3, "reinforcement_rpc", {"updates": 20})
    assert nothing == [None, None]
    assert won > 45


@pytest.mark.campaign
def test_observer_that_dies_is_named(tmp_path):
    script = [EXAMPLES / "reinforcement_rpc.py", "--updates", "100000"]
    code, talk = launch(tmp_path, 3, "--fault", "kill rank 2 after 3 s", *script)
    assert code == 137, talk
    assert "rank 2 of 3 was killed by SIGKILL" in talk


# ---- GPT, GAN --------------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_gpt_predicts_text_that_it_has_not_read_and_writes(tmp_path):
    code, talk = launch(tmp_path, 2, EXAMPLES / "gpt.py", "--quick")
    assert code == 0, talk
    assert re.search(r"\d\.\d+ bits per character of the held-out topics", talk)


@pytest.mark.campaign
def test_gan_comes_nearer_to_real_digits_and_ranks_do_not_matter():
    results = [run_ranks(play, ranks, "gan", {"epochs": 3}) for ranks in (1, 2)]
    assert len({result for world in results for result in world}) == 1
    held_out, score = results[0][0]
    assert held_out > 6
    assert score > 1.3


# ---- every strategy --------------------------------------------------------------------------------------------------

#: They compute what one rank alone would: all bits of it, or here at least all the digits that it reads.
AS_ALONE = ("none", "ddp", "zero", "fsdp", "hsdp", "parameter-server", "hybrid", "pipeline", "auto")
RANKS = dict.fromkeys(BUILT_IN, 2) | {"none": 1, "dp": 1, "parameter-server": 3}


def train_by(strategy):
    """On a rank: the accuracy of the vision transformer after one epoch."""
    os.environ["LOCKSTEP_STRATEGY"] = strategy
    return play("vit", {"epochs": 1})


@pytest.fixture(scope="module")
def accuracies():
    """By strategy, what each rank came to; or a traceback."""
    found = {}
    for ranks in sorted(set(RANKS.values())):
        words = [word for word in BUILT_IN if RANKS[word] == ranks]
        results = on_world(ranks, [(train_by, word) for word in words], env={"LOCKSTEP_REHEARSE": "true"})
        found |= dict(zip(words, results, strict=True))
    return found


@pytest.mark.together
@pytest.mark.campaign
@pytest.mark.parametrize("strategy", BUILT_IN)
def test_vision_transformer_learns_under_every_strategy(strategy, accuracies):
    by_rank = accuracies[strategy]
    assert all(isinstance(accuracy, float) for accuracy in by_rank), by_rank[0]
    assert len(set(by_rank)) == 1
    if strategy in AS_ALONE:
        assert by_rank[0] == accuracies["none"][0]
    assert by_rank[0] > 0.25


# ---- uneven inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_uneven_data_is_learnt_once_by_all_ranks(ranks):
    module = example("uneven")
    for tallies in run_ranks(play, ranks, "uneven"):
        assert {name: len(tally) for name, tally in tallies.items()} == {
            "shards": 65,
            "shards with skipping": 65,
            "rows": 50,
        }
        for tally in tallies.values():
            assert torch.allclose(tally.sort().values, module.fair(len(tally)))


def test_skipping_gives_what_reading_gives():
    module = example("uneven")
    everything = list(module.Shards(module.SHARDS))
    assert everything == list(range(65))
    shards = module.Skipping(module.SHARDS)
    for step in (1, 2, 8, 70):
        for start in (0, 1, 7, 36, 64, 65, 80):
            assert list(shards.stride(start, step)) == everything[start::step], (start, step)
