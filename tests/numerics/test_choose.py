"""Drawing: the right sets, the right frequencies, streams that depend only on (seed, sample, position)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gradserve.compute.engine.choose import Chooser, Settings
from gradserve.compute.engine.rng import streams, uniform

DRAWS = 20_000
CHI_SQUARE_LIMIT = 37.7
"""The 99.9 % quantile at 15 degrees of freedom; the seed is fixed, so this fails for a reason or never."""

VOCAB = 16


def choose(logits: Tensor, u: Tensor, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> Tensor:
    """Rows of one kind."""
    count = len(u)
    return Chooser(Settings.of([temperature] * count, [top_k] * count, [top_p] * count, u.device)).choose(logits, u)


def draw(logits: Tensor, count: int = DRAWS, **how: float) -> Tensor:
    u = torch.from_numpy(uniform(streams([7] * count, range(count)), [0] * count))
    return choose(logits.expand(count, -1), u, **how)  # type: ignore[arg-type]


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    assert observed[probabilities == 0].sum() == 0
    live = probabilities > 0
    expected = probabilities[live].double() * len(tokens)
    return float(((observed[live] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_are_the_softmax(logits: Tensor, temperature: float) -> None:
    assert chi_square(draw(logits, temperature=temperature), (logits / temperature).softmax(0)) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize("top_k", [1, 5, 15])
def test_top_k(logits: Tensor, top_k: int) -> None:
    kept = torch.full((VOCAB,), -torch.inf)
    best = logits.topk(top_k).indices
    kept[best] = logits[best]
    assert chi_square(draw(logits, top_k=top_k), kept.softmax(0)) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 0.3), (-1, 0.9), (6, 0.8), (-1, 1e-9)])
def test_top_p_keeps_the_fewest_that_reach_it(logits: Tensor, top_k: int, top_p: float) -> None:
    probabilities, order = logits.softmax(0).sort(descending=True)
    if top_k > 0:
        probabilities, order = probabilities[:top_k] / probabilities[:top_k].sum(), order[:top_k]
    count = next(n for n in range(1, VOCAB + 1) if probabilities[:n].sum() >= top_p)
    expected = torch.zeros(VOCAB)
    expected[order[:count]] = probabilities[:count] / probabilities[:count].sum()
    assert chi_square(draw(logits, top_k=top_k, top_p=top_p), expected) < CHI_SQUARE_LIMIT


def test_a_large_vocabulary_with_a_flat_tail() -> None:
    """top_p that needs more candidates than are looked at first."""
    logits = torch.zeros(5000)
    u = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert choose(logits.expand(3, -1), u, top_p=0.79995).tolist() == [0, 2000, 3999]
    assert choose(logits.expand(3, -1), u, top_k=3000).tolist() == [0, 1500, 2999]


@pytest.mark.parametrize("vocab", [1024, 1000, 257])
def test_a_plain_draw_inverts_the_whole_cdf(vocab: int) -> None:
    """Against the running sum of the softmax in float64, at points that are not within rounding of a boundary."""
    logits = 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    reached = logits.double().softmax(0).cumsum(0)
    u = torch.linspace(0.0005, 0.9995, 997, dtype=torch.float64)
    clear = (u[:, None] - reached).abs().amin(1) > 1e-6
    assert clear.sum() > 900
    expected = torch.searchsorted(reached, u, right=True)
    assert torch.equal(choose(logits.expand(len(u), -1), u)[clear], expected[clear])


def test_greedy_is_the_first_of_the_best() -> None:
    half = torch.tensor([0.5], dtype=torch.float64)
    assert choose(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), half, temperature=0.0).tolist() == [1]
    wide = torch.zeros(1, 1000)
    wide[0, [300, 310, 700]] = 5.0
    assert choose(wide, half, temperature=0.0).tolist() == [300]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("top_k", [-1, 3])
@pytest.mark.parametrize("apart", [2, 600])
def test_never_a_token_of_probability_zero(u: float, top_k: int, apart: int) -> None:
    logits = torch.full((1, 3 * apart), -torch.inf)
    logits[0, [apart, 2 * apart]] = 1.0
    assert choose(logits, torch.tensor([u], dtype=torch.float64), top_k=top_k).item() in (apart, 2 * apart)


def test_a_tiny_temperature_is_greedy(logits: Tensor) -> None:
    assert set(draw(logits, count=50, temperature=1e-30).tolist()) == {int(logits.argmax())}


def test_rows_of_all_kinds_in_one_batch_are_as_alone(logits: Tensor) -> None:
    kinds = [(0.0, -1, 1.0), (1.0, -1, 1.0), (0.7, 3, 1.0), (1.3, -1, 0.6), (0.0, 2, 0.5), (0.8, -1, 1.0)]
    temperature, top_k, top_p = (list(column) for column in zip(*kinds, strict=True))
    u = torch.linspace(0.05, 0.95, len(kinds), dtype=torch.float64)
    chooser = Chooser(Settings.of(temperature, top_k, top_p, u.device))
    together = chooser.choose(logits.expand(len(kinds), -1), u)
    for index, (t, k, p) in enumerate(kinds):
        alone = choose(logits[None], u[index : index + 1], temperature=t, top_k=k, top_p=p)
        assert alone.item() == together[index].item()


def test_streams() -> None:
    together = uniform(streams([1, 1, 1, 2, -1, 2**70 + 1], [0, 0, 1, 0, 0, 0]), [0, 1, 0, 0, 0, 0])
    assert len(set(together[:5])) == 5
    assert together[5] == uniform(streams([2**70 % 2**64 + 1], [0]), [0])[0]
    assert together[1] == uniform(streams([1], [0]), [1])[0]
    assert ((together >= 0) & (together < 1)).all()
    many = uniform(streams([9] * 100_000, range(100_000)), [3] * 100_000)
    assert np.histogram(many, bins=10)[0] == pytest.approx(10_000, rel=0.05)
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


def test_splitmix64_itself() -> None:
    """The finaliser against the generator's published outputs for seed 1234567."""
    from gradserve.compute.engine import rng

    seed = np.uint64(1234567)
    states = np.array(
        [seed + np.uint64((index + 1) * 0x9E3779B97F4A7C15 % 2**64) for index in range(3)], dtype=np.uint64
    )
    assert rng._mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
