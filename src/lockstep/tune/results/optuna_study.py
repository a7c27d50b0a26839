"""Exports searches as studies of Optuna and imports studies as searches, so that each can use the tools of the other.

export_optuna("runs/search", "search.db")       optuna-dashboard sqlite:///search.db
import_optuna("study.db", "runs/search")        lockstep tune --resume --run-dir runs/search search.py
"""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from lockstep.errors import SettingError
from lockstep.tune.record.journal import JournalWriter, SearchPlan, SearchRecord, read_search
from lockstep.tune.record.records import LossReported, Record, TrialBegan, TrialEnded
from lockstep.tune.record.trial import Trial
from lockstep.tune.record.trial_claims import TrialClaims
from lockstep.tune.search import Choice, Float, Int, Point, Space
from lockstep.tune.search.dimensions import Dimension, decoded, encoded
from lockstep.tune.search_settings import SearchSettings

if TYPE_CHECKING:  # the package need not be installed
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_SPACE: Final = "lockstep:space"
_TRIAL: Final = "lockstep:trial"
_CONSTRAINTS: Final = "constraints"  # by this name Optuna's samplers find them


def export_optuna(
    run_dir: str | os.PathLike[str], storage: str | os.PathLike[str] | object, study_name: str | None = None
) -> str:
    """Write the trials of a search that have ended into a study, and return the study's name.

    New trials are added to a study that exists already; its own trials are not changed, so a search may be exported
    again while it runs. Stopped trials become pruned ones. The reason of failed ones, and the island, worker, parents
    and operator of each, are user attributes.

    Args:
        run_dir: of the search, which may be running.
        storage: a file (``.db``: SQLite, else Optuna's journal), a URL such as ``postgresql://...``, or a storage
            object of Optuna's.
        study_name: by default the name of the directory.

    Raises:
        SettingError: if there is no search, or Optuna is not installed.
    """
    name = study_name or Path(run_dir).resolve().name
    with _opened(storage) as opened:
        study_of(read_search(run_dir), opened, name)
    return name


def study_of(record: SearchRecord, storage: str | object | None = None, name: str | None = None) -> Study:
    """A study with the trials of a search that have ended; added to the one of that name, if ``storage`` has it.

    Raises:
        SettingError: if Optuna is not installed.
    """
    optuna = _optuna()
    space = Space.from_json(record.space)
    objectives = max((len(trial.losses) for trial in record.trials), default=1) or 1
    study: Study = optuna.create_study(
        study_name=name, storage=storage, directions=["minimize"] * objectives, load_if_exists=True
    )
    study.set_user_attr(_SPACE, dict(record.space))
    known = {trial.user_attrs[_TRIAL]["number"] for trial in study.trials if _TRIAL in trial.user_attrs}
    study.add_trials(
        [
            _frozen(optuna, trial, space, objectives)
            for trial in record.trials
            if trial.state != "running" and trial.number not in known
        ]
    )
    return study


def import_optuna(
    storage: str | os.PathLike[str] | object, run_dir: str | os.PathLike[str], study_name: str | None = None
) -> int:
    """Begin a search in ``run_dir`` that knows the finished trials of a study; returns how many.

    A search over the same space that is resumed in this directory breeds from these trials. Losses of objectives that
    were maximised have their sign changed. Parameters that only some trials have must depend on the value of one
    categorical parameter.

    Args:
        storage: as for `export_optuna`.
        run_dir: a directory without a search.
        study_name: may be left out where the storage holds one study.

    Raises:
        SettingError: if ``run_dir`` holds a search, if there is no such study, if its parameters do not form a space,
            or if Optuna is not installed.
    """
    with _opened(storage) as opened:
        return _import(opened, Path(run_dir), study_name)


def _import(opened: object, directory: Path, study_name: str | None) -> int:
    optuna = _optuna()
    names = [summary.study_name for summary in optuna.get_all_study_summaries(opened)]
    if study_name is None and len(names) != 1:
        raise SettingError(f"the storage holds {len(names)} studies ({', '.join(names)}); give the name of one")
    if study_name is not None and study_name not in names:
        raise SettingError(f"there is no study {study_name!r}; the storage holds {', '.join(names) or 'none'}")
    study = optuna.load_study(study_name=study_name or names[0], storage=opened)
    finished = [trial for trial in study.trials if trial.state.is_finished()]
    told = study.user_attrs.get(_SPACE)
    space = Space.from_json(told) if told else _space_of([trial for trial in finished if trial.state.name != "FAIL"])
    # A trial may have failed before it had asked for all of its parameters.
    frozen = [trial for trial in finished if trial.state.name != "FAIL" or _fits(trial, space)]
    signs = [-1.0 if direction.name == "MAXIMIZE" else 1.0 for direction in study.directions]
    records = [record for trial in frozen for record in _records(trial, space, signs)]
    settings = SearchSettings(trials=max(len(frozen), 1), objectives=len(signs))
    if not SearchPlan(space.to_json(), settings.to_json() | {"imported_from": study.study_name}).write(directory):
        raise SettingError(f"{directory} has a search; give a directory without one")
    with closing(JournalWriter(directory, 0)) as journal, closing(TrialClaims(directory)) as claims:
        for record in records:
            journal.append(record)
        # Claims these numbers, so that a search that is resumed here continues after them.
        highest = max((_number(trial) for trial in frozen), default=-1)
        while claims.claim(0, highest + 1) is not None:
            pass
    return len(frozen)


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise SettingError("optuna is not installed; pip install 'torch-lockstep[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _opened(storage: str | os.PathLike[str] | object) -> Iterator[object]:
    """The storage as one of Optuna's, for a path of the kind that its suffix names; what it opens is closed at the end.

    Raises:
        SettingError: if Optuna is not installed.
    """
    storages = _optuna().storages
    if not isinstance(storage, str | os.PathLike):
        yield storage
        return
    path = os.fspath(storage)
    is_sqlite = Path(path).suffix in (".db", ".sqlite", ".sqlite3")
    if "://" not in path and not is_sqlite:
        from optuna.storages.journal import JournalFileBackend

        yield storages.JournalStorage(JournalFileBackend(path))
        return
    database = storages.RDBStorage(path if "://" in path else f"sqlite:///{path}")
    try:
        yield database
    finally:
        # Optuna leaves its connections to the garbage collector, which warns from Python 3.13 on.
        database.remove_session()
        database.engine.dispose()


def _frozen(optuna: ModuleType, trial: Trial, space: Space, objectives: int) -> FrozenTrial:
    distributions = _distributions(space, trial.point)
    params = space.params(trial.point)  # not the journal's: JSON knows no tuples
    states = optuna.trial.TrialState
    # What is unknown is left out: Optuna, too, takes it for the largest violation.
    known = trial.violation if math.isfinite(trial.violation) else None
    about = {
        "number": trial.number, "island": trial.island, "worker": trial.worker, "ranks": trial.ranks,
        "parents": list(trial.parents), "operator": trial.operator, "inherits": trial.inherits,
        "attempts": trial.attempts, "run_s": trial.run_s, "losses": list(trial.losses), "violation": known,
        "reason": trial.reason, "converged": trial.converged,
        "repeats": [None if math.isinf(loss) else loss for loss in trial.repeat_losses],
        "reports_at_s": [report.at_s for report in trial.reports],
    }  # fmt: skip
    made: FrozenTrial = optuna.trial.create_trial(
        state={"done": states.COMPLETE, "stopped": states.PRUNED, "failed": states.FAIL}[trial.state],
        params={name: _within(_plain(params[name]), of) for name, of in distributions.items()},
        distributions=distributions,
        values=list(trial.losses) if trial.state == "done" else None,
        intermediate_values={report.step: report.loss for report in trial.reports} if objectives == 1 else {},
        user_attrs={_TRIAL: about},
        system_attrs={_CONSTRAINTS: [known]} if known else {},
    )
    made.datetime_start = datetime.datetime.fromtimestamp(trial.began_at_s)
    made.datetime_complete = datetime.datetime.fromtimestamp(trial.ended_at_s or trial.began_at_s)
    return made


def _distributions(space: Space, point: Point) -> dict[str, BaseDistribution]:
    genes = zip(space.genes, space.active(point), strict=True)
    return {gene.name: _distribution(gene.dimension) for gene, exists in genes if exists}


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match dimension:
        case Float(low, high, log, step):
            # Optuna requires the upper limit to be one of the values, in decimal arithmetic.
            top = high if step is None else float(Decimal(str(low)) + (dimension.cells - 1) * Decimal(str(step)))
            return FloatDistribution(low, top, log=log, step=step)
        case Int(low, high, log, step):
            return IntDistribution(low, low + (dimension.cells - 1) * (step or 1), log=log, step=step or 1)
        case Choice():
            return CategoricalDistribution([_plain(value) for value in dimension.values])


def _plain(value: object) -> Any:
    """A value that Optuna accepts in a category; for tuples, lists and dicts a string that `_value` can read."""
    return value if value is None or isinstance(value, str | bool | int | float) else json.dumps(encoded(value))


def _within(plain: object, distribution: BaseDistribution) -> object:
    """``plain``, of which rounding may have made more than the last of the steps that Optuna counts as decimals."""
    return min(plain, distribution.high) if isinstance(plain, float) and hasattr(distribution, "high") else plain


def _value(plain: object, dimension: Dimension) -> object:
    if isinstance(dimension, Choice) and isinstance(plain, str) and plain not in dimension.values:
        return decoded(json.loads(plain))
    return plain


def _number(frozen: FrozenTrial) -> int:
    """The number of the trial from which ``frozen`` was exported, else Optuna's number."""
    return int(frozen.user_attrs.get(_TRIAL, {}).get("number", frozen.number))


def _params(frozen: FrozenTrial, space: Space) -> dict[str, object]:
    dimensions = {gene.name: gene.dimension for gene in space.genes}
    return {name: _value(value, dimensions[name]) for name, value in frozen.params.items()}


def _fits(frozen: FrozenTrial, space: Space) -> bool:
    """Whether its parameters are a point of ``space``."""
    try:
        space.point(_params(frozen, space))
    except (KeyError, SettingError):
        return False
    return True


def _records(frozen: FrozenTrial, space: Space, signs: Sequence[float]) -> Iterator[Record]:
    about: Mapping[str, Any] = frozen.user_attrs.get(_TRIAL, {})
    number = _number(frozen)
    began = frozen.datetime_start.timestamp() if frozen.datetime_start else time.time()
    ended = frozen.datetime_complete.timestamp() if frozen.datetime_complete else began
    params = _params(frozen, space)
    yield TrialBegan(
        number,
        about.get("attempts", 1),
        about.get("ranks", 1),
        began,
        params,
        space.point(params),
        about.get("island", 0),
        tuple(about.get("parents", ())),
        about.get("operator", "optuna"),
        about.get("inherits"),
    )
    times = about.get("reports_at_s") or [ended] * len(frozen.intermediate_values)
    curve = [(step, signs[0] * loss) for step, loss in sorted(frozen.intermediate_values.items())]
    # Optuna's steps are what the objective chose; here they count the reports.
    for step, ((_, loss), at_s) in enumerate(zip(curve, times, strict=True)):
        yield LossReported(number, about.get("attempts", 1), step, loss, at_s)
    state = {"COMPLETE": "done", "PRUNED": "stopped"}.get(frozen.state.name, "failed")
    values = [sign * value for sign, value in zip(signs, frozen.values or (), strict=False)]
    losses = tuple(about.get("losses") or values or ([curve[-1][1]] if state == "stopped" and curve else ()))
    if state == "stopped" and not losses:
        state = "failed"  # without a value there is nothing to rank it by
    constraints = frozen.system_attrs.get(_CONSTRAINTS) or ()
    yield TrialEnded(
        number,
        about.get("attempts", 1),
        state,  # type: ignore[arg-type]
        ended,
        about.get("run_s", ended - began),
        losses if state != "failed" else (),
        sum(max(value, 0.0) for value in constraints) if constraints or state != "stopped" else None,
        about.get("reason") or ("" if state == "done" else f"{frozen.state.name.lower()} in Optuna"),
        bool(about.get("converged")),
    )


def _space_of(trials: Sequence[FrozenTrial]) -> Space:
    """The space of the trials of a study; what only some of them have is opened by a choice."""
    known: dict[str, BaseDistribution] = {}
    for trial in trials:
        for name, distribution in trial.distributions.items():
            if known.setdefault(name, distribution) != distribution:
                raise SettingError(
                    f"the study has {name} as {known[name]} and as {distribution}; import trials of one space only"
                )
    if not known:
        raise SettingError("the study has no finished trial with parameters, from which its space could be known")
    always = [name for name in known if all(name in trial.params for trial in trials)]
    opens: dict[str, dict[Any, dict[str, Dimension]]] = {}
    for name in known:
        if name not in always:
            choice, values = _opened_by(name, always, known, trials)
            for value in values:
                opens.setdefault(choice, {}).setdefault(value, {})[name] = _dimension(known[name])
    return Space.of({name: _dimension(known[name], opens.get(name)) for name in always})


def _opened_by(
    name: str, always: Sequence[str], known: Mapping[str, BaseDistribution], trials: Sequence[FrozenTrial]
) -> tuple[str, list[object]]:
    """The categorical parameter that decides whether a trial has ``name``, and the values with which it has."""
    for choice in always:
        values = getattr(known[choice], "choices", None)
        if values is None:
            continue
        having = {trial.params[choice] for trial in trials if name in trial.params}
        lacking = {trial.params[choice] for trial in trials if name not in trial.params}
        if not having & lacking:
            return choice, [value for value in values if value in having]
    raise SettingError(
        f"some trials of the study have {name} and some do not, and no categorical parameter says which; import a "
        "study whose parameters depend on one choice at most"
    )


def _dimension(distribution: BaseDistribution, opens: Mapping[Any, Mapping[str, Dimension]] | None = None) -> Dimension:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match distribution:
        case CategoricalDistribution():
            return Choice(*distribution.choices, opens=opens)
        case IntDistribution() | FloatDistribution() if distribution.low == distribution.high:
            return Choice(distribution.low)
        case IntDistribution():
            return Int(
                distribution.low,
                distribution.high,
                distribution.log,
                distribution.step if distribution.step != 1 else None,
            )
        case FloatDistribution():
            return Float(distribution.low, distribution.high, distribution.log, distribution.step)
    raise SettingError(f"the study has {distribution}, which is of no kind that a space can have")
