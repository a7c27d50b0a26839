"""Each script in tests/harness/habits ends as their table says: with the same bits everywhere, or an error that helps.

The suite runs one of each kind, on few ranks; `make campaign` all of them, wherever the table has a column.
"""

import pytest

from habit_table import Habit, agrees, habits, read_table

TABLE = read_table()
#: One that shows each mechanism, and where.
SLICE = {
    "control": ("1", "2", "1>2"),  # nothing is wrong
    "running_loss_logged": ("1", "2"),  # replays are kept out of sums; ranks log different values
    "kl_global_step": ("1",),  # a replay: a counter of the script
    "dataset_own_rng": ("1",),  # of samples
    "cached_augmentation": ("2",),  # a second look at samples
    "teacher_bn_unkept": ("1", "2"),  # buffers beside the run's models
    "teacher_in_forward": ("2",),  # what bodies may not write
    "lookahead_list": ("1>2",),  # attributes of an optimizer are saved
    "dropout_schedule": ("1>2",),  # and of modules
    "temperature_by_epoch": ("1>2",),  # the proof of a resume
    "ema_shadow_dict": ("1>2",),  # and of weights of the script that nothing depends on yet
    "torch_generator_module": ("1",),  # a draw that shows rarely
    "closure_list_workers": ("1",),  # what loader processes hold copies of
    "rebound_queue": ("1",),  # variables that hold what is kept
    "adan_global_norm": ("zero@2",),  # what an optimizer mixes
    "gan_conditional": ("1",),  # a loss in some micro-batches
    "break_local_loss": ("2",),  # ranks that leave a loop apart
}


def wrong(name, columns=()):
    """What ends otherwise than the table says."""
    found = Habit(name).found(columns or tuple(TABLE[name]))
    return {column: end for column, end in found.items() if not agrees(end, TABLE[name][column])}


def test_what_the_table_has_is_run():
    columns = {habit.name: set(habit.columns) for habit in habits()}
    assert TABLE.keys() <= columns.keys()
    assert all(set(ends) <= columns[name] for name, ends in TABLE.items())


@pytest.mark.parametrize("name", SLICE)
def test_a_habit_ends_as_the_table_says(name):
    assert not wrong(name, SLICE[name])


@pytest.mark.campaign
@pytest.mark.parametrize("name", TABLE)
def test_a_habit_ends_everywhere_as_the_table_says(name):
    assert not wrong(name)
