"""The norm of a gradient does not tell how the gradient was divided."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.strategies.parts.grad_norm import norm_of_rows, squared_row_norms

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4)


def gradient(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(shapes, st.integers(0, 1000), st.data())
def test_rows_that_lie_apart_give_the_bits_of_those_that_lie_together(shape, seed, data):
    whole = gradient(shape, seed)
    if not shape:
        return
    cut = data.draw(st.integers(0, len(whole)))
    assert torch.equal(
        torch.cat([squared_row_norms(whole[:cut]), squared_row_norms(whole[cut:])]), squared_row_norms(whole)
    )


def test_large_gradients_are_added_as_small_ones_are():
    whole = gradient((40, 1001), 3)
    whole[7, 5], whole[8, 6], whole[9] = torch.nan, torch.inf, 1e-22
    rows = torch.cat([squared_row_norms(row.view(1, -1)) for row in whole])
    assert torch.equal(rows.nan_to_num(-1.0), squared_row_norms(whole).nan_to_num(-1.0))


@given(st.lists(shapes, max_size=4), st.integers(0, 1000))
def test_it_is_the_norm(list_of_shapes, seed):
    gradients = [gradient(shape, seed + i) for i, shape in enumerate(list_of_shapes)]
    found = norm_of_rows([squared_row_norms(g) for g in gradients], torch.device("cpu"))
    right = torch.tensor(sum(float(g.double().square().sum()) for g in gradients)).sqrt()
    torch.testing.assert_close(found, right, check_dtype=False)
    assert found.dim() == 0


def test_gradients_stay_as_they_were_and_layouts_do_not_matter():
    image = gradient((4, 3, 5, 5), 7)
    before = image.clone()
    assert torch.equal(squared_row_norms(image.to(memory_format=torch.channels_last)), squared_row_norms(image))
    assert torch.equal(image, before)


def test_half_precision_is_summed_in_single_and_double_stays():
    big = torch.full((1, 4096), 8.0, dtype=torch.float16)
    assert squared_row_norms(big).item() == 4096 * 64
    assert squared_row_norms(big.double()).dtype == torch.float64
    assert norm_of_rows([squared_row_norms(big.double()), squared_row_norms(big)], big.device).dtype == torch.float64
