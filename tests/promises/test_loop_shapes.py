"""What docs/loop_shapes.md says of each shape: the same bits on 1, 2 and 3 ranks and after a kill, or refused.

The suite leaves out the kills of most shapes, one of the worlds, and packages that take seconds to import; `make
campaign` leaves out nothing.
"""

import re

import pytest

from campaign_marks import IN_CAMPAIGN, combinations
from loop_shapes import PAGE, SHAPES, resumed, verdicts

ROW = re.compile(r"^\| (.+) \| (same bits|differs|refused: [\w ]+) \| (same bits|-) \|$", re.MULTILINE)
#: Of each shape, what the page says: of 1, 2 and 3 ranks, and of a kill.
ROWS = {words: (verdict, again) for words, verdict, again in ROW.findall(PAGE.read_text())}
SLOW = ("transformers_model", "datasets_map", "datasets_stream")
WORLDS = (1, 2, 3) if IN_CAMPAIGN else (1, 2)
RUN = [shape for name, shape in SHAPES.items() if IN_CAMPAIGN or name not in SLOW]
RESUMED = [shape.name for shape in RUN if ROWS.get(shape.words, ("", ""))[1] == "same bits"]

#: One that is killed within a pass, and one whose optimizer has more groups by then.
RESUMED_IN_SUITE = ("two_passes_in_an_epoch", "parameters_added_later")


def test_the_page_has_a_row_for_each():
    assert list(ROWS) == [shape.words for shape in SHAPES.values()]


# Its name says which worlds: on all three it is another test, one of `make campaign`.
@pytest.mark.parametrize("worlds", combinations([WORLDS], campaign=lambda _: IN_CAMPAIGN), ids=str)
@pytest.mark.parametrize("group", sorted({shape.group for shape in RUN}))
def test_each_ends_as_the_page_says(group, worlds):
    shapes = [shape for shape in RUN if shape.group == group]
    says = {shape.name: ROWS[shape.words][0] for shape in shapes}
    wrong = {name: verdict for name, verdict in verdicts(shapes, worlds).items() if verdict.words != says[name]}
    assert not wrong, f"on {worlds} ranks: {wrong}"


@pytest.mark.parametrize("name", combinations(RESUMED, campaign=lambda name: name not in RESUMED_IN_SUITE))
def test_it_is_killed_and_begun_again_on_other_ranks(name):
    undisturbed = verdicts([SHAPES[name]], (1,))[name]
    for before, after in ((2, 3), (3, 1)):
        again = resumed(SHAPES[name], 3, before, after)
        assert again.details == undisturbed.details, f"killed on {before} ranks, begun again on {after}"
