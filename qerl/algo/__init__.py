"""The mathematics of the update: pure functions, tensors in, tensors out."""

from qerl.algo.advantage import advantages, zero_variance
from qerl.algo.loss import Totals, mismatch_metrics, policy_loss

__all__ = ["Totals", "advantages", "mismatch_metrics", "policy_loss", "zero_variance"]
