"""A cancelled sample leaves nothing behind and its neighbours do not notice."""

from __future__ import annotations

from gradserve.compute.tasks import Done, Failed, Outcome, SampleTask
from tests.numerics.lab import Lab, all_tokens, ask, ids, sample_of


def drain(lab: Lab) -> dict[str, Outcome]:
    outcomes = {}
    while lab.sampler.busy:
        outcomes.update({outcome.task_id: outcome for outcome in lab.sampler.step()})
    return outcomes


def test_the_neighbours_of_a_cancelled_sample_do_not_notice(lab: Lab) -> None:
    weights = lab.adapter("llama")
    ops = [ask("llama", ids(n, 20 + n), weights, n=2, seed=n, max_tokens=20) for n in range(3)]
    expected = all_tokens(lab.sample(ops))
    for passes in (0, 1, 2, 7):  # still in line, being prefilled, decoding
        for number, op in enumerate(ops):
            lab.sampler.add(SampleTask(str(number), op))
        lab.sampler.add(SampleTask("gone", ask("llama", ids(9, 60), weights, n=4, max_tokens=150)))
        outcomes: dict[str, Outcome] = {}
        for _ in range(passes):
            outcomes |= {outcome.task_id: outcome for outcome in lab.sampler.step()}
        cancelled = lab.sampler.cancel("gone")
        assert isinstance(cancelled, Failed)
        assert (cancelled.task_id, cancelled.kind) == ("gone", "cancelled")
        assert lab.sampler.cancel("gone") is None
        outcomes |= drain(lab)
        assert set(outcomes) == {"0", "1", "2"}
        done = [outcomes[str(number)] for number in range(3)]
        assert all_tokens([sample_of(d) for d in done if isinstance(d, Done)]) == expected


def test_a_cancelled_sample_leaves_nothing_to_do(lab: Lab) -> None:
    long = ask("llama", ids(1, 40), n=2, max_tokens=200)
    lab.sampler.add(SampleTask("a", long))
    for _ in range(5):
        assert lab.sampler.step() == []
    assert lab.sampler.cancel("a") is not None
    assert not lab.sampler.busy


def test_what_is_not_there_cannot_be_cancelled(lab: Lab) -> None:
    assert lab.sampler.cancel("nobody") is None
    (done,) = lab.sample_tasks([ask("llama", ids(0, 4), max_tokens=2)])
    assert lab.sampler.cancel(done.task_id) is None
