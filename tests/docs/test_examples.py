"""The examples run to their end, alone and on ranks, and each asserts its own result."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(tmp_path, ranks, script, *options):
    """What the example said on ``ranks`` ranks; its own assertion has held."""
    launcher = ["-m", "lockstep", "run", "--nproc-per-node", str(ranks), "--run-dir", tmp_path / f"run-{ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), EXAMPLES / script, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    talk = done.stdout + done.stderr
    assert done.returncode == 0, talk
    return talk


def epochs_of(talk):
    """Loss and accuracy after each epoch, as they were printed."""
    return re.findall(r"epoch \d+, loss .*", talk)


@pytest.mark.campaign
@pytest.mark.long
def test_digits_reach_their_accuracy_and_ranks_do_not_matter(tmp_path):
    alone, together = run(tmp_path, 1, "digits.py"), run(tmp_path, 2, "digits.py")
    assert len(epochs_of(alone)) == 10
    assert epochs_of(together) == epochs_of(alone)


def write_idx(file, array):
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    file.write_bytes(head + array.astype(np.uint8).tobytes())


@pytest.fixture
def mnist(tmp_path):
    """A directory as torchvision's reader leaves it, with smaller digits in it."""
    from sklearn.datasets import load_digits  # takes a second

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = np.pad(np.kron(digits.images[order] * 15.9, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    labels = digits.target[order]
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, part in (("train", slice(0, 1437)), ("t10k", slice(1437, None))):
        write_idx(raw / f"{name}-images-idx3-ubyte", images[part])
        write_idx(raw / f"{name}-labels-idx1-ubyte", labels[part])
    return tmp_path / "data"


@pytest.mark.campaign
@pytest.mark.long
def test_mnist_is_read_once_on_each_machine_and_every_test_image_counted_once(tmp_path, mnist):
    talk = run(tmp_path, 2, "mnist.py", "--data", mnist, "--epochs", "12")
    assert re.search(r"\d+ of 360 test images are right", talk), talk
