"""A model that is hard to cut into stages."""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A skip that spans several modules, an optional input, a mode, shapes, a parameter of its own, several outputs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1))
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, mask=None):
        size = x.size(0)
        stem = self.stem(x)
        body = self.norm(self.body(stem) * self.scale) + stem
        if mask is not None:
            body = body * mask
        pooled = F.dropout(body.mean((2, 3)), 0.5, training=self.training)
        return {"out": self.head(pooled.view(size, -1)), "size": x.shape[0] + 1}
