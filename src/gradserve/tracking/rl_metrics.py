"""A policy's metrics from its episodes and from log-probs; names.py says what each means.

All functions are pure. Of what there is nothing (no scored episode, no token) they give no metric, rather than a 0. An
episode is gradserve.episodes.Episode, or what has its attributes. Log-probs are natural; those of several sequences are
given as one array [T], or as a list of them, one for each sequence. ``mask``, in the same shape, is 1 where a token was
sampled and 0 where it was given (a prompt); without it all count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Metrics = dict[str, float]
Floats = NDArray[np.float64]
PerToken: TypeAlias = ArrayLike | Sequence[ArrayLike]


class Reply(Protocol):
    """A turn of an episode."""

    @property
    def logprobs(self) -> Sequence[float]:
        """[T], of the sampled tokens."""


class Failed(Protocol):
    """Why there is no reward."""

    @property
    def kind(self) -> str: ...


class Episode(Protocol):
    """What is read of gradserve.episodes.Episode; one that failed may have no turns."""

    @property
    def turns(self) -> Sequence[Reply]: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def parts(self) -> Mapping[str, float]: ...
    @property
    def failure(self) -> Failed | None: ...
    @property
    def version(self) -> int: ...
    @property
    def truncated(self) -> bool: ...


def of_groups(groups: Sequence[Sequence[Episode]], *, version: int) -> Metrics:
    """All that the episodes themselves tell. ``version`` is the number of optimizer steps behind the weights that are
    to be trained on them.
    """
    episodes = [episode for group in groups for episode in group]
    return of_rewards(groups) | of_episodes(episodes) | of_staleness(episodes, version) | of_entropy(episodes)


def of_rewards(groups: Sequence[Sequence[Episode]]) -> Metrics:
    """``reward/...``, of scored episodes only; standard deviations divide by the number of rewards.

    A group is equal when its rewards are; a group with one scored episode is, one with none does not count.
    """
    scored = [[episode for episode in group if _is_scored(episode)] for group in groups]
    rewards = [[_reward(episode) for episode in group] for group in scored if group]
    if not rewards:
        return {}
    together = [reward for group in rewards for reward in group]
    parts: dict[str, list[float]] = defaultdict(list)
    for group in scored:
        for episode in group:
            for name, value in episode.parts.items():
                parts[name].append(value)
    return {
        "reward/mean": fmean(together),
        "reward/std": pstdev(together),
        "reward/min": min(together),
        "reward/max": max(together),
        "reward/std_in_group": fmean(pstdev(group) for group in rewards),
        "reward/zero_advantage_groups": fmean(min(group) == max(group) for group in rewards),
        **{f"reward/part/{name}": fmean(values) for name, values in parts.items()},
    }


def of_episodes(episodes: Sequence[Episode]) -> Metrics:
    """``episode/...``; lengths and truncation are of episodes that have a turn, also where they failed later."""
    if not episodes:
        return {}
    failures = Counter(episode.failure.kind for episode in episodes if episode.failure is not None)
    metrics: Metrics = {
        "episode/count": len(episodes),
        "episode/failed": failures.total() / len(episodes),
        **{f"episode/failed/{kind}": number for kind, number in failures.items()},
    }
    begun = [episode for episode in episodes if episode.turns]
    if begun:
        sampled = [sum(len(turn.logprobs) for turn in episode.turns) for episode in begun]
        metrics |= {
            "episode/turns_mean": fmean(len(episode.turns) for episode in begun),
            "episode/tokens_mean": fmean(sampled),
            "episode/tokens_max": max(sampled),
            "episode/tokens": sum(len(episode.tokens) for episode in begun),
            "episode/sampled_tokens": sum(sampled),
            "episode/truncated": fmean(episode.truncated for episode in begun),
        }
    return metrics


def of_staleness(episodes: Sequence[Episode], version: int) -> Metrics:
    """An episode is as old as its oldest turn."""
    ages = [version - episode.version for episode in episodes if episode.turns]
    return {"policy/staleness_mean": fmean(ages), "policy/staleness_max": max(ages)} if ages else {}


def of_entropy(episodes: Sequence[Episode]) -> Metrics:
    """-mean log p(token) over sampled tokens: a Monte-Carlo estimate of E[-log p], which needs no other log-prob."""
    logprobs = [value for episode in episodes for turn in episode.turns for value in turn.logprobs]
    return {"policy/entropy": -fmean(logprobs)} if logprobs else {}


def of_kl(policy: PerToken, reference: PerToken, mask: PerToken | None = None) -> Metrics:
    """KL(policy || reference) per token, from tokens that the policy sampled.

    k1 and k3 of Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), whose q is the policy.
    """
    difference = _flat(policy, mask) - _aligned(reference, policy, mask)
    return {"policy/kl_k1": float(difference.mean()), "policy/kl_k3": _k3(difference)} if difference.size else {}


def of_ratios(
    new: PerToken,
    old: PerToken,
    loss_config: Mapping[str, float] | None = None,
    *,
    advantages: PerToken | None = None,
    mask: PerToken | None = None,
) -> Metrics:
    """Percentiles of p_new / p_old, and how many are out of the clip range.

    ``loss_config`` is the protocol's: ``clip_low_threshold`` and ``clip_high_threshold`` are ratios, such as 0.8 and
    1.2; without them nothing is said about clipping. ``advantages`` tell which clips hold (Schulman et al. 2017,
    arXiv:1707.06347, equation 7).
    """
    with np.errstate(over="ignore"):  # An infinite ratio is told as one.
        ratio = np.exp(_flat(new, mask) - _aligned(old, new, mask))
    if not ratio.size:
        return {}
    p1, p50, p99 = np.percentile(ratio, (1, 50, 99)).tolist()
    metrics = {
        "policy/ratio_p1": p1,
        "policy/ratio_p50": p50,
        "policy/ratio_p99": p99,
        "policy/ratio_max": float(ratio.max()),
    }
    config = loss_config or {}
    if "clip_low_threshold" in config and "clip_high_threshold" in config:
        below, above = ratio < config["clip_low_threshold"], ratio > config["clip_high_threshold"]
        metrics |= {"policy/ratio_below_clip": float(below.mean()), "policy/ratio_above_clip": float(above.mean())}
        if advantages is not None:
            gain = _aligned(advantages, new, mask)
            metrics["policy/clip_fraction"] = float(((above & (gain > 0)) | (below & (gain < 0))).mean())
    return metrics


def of_mismatch(trainer: PerToken, sampler: PerToken, mask: PerToken | None = None) -> Metrics:
    """How far two computations of the same policy are apart, on tokens that the sampler sampled."""
    difference = _flat(sampler, mask) - _aligned(trainer, sampler, mask)
    if not difference.size:
        return {}
    apart = np.abs(difference)
    return {
        "policy/mismatch_mean": float(apart.mean()),
        "policy/mismatch_max": float(apart.max()),
        "policy/mismatch_kl": _k3(difference),
    }


def of_values(values: PerToken, returns: PerToken, mask: PerToken | None = None) -> Metrics:
    """Nothing where all returns are equal: there is no variance to explain."""
    target = _flat(returns, mask)
    missed = target - _aligned(values, returns, mask)
    variance = float(target.var()) if target.size else 0.0
    return {"policy/explained_variance": 1 - float(missed.var()) / variance} if variance else {}


def _k3(difference: Floats) -> float:
    """Mean of r - 1 - log r with log r = -``difference``; expm1 keeps the digits of small differences."""
    with np.errstate(over="ignore"):
        return float((np.expm1(-difference) + difference).mean())


def _is_scored(episode: Episode) -> bool:
    return episode.reward is not None and episode.failure is None


def _reward(episode: Episode) -> float:
    assert episode.reward is not None
    return episode.reward


def _aligned(values: PerToken, to: PerToken, mask: PerToken | None) -> Floats:
    """Flat; raises ValueError where ``to`` has other lengths."""
    lengths, wanted = ([array.size for array in _arrays(given)] for given in (values, to))
    if lengths != wanted:
        raise ValueError(f"values of {lengths} tokens do not belong to {wanted} tokens")
    return _flat(values, mask)


def _flat(values: PerToken, mask: PerToken | None) -> Floats:
    """The values that the mask leaves, [T]. Raises ValueError for a mask of other lengths."""
    arrays = _arrays(values)
    flat = np.concatenate(arrays) if arrays else np.zeros(0)
    return flat if mask is None else flat[_aligned(mask, values, None) > 0]


def _arrays(values: PerToken) -> list[Floats]:
    """One array for each sequence."""
    if isinstance(values, np.ndarray):
        return [values.astype(np.float64).reshape(-1)]
    given: list[ArrayLike] = list(values)  # type: ignore[arg-type]
    if not given or np.ndim(given[0]):
        return [np.asarray(value, dtype=np.float64).reshape(-1) for value in given]
    return [np.asarray(given, dtype=np.float64)]
