"""One-line errors planted in the parts that carry the promise, and which tests catch each: ``make mutants``.

    source ──► copy with one error ──► the tests that should notice, stopped at the first that does ──► a line
                                       (that one passes without the error, else it has noticed nothing)

    .venv/bin/python tests/harness/mutants.py               all of them
    .venv/bin/python tests/harness/mutants.py buffers norm  those whose name has one of these words

A mutant that no test notices is a hole in the suite, or changes nothing that anybody could see; docs/notebook.md says
of each survivor which. `tests/docs/test_mutants.py` sees to it that every line named here is still in the source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lockstep"
AT_ONCE = 2
LIMIT_S = 600

HAND = "tests/promises/test_by_hand.py"
BUFFERS = "tests/ranks/strategies/test_buffers.py"
LAYOUTS = "tests/ranks/strategies/test_layouts.py"
STRATEGIES = "tests/ranks/strategies/test_strategies.py"
GRAPHS = "tests/ranks/strategies/test_graphs.py"
NAMES_TWICE = "tests/ranks/run/test_names_used_twice.py"
LINE_CALLS = "tests/unit/run/test_line_calls.py"
RESUMES = "tests/ranks/run/test_resume_proof.py"
LEARNS = "tests/ranks/run/test_what_learns.py"
CARRY = "tests/ranks/run/test_carry.py"
STEP = "tests/ranks/run/test_end_of_step.py"
LOOPS = "tests/ranks/run/test_loops.py"
STEPS = "tests/ranks/run/test_steps.py"
DIVERGENCE = "tests/ranks/run/test_divergence.py"
IDENTITY = "tests/ranks/run/test_identity.py"
BATCH_LOSSES = "tests/unit/run/test_batch_losses.py"
LOSS_ITEMS = "tests/ranks/run/test_loss_items.py"
WRITTEN_FILES = "tests/ranks/run/test_written_files.py"
SHARES = "tests/ranks/run/test_shares_of_ranks.py"
BUFFER_MOVES = "tests/ranks/run/test_buffer_moves.py"
GRADIENT_HOOKS = "tests/ranks/run/test_gradient_hooks.py"
FINITE = "tests/ranks/run/test_nonfinite.py"
REGISTRATION = "tests/ranks/run/test_registration.py"
RANDOMNESS = "tests/ranks/run/test_randomness.py"
LOOP = "tests/ranks/run/test_run.py"
GUARDS = "tests/ranks/run/test_guards.py"
SAMPLERS = "tests/ranks/run/test_samplers.py"
WORLDS = "tests/promises/test_transparency.py"
WORLD = "tests/unit/world/test_world.py"
METRICS = "tests/unit/run/test_metrics.py"
MEAN = "tests/promises/test_mean_gradient.py"
OPERATIONS = "tests/ranks/strategies/test_divided_parameters.py::test_it_has_the_result_of_one_rank_or_is_refused"
TRAINING = "tests/ranks/strategies/test_divided_parameters.py::test_what_a_script_does_while_it_trains"
DRAWS = "tests/ranks/strategies/test_absent_parameters.py::test_ranks_draw_alike_or_it_is_refused"
SERVED = "tests/ranks/strategies/test_absent_parameters.py::test_what_servers_do_not_run_is_refused"
SHARED_INPUTS = "tests/ranks/strategies/test_shared_inputs.py"
LEFT_BEHIND = "tests/ranks/run/test_emergency.py::test_files_of_earlier_generations_are_found_wherever_there_was_room"
CHECKSUM = "tests/ranks/data/test_iterable_dataset.py::test_a_checksum_tells_samples_apart_and_is_the_same_for_copies"
SCHEDULER = "tests/ranks/run/test_guards.py::test_a_scheduler_that_the_script_steps_too"
PREDICT = "tests/ranks/scale/test_predict.py::test_what_it_refuses"
MEMBERSHIP = "tests/unit/launch/test_membership.py"
COLLECTIVES = ("tests/unit/collectives", "tests/ranks/collectives")
DATA = ("tests/unit/data", "tests/ranks/data")
RUN = ("tests/unit/run", "tests/ranks/run")
BAYESIAN = "tests/unit/tune/search/test_bayesian.py"
SEARCHES = "tests/ranks/tune/test_searches.py"
CHECKPOINT = ("tests/unit/checkpoint", "tests/promises/test_power.py", "tests/ranks/checkpoint")


@dataclass(frozen=True)
class Mutant:
    """One error: in ``file``, where ``old`` stands once, ``new`` stands instead."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """Such as ``run/run.py: after_step(1) for after_step(...)``."""
        return f"{self.file}: {_short(self.new)}   for   {_short(self.old)}"


def _short(text: str) -> str:
    return " ".join(text.split())[:70]


def mutant(file: str, old: str, new: str, *tests: str) -> Mutant:
    """A `Mutant`."""
    return Mutant(file, old, new, tests)


MUTANTS = [
    # ---- the tree, and who computes what
    mutant(
        "collectives/reduction_tree.py",
        "        middle = (first + end) // 2\n        return within(",
        "        middle = first + 1\n        return within(",
        "tests/unit/collectives",
        "tests/ranks/collectives",
    ),
    mutant(
        "collectives/reduction_tree.py",
        "if above is None or parent_of(self._micro_batches, left) != above:",
        "if above is None:",
        "tests/unit/collectives",
        "tests/ranks/collectives",
    ),
    mutant(
        "collectives/all_reduce.py",
        "return [pieces[place] for place in plan.folded.values()]",
        "return pieces[: len(plan.folded)]",
        "tests/unit/collectives",
        "tests/ranks/collectives",
        WORLDS,
    ),
    mutant(
        "collectives/reduction_plan.py",
        "len(nodes_by_rank) == 2 and all(len(nodes) == 1",
        "len(nodes_by_rank) > 1 and all(len(nodes) == 1",
        "tests/unit/collectives",
        "tests/ranks/collectives",
    ),
    mutant(
        "batch.py",
        "end in (rank - place, rank - place + ranks)",
        "end in (rank, rank - place + ranks)",
        "tests/unit/test_batch.py",
    ),
    mutant(
        "batch.py",
        "return range(start + (place + stop - start) % ranks, stop, ranks)",
        "return range(start + place, stop, ranks)",
        "tests/unit/test_batch.py",
    ),
    mutant(
        "batch.py",
        "return range(micro_batches * rank // self.world_size, m",
        "return range(-(-micro_batches * rank // self.world_size), m",
        "tests/unit/test_batch.py",
    ),
    mutant(
        "collectives/reduce_scatter.py",
        "held if id(held) in before else held.clone()",
        "held",
        "tests/ranks/collectives/test_reduce_scatter.py",
    ),
    mutant(
        "collectives/shared_memory.py",
        "free &= said[-1]",
        "free |= said[-1]",
        "tests/ranks/collectives/test_shared_memory_gather.py",
    ),
    mutant(
        "collectives/shared_memory.py",
        "turn, count = self._number % 2, ",
        "turn, count = 0, ",
        "tests/ranks/collectives/test_reduce_scatter.py",
    ),
    mutant(
        "batch.py",
        "return -(-samples // self.micro_batch)",
        "return samples // self.micro_batch",
        "tests/unit/test_batch.py",
    ),
    mutant(
        "batch.py",
        "return samples // self.global_batch if drop_last else",
        "return samples // self.global_batch if not drop_last else",
        "tests/unit/test_batch.py",
    ),
    mutant(
        "data/indexed/orders.py",
        'return torch.Generator().manual_seed(seed_of(seed, "order", epoch))',
        'return torch.Generator().manual_seed(seed_of(seed, "order"))',
        "tests/unit/data",
        "tests/ranks/data",
        HAND,
    ),
    mutant(
        "data/indexed/orders.py",
        "_seed(part, seed_of(",
        "(lambda *_: None)(part, seed_of(",
        "tests/unit/data",
        "tests/ranks/data",
    ),
    mutant(
        "data/indexed/orders.py",
        "            set_epoch(epoch)",
        "            set_epoch(0)",
        "tests/unit/data",
        "tests/ranks/data",
    ),
    mutant("data/indexed/indexed_loader.py", '("at", rows.start)', "(indices[0],)", *DATA),
    mutant(
        "run/batches/loaders.py",
        '"the order of a data set")\n        odd = [rank for rank, other in enumerate(others, 1) if other != first]',
        '"the order of a data set")\n        odd = [rank for rank, other in enumerate(others, 1) if other < ""]',
        SAMPLERS,
    ),
    mutant(
        "run/batches/loaders.py",
        '"samples of a data set")\n        odd = [rank for rank, other in enumerate(others, 1) if other != first]',
        '"samples of a data set")\n        odd = [rank for rank, other in enumerate(others, 1) if other < 0]',
        "tests/ranks/run/test_identity.py",
    ),
    mutant(
        "run/setup/run_checkpoints.py", "if was_epoch == epoch and was != digest", "if was_epoch is digest", SAMPLERS
    ),
    mutant(
        "batch.py",
        "samples = min(self.micro_batch, step_samples - index * self.micro_batch)",
        "samples = self.micro_batch",
        "tests/unit/data",
        "tests/ranks/data",
    ),
    mutant(
        "batch.py",
        "return step, number - self.micro_starts[step]",
        "return step, 0",
        "tests/unit/data",
        "tests/ranks/data",
        HAND,
    ),
    mutant(
        "data/indexed/sampling.py",
        "return -(-micro_batches // plan.world_size) - own",
        "return micro_batches // plan.world_size - own",
        "tests/unit/data",
        "tests/ranks/data",
    ),
    mutant(
        "data/indexed/indexed_loader.py",
        'seed_of(self.seed, "samples", epoch, *mark)',
        'seed_of(self.seed, "samples", *mark)',
        "tests/unit/data",
        "tests/ranks/data",
        HAND,
    ),
    mutant(
        "data/indexed/indexed_loader.py",
        'seed_of(self.seed, "samples", epoch, *mark)',
        'seed_of(self.seed, "samples", epoch)',
        "tests/unit/data",
        "tests/ranks/data",
        HAND,
    ),
    mutant(
        "data/iterable/iterable_dataset.py",
        'seed_of(seed, "collate", epoch, step, index)',
        'seed_of(seed, "collate", epoch, step)',
        "tests/unit/data",
        "tests/ranks/data",
    ),
    mutant(
        "data/iterable/iterable_dataset.py",
        'seed_of(self._share.seed, "samples", epoch, step, index)',
        'seed_of(self._share.seed, "samples", step, index)',
        "tests/unit/data",
        "tests/ranks/data",
    ),
    mutant(
        "data/iterable/iterable_dataset.py",
        "mark = checksum(first[:1])",
        "mark = 0",
        "tests/unit/data",
        "tests/ranks/data",
    ),
    # ---- gradients
    mutant(
        "strategies/replicated/ddp.py",
        "gradients = views_of(flat, parameters)",
        "gradients = list(bucket.gradients())",
        LAYOUTS,
        HAND,
    ),
    mutant(
        "strategies/replicated/ddp.py",
        "partials = [] if position.is_padding else accumulator.partials(",
        "partials = accumulator.partials(",
        HAND,
        WORLDS,
    ),
    mutant(
        "strategies/replicated/ddp.py",
        "for p in reducer.trained}:\n                self._reduce(reducer, init_sync=False)",
        "for p in reducer.trained}:\n                pass",
        LEARNS,
    ),
    mutant(
        "strategies/replicated/ddp.py",
        "if reducer.strides_have_changed():\n                self._reduce(reducer, init_sync=False)",
        "if reducer.strides_have_changed():\n                pass",
        LAYOUTS,
    ),
    mutant("strategies/replicated/ddp.py", "if not self._exact:  # else", "if True:  # else", GRAPHS),
    mutant(
        "strategies/sharded/whole_gradients.py",
        "gradient_like(parameter, piece)",
        "piece.view(parameter.shape)",
        LAYOUTS,
    ),
    mutant(
        "run/inputs/shared_inputs.py",
        "self._newest.update({**values, **self._newest})",
        "self._newest.update(values)",
        NAMES_TWICE,
    ),
    mutant("run/source/line_calls.py", "if not _is_of_body(value)", "if value is not None", LINE_CALLS),
    mutant(
        "run/proofs/resume_proof.py",
        "_OF_BODY, _relative_of_texts(was, is_now) if is_text else 0)",
        "_OF_BODY, 0)",
        RESUMES,
    ),
    mutant(
        "strategies/parts/gradient_accumulation.py",
        "parameter.grad = None\n        gradients.append(gradient.resolve_conj())",
        "gradients.append(gradient.resolve_conj())",
        HAND,
        LAYOUTS,
    ),
    mutant(
        "strategies/parts/gradient_accumulation.py",
        "foreach_mul_(gradients, samples / counted)",
        "foreach_mul_(gradients, 1.0)",
        MEAN,
        HAND,
    ),
    mutant(
        "strategies/parts/sparse_gradients.py",
        "table[gradient.indices()[0]] = torch.cat([values, values.new_ones(len(values), 1)], 1)",
        "table[gradient.indices()[0]] = torch.cat([values, values.new_zeros(len(values), 1)], 1)",
        LAYOUTS,
    ),
    mutant(
        "strategies/parts/sparse_gradients.py",
        "    gradient = gradient.coalesce()\n    values",
        "    gradient = gradient._coalesced_(True)\n    values",
        LAYOUTS,
    ),
    mutant(
        "strategies/replicated/zero.py",
        "if self._owner_of(parameter) != self._rank:",
        "if False:",
        "tests/ranks/strategies/test_zero.py",
    ),
    mutant(
        "strategies/parts/grad_norm.py",
        "gradient = torch.view_as_real(gradient.resolve_conj())",
        "gradient = gradient.real",
        LAYOUTS,
        HAND,
    ),
    mutant(
        "strategies/parts/grad_norm.py",
        "left += sums[:, kept:width]",
        "left[:] = sums[:, kept:width]",
        "tests/unit/strategies/test_grad_norm.py",
    ),
    # ---- buffers
    mutant(
        "strategies/parts/buffers.py",
        "pieces = sums[: sum(sizes)].div_(of).split(sizes)",
        "pieces = sums[: sum(sizes)].split(sizes)",
        BUFFERS,
        HAND,
    ),
    mutant(
        "strategies/parts/buffers.py",
        "        with torch.no_grad():\n            self._accumulate(position)\n        self._restore_base()",
        "        with torch.no_grad():\n            self._accumulate(position)",
        STRATEGIES,
        BUFFERS,
    ),
    mutant(
        "strategies/parts/buffers.py",
        "if self._by_value:\n            unversioned",
        "if False:\n            unversioned",
        BUFFERS,
    ),
    mutant(
        "strategies/parts/buffers.py",
        "return buffer.is_floating_point() or buffer.is_complex()",
        "return buffer.is_floating_point()",
        BUFFERS,
    ),
    mutant(
        "strategies/parts/buffers.py",
        "torch.where(present, most, bounds.min).amax(0)",
        "torch.where(present, least, bounds.max).amin(0)",
        BUFFERS,
    ),
    mutant(
        "strategies/parts/buffers.py",
        "if i not in self._norms and (self._by_value",
        "if False and (self._by_value",
        BUFFERS,
    ),
    mutant("strategies/parts/buffers.py", "base.masked_fill_(~base.isfinite(), 0)", "pass", BUFFERS),
    mutant("run/state/registered.py", "buffers[name].copy_(value)", "pass", BUFFERS),
    mutant("run/state/registered.py", "parameter.requires_grad_(learn[name])", "pass", LEARNS),
    # ---- the order of a step
    mutant(
        "run/loop/train_step.py",
        "items = position.samples if count is None else count",
        "items = 1 if count is None else count",
        HAND,
        MEAN,
    ),
    mutant(
        "run/loop/train_step.py",
        "if counts:\n                self._measure(value, items, position.index, target)",
        "if True:\n                self._measure(value, items, position.index, target)",
        HAND,
        LOOP,
    ),
    mutant("run/loop/train_step.py", "if not self._precision.update_scale():", "if False:", HAND, FINITE),
    mutant(
        "run/loop/train_step.py",
        "        self._strategy.end_micro_batch(current.position)\n        self._precision.forget_casts()",
        "        self._precision.forget_casts()",
        STEP,
        HAND,
        WORLDS,
    ),
    mutant("run/loop/train_step.py", "        self._precision.forget_casts()\n", "", STEP, STEPS),
    mutant("run/loop/train_step.py", "if id(scheduler.optimizer) in stepped:", "if True:", LOOP, STEP, HAND),
    mutant(
        "run/loop/train_step.py",
        "        self._losses.clear()\n        self._closures.discard()",
        "        self._closures.discard()",
        LOOP,
        STEP,
        MEAN,
    ),
    mutant("run/loop/train_step.py", "if len(due) == len(self._state.optimizers):", "if due:", STEP, WORLDS),
    mutant(
        "run/loop/step_losses.py",
        "names = [self._state.name_of(p) for p in target.parameters if p.grad is not None]",
        "names = []",
        LEARNS,
    ),
    mutant(
        "run/loop/step_losses.py",
        "if self.has_counts[target] != counts and not position.is_padding:",
        "if False:",
        GUARDS,
        "tests/unit/run",
        "tests/ranks/run",
    ),
    mutant(
        "run/checks/loop_checks.py",
        "        now = self._options_now()\n        if now == self._options:",
        "        now = self._options_now()\n        if True:",
        LEARNS,
    ),
    mutant(
        "run/checks/loop_checks.py", "if self.run_steps:\n            return", "if True:\n            return", LEARNS
    ),
    mutant("run/checks/loop_checks.py", "if _mark(self._state.kept[name]) != mark:", "if False:", STEP),
    mutant(
        "run/checks/loop_checks.py",
        "            if was != version_of(buffer):\n                raise",
        "            if False:\n                raise",
        "tests/unit/run",
        "tests/ranks/run",
        BUFFERS,
    ),
    mutant("run/setup/kernels.py", "return not skipped", "return True", HAND),
    mutant(
        "run/loop/train_step.py",
        "nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)",
        "pass",
        HAND,
        MEAN,
    ),
    mutant(
        "run/setup/kernels.py",
        "            self._scaler.load_state_dict(state)",
        "            pass",
        "tests/unit/run",
        "tests/ranks/run",
        "tests/promises/test_faults.py",
    ),
    # ---- metrics
    mutant(
        "run/metrics/metric_means.py",
        "self.units += numerator * weight <<",
        "self.units += numerator <<",
        HAND,
        METRICS,
    ),
    mutant(
        "run/metrics/metric_means.py",
        "items = samples if count is None else",
        "items = samples if True else",
        HAND,
        METRICS,
        LOOP,
    ),
    mutant(
        "run/metrics/metric_means.py",
        "        else:\n            self.odd += value",
        "",
        METRICS,
    ),
    mutant("run/state/snapshot.py", 'self._metrics.train.load(tree["measures"], here=leads)', "pass", STEP, WORLDS),
    mutant(
        "run/state/snapshot.py",
        'self._position.metrics = dict(tree["metrics"])',
        "pass",
        STEP,
        LOOP,
        "tests/promises/test_faults.py",
    ),
    mutant(
        "run/loop/rank_operations.py",
        "is_whole = not (value.is_floating_point() or value.is_complex())",
        "is_whole = False",
        "tests/unit/run",
        "tests/ranks/run",
    ),
    # ---- randomness
    mutant(
        "run/loop/training_loop.py",
        'seed_of(context.settings.seed, "step", step, position.index)',
        'seed_of(context.settings.seed, "step", position.index)',
        HAND,
    ),
    mutant(
        "run/loop/training_loop.py",
        'seed_of(context.settings.seed, "step", step, position.index)',
        'seed_of(context.settings.seed, "step", step)',
        HAND,
    ),
    mutant(
        "run/loop/evaluation_loop.py",
        "seed_generators(seed_of(*seed_key, at.step, at.index))",
        "seed_generators(seed_of(*seed_key, at.index))",
        RANDOMNESS,
        HAND,
    ),
    mutant("run/loop/evaluation_loop.py", "        position.evaluations += 1\n", "        pass\n", RANDOMNESS),
    mutant(
        "run/loop/evaluation_loop.py",
        '(context.settings.seed, "evaluate", position.progress.step, position.evaluations)',
        '(context.settings.seed, "evaluate", 0, position.evaluations)',
        RANDOMNESS,
        HAND,
    ),
    mutant(
        "run/loop/training_loop.py",
        "            self._position.seed_script()\n\n    # ---- its length",
        "\n    # ---- its length",
        RANDOMNESS,
    ),
    mutant("run/loop/end_of_step.py", '        self._position.seed_script("body")\n', "", RANDOMNESS),
    # ---- the end of a step, and a resume
    mutant(
        "run/loop/training_loop.py",
        "            modes.begin_pass()\n",
        "            pass\n",
        RANDOMNESS,
        "tests/unit/run",
        "tests/ranks/run",
    ),
    mutant(
        "run/loop/evaluation_loop.py",
        "                with torch.no_grad():\n                    buffer.copy_(before)",
        "                pass",
        BUFFERS,
    ),
    mutant(
        "run/setup/resume.py",
        "        self._restore(tree)\n        self._snapshot.restore_evaluations(tree)\n",
        "        self._snapshot.restore_evaluations(tree)\n",
        STEP,
    ),
    mutant(
        "run/loop/training_loop.py",
        "            self._leave_before_end()\n            raise",
        "            raise",
        STEP,
        LOOPS,
    ),
    mutant(
        "run/loop/training_loop.py",
        "            if not self._passes.is_open(names, site):\n                return False\n",
        "",
        LOOPS,
    ),
    mutant(
        "run/loop/epochs.py", "        if cursor.moved and cursor.site != site:\n            return False\n", "", LOOPS
    ),
    mutant("run/loop/epochs.py", "self._repeated.get(names[0], 0) < cursor.number", "False", LOOPS),
    mutant(
        "run/loop/epochs.py", "return epoch if number == 0 else seed_of", "return epoch if True else seed_of", LOOPS
    ),
    mutant(
        "run/loop/evaluation_loop.py",
        "            self._position.evaluations_done = self._position.evaluations\n",
        "",
        LOOPS,
    ),
    mutant(
        "run/loop/evaluation_loop.py",
        'self._position.seed_script("body" if in_body else "outside")',
        "self._position.seed_script()",
        LOOPS,
    ),
    mutant(
        "run/loop/evaluation_loop.py",
        'self._position.seed_script("body" if in_body else "outside")',
        "pass",
        LOOPS,
        STEPS,
    ),
    mutant("run/loop/training_loop.py", "            self._metrics.forget_step()\n", "", STEPS),
    mutant("run/loop/step_data.py", "and not self._strategy.goes_on()", "and False", STEPS),
    mutant(
        "run/setup/resume.py",
        "self._tree_within_turn = tree if self._snapshot.restore_position(tree) else None",
        "self._tree_within_turn = tree if self._snapshot.restore_position(tree) or True else None",
        STEP,
        LOOP,
    ),
    mutant("run/run.py", "if not (self._start.resumes_within_turn or", "if not (False or", STEP),
    mutant(
        "progress.py",
        "replace(self, epoch=self.epoch + 1, epoch_step=0)",
        "replace(self, epoch=self.epoch + 1)",
        "tests/unit/test_progress.py",
        HAND,
    ),
    mutant("progress.py", "self.samples + samples", "self.samples + 1", "tests/unit/test_progress.py", LOOP),
    mutant("run/state/carried_state.py", "self._by_index |= self._written", "pass", CARRY),
    mutant("run/state/carried_state.py", "if self._used and position.of != self._of:", "if False:", CARRY),
    mutant(
        "run/state/carried_state.py",
        "run = self._runs(self._group.rank, of) if everything else range(0)",
        "run = range(of)",
        CARRY,
    ),
    # ---- ranks that differ, what is not finite, who the run is
    mutant(
        "run/state/snapshot.py",
        "        self._divergence.compare(\n            shared,",
        "        return\n        self._divergence.compare(\n            shared,",
        DIVERGENCE,
    ),
    mutant(
        "run/loop/end_of_step.py",
        "return self.steps == self._steps_before_pass + 1 or self._is_check_due",
        "return self._is_check_due",
        DIVERGENCE,
    ),
    mutant(
        "run/checks/divergence.py",
        "    return numbers | 1",
        "    return torch.ones_like(numbers)",
        DIVERGENCE,
    ),
    mutant(
        "run/checks/nonfinite.py",
        "        if math.isfinite(value):",
        "        if not math.isnan(value):",
        FINITE,
    ),
    mutant(
        "run/loop/train_step.py",
        "not self._precision.scales and not position.is_padding and not",
        "not self._precision.scales and not",
        FINITE,
    ),
    mutant("run/loop/gradient_hooks.py", "hooks.update(own)", "pass", GRADIENT_HOOKS),
    mutant("run/loop/gradient_hooks.py", 'self._position.seed_script("hooks")', "pass", GRADIENT_HOOKS),
    mutant("run/loop/closures.py", "self._hooks.call(target.parameters)", "pass", GRADIENT_HOOKS),
    mutant("run/checks/written_files.py", "if len(some) > 1", "if some", WRITTEN_FILES),
    mutant("run/checks/written_files.py", "if place not in told", "if place", WRITTEN_FILES),
    mutant("run/checks/loss_items.py", "if len(children) != 1:", "if False:", LOSS_ITEMS),
    mutant(
        "run/loop/train_step.py", "elif self.current is not None and not self.current.complete", "elif False", SHARES
    ),
    mutant(
        "run/inputs/told_parts.py",
        "follower.is_in_body = context is contexts[0]",
        "follower.is_in_body = True",
        "tests/ranks/run/test_apart_for_a_while.py",
    ),
    mutant("run/checks/buffer_moves.py", "if len(rows) == samples else", "if rows else", BUFFER_MOVES),
    mutant("run/checks/buffer_moves.py", "kept.any() and torch", "torch", BUFFER_MOVES),
    mutant("run/checks/buffer_moves.py", "(moved.sum() == samples) & ", "", BUFFER_MOVES),
    mutant("run/checks/batch_losses.py", "return between > _LEAST * most", "return True", BATCH_LOSSES),
    mutant("run/checks/batch_losses.py", "if 0 < chosen < samples:", "if chosen:", BATCH_LOSSES),
    mutant("run/checks/loss_items.py", "if samples == step_samples or", "if", LOSS_ITEMS),
    mutant(
        "run/loop/training_loop.py",
        "        self._context.inputs.begin_pass(self._position.progress.step)\n",
        "",
        "tests/ranks/run/test_apart_for_a_while.py",
    ),
    mutant(
        "run/state/whole_models.py",
        "        self._snapshot.compare_models()\n",
        "",
        "tests/ranks/run/test_whole_models.py",
    ),
    mutant(
        "run/batches/loaders.py",
        "marks += checksums(loader.rows_in_memory())",
        "pass",
        "tests/ranks/run/test_identity.py",
    ),
    mutant(
        "run/inputs/body_changes.py",
        "not context.is_between and is_of_items(",
        "not context.is_between or is_of_items(",
        "tests/ranks/run/test_training_inputs.py",
    ),
    mutant("run/checks/loss_items.py", "if sizes in shapes:", "if False:", LOSS_ITEMS),
    mutant(
        "run/checks/loss_items.py",
        '(kind == "Mul" and round(1 / other, 6) % samples != 0)',
        'kind == "Mul"',
        LOSS_ITEMS,
    ),
    mutant("run/checks/loss_items.py", "divisor not in (None, elements)", "divisor is not None", LOSS_ITEMS),
    mutant("run/checks/nonfinite.py", "cmath.isfinite(sum([each.item() for each in sums]))", "True", FINITE),
    mutant(
        "run/setup/identity.py",
        "return [name for name, digest in now.items() if before.get(name, digest) != digest]",
        "return []",
        IDENTITY,
    ),
    mutant("run/setup/identity.py", "        if was != kind:", "        if False:", IDENTITY),
    mutant(
        "run/setup/registration.py",
        "        if parameter in state.known_parameters:",
        "        if False:",
        REGISTRATION,
    ),
    # ---- what a script does to parameters that this rank does not hold, or holds in part
    mutant(
        "strategies/not_whole/divided_operations.py",
        "_READ_NO_VALUES: Final = _DRAWS[:11]",
        "_READ_NO_VALUES: Final = _DRAWS",
        OPERATIONS,
    ),
    mutant(
        "strategies/not_whole/divided_operations.py",
        "return in_parts or (name in _BY_ROWS and op not in _NOT_BY_ROWS)",
        "return in_parts or name in _BY_ROWS",
        OPERATIONS,
    ),
    mutant(
        "strategies/not_whole/divided_operations.py",
        "return _whole(group, op, args, kwargs) if on_cpu else",
        "return _whole(group, op, args, kwargs) if not on_cpu else",
        OPERATIONS,
    ),
    mutant(
        "strategies/not_whole/divided_operations.py",
        "    if whole.stride() == tensor.stride():",
        "    if True:",
        OPERATIONS,
    ),
    mutant(
        "strategies/not_whole/divided_operations.py",
        "            set_custom_handlers(op_dispatcher(DTensor), dict(_of_torch))",
        "            pass",
        OPERATIONS,
    ),
    mutant(
        "strategies/not_whole/divided_operations.py",
        "_handlers.update(dict.fromkeys(",
        "dict().update(dict.fromkeys(",
        TRAINING,
    ),
    mutant(
        "strategies/not_whole/divided_operations.py",
        "is_exact = isinstance(args[1], int | float) and args[1] in _EXACT_EXPONENTS",
        "is_exact = True",
        OPERATIONS,
    ),
    mutant(
        "strategies/not_whole/held_parameters.py",
        "if gathered is not None and version_of(gathered) != version:",
        "if False:",
        TRAINING,
    ),
    mutant("strategies/not_whole/held_parameters.py", "if value is not parameter and (", "if False and (", TRAINING),
    mutant(
        "strategies/sharded/sharded_blocks.py",
        "        self._computes_step = False\n        for root",
        "        for root",
        TRAINING,
    ),
    mutant(
        "strategies/sharded/sharded_blocks.py",
        "            self._evaluates = False\n            self.reshard()",
        "            self._evaluates = False",
        TRAINING,
    ),
    mutant("strategies/sharded/finished_blocks.py", "if not tensor.is_leaf:", "if True:", SHARED_INPUTS),
    mutant(
        "strategies/sharded/finished_blocks.py",
        "        if call.over:\n            return gradient\n",
        "",
        SHARED_INPUTS,
    ),
    mutant("strategies/sharded/finished_blocks.py", "else len(self._calls)))", "else call.number))", SHARED_INPUTS),
    mutant(
        "strategies/sharded/finished_blocks.py",
        "            if call.recomputes:",
        "            if False:",
        SHARED_INPUTS,
    ),
    mutant(
        "strategies/not_whole/absent_parameters.py",
        "            func(*pytree.tree_map(self._in_memory, args)",
        "            (lambda *_, **__: None)(*pytree.tree_map(self._in_memory, args)",
        DRAWS,
    ),
    mutant(
        "strategies/not_whole/absent_parameters.py",
        "if is_read or func.overloadpacket in _BY_VALUES:",
        "if is_read:",
        DRAWS,
    ),
    mutant(
        "strategies/not_whole/absent_parameters.py",
        "changes = schema_of(func).is_mutable and self._in_loop()",
        "changes = False",
        SERVED,
    ),
    mutant(
        "strategies/not_whole/absent_parameters.py",
        "changes = schema_of(func).is_mutable and self._in_loop()",
        "changes = schema_of(func).is_mutable",
        SERVED,
    ),
    mutant(
        "strategies/parameter_server/parameter_server.py",
        "        self._parameters.check_copies(ends=True)\n        return complete\n\n    def finish_training",
        "        return complete\n\n    def finish_training",
        SERVED,
    ),
    mutant(
        "run/loop/training_loop.py",
        "                    self._end_of_step.error = error\n            self._leave_before_end",
        "                    raise error\n            self._leave_before_end",
        SERVED,
    ),
    mutant(
        "strategies/delegation.py",
        "    begin_micro_batch = _delegated()\n",
        "",
        "tests/ranks/strategies/test_zero.py",
        STRATEGIES,
    ),
    mutant(
        "strategies/replicated/ddp_reducer.py",
        "unseen = self.find_unused_parameters and not has_begun",
        "unseen = False",
        STRATEGIES,
        HAND,
    ),
    mutant(
        "strategies/replicated/ddp_reducer.py",
        "find_unused_parameters and not static_graph",
        "find_unused_parameters",
        "tests/ranks/strategies/test_graphs.py",
    ),
    # ---- what ranks compare of their data; who steps a scheduler
    mutant(
        "data/seen_samples.py",
        "value = os.path.basename(value)",
        "pass",
        "tests/ranks/data/test_iterable_dataset.py::test_a_checksum_does_not_depend_on_where_a_file_lies",
    ),
    mutant(
        "data/seen_samples.py",
        "so_far = _checksum(part, _checksum(key, so_far))",
        "so_far = _checksum(part, so_far)",
        CHECKSUM,
    ),
    mutant(
        "data/indexed/indexed_loader.py",
        "            with seeded_generators(_LOOK_SEED):\n",
        "            if True:\n",
        "tests/ranks/run/test_identity.py::test_ranks_that_hold_other_samples_are_refused",
    ),
    mutant(
        "data/indexed/indexed_loader.py",
        "iter(self._own if self._in_pass() else self._all)",
        "iter(self._own)",
        "tests/ranks/data/test_loader.py::test_a_loop_of_the_scripts_own_reads_all_outside_of_a_pass_and_this_ranks_part_within",
    ),
    mutant(
        "run/state/registered_scheduler.py",
        "        self._counts = self._count()",
        "        self._counts = None",
        SCHEDULER,
    ),
    mutant("run/state/registered_scheduler.py", 'getattr(self.scheduler, "_schedulers", ())', "()", SCHEDULER),
    # ---- what generations leave; launchers and ranks; who takes part
    mutant("run/recovery/emergency_files.py", "path.name != self._name]", "True]", LEFT_BEHIND),
    mutant("run/recovery/emergency_files.py", "if size_bytes > self.room():", "if False:", LEFT_BEHIND),
    mutant(
        "run/recovery/emergency_files.py",
        "                suspect.append(directory.name)",
        "                pass",
        LEFT_BEHIND,
    ),
    mutant(
        "launch/workers/rank_messages.py",
        "            (self._home / note).unlink(missing_ok=True)",
        "            pass",
        "tests/unit/launch/test_hang_monitor.py",
    ),
    mutant("launch/workers/rank_messages.py", "        self.receive()\n", "", "tests/unit/launch/test_hang_monitor.py"),
    mutant(
        "launch/workers/rank_messages.py",
        "        if text != self._lost:",
        "        if False:",
        "tests/unit/launch/test_hang_monitor.py",
    ),
    mutant(
        "launch/rendezvous/membership_state.py",
        "    if mode <= state.plan.stop_mode:",
        "    if mode < state.plan.stop_mode:",
        MEMBERSHIP,
    ),
    mutant("launch/rendezvous/membership_state.py", "        restart=state.plan.restart + 1,\n", "", MEMBERSHIP),
    mutant("launch/rendezvous/membership_state.py", "not_before_s=now_s + pause_s,", "not_before_s=now_s,", MEMBERSHIP),
    mutant(
        "launch/rendezvous/membership_state.py", "failures=state.failures + failures,", "failures=failures,", MEMBERSHIP
    ),
    mutant("world/launchers.py", "tasks is not None and tasks > 1", "tasks is not None", WORLD),
    mutant("world/launchers.py", '    elif found.rank != ("RANK",):', "    elif False:", WORLD),
    mutant(
        "world/world.py",
        "local_rank = rank % local_size",
        "local_rank = rank // local_size",
        WORLD,
    ),
    mutant(
        "world/world.py",
        "node_rank = min(rank // local_size, nodes - 1)",
        "node_rank = rank // local_size",
        WORLD,
    ),
    mutant("cli/predict.py", "not 0 < value < math.inf", "not 0 <= value < math.inf", PREDICT),
    mutant(
        "cli/predict.py",
        '_UNITS[match.group(2) or "s"]',
        '_UNITS["s"]',
        "tests/ranks/scale/test_predict.py::test_the_command",
    ),
    # ---- checkpoints
    mutant(
        "checkpoint/commit.py",
        "    disk.sync_directory(scratch)\n    disk.rename(scratch, place.path)",
        "    disk.rename(scratch, place.path)",
        "tests/unit/checkpoint",
        "tests/promises/test_power.py",
        "tests/ranks/checkpoint",
    ),
    mutant(
        "checkpoint/commit.py",
        "    disk.rename(scratch, place.path)\n    disk.sync_directory(root)",
        "    disk.rename(scratch, place.path)",
        "tests/unit/checkpoint",
        "tests/promises/test_power.py",
        "tests/ranks/checkpoint",
    ),
    mutant(
        "checkpoint/commit.py",
        "        disk.sync(file)\n    finally:",
        "    finally:",
        "tests/unit/checkpoint",
        "tests/promises/test_power.py",
        "tests/ranks/checkpoint",
    ),
    mutant(
        "checkpoint/commit.py",
        "    if found != committed:",
        "    if False:",
        "tests/unit/checkpoint",
        "tests/promises/test_power.py",
        "tests/ranks/checkpoint",
    ),
    mutant(
        "checkpoint/save_thread.py",
        "if self._disk.size(save.scratch / name) != length:",
        "if False:",
        "tests/unit/checkpoint",
        "tests/promises/test_power.py",
        "tests/ranks/checkpoint",
    ),
    mutant(
        "run/stopping/save_stop.py",
        'return Decision(interval is not None and interval.unit == "epoch" and epochs % int(interval.every) == 0)',
        'return Decision(interval is not None and interval.unit == "epoch")',
        LOOP,
    ),
    mutant("run/stopping/save_stop.py", "            self._agreement.met()\n", "", "tests/ranks/run/test_stops.py"),
    # ---- the default search
    mutant(
        "tune/search/bayesian.py",
        "            model = model.supposing(np.array(self._running))",
        "            pass",
        BAYESIAN,
    ),
    mutant(
        "tune/search/bayesian.py",
        "return improvement if chance is None else improvement + chance(candidates)",
        "return improvement",
        BAYESIAN,
    ),
    mutant(
        "tune/search/bayesian.py",
        "return 1.0 if place == 0 else 0.3",
        "return 0.0 if place == 0 else 0.3",
        BAYESIAN,
    ),
    mutant("tune/search/bayesian.py", "spent_s <= FREE_S", "True or spent_s <= FREE_S", BAYESIAN),
    mutant("tune/search/bayesian.py", "np.full(len(allowed), -1.0)", "np.full(len(allowed), 1.0)", BAYESIAN),
    mutant(
        "tune/search/gaussian_process.py",
        "distance**2 / 3",
        "distance**2 / 2",
        BAYESIAN,
    ),
    mutant("tune/search/gaussian_process.py", "gradient[-1] -= quiet", "gradient[-1] += quiet", BAYESIAN),
    mutant("tune/search/gaussian_process.py", "z * standard_normal_below(z)", "z - standard_normal_below(z)", BAYESIAN),
    mutant("tune/record/trial_history.py", "self._running.discard(record.number)", "pass", SEARCHES),
    mutant("tune/workers/breeding.py", 'if trial.state == "failed"', 'if trial.state == "done"', SEARCHES),
]


def main(words: list[str]) -> int:
    """Plant each error whose name has one of ``words``, and say which test noticed."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    caught = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for number, (mutant, noticed, took_s) in enumerate(pool.map(_try, chosen), 1):
            caught += noticed != ""
            print(f"{number:3} {took_s:5.0f} s  {mutant.name}\n             {noticed or 'SURVIVED'}", flush=True)
    print(f"{caught} of {len(chosen)} caught ({100 * caught / max(1, len(chosen)):.0f} %)")
    return 0 if caught >= 0.95 * len(chosen) else 1


def planted(mutant: Mutant, place: Path) -> None:
    """A copy of the package at ``place``, with the error in it."""
    shutil.copytree(SOURCE, place, ignore=shutil.ignore_patterns("__pycache__"))
    file = place / mutant.file
    file.write_text(broken(mutant, file.read_text()))


def broken(mutant: Mutant, text: str) -> str:
    """``text`` with the error in it.

    Raises:
        ValueError: if the place is not there, or there several times.
    """
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: the line stands {text.count(mutant.old)} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)


def _try(mutant: Mutant) -> tuple[Mutant, str, float]:
    """Which test noticed; empty if none did."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-mutant-") as directory:
        planted(mutant, Path(directory, "lockstep"))
        for tests in mutant.tests:
            noticed, said = _failing(tests, directory)
            if noticed and not _fails_anyway(noticed):
                return mutant, f"{noticed}{said}", time.monotonic() - began
    return mutant, "", time.monotonic() - began


@cache
def _fails_anyway(tests: str) -> bool:
    """Whether these fail also where there is no error, such as on a machine that has no time for them."""
    return _failing(tests, str(SOURCE.parent)) != ("", "")


def _failing(tests: str, directory: str) -> tuple[str, str]:
    """The first of ``tests`` that fails with the package of that directory, and how if not by itself; or nothing."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", tests]
    env = {**os.environ, "PYTHONPATH": directory, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return tests, f": did not end in {LIMIT_S} s"
    if ended.returncode == 4:  # a file of tests that is not there would look like one that noticed
        raise ValueError(f"pytest {tests}: {ended.stderr}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", ended.stdout, re.MULTILINE)
    if ended.returncode in (0, 5):
        return "", ""
    return (found[1], "") if found else (tests, f": pytest ended with {ended.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
