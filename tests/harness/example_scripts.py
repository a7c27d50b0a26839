"""The scripts of examples/, as modules."""

import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    """The module of an example, which finds its neighbours."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)
