"""A variational autoencoder whose model has `encode` and `decode`: it draws a page of digits after each epoch."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep

LATENT = 6
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class VAE(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.fc1 = nn.Linear(64, hidden)
        self.fc21 = nn.Linear(hidden, LATENT)
        self.fc22 = nn.Linear(hidden, LATENT)
        self.fc3 = nn.Linear(LATENT, hidden)
        self.fc4 = nn.Linear(hidden, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    """Reconstruction and KL divergence, summed over all elements and the batch."""
    bce = F.binary_cross_entropy(recon_x, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def get_data():
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return TensorDataset(images[order[:1024]]), TensorDataset(images[order[1024:1424]])


def draw(page):
    """Images of shape (n, 64) beside each other, in characters."""
    rows = (page.view(-1, 8, 8) * 4.99).long().permute(1, 0, 2).tolist()
    return "\n".join("  ".join("".join(" .:*#"[shade] for shade in row) for row in line) for line in rows)


def train(epoch, run, model, train_loader, log_interval):
    model.train()
    for batch_idx, (data,) in enumerate(run.train(train_loader)):
        data = data.to(device)
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        run.step(loss / len(data))
        if batch_idx % log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item() / len(data):.6f}")
    run.say(f"====> Epoch: {epoch} Average loss: {run.metrics['loss']:.4f}")


def test(run, model, test_loader):
    model.eval()
    with torch.no_grad():
        for (data,) in run.evaluate(test_loader):
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            run.measure(test_loss=loss_function(recon_batch, data, mu, logvar) / len(data))


def main(args, run):
    train_set, test_set = get_data()
    train_loader = run.loader(train_set, global_batch=args.batch_size, micro_batch=args.batch_size // 4)
    test_loader = run.loader(test_set, global_batch=args.batch_size, shuffle=False)
    model = run.model(VAE(args.hidden))
    run.optimizer(optim.Adam(model.parameters(), lr=args.lr))
    figures = []
    for epoch in run.epochs(args.epochs):
        train(epoch + 1, run, model, train_loader, args.log_interval)
        test(run, model, test_loader)
        with torch.no_grad():
            sample = torch.randn(8, LATENT).to(device)
            sample = model.decode(sample).cpu()
            print(draw(sample))
        figures.append(run.log(epoch=epoch + 1, ink=sample.mean().item()))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="VAE of digits")
    parser.add_argument("--batch-size", type=int, default=64, help="input batch size for training")
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs to train")
    parser.add_argument("--lr", type=float, default=8e-3, help="learning rate")
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layers")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--log-interval", type=int, default=10, help="batches between two lines")
    args = parser.parse_args()
    with lockstep.Run(seed=args.seed) as run:
        figures = main(args, run)
