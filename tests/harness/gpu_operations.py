"""The operations of docs/gpu.md: which torch computes deterministically on a GPU, and which it refuses.

    python tests/harness/gpu_operations.py            print the two tables, as the installed torch tells of them
    python tests/harness/gpu_operations.py --write    put them into docs/gpu.md

torch lists both kinds in the documentation of `torch.use_deterministic_algorithms`, and tells of no other place.
"""

import re
import sys
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- made by tests/harness/gpu_operations.py -->\n", "<!-- end -->\n"
#: What to write in the place of a refused operation.
INSTEAD = {
    "AvgPool3d": "a convolution with equal weights, in steps of the kernel's size",
    "AdaptiveAvgPool2d": "for an output of 1 x 1 nothing, for that is a mean; else `AvgPool2d` with a fixed kernel",
    "AdaptiveAvgPool3d": "for an output of 1 x 1 x 1 nothing, for that is a mean",
    "AdaptiveMaxPool2d": "`x.amax((2, 3))` for an output of 1 x 1; else `MaxPool2d` with a fixed kernel",
    "FractionalMaxPool2d": "`MaxPool2d`",
    "FractionalMaxPool3d": "`MaxPool3d`",
    "MaxUnpool1d": "`repeat_interleave`, or a transposed convolution",
    "MaxUnpool2d": "`interpolate(mode='nearest')`, or a transposed convolution",
    "MaxUnpool3d": "`interpolate(mode='nearest')`, or a transposed convolution",
    "interpolate": "`mode='nearest'`, or a transposed convolution",
    "ReflectionPad1d": "zero or replication padding",
    "ReflectionPad2d": "zero or replication padding",
    "ReflectionPad3d": "zero or replication padding",
    "NLLLoss": "for targets of more than one dimension: of `out.movedim(1, -1).flatten(0, -2)` and `target.flatten()`",
    "CTCLoss": "the loss on the CPU: `F.ctc_loss(log_probabilities.cpu(), ...)`",
    "EmbeddingBag": "`Embedding` and `amax(1)`",
    "put_": "`scatter`, or `index_put` with `accumulate=True`",
    "histc": "outside of what gradients depend on: on the CPU",
    "bincount": "`torch.zeros(n).scatter_add_(0, index, weights)`",
    "median": "`sort` and the middle element",
    "grid_sample": "the transform on the CPU, in the data set",
    "cumsum": "a product with a triangular matrix of ones, for short sequences",
    "scatter_reduce": "logarithms and `reduce='sum'`",
    "resize_": "a new tensor",
}


def listed(text: str) -> list[tuple[str, str]]:
    """The operations of one of torch's lists, each with the condition that torch names."""
    found = []
    for item in re.split(r"\n {8}\* ", text)[1:]:
        said = " ".join(item.split("\n\n    The following")[0].split())
        name, condition = re.match(r":\w+:`([\w.]+)`(.*)", said).groups()
        modes = re.sub(r" - ``(\w+)``", r" `\1`", condition).replace("``", "`").replace("`src`", "`src`")
        found.append((name, modes.strip().rstrip(":")))
    return found


def tables() -> str:
    """Both, as Markdown."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    _, deterministic, refused = re.split(r"The following normally-nondeterministic operations will", text)
    refused = refused.split("\n\n    In addition")[0]
    lines = [
        f"torch {torch.__version__.partition('+')[0]} refuses:",
        "",
        "| operation | when | write instead |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {when or 'always'} | {INSTEAD[name.rpartition('.')[2]]} |" for name, when in listed(refused)
    ]
    lines += ["", "It has another, deterministic kernel for:", "", "| operation | when |", "|---|---|"]
    lines += [f"| `{name}` | {when or 'always'} |" for name, when in listed(deterministic)]
    return "\n".join(lines) + "\n"


def page_with(made: str) -> str:
    """The page, with ``made`` in the place of its tables."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with(tables()))
    else:
        print(tables())
