# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "torchvision"]
# ///
"""DeepLabV3 on the PASCAL VOC 2012 segmentation data, scored by its mean intersection over union.

lockstep run --nproc-per-node gpu segmentation.py --data data
lockstep run --strategy dp segmentation.py --data data

It downloads 2 GB into --data, once on each machine, unless VOCdevkit/VOC2012 is there. The rest is torchvision's
reference: random scale, crop of 480, mirror; an auxiliary classifier that learns ten times as fast; the learning rate
falls as a polynomial. ``--sbd`` adds the images of the Semantic Boundaries Dataset. The backbone begins with what was
learnt on ImageNet where that file is at hand, in torch's cache or at ``--backbone-weights``.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Subset

import lockstep
from vision import torchvision

CLASSES = 21  # the background and twenty kinds of things
IGNORED = 255  # the border around each thing, and whatever was added around an image
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BACKBONES = ("resnet50", "resnet101", "mobilenet_v3_large")

Pair = tuple[Tensor, Tensor]


def tensors(image: Any, mask: Any) -> Pair:
    """Floats of shape (3, height, width), normalised, and class numbers of shape (height, width)."""
    to_tensor = torchvision("transforms.functional").pil_to_tensor
    pixels = to_tensor(image).float() / 255
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), to_tensor(mask)[0].long()


def padded(image: Tensor, mask: Tensor, height: int, width: int) -> Pair:
    """Both made at least so large, by adding at the right and below what counts for nothing."""
    room = (0, max(0, width - mask.shape[1]), 0, max(0, height - mask.shape[0]))
    return F.pad(image, room), F.pad(mask, room, value=IGNORED)


def cropped(crop: int) -> Callable[[Any, Any], Pair]:
    """For training: scaled, cut and mirrored differently each time, to ``crop`` pixels each way.

    The shorter side becomes 0.5 to 2 times 520 pixels for a crop of 480, and in proportion for others.
    """

    def transform(image: Any, mask: Any) -> Pair:
        pixels, classes = tensors(image, mask)
        scale = (0.5 + 1.5 * float(torch.rand(()))) * crop * 520 / 480 / min(classes.shape)
        size = [max(1, round(side * scale)) for side in classes.shape]
        pixels = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
        classes = F.interpolate(classes[None, None].float(), size, mode="nearest-exact")[0, 0].long()
        pixels, classes = padded(pixels, classes, crop, crop)
        top, left = (int(torch.randint(side - crop + 1, ())) for side in classes.shape)
        here = (..., slice(top, top + crop), slice(left, left + crop))
        mirrored = [-1] if torch.rand(()) < 0.5 else []
        return pixels[here].flip(mirrored), classes[here].flip(mirrored)

    return transform


def whole(canvas: int) -> Callable[[Any, Any], Pair]:
    """For evaluation: the image as it is, on a square of ``canvas`` pixels; what was added counts for nothing."""

    def transform(image: Any, mask: Any) -> Pair:
        return padded(*tensors(image, mask), canvas, canvas)

    return transform


def confusion(predicted: Tensor, classes: Tensor) -> Tensor:
    """How many pixels of each true class (row) were taken for each class (column): whole numbers, (21, 21)."""
    counted = classes != IGNORED
    return torch.bincount(classes[counted] * CLASSES + predicted[counted], minlength=CLASSES**2).view(CLASSES, CLASSES)


def mean_iou(counts: Tensor) -> float:
    """Mean over the classes that occur, in the truth or in what was said, of intersection over union."""
    counts = counts.double()
    either = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return float((counts.diagonal() / either)[either > 0].mean())


def of_background(counts: Tensor) -> float:
    """The mean IoU of a model that calls everything background: what a model must beat to have learnt anything."""
    pixels = counts.sum(1).double()
    return float(pixels[0] / pixels.sum() / (pixels > 0).sum())


class Network(nn.Module):
    """Torchvision's DeepLabV3: the scores of its head, and those of the auxiliary one that helps it learn."""

    def __init__(self, backbone: str) -> None:
        super().__init__()
        make = getattr(torchvision("models.segmentation"), f"deeplabv3_{backbone}")
        self.deeplab = make(weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1  # also where torchvision has 0.01, which remembers longer than a short training

    def load_backbone(self, file: Path) -> None:
        """Begin with a classifier's weights, as torchvision keeps them; its last layer is left out.

        Raises:
            ValueError: if they are those of another network.
        """
        weights = torch.load(file, map_location="cpu", weights_only=True)
        weights = {name.removeprefix("features."): weight for name, weight in weights.items()}
        own = self.deeplab.backbone.state_dict()
        missing = [name for name in own if name not in weights and not name.endswith("num_batches_tracked")]
        if missing:
            raise ValueError(f"{file} has no {missing[0]}: it is of another backbone")
        self.deeplab.backbone.load_state_dict({n: w for n, w in weights.items() if n in own}, strict=False)

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Parameters for the optimizer: the auxiliary classifier learns ten times as fast."""
        slow = [*self.deeplab.backbone.parameters(), *self.deeplab.classifier.parameters()]
        return [{"params": slow}, {"params": list(self.deeplab.aux_classifier.parameters()), "lr": 10 * lr}]

    def forward(self, images: Tensor) -> Pair:
        """Twice (n, 21, height, width), for images of shape (n, 3, height, width)."""
        scores = self.deeplab(images)
        return scores["out"], scores["aux"]


def cached_weights(backbone: str) -> Path | None:
    """Where torch's cache has ImageNet weights of this backbone, if it has; those that torchvision would download."""
    url = torchvision("models").get_model_weights(backbone).DEFAULT.url
    file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    return file if file.exists() else None


def augmented(train: Any, test: Any, sbd: str, crop: int) -> ConcatDataset:
    """VOC's training images, and those of SBD that are in neither of VOC's two lists; where both have one, VOC's."""
    known = {Path(image).stem for image in (*train.images, *test.images)}
    parts = [train]
    for image_set in ("train", "val"):
        more = torchvision("datasets").SBDataset(sbd, image_set, "segmentation", transforms=cropped(crop))
        parts.append(Subset(more, [n for n, image in enumerate(more.images) if Path(image).stem not in known]))
    return ConcatDataset(parts)


def loss_of(scores: Pair, classes: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the pixels that count, and how many these are; the auxiliary head counts 0.4 times."""
    counted = (classes != IGNORED).sum()
    head, auxiliary = (F.cross_entropy(each, classes, ignore_index=IGNORED, reduction="sum") for each in scores)
    return (head + 0.4 * auxiliary) / counted.clamp_min(1), counted


def main(
    data: str = "data",
    backbone: str = "resnet101",
    epochs: int = 20,
    crop: int = 480,
    canvas: int = 512,
    global_batch: int = 16,
    micro_batch: int = 4,
    lr: float = 0.01,
    sync_batchnorm: bool = False,
    backbone_weights: str | None = None,
    sbd: str | None = None,
) -> Tensor:
    """Train; the confusion matrix of the validation images."""
    with lockstep.Run(seed=0, sync_batchnorm=sync_batchnorm) as run:
        voc = torchvision("datasets").VOCSegmentation
        with run.leader_first():  # the leader of each machine downloads; the others find it done
            missing = not Path(data, "VOCdevkit", "VOC2012").exists()
            train = voc(data, image_set="train", download=missing, transforms=cropped(crop))
        test = voc(data, image_set="val", transforms=whole(canvas))
        if sbd is not None:
            train = augmented(train, test, sbd, crop)
        network = Network(backbone)
        # Every rank reads the file: `run.model` gives all of them the leader's weights anyway, where one has no file.
        weights = Path(backbone_weights) if backbone_weights else cached_weights(backbone)
        if weights is not None:
            network.load_backbone(weights)
        run.say(f"{len(train)} training images; the backbone begins with {weights or 'random weights'}")
        model = run.model(network)
        optimizer = run.optimizer(torch.optim.SGD(network.groups(lr), lr=lr, momentum=0.9, weight_decay=1e-4))
        # The short step at the end is left out: BatchNorm cannot learn from the single image that it might hold.
        batches = run.loader(train, global_batch=global_batch, micro_batch=micro_batch, drop_last=True)
        held_out = run.loader(test, global_batch=global_batch, micro_batch=micro_batch, shuffle=False)
        steps = epochs * (len(train) // global_batch)
        run.scheduler(torch.optim.lr_scheduler.PolynomialLR(optimizer, steps, power=0.9))

        def evaluate() -> Tensor:
            counts, images_seen = torch.zeros(CLASSES, CLASSES, dtype=torch.int64, device=run.device), 0
            for images, classes in run.evaluate(held_out):
                here = confusion(model(images)[0].argmax(1), classes)
                if run.counts:  # under some strategies a rank computes along only to meet the others
                    counts += here
                    images_seen += len(images)
            assert run.sum(images_seen) == len(test), "not each validation image once"
            # Whole numbers, each image counted once: the ratio of their sums is the same for any number of ranks,
            # which a mean of the ranks' own ratios would not be.
            return run.sum(counts).cpu()

        for epoch in run.epochs(epochs):
            for images, classes in run.train(batches):
                loss, counted = loss_of(model(images), classes)
                run.step(loss, count=counted)
            run.log(epoch=epoch + 1, mean_iou=mean_iou(evaluate()))
        counts = evaluate()
        run.say(
            f"mean IoU over {int(counts.sum())} pixels of {len(test)} images: {mean_iou(counts):.4f} "
            f"(everything called background: {of_background(counts):.4f})"
        )
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="where VOCdevkit is, or is downloaded to")
    parser.add_argument("--backbone", choices=BACKBONES, default="resnet101")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--crop", type=int, default=480, help="pixels of a training image, each way")
    parser.add_argument("--canvas", type=int, default=512, help="pixels of a validation image, each way, at least")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--sync-batchnorm", action="store_true", help="normalise over the images of all ranks at once")
    parser.add_argument(
        "--backbone-weights", help="a file of torchvision's ImageNet weights; else torch's cache, if there"
    )
    parser.add_argument("--sbd", help="where SBD's img, cls, train.txt and val.txt are, to train on these images, too")
    options = parser.parse_args()
    counts = main(**vars(options))
    if options.epochs >= 12:  # fewer are for a try
        assert mean_iou(counts) > of_background(counts), "no better than calling everything background"
