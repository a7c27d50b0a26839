"""A GAN with two optimizers, in turn: the discriminator's step, then the generator's."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

NZ = 16
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.1)
        nn.init.zeros_(m.bias)
    elif isinstance(m, nn.BatchNorm1d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(NZ, width),
            nn.BatchNorm1d(width),
            nn.ReLU(True),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(True),
            nn.Linear(width, 64),
            nn.Sigmoid(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(64, width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(width, 1),
        )

    def forward(self, images):
        return self.main(images).squeeze(1)


def get_data():
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return TensorDataset(images[order[:1024]])


def make_nets():
    generator, discriminator = Generator(), Discriminator()
    generator.apply(weights_init)
    discriminator.apply(weights_init)
    return generator, discriminator


def main(args):
    torch.manual_seed(args.seed)
    dataloader = DataLoader(get_data(), batch_size=args.batch_size, shuffle=True)
    net_g, net_d = make_nets()
    net_g, net_d = net_g.to(device), net_d.to(device)
    criterion = nn.BCEWithLogitsLoss()
    fixed_noise = torch.randn(32, NZ, device=device)
    optimizer_d = optim.Adam(net_d.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    optimizer_g = optim.Adam(net_g.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    figures = []
    for epoch in range(args.epochs):
        totals = torch.zeros(2)
        for (real,) in dataloader:
            real = real.to(device)
            size = real.size(0)

            # Update the discriminator: maximize log(D(x)) + log(1 - D(G(z)))
            net_d.zero_grad()
            loss_real = criterion(net_d(real), torch.ones(size, device=device))
            noise = torch.randn(size, NZ, device=device)
            fake = net_g(noise)
            loss_fake = criterion(net_d(fake.detach()), torch.zeros(size, device=device))
            loss_d = loss_real + loss_fake
            loss_d.backward()
            optimizer_d.step()

            # Update the generator: maximize log(D(G(z)))
            net_g.zero_grad()
            loss_g = criterion(net_d(fake), torch.ones(size, device=device))
            loss_g.backward()
            optimizer_g.step()
            totals += torch.tensor([loss_d.item(), loss_g.item()])

        net_g.eval()
        with torch.no_grad():
            ink = net_g(fixed_noise).mean().item()
        net_g.train()
        mean_d, mean_g = (totals / len(dataloader)).tolist()
        print(f"[{epoch}/{args.epochs}] Loss_D: {mean_d:.4f} Loss_G: {mean_g:.4f} ink: {ink:.4f}")
        figures.append({"loss_d": mean_d, "loss_g": mean_g, "ink": ink})
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GAN of digits")
    parser.add_argument("--batch-size", type=int, default=64, help="input batch size")
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs to train for")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--beta1", type=float, default=0.5, help="beta1 for adam")
    parser.add_argument("--seed", type=int, default=999, help="manual seed")
    args = parser.parse_args()
    figures = main(args)
