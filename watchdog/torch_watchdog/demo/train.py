"""A two-rank training as anybody writes it: a small text classifier, DDP over gloo, AdamW, a warm-up. One sample of its data is broken.

Nothing in here is needed by the watchdog but the one call to restore(), with which a later run goes on from a checkpoint.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torch_watchdog_agent

VOCABULARY, CLASSES, LENGTH = 512, 4, 24
SAMPLES, BATCH, EPOCHS = 480, 4, 1
BAD_SAMPLE, BAD_TOKEN = 304, 733  # written by a newer tokenizer, say: the table has rows 0 to 511


class Texts(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(index)
        label = index % CLASSES
        tokens = torch.randint(label * 128, (label + 1) * 128, (LENGTH,), generator=rng)
        if index == BAD_SAMPLE:
            tokens[17] = BAD_TOKEN
        return {"tokens": tokens, "label": torch.tensor(label)}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, CLASSES))

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(dim=1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = Texts()
    sampler = DistributedSampler(data, seed=7)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
    loss_function = nn.CrossEntropyLoss()

    resumed = torch_watchdog_agent.restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step = resumed.step if resumed else 0
    for epoch in range(resumed.epoch if resumed else 0, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_function(model(batch["tokens"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        print(f"trained for {step} steps", flush=True)
    dist.destroy_process_group()
    time.sleep(0.5)  # until gloo's threads have let go: torch aborts an exit in between now and then, with or without a watchdog


if __name__ == "__main__":
    main()
