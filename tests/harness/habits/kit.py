# ruff: noqa: F401 - what is imported here is what the scripts use
"""What the scripts share: `go` runs `main(run)` by Lockstep, or (PLAIN=1) by `Plain`, the same API in plain torch.

`Plain` imports nothing of the package. Its rules are those of docs/assumptions.md: order, seeds, weights along the
tree, buffers by the mean of the moves (integers: the greatest), all optimizers at the end of the step.
"""

import collections
import contextlib
import copy
import hashlib
import itertools
import os
import random
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

PLAIN = os.environ.get("PLAIN") == "1"
results = []  # of this process: what `done` has been told


def numbers(*shape, seed=5, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def classes(n, k=3, seed=6):
    return torch.randint(0, k, (n,), generator=torch.Generator().manual_seed(seed))


def data(n=40, d=6, k=3):
    return numbers(n, d), classes(n, k)


def mlp(d=6, h=8, k=3):
    return nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, k))


def sgd(model, lr=0.1, momentum=0.9, **kw):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum, **kw)


def adam(model, lr=0.01, **kw):
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr, **kw)


def _digest(tensor):
    t = tensor.detach()
    if t.is_sparse:
        t = t.to_dense()
    return hashlib.sha1(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def done(run, *models, **extra):
    """What came of the training, into `results`: the whole state, a digest of each tensor of this rank, and extras."""
    states, digests = [], {}
    for number, model in enumerate(models):
        whole = run.state_dict(model) if model in getattr(run, "models", [model]) else model.state_dict()
        states.append({key: value.detach().clone() for key, value in whole.items() if isinstance(value, torch.Tensor)})
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not hasattr(tensor, "to_local") and not tensor.is_meta:
                digests[f"{number}.{name}"] = _digest(tensor)
    same = {"states": states, "extra": _plain(extra), "step": run.progress.step, "metrics": dict(run.metrics)}
    results.append((same, digests))


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def go(main, **settings):
    settings = {"seed": 0} | settings
    if PLAIN:
        main(Plain(**settings))
        return
    import lockstep

    with lockstep.Run(**settings) as run:
        main(run)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def seed_of(*key):
    digest = hashlib.blake2b("/".join(repr(part) for part in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") // 2


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def tree(values):
    if len(values) == 1:
        return values[0]
    m = len(values) // 2
    return tree(values[:m]) + tree(values[m:])


class _Progress:
    step = 0
    epoch = 0


class _Micro:
    def __init__(s, index, of, samples, last):
        s.index, s.of, s.samples, s.last, s.is_padding = index, of, samples, last, False


class _Kept:
    pass


class _Loader:
    def __init__(s, run, ds, gb, mb, shuffle, order, collate, drop_last, sampler, batch_sampler):
        s.run, s.ds, s.gb, s.mb, s.shuffle, s.order, s.collate, s.drop_last = (
            run,
            ds,
            gb,
            mb,
            shuffle,
            order,
            collate,
            drop_last,
        )
        s.sampler, s.batch_sampler = sampler, batch_sampler
        s.columns = isinstance(ds, tuple) or type(ds) is TensorDataset
        s.n = len(ds[0]) if isinstance(ds, tuple) else len(ds)

    def indices(s, epoch, training=True):
        if s.sampler is not None:
            return torch.tensor(list(s.sampler))
        if s.order is not None:
            return torch.as_tensor(s.order(epoch, torch.Generator().manual_seed(seed_of(s.run.seed, "order", epoch))))
        if s.shuffle:
            return torch.randperm(s.n, generator=torch.Generator().manual_seed(seed_of(s.run.seed, "order", epoch)))
        return torch.arange(s.n)

    def steps(s, epoch):
        if s.batch_sampler is not None:
            for b in s.batch_sampler:
                yield torch.tensor(list(b)).split(s.mb)
            return
        o = s.indices(epoch)
        for start in range(0, len(o) - (s.gb - 1 if s.drop_last else 0), s.gb):
            yield o[start : start + s.gb].split(s.mb)

    def __len__(s):
        return len(list(s.steps(0)))

    def fetch(s, idx, epoch):
        if s.columns:
            t = s.ds if isinstance(s.ds, tuple) else s.ds.tensors
            found = [c[idx] for c in t]
            return type(s.ds)(found) if isinstance(s.ds, tuple) else found
        seed_everything(seed_of(s.run.seed, "samples", epoch, int(idx[0])))
        if callable(getattr(s.ds, "__getitems__", None)):
            got = s.ds.__getitems__([int(i) for i in idx])
        else:
            got = [s.ds[int(i)] for i in idx]
        return (s.collate or default_collate)(got)

    def __iter__(s):
        for step in s.steps(0):
            for idx in step:
                yield s.fetch(idx, 0)


class Plain:
    rank = 0
    world_size = 1
    leads = True
    counts = True
    device = torch.device("cpu")

    def __init__(s, seed=0, clip_norm=None, **rest):
        s.seed, s.clip_norm, s.models, s.optimizers, s.schedulers = seed, clip_norm, [], [], []
        s.progress, s.kept, s.carry, s.metrics, s._m = _Progress(), _Kept(), {}, {}, {}
        s.done_in = set()
        s.passes = {}
        seed_everything(seed_of(seed, "init"))

    def __enter__(s):
        return s

    def __exit__(s, *e):
        pass

    def model(s, m, **kw):
        m = m if isinstance(m, nn.Module) else (nn.Sequential(*m) if isinstance(m, list) else m())
        s.models.append(m)
        return m

    def optimizer(s, o, closure=None):
        s.optimizers.append(o)
        return o

    def scheduler(s, x):
        s.schedulers.append(x)
        return x

    def keep(_self, **kw):
        _self.kept.__dict__.update(kw)

    def loader(
        s,
        ds,
        global_batch=None,
        micro_batch=None,
        shuffle=True,
        order=None,
        collate_fn=None,
        drop_last=False,
        sampler=None,
        batch_sampler=None,
        workers=0,
        **kw,
    ):
        gb = global_batch
        return _Loader(
            s,
            ds,
            gb,
            micro_batch or max(1, (gb or 8) // 8),
            shuffle,
            order,
            collate_fn,
            drop_last,
            sampler,
            batch_sampler,
        )

    def epochs(s, n):
        for e in range(n):
            s.progress.epoch = e
            s.passes = {}
            seed_everything(seed_of(s.seed, "plain epoch", e))
            yield e

    def say(s, t):
        pass

    def log(s, **kw):
        return dict(s.metrics) | kw

    def barrier(s):
        pass

    def sum(s, v):
        return v

    mean = broadcast = sum

    def gather(s, v):
        return [v]

    def state_dict(s, m):
        return m.state_dict()

    def _buffers(s):
        mods = dict.fromkeys(m for model in s.models for m in model.modules())
        return [(o, n, b.clone()) for o in mods for n, b in o.named_buffers(recurse=False)]

    @staticmethod
    def _put(base):
        for o, n, b in base:
            setattr(o, n, b.clone())

    def train(s, *loaders):
        for m in s.models:
            if not m.training:
                m.train()
        s._m = {}
        l0 = loaders[0]
        for picks in zip(*(l.steps(s.progress.epoch) for l in loaders)):
            base, moved, s.found = s._buffers(), [], {}
            total = sum(map(len, picks[0]))
            s.total = total
            for i, idx in enumerate(zip(*picks)):
                got = [l.fetch(x, s.progress.epoch) for l, x in zip(loaders, idx)]
                s._put(base)
                seed_everything(seed_of(s.seed, "step", s.progress.step, i))
                s.micro_batch = _Micro(i, len(picks[0]), len(idx[0]), i == len(picks[0]) - 1)
                s.base, s.moved, s.counted = base, moved, False
                s.reached = set()
                with s.carrying(i):
                    yield got[0] if len(loaders) == 1 else tuple(got)
                if s.micro_batch.last and not s.counted:
                    s._finish()
                if not s.counted:
                    moved.append([getattr(o, n).clone() for o, n, _ in base])
        s.metrics = {**s.metrics, **{k: a / b for k, (a, b) in s._m.items()}}

    @contextlib.contextmanager
    def carrying(s, i):
        all_ = s.__dict__.setdefault("_carry", {})
        s.carry = all_.setdefault(i, {})
        yield

    def _of(s, o):
        if o is None:
            return (s.optimizers[0],) if len(s.optimizers) == 1 else tuple(s.optimizers)
        return (o,) if isinstance(o, torch.optim.Optimizer) else tuple(o)

    def step(s, loss, *data, count=None, loss_is="mean", optimizer=None):
        s.backward(loss, *data, count=count, loss_is=loss_is, optimizer=optimizer)
        return s.update(optimizer)

    def backward(s, loss, *data, count=None, loss_is="mean", optimizer=None):
        if callable(loss) and not isinstance(loss, torch.Tensor):
            x = data[0] if isinstance(data[0], tuple) else (data[0],)
            y = data[1] if isinstance(data[1], tuple) else (data[1],)
            loss = loss(s.models[0](*x), *y)
        opts = s._of(optimizer)
        items = s.micro_batch.samples if count is None else int(count)
        if loss_is == "sum":
            loss = loss / max(1, items)
        ps = [p for o in opts for g in o.param_groups for p in g["params"] if p.requires_grad]
        if len(s.optimizers) == 1:
            ps = list(dict.fromkeys([*ps, *(p for m in s.models for p in m.parameters() if p.requires_grad)]))
        share = items / s.total
        old = {p: p.grad for m in s.models for p in m.parameters()}
        for p in old:
            p.grad = None
        (loss * share).backward(retain_graph=len(s.optimizers) > 1)
        g = {p: p.grad for p in ps if p.grad is not None}
        for p, was in old.items():
            p.grad = was
        s.found.setdefault(opts, []).append((items, count is not None, g))
        a, b = s._m.get("loss", (0.0, 0.0))
        s._m["loss"] = (a + float(loss.detach()) * items, b + items)
        s.reached.add(opts)
        if s.micro_batch.last:
            s._reduce(opts)
        return s.micro_batch.last

    def _reduce(s, opts):
        found = s.found[opts]
        counted = any(c for _, c, _ in found)
        all_items = sum(i for i, _, _ in found)
        for p in dict.fromkeys(p for _, _, g in found for p in g):
            parts = [g[p] if p in g else torch.zeros_like(p) for _, _, g in found]
            parts = [x.to_dense() if x.is_sparse else x for x in parts]
            total = tree(parts)
            if counted:
                total = total * (s.total / max(1, all_items))
            p.grad = total.detach()

    def update(s, optimizer=None):
        if not s.micro_batch.last or not all(any(o in r for r in s.reached) for o in s.optimizers):
            return False
        return s._finish()

    def _finish(s):
        s.moved.append([getattr(o, n).clone() for o, n, _ in s.base])
        s.counted = True
        for opts in s.reached:
            if s.clip_norm is not None:
                nn.utils.clip_grad_norm_(
                    [p for m in s.models for p in m.parameters()]
                    if len(s.optimizers) == 1
                    else [p for o in opts for g in o.param_groups for p in g["params"]],
                    s.clip_norm,
                )
        for o in dict.fromkeys(o for opts in s.reached for o in opts):
            o.step()
        for m in s.models:
            m.zero_grad(set_to_none=True)
        with torch.no_grad():
            for k, (owner, name, before) in enumerate(s.base):
                after = [m[k] for m in s.moved]
                if len(after) == 1:
                    setattr(owner, name, after[0])
                elif before.is_floating_point() or before.is_complex():
                    fin = torch.where(before.isfinite(), before, torch.zeros_like(before))
                    setattr(owner, name, fin + tree([a - fin for a in after]) / len(after))
                else:
                    setattr(owner, name, torch.stack(after).amax(0))
        for x in s.schedulers:
            x.step()
        s.progress.step += 1
        seed_everything(seed_of(s.seed, "plain body", s.progress.step))
        return True

    def evaluate(s, loader):
        kept = [k for k in s.kept.__dict__.values() if isinstance(k, nn.Module)]
        was = [[(x, x.training) for x in m.modules()] for m in (*s.models, *kept)]
        s._e = {}
        s._in_eval = True
        for m in (*s.models, *kept):
            m.eval()
        n = 0
        for step in loader.steps(0):
            for idx in step:
                base = s._buffers()
                s.micro_batch = _Micro(0, 1, len(idx), True)
                with torch.no_grad():
                    yield loader.fetch(idx, 0)
                s._put(base)
        for m, w in zip((*s.models, *kept), was):
            m.train()
            for x, mode in w:
                x.training = mode
        s._in_eval = False
        s.metrics = {**s.metrics, **{k: a / b for k, (a, b) in s._e.items()}}

    def measure(s, count=None, **kw):
        into = s._e if getattr(s, "_in_eval", False) else s._m
        for k, v in kw.items():
            t = torch.as_tensor(v).detach().double()
            c = t.numel() if t.dim() else (int(count) if count is not None else s.micro_batch.samples)
            a, b = into.get(k, (0.0, 0.0))
            into[k] = (a + float(t.mean()) * c, b + c)
