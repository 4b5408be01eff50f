"""Order within a run: accept out of order, execute in order, readers side by side, barriers alone."""

from __future__ import annotations

from gradserve.orchestration.lanes import Lane
from gradserve.store.base import Op, OpState, Run
from gradserve.wire.ops import LoraConfig, OpKind


def op(seq: int, kind: OpKind, state: OpState = "accepted") -> Op:
    return Op(f"r:op:{seq}", "t", "s", "r", seq, kind, b"", 0.0, run_id="r", state=state)


def lane(head: int = 1) -> Lane:
    return Lane(Run("r", "t", "s", "tiny", LoraConfig(8, 0), 0.0, 0.0), head)


def seqs(ops: list[Op]) -> list[int]:
    return [op.seq for op in ops]


def test_the_first_chunk_arrives_last_and_runs_first() -> None:
    it = lane()
    it.add(op(3, "forward_backward"))
    it.add(op(2, "forward_backward"))
    assert it.start_ready() == []
    it.add(op(1, "forward_backward"))
    assert seqs(it.start_ready()) == [1, 2, 3]


def test_a_barrier_waits_for_all_readers_before_it() -> None:
    it = lane()
    for seq in (1, 2):
        it.add(op(seq, "forward_backward"))
    it.add(op(3, "optim_step"))
    it.add(op(4, "forward_backward"))
    assert seqs(it.start_ready()) == [1, 2]
    it.end(2)
    assert it.start_ready() == []
    it.end(1)
    assert seqs(it.start_ready()) == [3]
    assert it.start_ready() == []
    it.end(3)
    assert seqs(it.start_ready()) == [4]


def test_a_rejected_op_consumes_its_seq() -> None:
    it = lane()
    it.add(op(2, "optim_step"))
    assert it.start_ready() == []
    it.add(op(1, "forward_backward", state="rejected"))
    assert seqs(it.start_ready()) == [2]


def test_a_rejection_ahead_of_the_head_is_remembered() -> None:
    it = lane()
    it.add(op(2, "optim_step", state="rejected"))
    it.add(op(3, "save_weights"))
    it.add(op(1, "forward_backward"))
    assert seqs(it.start_ready()) == [1]
    it.end(1)
    assert seqs(it.start_ready()) == [3]


def test_an_op_told_twice_runs_once() -> None:
    it = lane()
    it.add(op(1, "forward_backward"))
    assert seqs(it.start_ready()) == [1]
    it.add(op(1, "forward_backward"))
    assert it.start_ready() == []
    it.end(1)
    it.add(op(1, "forward_backward"))
    assert it.start_ready() == []
    assert it.idle


def test_a_new_run_begins_with_seq_0() -> None:
    it = lane(head=0)
    it.add(op(1, "forward_backward"))
    it.add(op(0, "create_model"))
    assert seqs(it.start_ready()) == [0]
    it.end(0)
    assert seqs(it.start_ready()) == [1]
