"""The data set and the model that the GPT scripts of this folder train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset


class Sorting(Dataset[tuple[Tensor, Tensor]]):
    """Six letters, followed by the same letters in order."""

    def __init__(self, count: int = 768, seed: int = 1) -> None:
        letters = torch.randint(6, (count, 6), generator=torch.Generator().manual_seed(seed))
        self.rows = torch.cat([letters, letters.sort(1).values], 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions, self.head = (
            nn.Embedding(6, 32),
            nn.Embedding(11, 32),
            nn.Linear(32, 6),
        )
        layer = nn.TransformerEncoderLayer(
            32, 4, 128, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of the next letters."""
        x = self.tokens(ids) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return cross_entropy(
            self.head(self.blocks(x, mask=mask, is_causal=True)).flatten(0, 1), targets.flatten()
        )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3
    )
