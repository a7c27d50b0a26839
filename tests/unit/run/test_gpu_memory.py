"""What is said of a GPU whose memory is full; the estimate is a function of values."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.run.checks.oom_advice import MemoryPeak, add_memory_advice, advice, staying_bytes, wanted_bytes

GIB = 1 << 30


def peak(stays=10, grows=80, micro_batch=32, precision="fp32", total=80):
    return MemoryPeak((stays + grows) * GIB, stays * GIB, total * GIB, micro_batch, 256, precision)


def test_two_settings_that_fit():
    first, second = advice(peak())
    assert first.startswith("peak 90.0 GiB of 80.0 GiB with micro_batch=32, of which 10.0 GiB are parameters")
    assert second == (
        "would fit, by estimate: micro_batch=16 (50.0 GiB), or --precision bf16 (50.0 GiB); global_batch stays 256"
    )
    assert "bf16" not in advice(peak(precision="bf16"))[1]
    assert "--precision bf16 with micro_batch=16" in advice(peak(grows=200))[1]
    assert advice(peak(stays=79))[1].startswith("no micro_batch would fit")


@given(st.integers(0, 200), st.integers(0, 400), st.integers(1, 512), st.integers(1, 200))
def test_what_is_recommended_is_smaller_and_fits(stays, grows, micro_batch, total):
    here = peak(stays, grows, micro_batch, total=total)
    for halved in (False, True):
        size = here.largest(halved=halved)
        if size is not None:
            assert 0 < size <= micro_batch
            assert halved or size < micro_batch
            assert here.fits(size, halved=halved)


def test_the_error_says_it_once():
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB")
    assert wanted_bytes(error) == int(2.5 * GIB)
    assert wanted_bytes(RuntimeError("no")) == 0
    add_memory_advice(error, peak())
    add_memory_advice(error, peak())
    assert error.__notes__ == advice(peak())


def test_staying_bytes_counts_each_tensor():
    import torch

    parameter = torch.zeros(10)
    assert staying_bytes([parameter, torch.zeros(4, dtype=torch.bfloat16)], [parameter]) == 40 + 8 + 40
