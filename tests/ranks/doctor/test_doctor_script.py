"""What the doctor says of scripts: faults are planted in scripts that really run on two ranks, and each is found."""

import json
import shutil
from dataclasses import replace

import pytest

from doctor_command import DEADLINE_S, doctor
from doctor_scripts import CLEAN, RAW, RUN, UNUSED, line_of
from example_scripts import EXAMPLES
from lockstep.doctor.script_facts import PassFacts, SaveFacts, ScriptFacts, averaged_twice
from lockstep.doctor.script_findings import ScriptSeen, Tried, judge_script, workers_wanted
from lockstep.step_record import HostWait

pytestmark = pytest.mark.timeout(DEADLINE_S + 30)


def examined(tmp_path, script, *words):
    """The exit code, and what is not well: section and level, what is said."""
    (tmp_path / "train.py").write_text(script)
    code, shown, said = doctor("train.py", "--time", "8", "--json", *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert shown, said
    report = json.loads(shown)
    assert report["tested"].startswith("2 ranks on 1 node"), report
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing is left"
    found = {(each["section"], each["level"], each["what"]) for each in report["findings"]}
    if "class Slow" in script:
        # On a busy machine it may be that more workers gain nothing, and that this is told in place of a note.
        assert [what for section, _, what in found if section == "loader" and what.startswith("a rank waits")], found
    return code, {each for each in found if each[0] != "loader" and each[1] != "ok"}


def test_each_fault_of_a_script_with_ddp_is_found_at_its_line(tmp_path):
    code, found = examined(tmp_path, RAW)
    at = {
        mark: f"train.py:{line_of(RAW, mark)}" for mark in ("order", "mean", "waits", "prints", "evaluation", "saves")
    }
    expected = [
        ("order", "problem", f"{at['order']}: two epochs in the same order"),
        ("evaluation", "problem", f"{at['evaluation']}: 1 sample of 101 counted twice"),
        ("evaluation", "problem", f"{at['evaluation']}: the result is never put together"),
        ("saves", "problem", f"{at['saves']}: ranks 0, 1 write model.pt"),
        ("mean", "problem", f"{at['mean']}: the loss is divided by the number of ranks"),
        ("host waits", "note", f"{at['waits']}: .item()"),
        ("host waits", "note", f"{at['prints']}: print"),
    ]
    assert code == 3
    for section, level, begins in expected:
        assert [e for e in found if e[:2] == (section, level) and e[2].startswith(begins)], (begins, found)
    assert len(found) == len(expected), found


def test_a_clean_script_with_ddp_has_no_finding(tmp_path):
    assert examined(tmp_path, CLEAN) == (0, set())


@pytest.mark.campaign
def test_parameters_that_ddp_will_wait_for_are_named_though_it_fails(tmp_path):
    code, found = examined(tmp_path, UNUSED)
    assert code == 3
    said = {section: what for section, _, what in found}
    assert said["gradients"] == "2 parameters got no gradient: head.weight, head.bias"
    assert "Expected to have finished reduction" in said["script"]


def test_each_fault_of_a_script_with_run_is_found(tmp_path):
    code, found = examined(tmp_path, RUN)
    assert code == 0, "none of them makes the result wrong"
    said = sorted((section, what) for section, _, what in found)
    assert [section for section, _ in said] == ["batches", "batches", "gradients", "host waits"], said
    assert said[0][1] == "global_batch=20 is 2 micro-batches of 8 and one of 4"
    assert said[1][1] == "of 3 micro-batches one rank of 2 computes 2, and another fewer"
    assert said[2][1] == "2 parameters got no gradient: extra.weight, extra.bias"
    assert said[3][1].startswith(f"train.py:{line_of(RUN, 'waits')}: print, 1.0 times a step")


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["contrastive", "digits", "embedding", "finetune", "gan", "gpt", "uneven", "vit"])
def test_examples_have_no_problem(tmp_path, name):
    """Those that need no data; a note may be there, such as of a line that needs a tensor's value."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    code, shown, said = doctor(f"{name}.py", "--time", "8", "--json", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert code == 0, shown + said
    found = {each["section"] for each in json.loads(shown)["findings"] if each["level"] != "ok"}
    assert found <= {"host waits", "loader"}, shown


# ---- judgements ----------------------------------------------------------------------------------------------------

ALONE = ScriptFacts(
    rank=0, ranks=2, uses_run=True, step_s=0.1, global_batch=64, micro_batch=16, free_bytes=1 << 30, peak_bytes=1 << 28
)
EVALUATION = PassFacts("a.py", 9, evaluates=True, length=100, batch_size=10, divided=2, reductions=1)
TRAINING = PassFacts("a.py", 5, evaluates=False, steps=5, length=100, batch_size=10, divided=2, shuffles=True)
BY_HAND = replace(ALONE, uses_run=False, waits_for_all=True, passes=(TRAINING, replace(TRAINING, epoch=1), EVALUATION))


def found_of(facts, *others, **more):
    """Sections of what is not well, where the second rank is as the first."""
    ranks = [facts, *(others or [replace(facts, rank=1)])]
    return [f.section for f in judge_script(ScriptSeen(ranks, **more)) if f.level != "ok"]


def test_where_nothing_is_wrong_nothing_is_found():
    assert found_of(ALONE) == []
    assert found_of(BY_HAND) == []


@pytest.mark.parametrize(
    ("facts", "section"),
    [
        (replace(ALONE, unused=("a",)), "gradients"),
        (replace(ALONE, data_s=0.05), "loader"),
        (replace(ALONE, waits=(HostWait("a.py", 3, ".item()", 1.0, 1e-6),)), "host waits"),
        (replace(ALONE, waits=(HostWait("a.py", 3, "print", 0.1, 0.05),)), "host waits"),
        (replace(ALONE, free_bytes=1 << 20), "memory"),
        (replace(ALONE, micro_batch=24), "batches"),
        (replace(BY_HAND, passes=(TRAINING, TRAINING)), "order"),
        (replace(BY_HAND, passes=(replace(TRAINING, divided=0, shuffles=False),)), "order"),
        (replace(BY_HAND, passes=(replace(EVALUATION, length=101),)), "evaluation"),
        (replace(BY_HAND, passes=(replace(EVALUATION, reductions=0),)), "evaluation"),
        (replace(BY_HAND, passes=(replace(EVALUATION, divided=0),)), "evaluation"),
        (replace(BY_HAND, saves=(SaveFacts("/a/m.pt", "a.py", 7),)), "saves"),
        (replace(BY_HAND, joined=False), "ranks"),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(facts, section):
    assert set(found_of(facts)) == {section}


def test_what_is_no_fault():
    rarely = HostWait("a.py", 3, ".item()", 0.05, 1e-6)
    assert found_of(replace(ALONE, waits=(rarely,), data_s=0.0005, step_s=0.001)) == []
    dropped = replace(EVALUATION, length=101, drop_last=True)
    not_counted = replace(EVALUATION, reductions=0, watched=False)
    own = replace(TRAINING, divided=0, own_order=True)
    assert found_of(replace(BY_HAND, passes=(dropped, not_counted, own))) == []
    parts = [replace(BY_HAND, rank=r, passes=(replace(EVALUATION, divided=0, part=str(r)),)) for r in (0, 1)]
    assert found_of(*parts) == [], "each rank has a part of its own"
    saves = [replace(BY_HAND, rank=r, saves=(SaveFacts(f"/a/m{r}.pt", "a.py", 7),)) for r in (0, 1)]
    assert found_of(*saves) == []
    assert found_of(replace(ALONE, data_s=0.05), tried=Tried(0.1)) == [], "more workers were tried and gain nothing"


def test_workers_are_as_many_as_it_takes():
    assert workers_wanted(replace(ALONE, step_s=0.1, data_s=0.08)) == 4  # reads 80 ms, computes 20 ms
    assert workers_wanted(replace(ALONE, step_s=0.1, data_s=0.08, workers=2)) == 10  # two read for 100 ms each
    assert workers_wanted(replace(ALONE, step_s=0.1, data_s=0.0, workers=3)) == 4


def test_only_a_ddp_that_waits_for_each_gradient_fails_without_one():
    for waits, level in ((True, "problem"), (False, "note")):
        facts = replace(BY_HAND, unused=("head",), waits_for_all=waits)
        assert [f.level for f in judge_script(ScriptSeen([facts, facts])) if f.section == "gradients"] == [level]


def test_a_gradient_that_is_missing_on_one_rank_is_told_as_that():
    seen = ScriptSeen([ALONE, replace(ALONE, rank=1, unused=("head",))])
    (found,) = [f for f in judge_script(seen) if f.level != "ok"]
    assert found.what == "1 parameter got no gradient on some ranks: head"


HEAD = "from torch.nn.parallel import DistributedDataParallel\ndef train(model, world_size, args):\n"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("  loss = f(model)\n  loss = loss / world_size\n  loss.backward()", [4]),
        ("  loss = f(model) / dist.get_world_size()\n  loss.backward()", [3]),
        ("  loss = f(model)\n  loss /= args.world_size\n  scaler.scale(loss).backward()", [4]),
        ("  (f(model) / world_size).backward()", [3]),
        ("  loss = f(model)\n  loss.backward()\n  for p in model.parameters():\n    dist.all_reduce(p.grad)", [6]),
        ("  loss = f(model) / args.accumulate\n  loss.backward()", []),
        ("  loss = f(model)\n  loss.backward()\n  dist.all_reduce(loss)\n  loss /= world_size", []),
        ("  lr = 0.1 / world_size\n  loss = f(model)\n  loss.backward()\n  total = loss / world_size", []),
        ("  for x in data:\n    loss = f(x)\n    loss.backward()\n    loss = loss.detach() / world_size", []),
        ("  def log(loss):\n    loss = loss / world_size\n  loss = f(model)\n  loss.backward()", []),
    ],
)
def test_a_mean_that_is_taken_twice_is_read_in_the_source(lines, found):
    assert [fault.line for fault in averaged_twice("a.py", HEAD + lines)] == found
