"""Steps of Adam that fit a few parameters of a trained model to what is known of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor


def fitted(
    parameters: Sequence[Tensor],
    batch_loss: Callable[[Generator], Tensor],
    *,
    steps: int,
    learning_rate: float,
) -> float:
    """Fits parameters in place.

    Args:
        parameters: what is fitted.
        batch_loss: the loss of a batch that it draws.
        steps: steps of Adam.
        learning_rate: rate of the first step; it falls to 0 linearly.

    Returns:
        The mean loss of the last tenth of the steps.
    """
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        loss = batch_loss(generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)
