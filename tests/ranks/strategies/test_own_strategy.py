"""A strategy of another package: docs/own_strategy.md holds it whole, and nothing in Lockstep names it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/own_strategy.md").read_text(encoding="utf-8")
CODE = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
SCRIPT = """
import torch
from lockstep import Run

with Run(seed=1) as run:
    model = run.model(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))
    batches = run.loader((x, (x.sum(1) > 0).long()), global_batch=16, micro_batch=4)
    for _ in run.epochs(3):
        for samples, classes in run.train(batches):
            run.step(torch.nn.functional.cross_entropy(model(samples), classes))
    run.say(f"hash {sum(p.double().sum().item() for p in model.parameters()).hex()}")
"""


def install(directory: Path, *, module: str = "flat_sum", entry: str = "flat-sum = flat_sum:KIND") -> None:
    """What pip leaves of such a package in ``directory``."""
    (directory / f"{module}.py").write_text(CODE["flat_sum.py"], encoding="utf-8")
    about = directory / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[lockstep.strategies]\n{entry}\n", encoding="utf-8")


def started(directory: Path, *words: str, module: str = "lockstep") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "COLUMNS": "112"}
    return subprocess.run(
        [sys.executable, "-m", module, *words], cwd=directory, env=env, capture_output=True, text=True, check=False
    )


def printed(directory: Path, *words: str) -> str:
    done = started(directory, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def package(tmp_path):
    install(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.mark.campaign
def test_the_laws_hold(package):
    (package / "test_flat_sum.py").write_text(CODE["test_flat_sum.py"], encoding="utf-8")
    done = started(package, "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "test_flat_sum.py", module="pytest")
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout


def test_it_trains_from_the_command_line_with_the_bits_of_ddp(package):
    told = [
        printed(package, "run", "--nproc-per-node", "2", "--strategy", word, "--run-dir", place, "train.py")
        for word, place in (("ddp", "ddp"), ("flat-sum:pieces=3", "flat-sum"))
    ]
    told += [printed(package, "run", "--nproc-per-node", "1", "--resume", "--run-dir", "flat-sum", "train.py")]
    assert len({re.search(r"hash (\S+)", text)[1] for text in told}) == 1, told


def test_help_bench_and_predict_know_it(package):
    assert "auto, flat-sum" in printed(package, "run", "--help")
    assert "auto, flat-sum" in printed(package, "bench", "--help")
    quick = ("bench", "train.py", "--steps", "4", "--rounds", "1")
    assert "flat-sum" in printed(package, *quick, "--strategies", "flat-sum", "--ranks", "2")
    printed(package, *quick, "--ranks", "1", "--profile", "profile.json")
    predict = ("predict", "--profile", "profile.json", "--on", "8xA100", "--strategies", "flat-sum", "--json")
    assert {row["strategy"] for row in json.loads(printed(package, *predict))} == {"flat-sum"}


def test_bad_words_are_refused_before_a_rank_starts(package):
    for word, says in (
        ("flat-sum:pieces=0", "pieces=0; give a number from 1"),
        ("flat-sum:piece=2", "flat-sum has no option piece; did you mean pieces?"),
        ("flatsum", "did you mean flat-sum?"),
    ):
        assert says in started(package, "run", "--strategy", word, "train.py").stderr


def test_a_package_that_cannot_be_used_is_named(tmp_path):
    install(tmp_path, entry="flat-sum = flat_sum:MISSING\nother = flat_sum:KIND\nddp = flat_sum:KIND")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    said = started(tmp_path, "run", "--strategy", "flat-sum", "train.py").stderr
    assert "the entry point flat-sum = 'flat_sum:MISSING' of flat_sum cannot be loaded: AttributeError" in said
    said = started(tmp_path, "run", "--strategy", "other", "train.py").stderr
    assert "let it name a StrategyKind with name='other'" in said
    assert "hash" in printed(tmp_path, "run", "--strategy", "ddp", "train.py"), "a word of Lockstep's own is its own"
