"""Data: every format against files made by other means, orders, resumes, bad rows, overlaps."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve.cli import main
from gradserve.crc32c import crc32c
from gradserve.data import BadRow, DataError, Dataset, contamination
from gradserve.data.order import buffered, permutation
from gradserve.data.row import digest, pack, unpack
from gradserve.data.selection import percent
from tests.s3 import s3_server

ROWS: list[dict[str, Any]] = [{"text": f"row {i}", "n": i} for i in range(100)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbers(dataset: Dataset) -> list[int]:
    return [row["n"] for row in dataset]


# formats


def test_jsonl_plain_and_gzipped(tmp_path: Path) -> None:
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(b'\xef\xbb\xbf{"text": "\xc3\xa9", "n": 1}\n\n{"text": null, "n": [2.5]}')
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    expected = [{"text": "é", "n": 1}, {"text": None, "n": [2.5]}]
    assert list(Dataset(plain)) == list(Dataset(packed)) == expected


def test_csv_keeps_strings_quotes_and_lines_in_values(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    with file.open("w", newline="", encoding="utf-8-sig") as out:
        csv.writer(out).writerows([["q", "a"], ['say "hi",\nthen go', "1"], ["é", ""]])
    assert list(Dataset(file)) == [{"q": 'say "hi",\nthen go', "a": "1"}, {"q": "é", "a": ""}]


def test_parquet_and_arrow_in_both_containers(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.feather
    import pyarrow.ipc
    import pyarrow.parquet

    at = datetime.datetime(2026, 1, 2, 3, 4, 5)
    rows = [{"text": "a", "tokens": [1, 2], "at": at}, {"text": None, "tokens": [], "at": at}]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    pyarrow.feather.write_feather(table, tmp_path / "a.feather")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    for name in ("a.parquet", "a.feather", "a.arrow"):
        assert list(Dataset(tmp_path / name)) == rows
        # Through the copy on disk that a full shuffle makes, values keep their types.
        assert sorted(Dataset(tmp_path / name, shuffle_seed=1), key=lambda row: len(row["tokens"])) == rows[::-1]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a\.parquet is damaged after row 0"):
        list(Dataset(tmp_path / "a.parquet"))


def test_hdf5_columns_arrays_and_groups(tmp_path: Path) -> None:
    import h5py

    observations = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    with h5py.File(tmp_path / "a.h5", "w") as out:
        out["observation"] = observations
        out["meta/name"] = ["x", "é", "z"]
        out["reward"] = np.array([0.5, 1.5, 2.5])
    rows = list(Dataset(tmp_path / "a.h5"))
    assert [(row["meta/name"], row["reward"]) for row in rows] == [("x", 0.5), ("é", 1.5), ("z", 2.5)]
    for row, expected in zip(rows, observations, strict=True):
        assert row["observation"].dtype == np.float32
        np.testing.assert_array_equal(row["observation"], expected)
    with h5py.File(tmp_path / "b.h5", "w") as out:
        out["a"], out["b"] = [1, 2], [1, 2, 3]
    with pytest.raises(DataError, match=r"differ in their first dimension \(a 2, b 3\)"):
        list(Dataset(tmp_path / "b.h5"))


def test_crc32c_vectors_of_rfc_3720() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("size", [4095, 4096, 4097, 4159, 4160, 10000])
def test_crc32c_of_long_data_is_that_of_the_definition(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == bit_by_bit(data)


def bit_by_bit(data: bytes) -> int:
    """CRC-32C from the polynomial's usual notation."""
    crc = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            top = crc >> 31 ^ (byte >> bit & 1)
            crc = (crc << 1) & 0xFFFFFFFF ^ (0x1EDC6F41 if top else 0)
    return int(f"{crc:032b}"[::-1], 2) ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = bit_by_bit(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32))


def record(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    return head + masked(head) + payload + masked(payload)


def example_class() -> Any:
    """tf.train.Example, made by protobuf itself from its declaration."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    F = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, Any, bool, str | None]) -> Any:
        made = file.message_type.add(name=name)
        for field, number, kind, repeated, of in fields:
            label = F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL
            made.field.add(name=field, number=number, type=kind, label=label, type_name=of)
        return made

    message("BytesList", ("value", 1, F.TYPE_BYTES, True, None))
    message("FloatList", ("value", 1, F.TYPE_FLOAT, True, None))
    message("Int64List", ("value", 1, F.TYPE_INT64, True, None))
    lists = ("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")
    message("Feature", *((name, i, F.TYPE_MESSAGE, False, f".t.{of}") for i, (name, of) in enumerate(lists, 1)))
    features = message("Features", ("feature", 1, F.TYPE_MESSAGE, True, ".t.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=F.TYPE_MESSAGE, label=F.LABEL_OPTIONAL, type_name=".t.Feature")
    message("Example", ("features", 1, F.TYPE_MESSAGE, False, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def example(i: int) -> bytes:
    made = example_class()()
    made.features.feature["text"].bytes_list.value.append(f"row {i}".encode())
    made.features.feature["scores"].float_list.value.extend([0.5, -2.0])
    made.features.feature["ids"].int64_list.value.extend([i, -1, 1 << 40])
    made.features.feature["none"].SetInParent()
    encoded: bytes = made.SerializeToString()
    return encoded


def test_tfrecord_against_protobuf(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(b"".join(record(example(i)) for i in range(3)))
    (tmp_path / "b.tfrecord.gz").write_bytes(gzip.compress((tmp_path / "a.tfrecord").read_bytes()))
    expected = [
        {"text": [f"row {i}".encode()], "scores": [0.5, -2.0], "ids": [i, -1, 1 << 40], "none": []} for i in range(3)
    ]
    assert list(Dataset(tmp_path / "a.tfrecord")) == list(Dataset(tmp_path / "b.tfrecord.gz")) == expected


def test_tfrecord_damage_by_record(tmp_path: Path) -> None:
    good = [record(example(i)) for i in range(3)]
    flipped = bytearray(good[1])
    flipped[20] ^= 1
    file = tmp_path / "a.tfrecord"
    file.write_bytes(good[0] + flipped + good[2])
    with pytest.raises(BadRow, match=r"a\.tfrecord, record 2: the checksum of its bytes is wrong"):
        list(Dataset(file))
    dataset = Dataset(file, skip_bad_rows=True)
    assert [row["ids"][0] for row in dataset] == [0, 2]
    assert dataset.counts.bad == 1
    file.write_bytes(good[0] + b"\x01" + good[1][1:])
    with pytest.raises(DataError, match="record 2: its length's checksum"):
        list(Dataset(file, skip_bad_rows=True))
    file.write_bytes(good[0] + good[1][:-3])
    with pytest.raises(DataError, match="record 2: the file ends within it"):
        list(Dataset(file))
    file.write_bytes(record(b"\x0a\x7f"))
    with pytest.raises(BadRow, match=r"record 1: no tf\.train\.Example"):
        list(Dataset(file))


def test_folders_globs_and_named_parts(tmp_path: Path) -> None:
    jsonl(tmp_path / "train-00000-of-00002.jsonl", ROWS[:2])
    jsonl(tmp_path / "train-00001-of-00002.jsonl", ROWS[2:4])
    jsonl(tmp_path / "test.jsonl", ROWS[4:6])
    (tmp_path / "README.md").write_text("about")
    assert numbers(Dataset(tmp_path, split="train")) == [0, 1, 2, 3]
    assert numbers(Dataset(tmp_path, split="test")) == [4, 5]
    assert numbers(Dataset(tmp_path / "train-*.jsonl")) == [0, 1, 2, 3]
    with pytest.raises(DataError, match=r"parts test, train; choose one"):
        Dataset(tmp_path)
    with pytest.raises(DataError, match="no file is named 'dev'"):
        Dataset(tmp_path, split="dev")
    with pytest.raises(DataError, match="nothing tells the format"):
        Dataset(tmp_path / "README.md")
    with pytest.raises(DataError, match="there is no"):
        Dataset(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["train/sub/a", "test/sub/a"], "train", [0]),
        (["train/sub/a", "test/sub/a"], "test[:100%]", [1]),
        (["train/a", "train/test"], "train", [0]),
        (["train/a", "train/test"], "test", [1]),
        (["a", "b"], "train", [0, 1]),
        (["mine-0", "other-1"], "mine", [0]),
    ],
)
def test_the_nearest_name_says_what_a_file_is_for(
    tmp_path: Path, names: list[str], split: str, expected: list[int]
) -> None:
    for number, name in enumerate(names):
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        jsonl(file, [{"n": number}])
    assert numbers(Dataset(tmp_path, split=split)) == expected


_READS_A_COPY = """
import sys, s3fs
from gradserve.data import Dataset
fetched = []
real = s3fs.S3FileSystem._get_file
def counted(self, path, *rest, **more):
    fetched.append(path)
    return real(self, path, *rest, **more)
s3fs.S3FileSystem._get_file = counted
rows = [row["n"] for row in Dataset("s3://copies/a.jsonl", cache=sys.argv[1])]
print(rows, "fetched", len(fetched))
"""


@pytest.mark.parametrize("source", ["rows.jsonl", ROWS])
def test_a_cache_where_there_is_nothing_to_copy_is_refused(source: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no URL; leave it out"):
        Dataset(source, cache=tmp_path)
    with pytest.raises(DataError, match="give the folder"):
        Dataset("s3://rows/a.jsonl", cache=True)  # type: ignore[arg-type]


def test_copies_of_remote_files_are_fetched_once_and_again_when_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    import s3fs

    def put(rows: list[dict[str, object]]) -> None:
        body = "".join(json.dumps(row) + "\n" for row in rows).encode()
        boto3.client("s3").put_object(Bucket="copies", Key="a.jsonl", Body=body)

    fetched: list[str] = []
    real = s3fs.S3FileSystem._get_file

    async def counted(self: Any, path: str, *rest: Any, **more: Any) -> Any:
        fetched.append(path)
        return await real(self, path, *rest, **more)

    with s3_server("copies"):
        s3fs.S3FileSystem.clear_instance_cache()
        monkeypatch.setattr(s3fs.S3FileSystem, "_get_file", counted)
        put([{"n": 1}, {"n": 2}])
        dataset = Dataset("s3://copies/a.jsonl", cache=tmp_path)
        assert [numbers(dataset), numbers(dataset)] == [[1, 2], [1, 2]]
        assert numbers(Dataset("s3://copies/a.jsonl", cache=tmp_path)) == [1, 2]
        assert fetched == ["copies/a.jsonl"]
        put([{"n": 3}, {"n": 4}])  # as many bytes
        assert numbers(Dataset("s3://copies/a.jsonl", cache=tmp_path)) == [3, 4]
        assert len(fetched) == 2
        (copy,) = (file for file in tmp_path.iterdir() if file.suffix == "")
        assert len(list(tmp_path.iterdir())) == 2, "the copy of what was there before is gone"
        copy.write_bytes(copy.read_bytes().replace(b"3", b"7"))  # as many bytes
        assert numbers(Dataset("s3://copies/a.jsonl", cache=tmp_path)) == [3, 4]
        command = [sys.executable, "-c", _READS_A_COPY, str(tmp_path)]
        served = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        assert served == "[3, 4] fetched 0\n", "another process finds the copy"
        assert len(fetched) == 3
    s3fs.S3FileSystem.clear_instance_cache()


def test_urls_memory_and_s3() -> None:
    import boto3
    import fsspec
    import s3fs

    lines = "".join(json.dumps(row) + "\n" for row in ROWS[:4]).encode()
    fs = fsspec.filesystem("memory")
    fs.pipe("/gradserve-data/train/a.jsonl", lines)
    assert numbers(Dataset("memory://gradserve-data/train")) == [0, 1, 2, 3]
    assert numbers(Dataset("memory://gradserve-data/*/a.jsonl")) == [0, 1, 2, 3]
    with s3_server("rows"):
        boto3.client("s3").put_object(Bucket="rows", Key="deep/a.jsonl.gz", Body=gzip.compress(lines))
        s3fs.S3FileSystem.clear_instance_cache()
        assert numbers(Dataset("s3://rows/deep/a.jsonl.gz", shuffle_seed=0)) == numbers(
            Dataset(ROWS[:4], shuffle_seed=0)
        )
        with pytest.raises(DataError, match="s3://rows/absent"):
            Dataset("s3://rows/absent.jsonl")
    s3fs.S3FileSystem.clear_instance_cache()  # those kept would ask this server, which is gone, in the next test


class Columns:
    """What Dataset uses of a HF dataset."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(ROWS[range(3)[index]])


def test_sources_that_are_no_files() -> None:
    assert gradserve.Dataset is Dataset
    assert numbers(Dataset(Columns())) == [0, 1, 2]
    assert numbers(Dataset({"train": Columns(), "test": ROWS[7:]}, split="test")) == list(range(7, 100))
    assert numbers(Dataset(lambda: iter(ROWS[:2]))) == [0, 1]
    with pytest.raises(DataError, match="give the function that makes it"):
        Dataset(iter(ROWS))
    with pytest.raises(BadRow, match="row 2: a int, not a dict"):
        list(Dataset([{"n": 1}, 2]))


# bad rows


def test_bad_lines_are_named_and_skipped_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"n": 0}\n\n{"n": \n[1]\n{"n": 4}\n')
    with pytest.raises(BadRow, match=r"a\.jsonl, line 3: no JSON") as caught:
        list(Dataset(file))
    assert (caught.value.source, caught.value.place, caught.value.cure) == (str(file), "line 3", "mend the line")
    dataset = Dataset(file, skip_bad_rows=True)
    assert numbers(dataset) == [0, 4]
    assert (dataset.counts.taken, dataset.counts.bad) == (2, 2)


def test_bad_csv_rows_are_named_by_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'n,t\n1,"two\nlines"\n2\n3,\xff\n4,"x"y\n5,ok\n')
    dataset = Dataset(file, skip_bad_rows=True)
    assert list(dataset) == [{"n": "1", "t": "two\nlines"}, {"n": "5", "t": "ok"}]
    assert dataset.counts.bad == 3
    with pytest.raises(BadRow, match="line 4: 1 values for 2 columns"):
        list(Dataset(file))
    file.write_bytes(b"n,n\n1,2\n")
    with pytest.raises(DataError, match="more than one column is named 'n'"):
        list(Dataset(file))


def test_a_cut_gzip_file_is_an_error_that_is_not_skipped(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(50_000).hex()
    whole = gzip.compress(b"".join(b'{"n": %d, "x": "%s"}\n' % (i, noise.encode()) for i in range(5)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-2000])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz can't be read after line \d.*is it whole"):
        list(Dataset(tmp_path / "a.jsonl.gz", skip_bad_rows=True))


def test_a_length_function_that_raises_names_the_row() -> None:
    rows = [{"text": "a"}, {"other": "b"}]
    with pytest.raises(BadRow, match="row 2: the length function raised KeyError: 'text'"):
        list(Dataset(rows, length=lambda row: len(row["text"]), max_length=3))


def test_a_number_that_a_full_shuffle_cannot_copy_names_its_line(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", [{"n": 1}, {"n": 1 << 70}])
    assert numbers(Dataset(file)) == [1, 1 << 70]
    with pytest.raises(BadRow, match=r"a\.jsonl, line 2: it can't be copied .* more than 64 bits"):
        list(Dataset(file, shuffle_seed=0))
    dataset = Dataset(file, shuffle_seed=0, skip_bad_rows=True)
    assert numbers(dataset) == [1]
    assert (dataset.counts.taken, dataset.counts.bad) == (1, 1)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the integer"):
        Dataset(file).fingerprint()


@pytest.mark.parametrize(
    ("module", "name"),
    [("pyarrow", "a.parquet"), ("pyarrow", "a.arrow"), ("h5py", "a.h5"), ("fsspec", "memory://a.csv")],
)
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name.split("//")[-1]).touch()
    source = name if "://" in name else tmp_path / name
    with pytest.raises(DataError, match=rf"read by {module}; pip install 'gradserve\[data\]'"):
        list(Dataset(source))


# orders and positions

ORDERS: list[dict[str, Any]] = [{}, {"shuffle_seed": 3}, {"shuffle_seed": 3, "shuffle_buffer": 10}]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prefetch", [0, 8])
@pytest.mark.parametrize("stop", [0, 1, 37, 99, 100])
def test_a_resume_gives_each_row_once(tmp_path: Path, order: dict[str, Any], prefetch: int, stop: int) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    whole = numbers(Dataset(file, **order))
    before = Dataset(file, prefetch=prefetch, **order)
    rows = iter(before)
    seen = [next(rows)["n"] for _ in range(stop)]
    after = Dataset(file, prefetch=prefetch, **order).at(before.position())
    seen += numbers(after)
    assert Counter(seen) == Counter(range(100))
    assert seen == whole
    assert after.epoch == 1


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_does_not_depend_on_the_number_of_workers(tmp_path: Path, order: dict[str, Any]) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    whole = numbers(Dataset(file, **order))
    for count in (2, 3, 7):
        shards = [numbers(Dataset(file, **order).shard(index, count)) for index in range(count)]
        assert [shards[i % count][i // count] for i in range(100)] == whole


@pytest.mark.parametrize("order", ORDERS)
def test_three_workers_in_step_resume_as_two(order: dict[str, Any]) -> None:
    whole = numbers(Dataset(ROWS, **order))
    three = [Dataset(ROWS, **order).shard(index, 3) for index in range(3)]
    loops = [iter(shard) for shard in three]
    seen = [next(loop)["n"] for _ in range(11) for loop in loops]
    positions = {shard.position() for shard in three}
    assert seen == whole[:33]
    assert len(positions) == 1
    resumed = Dataset(ROWS, **order).at(positions.pop())
    rest = [numbers(resumed.shard(index, 2)) for index in range(2)]
    assert Counter(seen + rest[0] + rest[1]) == Counter(range(100))


def test_epochs_are_shuffled_anew_and_again_the_same() -> None:
    dataset = Dataset(ROWS, shuffle_seed=3)
    first, second = numbers(dataset), numbers(dataset)
    assert first != second != list(range(100)) != first
    assert sorted(second) == list(range(100))
    again = Dataset(ROWS, shuffle_seed=3)
    assert [numbers(again), numbers(again)] == [first, second]
    assert numbers(Dataset(ROWS, shuffle_seed=4)) != first


def test_a_position_of_another_order_is_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    position = Dataset(file, shuffle_seed=1).position()
    assert len(position) < 80
    for other in (Dataset(file, shuffle_seed=2), Dataset(file), Dataset(file, shuffle_seed=1, split="[:90%]")):
        with pytest.raises(DataError, match="of another order"):
            other.at(position)
    jsonl(file, ROWS[:99])
    with pytest.raises(DataError, match="of another order"):
        Dataset(file, shuffle_seed=1).at(position)
    with pytest.raises(DataError, match="no position"):
        Dataset(file).at("{}")
    with pytest.raises(DataError, match="no position"):
        Dataset(file).at(Dataset(file).position().replace('"taken": 0', '"taken": -1'))


def test_two_loops_on_one_dataset_are_refused() -> None:
    dataset = Dataset(ROWS)
    first = iter(dataset)
    next(first)
    second = iter(dataset)
    assert next(second)["n"] == 1
    with pytest.raises(DataError, match="another loop"):
        next(first)


def test_orders_are_frozen() -> None:
    """A position outlives releases of Python, NumPy and gradserve only if these stay."""
    assert permutation(8, 3, 0).tolist() == [2, 3, 4, 6, 5, 0, 7, 1]
    assert list(buffered(range(8), 3, 3, 0)) == [0, 1, 3, 4, 6, 5, 2, 7]


def test_a_broken_off_loop_ends_its_thread() -> None:
    for _ in Dataset(ROWS, prefetch=2):
        break
    assert not [thread for thread in threading.enumerate() if thread.name == "gradserve-data"]


def test_the_wait_for_rows_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("gradserve.data.dataset.time.perf_counter", lambda: next(clock))
    dataset = Dataset(ROWS[:3], prefetch=0)
    list(dataset)
    assert dataset.data_loading_time == 4  # three rows and the end, one tick each


# selection


def test_splits_go_by_the_hash_alone() -> None:
    assert (percent(bytes(16)), percent(b"\xff" * 16), percent(b"\x80" + bytes(15))) == (0, 99, 50)
    train, test = Dataset(ROWS, split="[:80%]"), Dataset(ROWS, split="train[80%:]")
    expected = [row["n"] for row in ROWS if percent(digest(row)) >= 80]
    assert numbers(test) == expected
    assert 5 < len(expected) < 40
    assert sorted(numbers(train) + expected) == list(range(100))
    assert train.counts.other_split == len(expected)
    # More data moves no row to the other side.
    assert [n for n in numbers(Dataset([{"n": -1}, *ROWS[::-1]], split="[80%:]")) if n >= 0] == expected[::-1]
    for wrong in ("[90%:10%]", "[:900]", "[:101%]"):
        with pytest.raises(DataError, match="split="):
            Dataset(ROWS, split=wrong)


def test_dedup_of_rows_and_of_columns() -> None:
    rows = [{"q": "a", "n": 0}, {"n": 0, "q": "a"}, {"q": "a", "n": 1}, {"q": "b", "n": 2}]
    assert numbers(Dataset(rows)) == [0, 0, 1, 2]
    assert numbers(Dataset(rows, dedup=True)) == [0, 1, 2]
    dataset = Dataset(rows, dedup=["q"])
    assert numbers(dataset) == [0, 2]
    assert dataset.counts.duplicates == 2
    with pytest.raises(BadRow, match="row 1: there is no column 'x'"):
        list(Dataset(rows, dedup=["x"]))


def test_length_bounds_are_included() -> None:
    rows = [{"text": "a" * n, "n": n} for n in range(6)]
    dataset = Dataset(rows, length=lambda row: len(row["text"]), min_length=2, max_length=4)
    assert numbers(dataset) == [2, 3, 4]
    assert dataset.counts.wrong_length == 3
    with pytest.raises(DataError, match="a function and a bound"):
        Dataset(rows, max_length=3)


def test_rows_keep_their_types_and_fingerprints_go_by_content(tmp_path: Path) -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    row = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "when": [datetime.datetime(2026, 1, 2, tzinfo=zone), datetime.date(2026, 1, 2), datetime.time(1, 2)],
        "deep": {"b": b"\x00", "f": 0.1, "none": None, "yes": True},
    }
    back = unpack(pack(row))
    np.testing.assert_array_equal(back.pop("array"), row["array"])
    assert back == {name: row[name] for name in ("when", "deep")}
    with pytest.raises(DataError, match="a value of type set"):
        pack({1, 2})

    file = jsonl(tmp_path / "a.jsonl", ROWS)
    fingerprint = Dataset(file).fingerprint()
    assert (
        fingerprint
        == Dataset(ROWS, shuffle_seed=9).fingerprint()
        == Dataset([*ROWS, ROWS[0]], dedup=True).fingerprint()
    )
    assert fingerprint != Dataset(ROWS[::-1]).fingerprint()


# contamination


def test_contamination_by_hand() -> None:
    words = [f"w{i}" for i in range(20)]
    train = [
        {"text": "Nothing alike"},
        {"text": "x " + " ".join(words[:13]) + " y"},
        {"text": "what IS 2+2"},
        {"text": "What is 2 + 2?"},
    ]
    evaluation = [
        {"text": "What is 2 + 2?"},
        {"text": "Before: " + ", ".join(words[:13])},
        {"text": " ".join(words[1:13])},
        {"text": "what is 2 2!"},
        {"text": "?!"},
    ]
    found = contamination(train, evaluation, "text")
    assert [(one.kind, one.eval_index, one.train_index) for one in found] == [
        ("exact", 0, 3),
        ("ngram", 1, 1),
        ("normalised", 3, 2),
    ]
    assert found[1].shared == " ".join(words[:13])
    assert (found[0].eval_row, found[0].train_row) == (evaluation[0], train[3])
    assert [one.eval_index for one in contamination(train, evaluation, lambda row: row["text"], n=12)] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="no column 'prompt'"):
        contamination(train, evaluation, "prompt")


# command line


def test_data_check(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "abc", "n": 1}\n{"q": "a"}\nno\n{"q": "abc", "n": 1}\n{"q": "abcde", "n": 1.5}\n')
    answer = CliRunner().invoke(main, ["data", "check", str(file)])
    assert answer.exit_code == 1
    lines = answer.output.splitlines()
    assert lines[:3] == [
        "4 rows, 1 bad, 1 duplicates",
        "  q: str; length 1 to 5, median 3",
        "  n: int (2), float (1); missing in 1 rows",
    ]
    assert lines[3].startswith(f"bad: {file}, line 3: no JSON")
    assert lines[4] == f"duplicate: {file}, line 4 is the same as {file}, line 1"
    jsonl(file, ROWS)
    assert CliRunner().invoke(main, ["data", "check", str(file)]).exit_code == 0
    answer = CliRunner().invoke(main, ["data", "check", str(tmp_path / "none.jsonl")])
    assert answer.exit_code == 1
    assert "there is no" in answer.output
