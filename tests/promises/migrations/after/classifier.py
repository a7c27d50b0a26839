"""An image classifier: augmentation, BatchNorm, a cosine schedule, label smoothing, the accuracy after each epoch."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


class Augmented(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        shift = torch.randint(-1, 2, (2,)).tolist()
        return torch.roll(self.images[index], shift, dims=(1, 2)), self.labels[index]


class Block(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, bias=False) if inside != outside else nn.Identity()

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width=8, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1 = Block(width, width)
        self.pool = nn.MaxPool2d(2)
        self.layer2 = Block(width, 2 * width)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.layer2(self.pool(self.layer1(self.stem(x))))
        return self.fc(self.dropout(x.mean((2, 3))))


def get_data():
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:512], order[512:712]
    return Augmented(images[train], labels[train]), TensorDataset(images[test], labels[test])


def train(args, run, model, train_loader, criterion, epoch):
    model.train()
    for batch_idx, (images, labels) in enumerate(run.train(train_loader)):
        loss = criterion(model(images), labels)
        run.step(loss)
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")


def test(run, model, test_loader):
    model.eval()
    for images, labels in run.evaluate(test_loader):
        output = model(images)
        run.measure(test_loss=nn.functional.cross_entropy(output, labels, reduction="none"))
        run.measure(accuracy=output.argmax(1) == labels)
    return run.log()


def main(args, run):
    train_set, test_set = get_data()
    train_loader = run.loader(train_set, global_batch=args.batch_size, micro_batch=args.batch_size // 4)
    test_loader = run.loader(test_set, global_batch=args.test_batch_size, shuffle=False)
    model = run.model(ResNet(args.width))
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        nesterov=True,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))
    run.optimizer(optimizer)
    run.scheduler(scheduler)
    figures = []
    for epoch in run.epochs(args.epochs):
        train(args, run, model, train_loader, criterion, epoch)
        figures.append(test(run, model, test_loader))
    if args.save_model and run.leads:
        torch.save(model.state_dict(), args.save_model)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits")
    parser.add_argument("--batch-size", type=int, default=64, help="input batch size for training")
    parser.add_argument("--test-batch-size", type=int, default=128, help="input batch size for testing")
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs to train")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.05)
    parser.add_argument("--width", type=int, default=8, help="channels of the first layer")
    parser.add_argument("--seed", type=int, default=1, help="random seed")
    parser.add_argument("--log-interval", type=int, default=10, help="batches between two lines")
    parser.add_argument("--save-model", default="", help="where to save the model at the end")
    args = parser.parse_args()
    with lockstep.Run(seed=args.seed) as run:
        figures = main(args, run)
