import math

import pytest
import torch

from qerl.algo.advantage import advantages, zero_variance

REWARDS = torch.tensor([[0.0, 1.0, 2.0, 5.0], [0.1, 0.1, 0.1, 0.1]])


def test_group_scale_by_hand():
    # mean 2, squared deviations 4 + 1 + 0 + 9 = 14, unbiased std sqrt(14 / 3)
    std = math.sqrt(14 / 3) + 1e-4
    expected = torch.tensor([[-2 / std, -1 / std, 0.0, 3 / std], [0.0] * 4])
    torch.testing.assert_close(advantages(REWARDS), expected)


def test_no_scale_by_hand():
    expected = torch.tensor([[-2.0, -1.0, 0.0, 3.0], [0.0] * 4])
    torch.testing.assert_close(advantages(REWARDS, scale="none"), expected)


def test_batch_scale_by_hand():
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    # all four: mean 3/4, squared deviations 9/16 + 3 * 1/16 = 3/4, unbiased std sqrt(1/4)
    expected = torch.tensor([[-0.5, 0.5], [0.0, 0.0]]) / (0.5 + 1e-4)
    torch.testing.assert_close(advantages(rewards, scale="batch"), expected)


def test_leave_one_out_by_hand():
    # each reward minus the mean of the other three: 0 - 8/3, 1 - 7/3, 2 - 2, 5 - 1
    expected = torch.tensor([[-8 / 3, -4 / 3, 0.0, 4.0], [0.0] * 4])
    torch.testing.assert_close(advantages(REWARDS, "none", "leave_one_out"), expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_groups_of_one_are_zero(scale, baseline):
    rewards = torch.tensor([[3.0], [5.0]])
    assert advantages(rewards, scale, baseline).tolist() == [[0.0], [0.0]]
    assert advantages(rewards[:1], scale, baseline).tolist() == [[0.0]]


def test_equal_rewards_are_exactly_zero_despite_rounding():
    rewards = torch.full((1, 7), 0.1)
    rounding = rewards - rewards.mean()
    assert advantages(rewards).tolist() == [[0.0] * 7]
    assert rounding.abs().max() < 1e-7  # what 1 / eps would have multiplied


def test_zero_variance():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1e-3], [0.0, 1e-9]])
    assert zero_variance(rewards).tolist() == [True, False, True]


def test_rejects_rewards_that_are_not_finite():
    with pytest.raises(AssertionError, match="finite"):
        advantages(torch.tensor([[1.0, math.nan]]))
