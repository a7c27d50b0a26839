"""PASCAL VOC 2012 in small, for a segmentation that takes seconds: ``python tests/harness/tiny_voc.py DIRECTORY``."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image


def write_voc(root, train, val):
    """VOC 2012 in small: its folders, lists, photographs, and class numbers as PNGs with its palette."""
    home, rng = Path(root, "VOCdevkit", "VOC2012"), np.random.default_rng(0)
    for folder in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (home / folder).mkdir(parents=True)
    # Three bits of a class's number make the highest bits of red, green and blue, the next three the second highest.
    bits = [[[(n >> (3 * b + c)) & 1 for b in range(3)] for c in range(3)] for n in range(256)]
    palette = [sum(bit << (7 - b) for b, bit in enumerate(channel)) for color in bits for channel in color]
    for part, number in (("train", train), ("val", val)):
        names = [f"2012_{part}{n:05}" for n in range(number)]
        (home / "ImageSets" / "Segmentation" / f"{part}.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            height, width = rng.integers(33, 66, 2)
            kind, (top, left) = int(rng.integers(1, 3)), rng.integers(2, 12, 2)
            low, right = top + rng.integers(12, height - 14), left + rng.integers(12, width - 14)
            pixels = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
            pixels[top:low, left:right, kind] += np.uint8(180)
            classes = np.zeros((height, width), np.uint8)
            classes[top - 1 : low + 1, left - 1 : right + 1] = 255
            classes[top:low, left:right] = kind
            Image.fromarray(pixels).save(home / "JPEGImages" / f"{name}.jpg")
            mask = Image.fromarray(classes)
            mask.putpalette(palette)
            assert mask.mode == "P"
            mask.save(home / "SegmentationClass" / f"{name}.png")
    return root


def write_sbd(root, train, val):
    """The Semantic Boundaries Dataset in small: images of these names, each with the class 3 in its middle."""
    from scipy.io import savemat  # takes half a second

    for folder in ("img", "cls"):
        Path(root, folder).mkdir(parents=True)
    for part, names in (("train", train), ("val", val)):
        Path(root, f"{part}.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            classes = np.zeros((40, 50), np.uint8)
            classes[10:30, 10:30] = 3
            Image.fromarray(np.repeat(classes[:, :, None] * 60, 3, 2)).save(Path(root, "img", f"{name}.jpg"))
            savemat(Path(root, "cls", f"{name}.mat"), {"GTcls": {"Segmentation": classes}})
    return root


if __name__ == "__main__":
    write_voc(sys.argv[1], train=48, val=16)
