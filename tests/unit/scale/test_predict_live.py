"""How the live benchmark of predictions counts what was right."""

from itertools import pairwise

from predict_live import SUM_BYTES, best_of, held_out, link_of, network, right, summary


def row(bucket, said, took, strategy="ddp", noise=0.001, model="mlp"):
    seconds = {"said_s": said, "took_s": took, "noise_s": noise}
    return {"model": model, "strategy": strategy, "bucket_mb": bucket, **seconds}


def test_held_out_sizes_are_between_those_of_a_link_profile():
    assert all(a < between < b for between, (a, b) in zip(held_out(), pairwise(SUM_BYTES), strict=True))
    sums = [(size, 1e-4 + size / 50e6) for size in sorted([*SUM_BYTES, *held_out()])]
    link, errors = link_of(sums)
    assert link.bytes == SUM_BYTES
    assert len(errors) == 9
    assert max(map(abs, errors)) < 0.15
    assert max(abs(e) for e in link_of([(size, size / 50e6) for size, _ in sums])[1]) < 1e-3


def test_a_choice_is_right_if_nothing_is_faster_beyond_the_noise():
    near, far = [row(1, 0.1, 0.101), row(25, 0.2, 0.1)], [row(1, 0.1, 0.15), row(25, 0.2, 0.1)]
    assert right(near)
    assert not right(far)
    rows = [*near, row(25, 0.09, 0.05, "ddp:compress=fp16")]
    assert [(each["strategy"], each["bucket_mb"]) for each in best_of(rows)] == [("ddp", 1), ("ddp:compress=fp16", 25)]
    found = summary([{"rows": rows, "link_errors": [0.01, -0.03]}, {"rows": far, "link_errors": [0.02]}])
    assert (found["best_bucket_right"], found["best_strategy_right"], found["of"]) == (1, 2, 2)
    assert abs(found["sums_mean_error"] - 0.02) < 1e-9


def test_the_models_have_as_many_gradients_as_is_said():
    megabytes = [sum(4 * p.numel() for p in network(kind)[0].parameters()) / 1e6 for kind in ("mlp", "cnn")]
    assert 19 < megabytes[0] < 22
    assert 12.5 < megabytes[1] < 13.5
