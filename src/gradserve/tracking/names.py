"""The metrics' names and what they mean: stable, and shown by TensorBoard beside each chart."""

from __future__ import annotations

from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    "epoch": "Pass through the training data, from 1.",
    "loss": "What the optimizer minimises. With policy gradients it is near 0 while a policy learns well: look at the "
    "reward and the gradient norm instead.",
    "optim/grad_norm": "Length of the whole gradient before clipping. 0: nothing is learnt from this step.",
    "optim/lr": "Learning rate of this step.",
    "data/rows": "Rows in this step's batch.",
    "data/tokens": "Tokens in this step's batch, prompts included.",
    "data/trained_tokens": "Tokens in this step's batch that have a loss.",
    "data/overlong_skipped": "Rows left out so far because they are longer than the limit.",
    "time/step": "Seconds from the end of the step before to the end of this one; evaluations are not in it.",
    "time/data_loading": "Seconds that this step waited for rows.",
    "reward/mean": "Mean reward of the episodes that have one.",
    "reward/std": "Standard deviation of the rewards over all episodes.",
    "reward/min": "Lowest reward.",
    "reward/max": "Highest reward.",
    "reward/std_in_group": "Standard deviation of the rewards among the answers to one prompt, mean over prompts. What "
    "group-relative methods learn from.",
    "reward/zero_advantage_groups": "Fraction of the scored groups whose rewards are all equal, so that nothing is "
    "learnt from them. Near 1: the task is too easy or too hard.",
    "reward/part/*": "Mean of one named part of the reward, over the episodes that have it.",
    "episode/count": "Episodes of this step, failed ones included.",
    "episode/turns_mean": "Mean number of the policy's replies in an episode.",
    "episode/tokens_mean": "Mean number of sampled tokens in an episode.",
    "episode/tokens_max": "Most sampled tokens in one episode.",
    "episode/tokens": "Tokens of all episodes, prompts included.",
    "episode/sampled_tokens": "Tokens that the policy sampled, of all episodes.",
    "episode/truncated": "Fraction of the episodes whose last reply was cut at the token limit.",
    "episode/failed": "Fraction of the episodes without a reward because something failed. They are not trained on.",
    "episode/failed/*": "Number of episodes that failed in one way: timeout, crash, invalid_value and others.",
    "policy/entropy": "Estimate of the policy's entropy per token, in nats: minus the mean log-prob of the tokens that "
    "it sampled. Falling to 0: it says always the same. At another temperature than 1, or with top-p or top-k, it is "
    "of the tokens so sampled, under the untempered policy.",
    "policy/staleness_mean": "Optimizer steps between the weights that sampled an episode and those it trains, mean.",
    "policy/staleness_max": "Optimizer steps between the weights that sampled an episode and those it trains, most.",
    "policy/kl_k1": "Estimate of KL(policy || reference) per token, in nats: mean of log p - log p_ref. Unbiased, can "
    "be negative.",
    "policy/kl_k3": "Estimate of KL(policy || reference) per token, in nats: mean of r - 1 - log r, r = p_ref / p. "
    "Unbiased, never negative, less noisy than k1.",
    "policy/ratio_p1": "1st percentile of the importance ratios p_new / p_old of tokens.",
    "policy/ratio_p50": "Median of the importance ratios p_new / p_old of tokens.",
    "policy/ratio_p99": "99th percentile of the importance ratios p_new / p_old of tokens.",
    "policy/ratio_max": "Largest importance ratio p_new / p_old of a token.",
    "policy/ratio_below_clip": "Fraction of the tokens whose ratio is below the clip range.",
    "policy/ratio_above_clip": "Fraction of the tokens whose ratio is above the clip range.",
    "policy/clip_fraction": "Fraction of the tokens that have no gradient because the clip holds: above the range with "
    "a positive advantage, or below it with a negative one.",
    "policy/mismatch_mean": "Mean absolute difference of the trainer's and the sampler's log-probs of the same tokens "
    "under the same weights. Far from 0: they compute different policies.",
    "policy/mismatch_max": "Largest absolute difference of the trainer's and the sampler's log-prob of one token.",
    "policy/mismatch_kl": "Estimate (k3) of KL(sampler || trainer) per token, in nats.",
    "policy/value_error": "Mean squared error of the value head at sampled tokens, against the estimated returns.",
    "policy/explained_variance": "1 - Var(returns - values) / Var(returns). 1: the value head predicts returns; 0: no "
    "better than a constant; negative: worse than that.",
    "importance/mean": "Mean weight by which stale tokens are corrected; 1 where sampler and trainer agree.",
    "importance/max": "Largest such weight.",
    "importance/truncated": "Fraction of the tokens where the cap of the weights acted.",
    "importance/ess": "Effective sample size over the number of tokens (Kish): 1 when all weights are equal.",
    "data/pairs": "Pairs of answers in this step's batch.",
    "accuracy": "Fraction of the pairs whose chosen answer has the higher reward or score.",
    "margin": "Mean difference of reward or score between the chosen and the rejected answer.",
    "rewards/*": "Mean implicit reward of the chosen or rejected answers: beta times the log-ratio to the reference.",
    "scores/*": "Mean score of the chosen or rejected answers.",
    "kl/reverse": "KL(student || teacher) per token, estimated on what the student sampled.",
    "kl/forward": "KL(teacher || student) per token, over the teacher's likeliest tokens.",
    "teacher/top_k_mass": "Probability that the teacher gives its top-k tokens together; the rest is not taught.",
    "length/mean": "Mean length of the sampled answers, tokens.",
    "length/truncated": "Fraction of the sampled answers that were cut at the token limit.",
    "eval/loss": "Mean loss per token on the evaluation data.",
    "eval/*": "On the evaluation data; _low and _high bound the mean's confidence interval, _count is how many "
    "independent problems it is of.",
}
"""``*`` at the end stands for any one name."""


def meaning(name: str) -> str | None:
    """A sentence about a metric; None where nobody has said what it means.

    >>> meaning("reward/part/right")
    'Mean of one named part of the reward, over the episodes that have it.'
    """
    return NAMES.get(name) or NAMES.get(name.rpartition("/")[0] + "/*")
