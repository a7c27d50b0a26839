"""Tensors lie where they are wanted, whatever a script makes its own tensors on by default."""

import ast
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

import lockstep

PACKAGE = Path(lockstep.__file__).parent
#: Functions of torch that make a tensor where `torch.set_default_device` says, by name.
MAKERS = {
    function.__name__ for function in _device_constructors() if getattr(torch, function.__name__, None) is function
}


def test_each_tensor_that_is_made_says_where():
    """`lockstep.testing` is for tests, which do not set a default device."""
    assert {"zeros", "as_tensor", "randperm", "full"} <= MAKERS
    silent = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        if "testing" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}
        and not {keyword.arg for keyword in node.keywords} & {"device", "out", None}
    ]
    assert silent == []
