"""How the next token is chosen."""

from __future__ import annotations

from collections import Counter

import torch

from tiercache.service.runners.sampling import picker


def test_temperature_zero_takes_the_most_likely() -> None:
    """Without a temperature the seed is of no account."""
    logits = torch.tensor([0.0, 3.0, 1.0])

    assert {picker(0, seed)(logits) for seed in (None, 1, 2)} == {1}


def test_draws_follow_the_distribution() -> None:
    """Tokens come about as often as their softmax says."""
    pick = picker(2.0, 3)
    logits = torch.log(torch.tensor([0.64, 0.04, 0.16, 0.16]))  # at temperature 2, their square roots count: 8, 2, 4, 4

    counts = Counter(pick(logits) for _ in range(4000))

    assert all(abs(counts[token] / 4000 - share / 18) < 0.03 for token, share in enumerate((8, 2, 4, 4)))


def test_two_pickers_do_not_share_their_draws() -> None:
    """What one sequence draws changes nothing for another, and nothing for torch's own generator."""
    logits = torch.zeros(1000)
    alone = picker(1.0, 5)
    expected = [alone(logits) for _ in range(5)]
    state = torch.random.get_rng_state()
    one, other = picker(1.0, 5), picker(1.0, 6)

    found = [(one(logits), other(logits))[0] for _ in range(5)]

    assert found == expected
    assert torch.equal(torch.random.get_rng_state(), state)
