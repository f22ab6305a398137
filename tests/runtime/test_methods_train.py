"""A small GPT trained for 50 steps by every method ends at the loss of the standard one."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch

from freehold import AdamW, LayerwiseOptimizer, Muon


def final_loss(**options: Any) -> tuple[float, torch.Tensor]:
    """Mean loss of the last 10 of 50 steps, and the weights."""
    model = models.make("gpt")
    opt = LayerwiseOptimizer(
        model, matrix=Muon(lr=0.01, weight_decay=0.01, **options), elementwise=AdamW(lr=3e-3), bucket_numel=4000
    )
    losses = []
    for step in range(50):
        inputs = models.batch("gpt", torch.Generator().manual_seed(step % 4))
        loss = models.loss_of(model, inputs)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    opt.close()
    assert losses[-1] < 0.6 * losses[0]
    return sum(losses[-10:]) / 10, weights


@pytest.fixture(scope="module", name="standard")
def _standard() -> tuple[float, torch.Tensor]:
    return final_loss()


@pytest.mark.parametrize(
    "options", [{"method": "gram"}, {"method": "auto"}, {"method": "gram", "ns_dtype": "float32"}], ids=str
)
def test_faster_methods_end_within_half_a_percent_of_the_standard_loss(
    options: dict[str, Any], standard: tuple[float, torch.Tensor]
) -> None:
    loss, weights = final_loss(**options)
    assert abs(loss / standard[0] - 1) < 0.005
    assert (weights - standard[1]).norm() < 0.1 * standard[1].norm()
