"""What a checkpoint's state becomes on disk, and back: `pack` and `unpack`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from phalanx.runs.checkpoint import Checkpoints
from phalanx.runs.pack import TENSOR_TYPES, pack, unpack
from whole_runs import same

TORCH_TYPES = sorted(TENSOR_TYPES, key=str)


def make_tensor(dtype: torch.dtype, shape: list[int], transpose: bool) -> torch.Tensor:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    return tensor.T if transpose and tensor.ndim == 2 else tensor


array_types = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.unicode_string_dtypes(max_len=3),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
arrays = hnp.arrays(array_types, shapes)
tensors = st.builds(make_tensor, st.sampled_from(TORCH_TYPES), st.lists(st.integers(0, 3), max_size=3), st.booleans())
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 2**128 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=20),
    arrays,
    arrays.map(lambda a: a.T[::2] if a.ndim else a),
    tensors,
)
keys = st.one_of(st.text(max_size=5), st.integers(), st.just("$"))
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_everything_comes_back_as_it_was(tree: Any) -> None:
    packed, kept = pack(tree)
    text = json.dumps(packed, allow_nan=False)
    assert same(tree, unpack(json.loads(text), kept))


@settings(max_examples=25, deadline=None)
@given(tree=trees)
def test_through_the_disk(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    saved = Checkpoints(tmp_path_factory.mktemp("c"), keep=1)
    saved.write({}, tree, 1, None)
    assert same(tree, saved.load().state)


def test_generators_go_on_where_they_stopped() -> None:
    generators = [np.random.Generator(kind(3)) for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)]
    for generator in generators:
        generator.random(5)
        packed, kept = pack(generator.bit_generator.state)
        expected = generator.random(3)
        generator.bit_generator.state = unpack(json.loads(json.dumps(packed)), kept)
        assert np.array_equal(generator.random(3), expected)


def test_numpy_scalars_tuples_and_huge_ints() -> None:
    tree = {"s": np.float64(0.1), "i": np.int64(-3), "b": np.bool_(True), "t": (1, (2,)), "h": -(7**9000)}
    packed, kept = pack(tree)
    back = unpack(json.loads(json.dumps(packed)), kept)
    assert same(tree, back)
    assert back["t"] == [1, [2]]


def test_a_dict_that_looks_like_a_reference_is_none() -> None:
    tree = {"$": "tensor", "name": "0 state"}
    packed, kept = pack(tree)
    assert unpack(packed, kept) == tree


def test_arrays_that_came_back_are_writable_and_aligned(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, 1)
    saved.write({}, [b"odd", np.arange(3.0), np.arange(5, dtype=np.uint8), np.arange(4.0)], 1, None)
    for array in saved.load().state[1:]:
        array += 1
        assert array.flags.aligned


@pytest.mark.parametrize(
    "stranger",
    [object(), {1, 2}, np.array([None]), {(1, 2): 3}, {True: 1}, torch.zeros(1, dtype=torch.complex128)],
)
def test_what_cannot_be_kept_is_named(stranger: Any) -> None:
    with pytest.raises(TypeError, match=r"state\.outer\.0"):
        pack({"outer": [stranger]})
