"""A search becomes a study of Optuna, and comes back as it was; studies of others become searches."""

import json
import math
from contextlib import closing

import numpy as np
import optuna
import pytest

from lockstep.errors import SettingError
from lockstep.tune.record.journal import JournalWriter, SearchPlan, read_search
from lockstep.tune.record.records import TrialBegan, TrialEnded
from lockstep.tune.results.optuna_study import export_optuna, import_optuna
from lockstep.tune.results.result import load
from lockstep.tune.search import Bool, Choice, Float, Individual, Int, Space, make_algorithm
from simulated_search import simulated_search, write


def told(trial):
    """What must come back of a trial: all but the worker in whose file it is written, and rounding of times."""
    point = [round(gene, 9) for gene in trial.point]
    losses = [(report.step, report.loss) for report in trial.reports]
    return (
        *(trial.number, dict(trial.params), point, trial.state, trial.losses, trial.violation, trial.reason),
        *(trial.island, trial.ranks, trial.parents, trial.operator, losses, round(trial.began_at_s, 3)),
    )


@pytest.mark.parametrize("file", ["study.db", "study.log"])
def test_a_search_comes_back_from_a_study_as_it_was(tmp_path, file):
    record = simulated_search(trials=24)
    first = write(record, tmp_path / "first")
    assert export_optuna(first, tmp_path / file) == "first"
    export_optuna(first, tmp_path / file)  # once more adds nothing
    assert import_optuna(tmp_path / file, tmp_path / "second") == 24
    assert list(map(told, read_search(tmp_path / "second").trials)) == list(map(told, record.trials))
    assert read_search(tmp_path / "second").space == record.space


def test_optunas_own_tools_work_on_an_exported_search(tmp_path):
    record = simulated_search(trials=40)
    name = export_optuna(write(record, tmp_path / "search"), tmp_path / "study.log")
    study = optuna.load_study(
        study_name=name,
        storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))),
    )
    done = [trial for trial in record.trials if trial.state == "done"]
    assert study.best_value == min(trial.loss for trial in done)
    states = [trial.state.name for trial in study.trials]
    assert states.count("PRUNED") == sum(trial.state == "stopped" for trial in record.trials)
    assert states.count("FAIL") == sum(trial.state == "failed" for trial in record.trials)
    importance = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
    )
    assert {"layers", "activation", "lr", "optimizer"} <= set(importance)
    study.sampler = optuna.samplers.TPESampler(seed=0)
    asked = study.ask()  # it learns from what was exported
    assert 2 <= asked.suggest_int("layers", 2, 10) <= 10


def test_all_kinds_of_dimensions_are_exported(tmp_path):
    space = Space.of(
        {
            "rate": Float(0.0, 1.0, step=0.3),
            "width": Int(16, 1024, log=True),
            "even": Int(2, 9, step=2),
            "flag": Bool(),
            "shape": Choice((3, 3), [1], None, "text"),
        }
    )
    SearchPlan(space.to_json(), {}).write(tmp_path / "search")
    given = [
        {"rate": 0.6, "width": 1024, "even": 8, "flag": True, "shape": (3, 3)},
        {"rate": 0.0, "width": 16, "even": 2, "flag": False, "shape": [1]},
        {"rate": 0.3, "width": 99, "even": 4, "flag": False, "shape": None},
    ]
    with closing(JournalWriter(tmp_path / "search", 0)) as journal:
        for number, params in enumerate(given):
            journal.append(TrialBegan(number, 1, 1, 1e9, params, space.point(params)))
            journal.append(TrialEnded(number, 1, "done", 1e9 + 1, 1.0, (float(number), 1.0), 0.5 * number))
    export_optuna(tmp_path / "search", tmp_path / "study.log", "kinds")
    import_optuna(tmp_path / "study.log", tmp_path / "again", "kinds")
    found = load(tmp_path / "again").trials
    assert [trial.params for trial in found] == given
    assert [trial.losses for trial in found] == [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)]
    assert [trial.violation for trial in found] == [0.0, 0.5, 1.0]


def objective(trial):
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
    if trial.suggest_categorical("kind", ["sgd", "adam"]) == "sgd":
        rate += trial.suggest_float("momentum", 0, 1)
    trial.report(-rate, 10)
    return -rate


def test_a_study_of_someone_else_becomes_a_search_with_its_conditions(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.RandomSampler(1), storage=storage, study_name="theirs"
    )
    study.optimize(objective, n_trials=12)
    import_optuna(storage, tmp_path)
    space = Space.from_json(read_search(tmp_path).space)
    assert space == Space.of(
        {
            "rate": Float(1e-4, 1e-1, log=True),
            "kind": Choice("sgd", "adam", opens={"sgd": {"momentum": Float(0.0, 1.0)}}),
        }
    )
    # A script may write the limits as whole numbers: it is the same space, and the search can be gone on with.
    as_written = {
        "rate": Float(1e-4, 1e-1, log=True),
        "kind": Choice("sgd", "adam", opens={"sgd": {"momentum": Float(0, 1)}}),
    }
    assert json.dumps(Space.of(as_written).to_json()) == json.dumps(read_search(tmp_path).space)
    result = load(tmp_path)
    assert result.best.params == study.best_params
    assert result.best.loss == -study.best_value
    assert all(not math.isnan(trial.reports[0].loss) for trial in result.trials)


def test_what_cannot_be_imported_is_refused(tmp_path):
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(SettingError, match="holds 0 studies"):
        import_optuna(storage, tmp_path)
    study = optuna.create_study(storage=storage, study_name="one")
    with pytest.raises(SettingError, match="no study 'two'; the storage holds one"):
        import_optuna(storage, tmp_path, "two")
    study.optimize(lambda trial: trial.suggest_float("a" if trial.number % 2 else "b", 0, 1), n_trials=4)
    with pytest.raises(SettingError, match="no categorical parameter says which"):
        import_optuna(storage, tmp_path)
    SearchPlan({}, {}).write(tmp_path)  # from now on there is a search
    study = optuna.create_study(storage=storage, study_name="three")
    study.optimize(lambda trial: trial.suggest_float("a", 0, 1), n_trials=1)
    with pytest.raises(SettingError, match="has a search"):
        import_optuna(storage, tmp_path, "three")


def test_trials_that_failed_before_they_had_all_parameters_are_left_out(tmp_path):
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    study = optuna.create_study(storage=storage)

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 1:
            raise ValueError
        if trial.suggest_int("n", 0, 3) == 9 or trial.number == 2:
            raise ValueError
        return x

    study.optimize(objective, n_trials=4, catch=(ValueError,))
    storage.remove_session()
    storage.engine.dispose()
    assert import_optuna(tmp_path / "study.db", tmp_path / "search") == 3
    assert [(trial.number, trial.state) for trial in load(tmp_path / "search").trials] == [
        (0, "done"), (2, "failed"), (3, "done")
    ]  # fmt: skip


@pytest.mark.parametrize(("low", "high", "step"), [(0.0, 1.0, 0.3), (0.0, 0.35, 0.1), (0.1, 0.7, 0.2)])
def test_each_step_is_known_to_optuna(tmp_path, low, high, step):
    dimension = Float(low, high, step=step)
    space = Space.of({"s": dimension})
    sampler = make_algorithm("tpe", space)
    values = [dimension.value((cell + 0.5) / dimension.cells) for cell in range(dimension.cells)]
    for number, value in enumerate(values):
        sampler.observe([Individual(number, space.point({"s": value}), (value,))])
    assert {space.params(sampler.propose(np.random.default_rng(n)).point)["s"] for n in range(40)} == set(values)
    SearchPlan(space.to_json(), {}).write(tmp_path / "search")
    with closing(JournalWriter(tmp_path / "search", 0)) as journal:
        for number, value in enumerate(values):
            journal.append(TrialBegan(number, 1, 1, 1.0, {"s": value}, space.point({"s": value})))
            journal.append(TrialEnded(number, 1, "done", 2.0, 1.0, (value,)))
    export_optuna(tmp_path / "search", tmp_path / "study.log")
    import_optuna(tmp_path / "study.log", tmp_path / "back")
    assert [trial.params["s"] for trial in load(tmp_path / "back").trials] == values
