"""A training script as they are written for Horovod; one import is not Horovod's own."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import topo_ar.integrations.horovod as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--momentum", type=float, default=0.5)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--double", action="store_true")
parser.add_argument("--save")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 12, 5)
        self.fc1 = nn.Linear(192, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.silu(F.avg_pool2d(self.conv1(x), 2))
        x = F.silu(F.avg_pool2d(self.conv2(x), 2))
        x = F.silu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count, seed):
    """Images whose class says where a bright square lies."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    images = 0.3 * torch.randn(count, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 4)
        image[0, 7 * row + 1 : 7 * row + 6, 7 * column + 1 : 7 * column + 6] += 1.0
    return images, labels


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main(argv=None):
    args = parser.parse_args(argv)
    hvd.init()
    torch.manual_seed(args.seed)
    images, labels = digits(640, args.seed)
    if args.double:
        images = images.double()
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = Net().double() if args.double else Net()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
    )
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            if batch_idx % 10 == 0 and hvd.rank() == 0:
                print(
                    f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(sampler)}]"
                    f"\tLoss: {loss.item():.6f}"
                )
        scheduler.step()

    model.eval()
    with torch.no_grad():
        output = model(images[hvd.rank() :: hvd.size()])
        accuracy = (output.argmax(1) == labels[hvd.rank() :: hvd.size()]).double().mean().item()
    accuracy = metric_average(accuracy, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"Accuracy: {100 * accuracy:.2f}%")
        if args.save:
            torch.save(model.state_dict(), args.save)
    return model, accuracy


if __name__ == "__main__":
    main()
