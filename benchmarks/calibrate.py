"""Choose the constants of `lockstep predict` from a table of published throughputs, and say how well they predict.

python benchmarks/calibrate.py --write                 # the shipped constants, from benchmarks/published/scaling.csv
python benchmarks/calibrate.py --check                 # only how well they predict
python benchmarks/calibrate.py --nested source         # ... of each source, with all that is fitted from the others
python benchmarks/calibrate.py --batches               # ... the rates of single GPUs with smaller batches
python benchmarks/calibrate.py --nested half           # ... of each half of all models and GPUs, from the other half

Nothing is reported on a row that it was fitted on: a row is predicted without the rows of its own model and GPU. The
constants themselves are chosen so that rows left out like that, and by model and by source, are predicted best; with
``--nested`` rows, constants and the widths of intervals all come from other sources than the one that is reported, or
from the other half.

Only what is fitted is independent of what is reported. The form of the model (which traits count, and how), the guesses
near which constants are held, and how near, were settled by looking at errors on this same table, so a table that it
has not seen is a harder test: hold one against it with ``lockstep predict --table``.
"""

import argparse
import datetime
import hashlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from lockstep.scale.catalogue import open_catalogue
from lockstep.scale.predict_report import errors_of, rows_summary
from lockstep.scale.published import Comparison, PublishedRow, compare, read_rows
from lockstep.scale.scaling_loss import (
    INSIDE,
    MEAN,
    Constants,
    ScalingLoss,
    Traits,
    growth,
    in_common,
    observed,
    weighted_quantile,
)
from lockstep.scale.step_profile import fixed_share, time_at
from lockstep.scale.table_prediction import TablePrediction, predict_table, traits_of

TABLE = Path(__file__).parent / "published" / "scaling.csv"
BATCHES = TABLE.with_name("batch_sizes.csv")
DATA = Path(__file__).parents[1] / "src" / "lockstep" / "scale" / "calibration.json"
CHOSEN = (
    *("p", "q", "c", "noise", "measuring", "everything", "source", "unit", "unit_and_precision"),
    *("framework_and_precision", "words", "model", "model_gpu_precision", "run", "accumulation", "size", "like_size"),
    *("model_and_ranks", "gpu"),
)
FACTORS = (0.25, 0.6, 1.6, 4.0)
ANCHORS = (2, 4, 8)
HEAD = f"{'':<28}{'rows':>5}{'mean':>8}{'median':>8}{'p90':>8}{'inside':>8}{'width':>8}"
NEAR = 0.0002  #: badness of a constant that is e times its guess


def usable(comparison: Comparison) -> bool:
    """Whether a row says something about scaling alone: the same batch for each GPU, and no contradiction."""
    row = comparison.row
    return bool(row.throughput) and comparison.same_batch and not row.strong and not row.suspect


def traits(rows: Sequence[PublishedRow]) -> list[Traits]:
    """What the rows of a table say about systems."""
    catalogue = open_catalogue()
    return [traits_of(one, one.row, catalogue) for one in compare(rows)[0] if usable(one)]


class LeftOut:
    """Predictions of rows from those that remain when blocks of them are left out, all from one inverse."""

    def __init__(self, known: Sequence[Traits]) -> None:
        self.known = list(known)
        self.parts = in_common(known, known)
        self.loss = np.array([row.loss for row in known])
        by = {
            "subject": [(row.source, row.model, row.gpu) for row in known],
            "model": [row.model for row in known],
            "source": [row.source for row in known],
        }
        self.blocks = {name: [(b, b) for b in self._same(keys)] for name, keys in by.items()}
        self.anchored = [pair for block in self._same(by["subject"]) for pair in self._beyond_anchors(block)]

    @staticmethod
    def _same(keys: Sequence[object]) -> list[list[int]]:
        return [[i for i, key in enumerate(keys) if key == one] for one in dict.fromkeys(keys)]

    def _beyond_anchors(self, block: list[int]) -> list[tuple[list[int], list[int]]]:
        pairs = []
        for ranks in ANCHORS:
            for run in {self.known[i].run for i in block}:
                held = [i for i in block if self.known[i].run == run and self.known[i].ranks == ranks]
                asked = [i for i in block if self.known[i].run == run and self.known[i].ranks > ranks]
                if held and asked:
                    pairs.append(([i for i in block if i not in held], asked))
        return pairs

    def errors(self, c: Constants, blocks: Sequence[tuple[list[int], list[int]]]) -> np.ndarray:
        """Relative errors of throughput of the second of each pair, where the first is left out."""
        z, noise = observed(c, self.known)
        covariance = sum(getattr(c, name) * part for name, part in self.parts.items())
        inverse = np.linalg.inv(covariance + np.diag(noise))
        weighted = inverse @ (z - MEAN)
        found = []
        for left_out, asked in blocks:
            predicted = z[left_out] - np.linalg.solve(inverse[np.ix_(left_out, left_out)], weighted[left_out])
            for i in asked:
                row = self.known[i]
                y = row.simulated + (math.exp(predicted[left_out.index(i)]) - c.c) * growth(c, row)
                found.append(abs(math.exp(self.loss[i] - y) - 1))
        return np.array(found)

    def badness(self, c: Constants) -> float:
        """What is minimised: mean, median and tail of the errors, for each way to leave out."""
        weights = {"subject": 0.5, "model": 0.3, "source": 0.1}
        ways = [(weight, self.blocks[name]) for name, weight in weights.items()] + [(0.3, self.anchored)]
        total = 0.0
        for weight, blocks in ways:
            errors = self.errors(c, blocks)
            if len(errors):
                total += weight * (errors.mean() + 0.5 * np.median(errors) + 0.1 * np.quantile(errors, 0.9))
        return total


def choose(known: Sequence[Traits], rounds: int) -> Constants:
    """The constants that predict best what is left out, by a search along one of them after another.

    They are held near the guesses that they start from: without that, rows of another fifth are predicted worse.
    """
    left_out, guess = LeftOut(known), Constants()

    def badness(tried: Constants) -> float:
        away = sum(math.log(getattr(tried, name) / getattr(guess, name)) ** 2 for name in CHOSEN)
        return left_out.badness(tried) + NEAR * away

    best, least = guess, badness(guess)
    for _ in range(rounds):
        before = least
        for name in CHOSEN:
            for factor in FACTORS:
                tried = replace(best, **{name: min(2.0, getattr(best, name) * factor)})
                found = badness(tried)
                if found < least - 1e-5:
                    best, least = tried, found
        print(f"  badness {least:.5f}", file=sys.stderr)
        if before - least < 1e-4:
            break
    return best


def fixed_shares(rows: Sequence[PublishedRow]) -> dict[str, float]:
    """Median, least and most of what of a pass does not shrink: from single GPUs that have several batches.

    Each combination of source, model, GPU and precision has one value, and each model one vote.
    """
    found = []
    for pairs in smaller_batches(rows).values():
        shares = [fixed_share(small.batch / large.batch, time) for small, large, time in pairs]
        found.append((pairs[0][0].model, median(shares)))
    models = Counter(model for model, _ in found)
    shares, votes = [share for _, share in found], [1 / models[model] for model, _ in found]
    parts = {"fixed_share": 0.5, "fixed_share_least": (1 - INSIDE) / 2, "fixed_share_most": (1 + INSIDE) / 2}
    return {name: round(weighted_quantile(shares, votes, part), 3) for name, part in parts.items()} if found else {}


def smaller_batches(rows: Sequence[PublishedRow]) -> dict[object, list[tuple[PublishedRow, PublishedRow, float]]]:
    """For each model on a GPU its smaller batches, each with the largest and the time of a pass over that one's."""
    alike = defaultdict(list)
    for row in rows:
        if row.ranks == 1 and row.throughput and row.batch and not row.suspect:
            alike[row.source, row.model, row.gpu, row.precision, row.unit, row.strategy, row.sample].append(row)
    found = defaultdict(list)
    for key, several in alike.items():
        large = max(several, key=lambda row: row.batch)
        for row in several:
            if row.batch < large.batch:
                time = row.batch / row.throughput * large.throughput / large.batch
                found[key].append((row, large, time))
    return found


def batch_errors(rows: Sequence[PublishedRow]) -> dict[str, list[float]]:
    """Errors of the rates of smaller batches, by the share of a pass that does not shrink with them."""
    errors = defaultdict(list)
    for pairs in smaller_batches(rows).values():
        model = pairs[0][0].model
        others = fixed_shares([row for row in rows if row.model != model])["fixed_share"]
        for small, large, time in pairs:
            for name, share in (("that of other models", others), ("0.1", 0.1), ("0", 0.0)):
                errors[name].append(abs(time / time_at(small.batch / large.batch, share) - 1))
    return errors


def counts(one: TablePrediction) -> bool:
    """Whether a prediction is one of weak scaling, of a source that does not contradict itself."""
    return one.error is not None and not one.row.strong and not one.row.suspect


def fitted(rows: Sequence[PublishedRow], rounds: int) -> ScalingLoss:
    """Constants and rows of a model."""
    known = traits(rows)
    model = ScalingLoss(replace(choose(known, rounds), **fixed_shares(rows)), tuple(known))
    return replace(model, constants=replace(model.constants, beyond_anchored=beyond_anchored(model, rows)))


def beyond_anchored(model: ScalingLoss, rows: Sequence[PublishedRow]) -> float:
    """By how much nine of ten rows at most lie outside of their intervals where a row with several GPUs is known."""
    every = (one for anchor in ANCHORS for one in predict_table(rows, model, open_catalogue(), anchor)[0])
    found = [one for one in every if counts(one)]
    outside = [
        max(0.0, math.log(one.low / one.row.throughput), math.log(one.row.throughput / one.high)) for one in found
    ]
    return round(float(np.quantile(outside, INSIDE)), 4) if found else 0.0


def said(name: str, found: Sequence[TablePrediction]) -> str:
    """A line of a table: count, mean, median and 90th percentile of the error, coverage, width of the intervals."""
    one = errors_of(name, found)
    errors = f"{one.mean_error:>8.1%}{one.median_error:>8.1%}{one.tail_error:>8.1%}"
    return f"{name:<28}{one.rows:>5}{errors}{one.inside:>8.0%}{one.median_width:>8.0%}"


def linear(found: Sequence[TablePrediction], rows: Sequence[PublishedRow]) -> str:
    """The same line for throughput in proportion to the number of GPUs."""
    by_line = {one.row.line: one for one in compare(rows)[0]}
    as_linear = [replace(one, predicted=by_line[one.row.line].base_rate * one.row.ranks) for one in found]
    return said("linear", as_linear)[:-16]


def report(rows: Sequence[PublishedRow], model: ScalingLoss) -> None:
    """How well the model predicts a table, without the rows of the same source, model and GPU."""
    print(HEAD)
    every = [one for one in predict_table(rows, model, open_catalogue())[0] if counts(one)]
    single = [one for one in every if one.base_ranks == 1]
    print(linear(single, rows))
    print(said("from one GPU", single))
    print(said("from the fewest GPUs", every))
    for anchor in ANCHORS:
        found = [one for one in predict_table(rows, model, open_catalogue(), anchor)[0] if counts(one)]
        print(said(f"anchor at {anchor} GPUs", found))


def half_of(row: PublishedRow) -> object:
    """One of two halves, of which all rows of a model and GPU are in the same."""
    return hashlib.sha256("|".join(row.subject).encode()).digest()[0] % 2


def source_of(row: PublishedRow) -> object:
    """Where a row was published."""
    return row.source


def nested(
    rows: Sequence[PublishedRow], rounds: int, fold: Callable[[PublishedRow], object] = source_of
) -> list[TablePrediction]:
    """Predictions of the rows of each fold by a model whose rows and constants come from all other folds."""
    found = []
    for left_out in dict.fromkeys(map(fold, rows)):
        asked = [row for row in rows if fold(row) == left_out]
        if compare(asked)[0]:
            model = fitted([row for row in rows if fold(row) != left_out], rounds)
            found += predict_table(asked, model, open_catalogue())[0]
    return found


FOLDS = {"source": source_of, "half": half_of}


def by_source(found: Sequence[TablePrediction]) -> dict[str, list[TablePrediction]]:
    """The predictions for each source."""
    sources = dict.fromkeys(one.row.source for one in found)
    return {source: [one for one in found if one.row.source == source] for source in sources}


def main() -> None:
    """Read the table, and do what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--rounds", type=int, default=2, help="over all constants (default: 2)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help=f"to {DATA.name} of the package")
    what.add_argument("--check", action="store_true")
    what.add_argument("--nested", choices=FOLDS)
    what.add_argument("--batches", action="store_true", help="how well the rates of smaller batches are predicted")
    given = parser.parse_args()
    rows, _ = read_rows(given.table.read_text(encoding="utf-8"))
    single, _ = read_rows(BATCHES.read_text(encoding="utf-8"))
    if given.batches:
        for share, found in batch_errors([*rows, *single]).items():
            print(f"{share:<22}{len(found):>4} batches: error {fmean(found):.1%} mean, {median(found):.1%} median")
        return
    if given.nested:
        found = nested([*rows, *single], given.rounds, FOLDS[given.nested])
        print("\n".join([HEAD, *(said(source, one) for source, one in by_source(found).items()), *rows_summary(found)]))
        return
    if given.write:
        model = fitted([*rows, *single], given.rounds)
        today = datetime.date.today().isoformat()
        origin = f"benchmarks/published/{given.table.name}, {len(model.known)} of {len(rows)} rows"
        DATA.write_text(replace(model, date=today, origin=origin).as_json(), encoding="utf-8")
        print(asdict(model.constants), file=sys.stderr)
    report(rows, ScalingLoss.read(DATA.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
