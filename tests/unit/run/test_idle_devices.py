"""What is said where CPUs or GPUs lie idle."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.cpu_use import CpuUse
from lockstep.run.benchmark.idle_devices import IdleDevices, LocalRanks, advice


def test_one_rank_on_many_cpus():
    text = advice(LocalRanks(1, 1, 8, 0, most=64), CpuUse(8, 1.0, 0.1), 31.0)
    assert text == (
        "1 rank keeps 1.0 of 8 CPUs busy, and 6.9 were idle for 31 s: --nproc-per-node 8 would use them, "
        "with the same bits"
    )


def test_one_rank_on_many_gpus():
    text = advice(LocalRanks(1, 8, 64, 4, most=64), CpuUse(64, 1.0, 0.1), 30.0)
    assert text == "1 rank computes on 1 of 4 GPUs: --nproc-per-node 4 would use them, with the same bits"


def test_others_keep_the_cpus_busy():
    assert advice(LocalRanks(1, 1, 2, 0, most=8), CpuUse(2, 1.0, 0.6), 30.0) is None


def test_a_rank_that_waits_for_its_data():
    assert advice(LocalRanks(1, 1, 8, 0, most=64), CpuUse(8, 0.3, 0.0), 30.0) is None


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 64), st.integers(1, 64), st.floats(0, 4), st.floats(0, 64))
def test_no_more_ranks_than_have_a_cpu_and_a_micro_batch(ranks, threads, cpus, most, own, others):
    text = advice(LocalRanks(ranks, threads, cpus, 0, most), CpuUse(cpus, own, others), 30.0)
    if text is None:
        return
    told = int(text.partition("--nproc-per-node ")[2].split()[0])
    assert ranks < told <= most
    assert told * threads <= cpus
    assert (told - ranks) * threads <= CpuUse(cpus, own, others).idle + 0.25 + 1e-9


def test_it_is_looked_at_once_after_half_a_minute():
    now, asked, said = [0.0], [], []

    def local():
        asked.append(now[0])
        return LocalRanks(1, 1, 64, 4, most=64)

    watch = IdleDevices(local, said.append, lambda: now[0])
    for second in range(100):
        now[0] = float(second)
        watch.look()
    assert asked == [30.0]
    assert len(said) == 1
