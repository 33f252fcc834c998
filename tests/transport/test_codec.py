"""Bytes and back: equal structs, absent streams that cost nothing, clear errors for what is not ours."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrl.batching import pack
from jaxrl.errors import TransportError
from jaxrl.transport import decode, encode
from jaxrl.types import MicroBatch, StepReport, TrainBatch, TrainingSample
from tests.builders import make_micro_batch, make_sample


def assert_equal(left: object, right: object) -> None:
    """Equality of structs whose fields may be arrays, dtype and shape included."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        np.testing.assert_array_equal(left, right, strict=True)
    elif isinstance(left, msgspec.Struct):
        for name in left.__struct_fields__:
            assert_equal(getattr(left, name), getattr(right, name))
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


def test_an_encoded_plain_grpo_micro_batch_carries_only_advantages_as_an_extra_stream():
    (m,) = pack([make_sample(), make_sample(2, 4)], row_length=16, rows=1, shards=1).micro_batches
    keys = set(msgspec.msgpack.decode(encode(m)))
    required = {
        "token_ids",
        "segment_ids",
        "position_ids",
        "loss_mask",
        "inference_logprobs",
        "temperatures",
        "sample_index",
    }
    assert keys == required | {"advantages"}


def test_a_train_batch_comes_back_equal_with_arrays_that_can_be_written_to():
    samples = [make_sample(2, 2), make_sample(1, 4, ce_weights=0.1), make_sample(3, 9)]
    batch = pack(samples, step=4, row_length=8, rows=2, shards=2, overlong="drop")
    back = decode(TrainBatch, encode(batch))
    assert_equal(back, batch)
    back.micro_batches[0].token_ids[:] = 1


def test_a_report_comes_back_equal_with_and_without_its_optional_parts():
    report = StepReport(step=2, version=2, skipped=True, metrics={"loss/total": -0.5, "optim/lr": 1e-6})
    assert_equal(decode(StepReport, encode(report)), report)
    report.token_logprobs = [np.float32([-0.5, -1]), np.zeros(0, np.float32)]
    report.probe_logprobs = np.float32([-2.0])
    assert_equal(decode(StepReport, encode(report)), report)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64]),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_any_numeric_array_comes_back_bit_for_bit(dtype, shape, seed):
    array = np.random.default_rng(seed).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    array = np.asarray(array[..., 0] > 127) if dtype is np.bool_ else array.view(dtype).reshape(shape)
    sample = make_sample()
    sample.advantages = array
    back = decode(TrainingSample, encode(sample)).advantages
    assert (back.shape, back.dtype, back.tobytes()) == (array.shape, array.dtype, array.tobytes())


def test_views_and_big_endian_arrays_arrive_with_the_values_that_they_showed():
    sample = make_sample()
    sample.advantages = np.arange(10, dtype=">f4")[::2]
    assert decode(TrainingSample, encode(sample)).advantages.tolist() == [0, 2, 4, 6, 8]


def test_what_is_not_an_array_of_numbers_is_refused_by_the_encoder():
    sample = make_sample()
    for value, kind in ((np.array(["a"], object), "object array"), ({1, 2}.__iter__(), "set_iterator")):
        sample.advantages = value
        with pytest.raises(TypeError, match=f"cannot encode a {kind}"):
            encode(sample)


@pytest.mark.parametrize("keep", [0, 1, 10, 100, -1])
def test_bytes_that_were_cut_short_are_refused(keep):
    data = encode(make_micro_batch())
    with pytest.raises(TransportError, match=r"not a whole `MicroBatch`: Input data was truncated"):
        decode(MicroBatch, data[:keep])


def test_another_struct_is_refused_with_the_field_that_is_missing():
    data = encode(StepReport(step=1, version=1, skipped=False, metrics={}))
    with pytest.raises(TransportError, match="missing required field `token_ids`"):
        decode(MicroBatch, data)


def test_a_number_where_an_array_belongs_is_refused():
    fields = msgspec.msgpack.decode(encode(make_micro_batch()))
    with pytest.raises(TransportError, match="expected ndarray, got int"):
        decode(MicroBatch, msgspec.msgpack.encode(fields | {"token_ids": 3}))


def array_value(dtype: str, shape: list[int], num_bytes: int) -> bytes:
    header = msgspec.msgpack.encode([dtype, shape])
    return bytes([len(header)]) + header + bytes(num_bytes)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (1, b""),
        (1, b"\x07garbage"),
        (1, array_value("<i4", [2, 2], num_bytes=12)),
        (1, array_value("|O", [1, 1], num_bytes=8)),
        (1, array_value("|S4", [1, 2], num_bytes=8)),
        (2, array_value("<i4", [2, 2], num_bytes=16)),
    ],
)
def test_a_damaged_array_is_refused(code, value):
    fields = msgspec.msgpack.decode(encode(make_micro_batch()))
    with pytest.raises(TransportError, match="not a whole `MicroBatch`"):
        decode(MicroBatch, msgspec.msgpack.encode(fields | {"token_ids": msgspec.msgpack.Ext(code, value)}))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_alien_bytes_are_always_a_transport_error(data):
    with pytest.raises(TransportError, match="not a whole `MicroBatch`"):
        decode(MicroBatch, data)
