"""The state of the loop around the learners of an outer step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.training.rewound_state import RewoundState
from lockstep.training.saved_state import SavedState


def test_numbers_are_put_back_and_tensors_must_not_change() -> None:
    saved, average = SavedState(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = RewoundState(saved.add({"scheduler": scheduler, "seen": [1], "average": average}))
    before = state.take()
    optimizer.step()
    scheduler.step()
    saved.seen.append(2)
    after = state.take()
    state.refuse_changed_tensors(before, after, 0)
    assert after["scheduler"].number() != before["scheduler"].number()
    state.put(before)
    assert (scheduler.last_epoch, saved.seen) == (0, [1])
    state.put(after)
    assert (scheduler.last_epoch, saved.seen) == (1, [1, 2])
    with torch.no_grad():
        average.weight += 1
    with pytest.raises(UsageError, match="session state average changed in the steps of learner 3"):
        state.refuse_changed_tensors(before, state.take(), 3)
