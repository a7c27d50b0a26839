"""A GPT trained for so many iterations on random windows; the learning rate by hand, an estimate now and then."""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import lockstep


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (each.view(batch, length, self.n_head, -1).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.c_proj(y.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, dropout):
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head, dropout) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # tied
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.block_size :])
            idx = torch.cat([idx, torch.multinomial(F.softmax(logits[:, -1], dim=-1), num_samples=1)], dim=1)
        return idx

    def configure_optimizers(self, weight_decay, learning_rate):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def load_text(length):
    text = "\n".join(topics[name] for name in sorted(topics))[:length]
    data = torch.tensor(list(text.encode("ascii", "replace")))
    return {"train": data[: length * 9 // 10], "val": data[length * 9 // 10 :]}


def get_batches(run, data, args, iters):
    """Windows that begin anywhere in the text."""

    def order(epoch, generator):
        return torch.randint(len(data) - args.block_size, (iters * args.batch_size,), generator=generator)

    x = data[:-1].unfold(0, args.block_size, 1)
    y = data[1:].unfold(0, args.block_size, 1)
    return run.loader((x, y), order=order, global_batch=args.batch_size, micro_batch=args.batch_size // 4)


def get_lr(it, args):
    """Of iteration ``it``, as a part of the greatest one: linear warm-up, then a cosine down to a tenth."""
    if it < args.warmup_iters:
        return (it + 1) / (args.warmup_iters + 1)
    ratio = (it - args.warmup_iters) / (args.max_iters - args.warmup_iters)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * ratio))


@torch.no_grad()
def estimate_loss(run, model, held_out):
    for split in ("train", "val"):
        for x, y in run.evaluate(held_out[split]):
            run.measure(**{split: model(x, y)[1]})
    return run.metrics


def main(args, run):
    data = load_text(args.length)
    batches = get_batches(run, data["train"], args, args.max_iters)
    held_out = {split: get_batches(run, data[split], args, args.eval_iters) for split in data}
    model = run.model(GPT(128, args.block_size, args.n_layer, args.n_head, args.n_embd, args.dropout))
    optimizer = run.optimizer(model.configure_optimizers(args.weight_decay, args.learning_rate))
    run.scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda iter_num: get_lr(iter_num, args)))
    figures = []
    for _ in run.steps(args.max_iters):
        for x, y in run.train(batches):
            _, loss = model(x, y)
            if run.step(loss) and run.progress.step % args.eval_interval == 0:
                losses = estimate_loss(run, model, held_out)
                print(f"step {run.progress.step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
                figures.append(run.log())
    written = model.generate(torch.tensor([[84, 104, 101]], device=run.device), 60)
    print(bytes(written[0].tolist()).decode("ascii"))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GPT by characters")
    parser.add_argument("--length", type=int, default=40000, help="characters of the text")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--n-layer", type=int, default=2)
    parser.add_argument("--n-head", type=int, default=2)
    parser.add_argument("--n-embd", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-iters", type=int, default=60)
    parser.add_argument("--eval-interval", type=int, default=20)
    parser.add_argument("--eval-iters", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--warmup-iters", type=int, default=10)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1337)
    args = parser.parse_args()
    with lockstep.Run(seed=args.seed, clip_norm=args.grad_clip) as run:
        figures = main(args, run)
