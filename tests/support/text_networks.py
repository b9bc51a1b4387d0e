"""Small networks in the form of those that read text: token ids, a mask, outputs as an object."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

WORDS = 30


class Classifier(nn.Module):
    """Inputs by keyword, labels among them, as models of the transformers library take them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.classifier = nn.Linear(8, 2)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> SimpleNamespace:
        h = self.embedding(input_ids)
        h, _ = self.attention(h, h, h, key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].float()
        return SimpleNamespace(loss=None, logits=self.classifier((h * mask).sum(1) / mask.sum(1)))


class Bag(nn.Module):
    """One tensor of token ids (n, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embedding(ids).mean(1))


class TwoKinds(nn.Module):
    """Token ids and numbers, by position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.out = nn.Linear(4 + 3, 2)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        return self.out(torch.cat([self.embedding(ids).mean(1), numbers], 1))


def sentences(count: int = 24) -> list[dict[str, object]]:
    """Rows as a tokenizer makes them, of different lengths; the first word decides the label."""
    draws = torch.Generator().manual_seed(0)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        length = int(torch.randint(3, 8, (), generator=draws))
        ids = torch.randint(1, WORDS, (length,), generator=draws).tolist()
        mask = [1] * length
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": int(ids[0] > 15)})
    return rows


def padded(rows: list[dict[str, object]]) -> dict[str, Tensor]:
    """A mini-batch, padded by zeros to its longest row, as a collate function makes it."""
    batch = {}
    for name in ("input_ids", "attention_mask"):
        batch[name] = pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
    batch["labels"] = torch.tensor([row["labels"] for row in rows])
    return batch
