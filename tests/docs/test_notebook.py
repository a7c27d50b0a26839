"""The example notebook does what its file shows: executed anew, its cells have outputs of the same shape."""

import copy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks are not installed (nbformat, nbclient, ipykernel)")
for needed in ("nbclient", "ipykernel", "matplotlib_inline", "pandas"):
    pytest.importorskip(needed, reason=f"notebooks need {needed}, which is not installed")

from executed_notebook import executed, shapes  # noqa: E402 - needs what was looked for

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.campaign
@pytest.mark.long
def test_the_kept_outputs_are_those_of_its_cells(tmp_path):
    kept = nbformat.read(NOTEBOOK, as_version=4)
    anew = executed(NOTEBOOK, tmp_path)
    assert shapes(anew) == shapes(kept)
    assert not any(("stream", "stderr") in cell for cell in shapes(kept)), "where nothing fails, nothing looks like it"
    assert any("image/png" in kinds for cell in shapes(kept) for kinds in cell), "a picture stands in the notebook"


def test_outputs_of_another_shape_are_noticed():
    kept = nbformat.read(NOTEBOOK, as_version=4)
    for number, cell in enumerate(kept.cells):
        for output in cell.get("outputs", ()):
            changed = copy.deepcopy(kept)
            changed.cells[number].outputs.remove(output)
            assert shapes(changed) != shapes(kept)


def test_it_says_nothing_of_the_machine_where_it_was_executed():
    text = NOTEBOOK.read_text()
    assert str(Path.home()) not in text
    assert "/site-packages/" not in text
