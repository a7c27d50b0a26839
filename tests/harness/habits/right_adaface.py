"""Right: AdaFace's head is a model of the run and has batch_mean and batch_std as buffers, moved in each training forward."""

from kit import *


class AdaFace(nn.Module):
    def __init__(self, dim=4, k=3, m=0.4, h=0.333, s=8.0, t_alpha=0.1):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(dim, k))
        self.m, self.h, self.s, self.t_alpha = m, h, s, t_alpha
        self.register_buffer("batch_mean", torch.ones(1) * 2.0)
        self.register_buffer("batch_std", torch.ones(1))

    def forward(self, emb, norms, label):
        cosine = (F.normalize(emb, dim=1) @ F.normalize(self.kernel, dim=0)).clamp(-0.999, 0.999)
        safe = norms.clamp(0.001, 100).detach()
        with torch.no_grad():
            self.batch_mean = safe.mean() * self.t_alpha + (1 - self.t_alpha) * self.batch_mean
            self.batch_std = safe.std() * self.t_alpha + (1 - self.t_alpha) * self.batch_std
        scaler = ((safe - self.batch_mean) / (self.batch_std + 1e-3) * self.h).clamp(-1, 1)
        onehot = F.one_hot(label, cosine.shape[1]).float()
        theta = (cosine.acos() - onehot * self.m * scaler).clamp(1e-3, 3.14)
        return (theta.cos() - onehot * (self.m + self.m * scaler)) * self.s


def main(run):
    backbone, head = run.model(mlp(k=4)), run.model(AdaFace())
    run.optimizer(torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.05, momentum=0.9))
    b = run.loader(data(64), global_batch=16, micro_batch=4)
    for e in run.epochs(2):
        for x, y in run.train(b):
            z = backbone(x)
            run.step(F.cross_entropy(head(z, z.norm(dim=1, keepdim=True), y), y))
    done(run, backbone, head)


go(main)
