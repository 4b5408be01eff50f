"""What is written where; TensorBoard's files are read back with tensorboardX's message types."""

from __future__ import annotations

import io
import json
import math
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gradserve.crc32c import masked_crc32c
from gradserve.tracking import SinkUnusable, Tracker
from gradserve.tracking.names import NAMES
from gradserve.tracking.sinks import jsonl
from gradserve.tracking.sinks.background import Background


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def log_steps(folder: Path, first: int, last: int, value: float, resume_step: int | None = None) -> None:
    with Tracker(folder, resume_step=resume_step) as tracker:
        for step in range(first, last + 1):
            tracker.log(step, {"reward/mean": value})
            tracker.text(step, "sample", f"{value}")


def records(file: Path) -> Iterator[bytes]:
    """Checks both checksums of each."""
    stream = io.BytesIO(file.read_bytes())
    while head := stream.read(8):
        assert struct.unpack("<I", stream.read(4))[0] == masked_crc32c(head)
        data = stream.read(struct.unpack("<Q", head)[0])
        assert struct.unpack("<I", stream.read(4))[0] == masked_crc32c(data)
        yield data


def events(folder: Path) -> list[Any]:
    """Of all files in the order of their names, as TensorBoard reads them."""
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    return [proto.Event.FromString(data) for file in sorted(folder.glob("*tfevents*")) for data in records(file)]


def test_metrics_are_lines_that_are_there_at_once(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run", config={"learning_rate": 1e-4})
    tracker.log(1, {"reward/mean": 0.25, "optim/lr": 1})
    tracker.text(1, "sample", "2 + 2 = *4* \N{SNOWMAN}\n")
    (metrics,), (sample,) = lines(tmp_path / "run/metrics.jsonl"), lines(tmp_path / "run/samples.jsonl")
    assert metrics.pop("time") == pytest.approx(sample.pop("time"), abs=5)
    assert metrics == {"step": 1, "reward/mean": 0.25, "optim/lr": 1.0}
    assert sample == {"step": 1, "name": "sample", "text": "2 + 2 = *4* \N{SNOWMAN}\n"}
    assert json.loads((tmp_path / "run/config.json").read_text()) == {"learning_rate": 1e-4}
    tracker.close()


def test_what_is_not_finite_is_null_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.log(1, {"policy/kl_k1": math.nan, "loss": -math.inf, "reward/mean": 1.0})
        tracker.log(2, {"policy/kl_k1": math.nan})
    assert [line["policy/kl_k1"] for line in lines(tmp_path / "metrics.jsonl")] == [None, None]
    assert lines(tmp_path / "metrics.jsonl")[0]["loss"] is None
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "step 1: metric policy/kl_k1 is nan",
        "step 1: metric loss is -inf",
    ]
    assert [value.tag for event in events(tmp_path) for value in event.summary.value] == ["reward/mean"]


@pytest.mark.parametrize(
    ("metrics", "words"), [({"step": 1.0}, "'step'"), ({"time": 1.0}, "'time'"), ({"loss": "low"}, "loss is 'low'")]
)
def test_what_is_no_metric_is_refused(tmp_path: Path, metrics: Mapping[str, Any], words: str) -> None:
    with Tracker(tmp_path) as tracker, pytest.raises(ValueError, match=words):
        tracker.log(1, metrics)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 5, 0.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "ti')  # Killed while it wrote.
    log_steps(tmp_path, 4, 6, 1.0, resume_step=3)
    expected = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    assert [(line["step"], line["reward/mean"]) for line in lines(tmp_path / "metrics.jsonl")] == expected
    assert [(line["step"], float(line["text"])) for line in lines(tmp_path / "samples.jsonl")] == expected


def test_tensorboard_is_told_from_which_step_a_resumed_run_goes_on(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 5, 0.0)
    log_steps(tmp_path, 4, 4, 1.0, resume_step=3)
    (start,) = [event for event in events(tmp_path) if event.HasField("session_log")]
    assert (start.step, start.session_log.status) == (4, start.session_log.START)
    after = events(tmp_path)[events(tmp_path).index(start) + 1 :]
    assert [event.step for event in after if event.HasField("summary")] == [4, 4]


def test_another_run_is_not_written_into(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 2, 0.0)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SinkUnusable, match=r"metrics\.jsonl is of another run.*resume_step"):
        Tracker(tmp_path, config={"other": True})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_damaged_line_is_named_rather_than_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(SinkUnusable, match="line 2 has no step"):
        Tracker(tmp_path, resume_step=3)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"ste\n{"step": 3}\n'


def test_tensorboard_events(tmp_path: Path) -> None:
    with Tracker(tmp_path, run_name="sum", config={"rank": 8}) as tracker:
        tracker.log(300, {"reward/mean": 0.25, "mine": -1.5})
        tracker.log(301, {"reward/mean": 0.5})
        tracker.text(301, "sample", "*4* " * 2000)
    version, config, first, second, sample = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert b'"rank": 8' in config.summary.value[0].tensor.string_val[0]
    assert [(value.tag, value.simple_value) for value in first.summary.value] == [("reward/mean", 0.25), ("mine", -1.5)]
    assert [value.metadata.summary_description for value in first.summary.value] == [NAMES["reward/mean"], ""]
    assert (second.step, second.summary.value[0].simple_value) == (301, 0.5)
    assert not second.summary.value[0].HasField("metadata")
    (text,) = sample.summary.value
    assert (sample.step, text.tag, text.metadata.plugin_data.plugin_name) == (301, "sample", "text")
    assert text.tensor.string_val == [b"*4* " * 2000]
    assert [dim.size for dim in text.tensor.tensor_shape.dim] == [1]
    assert text.tensor.dtype == 7


def test_a_sink_that_fails_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Tracker(tmp_path) as tracker:
        tracker.log(1, {"loss": 1.0})
        with monkeypatch.context() as broken:
            broken.setattr(jsonl.LineFile, "append", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
            tracker.log(2, {"loss": 2.0})
            tracker.log(3, {"loss": 3.0})
        tracker.log(4, {"loss": 4.0})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 4]
    assert tracker.failures == {"jsonl": 2}
    assert len(caplog.records) == 1
    assert "the disk is full" in caplog.text
    assert [event.step for event in events(tmp_path) if event.HasField("summary")] == [1, 2, 3, 4]


_SMALL_DISK = """
import resource, signal, sys
from gradserve.tracking import Tracker
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tracker = Tracker(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
for step in range(100):
    tracker.log(step, {f"reward/part/{part}": 0.5 for part in range(50)})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tracker.log(100, {"reward/mean": 1.0})
tracker.close()
print(sorted(tracker.failures))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on file sizes")
def test_a_disk_that_is_full_for_a_while_leaves_whole_files(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", _SMALL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "['jsonl', 'tensorboard']\n"
    steps = [line["step"] for line in lines(tmp_path / "metrics.jsonl")]
    assert steps[-1] == 100
    assert steps[:-1] == list(range(len(steps) - 1))
    assert [event.step for event in events(tmp_path) if event.HasField("summary")][-1] == 100


def test_unknown_sinks_and_missing_libraries_are_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SinkUnusable, match=r"'comet'; there are jsonl, tensorboard, wandb, mlflow"):
        Tracker(tmp_path, sinks=("comet",))
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SinkUnusable, match=rf"pip install 'gradserve\[{name}\]'"):
            Tracker(tmp_path, sinks=(name,))
    Tracker(tmp_path).close()  # Nothing was logged, so the folder is still free.


def test_the_files_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from gradserve.tracking import Tracker, rl_metrics; Tracker(sys.argv[1]).close(); "
        "print({'torch', 'tensorboardX', 'google.protobuf'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "set()\n"


class Service:
    """Notes its calls; waits with each until it is ``free``; fails at odd steps."""

    def __init__(self) -> None:
        self.free, self.steps = threading.Event(), list[int]()

    def metrics(self, step: int, time: float, values: Mapping[str, float | None]) -> None:
        self.free.wait(60)
        if step % 2:
            raise ConnectionError(f"step {step}")
        self.steps.append(step)

    def text(self, step: int, time: float, name: str, markdown: str) -> None:
        self.metrics(step, time, {})

    def close(self) -> None:
        self.steps.append(-1)


def test_a_service_that_hangs_holds_up_no_step() -> None:
    service = Service()
    sink = Background(service, waiting=4, close_s=0.05)
    lost = sum(bool(raised(lambda: sink.metrics(0, 0.0, {}))) for _ in range(50))
    assert 50 - lost in (4, 5)  # The thread may have taken the first already.
    with pytest.raises(TimeoutError, match="calls were not made"):
        sink.close()
    assert service.steps == []
    service.free.set()


def test_a_service_in_the_background_gets_its_calls_in_order_and_its_errors_are_told() -> None:
    service = Service()
    service.free.set()
    sink = Background(service)
    errors = [
        raised(lambda: sink.metrics(0, 0.0, {})),
        raised(lambda: sink.text(1, 0.0, "a", "b")),
        raised(lambda: sink.metrics(2, 0.0, {})),
        raised(sink.close),
    ]
    assert (service.steps, "".join(errors)) == ([0, 2, -1], "ConnectionError('step 1')")


def raised(call: Callable[[], object]) -> str:
    """What a call raises, "" for nothing."""
    try:
        call()
    except Exception as error:
        return repr(error)
    return ""


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracker(tmp_path, sinks=("wandb",)) as tracker:
        tracker.log(1, {"reward/mean": 0.25})
        tracker.text(1, "sample", "<b>")
    identity = (tmp_path / "wandb-run.txt").read_text().strip()
    with Tracker(tmp_path, sinks=("wandb",), resume_step=1) as resumed:
        resumed.log(2, {"reward/mean": 0.5})
    assert tracker.failures == resumed.failures == {}
    written = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in written} == {f"run-{identity}.wandb"}
    assert b"reward/mean" in written[0].read_bytes()


def test_mlflow_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    with Tracker(tmp_path / "run", sinks=("mlflow",), config={"data": {"path": "a"}}) as tracker:
        tracker.log(1, {"reward/mean": 0.25, "loss": math.nan})
        tracker.text(1, "sample", "<b>")
    with Tracker(tmp_path / "run", sinks=("mlflow",), config={"data": {"path": "b"}}, resume_step=1) as resumed:
        resumed.log(2, {"reward/mean": 0.5})
    assert tracker.failures == resumed.failures == {}
    client = mlflow.MlflowClient()
    run = (tmp_path / "run/mlflow-run.txt").read_text().strip()
    history = client.get_metric_history(run, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert client.get_run(run).data.params == {"data.path": "a"}
    assert client.list_artifacts(run, "sample")[0].path == "sample/step-00000001.md"
