"""Any tree of JSON and tensors, any tensor a snapshot can hold, and clear words for those it cannot."""

from __future__ import annotations

import json
import math
import tempfile
import uuid
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.optim import SGD

from elasticflow.errors import StateError
from elasticflow.runtime.state import codec
from elasticflow.runtime.state.state import State
from elasticflow.runtime.state.tensors import DTYPES, copy_with_layout, layout_of
from elasticflow.snapshots.read import load
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.runtime.stored import assert_same_state, bits, read_back, transfer
from tests.snapshots import in_pieces

if TYPE_CHECKING:
    from collections.abc import Callable

ALL_DTYPES = sorted(DTYPES, key=str)


class Holder:
    """An object of the job's own that keeps whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return what it keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.value = state["value"]


def holding(value: Any, model: nn.Module | None = None) -> State:
    """Return a state with *value* in an object of the job's own."""
    model = model or nn.Linear(1, 1)
    return State(model=model, optimizer=SGD(model.parameters()), include={"thing": Holder(value)})


def after_files(value: Any) -> Any:
    """Return *value* as another object gets it from a snapshot's files."""
    restored = Holder()
    model = nn.Linear(1, 1)
    with tempfile.TemporaryDirectory() as folder:
        target = State(model=model, optimizer=SGD(model.parameters()), include={"thing": restored})
        transfer(holding(value), target, Path(folder))
    return restored.value


def equal(one: Any, other: Any) -> bool:
    """True if both are the same values of the same types, every bit of their tensors included."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and bits(one) == bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and math.isnan(one):
        return bool(math.isnan(other))
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            map(equal, one.values(), other.values())
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, shape, and way to lie in memory."""
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    dtype = draw(st.sampled_from(ALL_DTYPES))
    steps = draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 2))
    room = [size * step + offset for size, step in zip(shape, steps, strict=True)]
    count = math.prod(room) * dtype.itemsize
    seed = draw(st.integers(0, 2**32))
    raw = torch.randint(0, 256, (count + 16,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    whole = raw[:count].view(dtype) if count else torch.empty(0, dtype=dtype)
    found = whole.view(room)[
        tuple(slice(offset, offset + size * step, step) for size, step in zip(shape, steps, strict=True))
    ]
    found = found.permute(draw(st.permutations(range(len(shape)))))
    if found.dim() == 4 and draw(st.booleans()):
        found = found.contiguous(memory_format=torch.channels_last)
    if draw(st.booleans()) and dtype.is_complex:
        found = found.conj()
    if draw(st.integers(0, 9)) == 0:
        found = found.unsqueeze(0).expand(3, *found.shape)
    return found


KEYS = st.one_of(
    st.text(max_size=4),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
    st.tuples(st.integers(), st.text()),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), tensors(),
    st.dictionaries(st.text(max_size=3), st.integers()).map(Counter),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.sampled_from(["$", "$tensor", "a/b"])), inner, max_size=4
        ),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


@given(TREES)
@settings(max_examples=100, deadline=None)
def test_any_tree_comes_back(value: Any) -> None:
    """Any tree of JSON, tuples, counters and tensors comes back from files as it was, type by type and bit by bit."""
    assert equal(value, after_files(value))


@given(tensors())
@settings(max_examples=100, deadline=None)
def test_any_tensor_lies_in_memory_as_it_did(tensor: Tensor) -> None:
    """A dense tensor keeps its strides, whatever the order of its dimensions; another one becomes contiguous."""
    layout = layout_of(tensor)
    copy = copy_with_layout(tensor.contiguous(), layout)
    assert bits(copy) == bits(tensor)
    places = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if layout is not None:
        assert places == [
            (size, stride) for size, stride in zip(copy.shape, copy.stride(), strict=True) if size > 1
        ]
    else:
        assert copy.is_contiguous()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_in_a_module(dtype: torch.dtype, tmp_path: Path) -> None:
    """Buffers of every dtype are copied into those that are there: with dimensions, without, and without elements."""

    def build(seed: int) -> State:
        model = nn.Linear(2, 2)
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
        values = raw.to(torch.uint8).view(dtype).view(2, 3)
        model.register_buffer("whole", values)
        model.register_buffer("turned", values.clone().t())
        model.register_buffer("cut", torch.cat([values, values], 1)[:, ::2])
        model.register_buffer("scalar", values[0, 0].clone())
        model.register_buffer("nothing", values[:0].clone())
        return State(model=model, optimizer=SGD(model.parameters()))

    source, target = build(0), build(1)
    assert source.capture().tensors["model/whole"].dtype is dtype
    transfer(source, target, tmp_path)
    assert_same_state(source, target)
    assert target.model.get_buffer("turned").stride() == (1, 3)


class Odd(nn.Module):
    """Tied weights, views of one storage, channels_last, an empty parameter, a scalar, and a state of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        flat = torch.randn(12)
        self.left, self.right = nn.Parameter(flat[:6].view(2, 3)), nn.Parameter(flat[6:].view(3, 2))
        self.register_buffer("overlapping", flat[4:8])
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.randn(()))
        self.narrow = nn.Parameter(torch.randn(4).bfloat16())
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.note = {"seed": seed, "trace": torch.randn(2)}

    def get_extra_state(self) -> Any:
        """Return what is neither parameter nor buffer."""
        return self.note

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        self.note = state


def test_odd_module(tmp_path: Path) -> None:
    """An odd module comes back whole, in its own memory, tied and overlapping as it was built."""
    one, other = Odd(1), Odd(2)
    places = {name: t.data_ptr() for name, t in other.state_dict().items() if isinstance(t, Tensor)}
    source, target = (State(model=m, optimizer=SGD(m.parameters(), momentum=0.9)) for m in (one, other))
    captured = source.capture()
    assert captured.aliases == {"model/tied.weight": "model/first.weight"}
    transfer(source, target, tmp_path)
    assert_same_state(source, target)
    assert other.tied.weight is other.first.weight
    assert other.note["seed"] == 1
    assert places == {name: t.data_ptr() for name, t in other.state_dict().items() if isinstance(t, Tensor)}


Point = namedtuple("Point", "x y")  # noqa: PYI024  # the kind people have


class Phase(StrEnum):
    """A text, whose members scripts compare by `is`."""

    WARMUP = "warmup"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: deque([1]), "/value is a collections.deque"),
        (lambda: {"queue": [deque()]}, "/value/queue/0 is a collections.deque"),
        (lambda: {1, 2}, "/value is a builtins.set"),
        (lambda: b"x", "/value is a builtins.bytes"),
        (lambda: Point(1, 2), f"/value is a {__name__}.Point"),
        (lambda: defaultdict(int), "/value is a collections.defaultdict"),
        (lambda: Phase.WARMUP, f"/value is a {__name__}.Phase"),
        (lambda: {Phase.WARMUP: 1}, f"/value has a key that is a {__name__}.Phase"),
        (lambda: torch.Size([1]), "/value is a torch.Size"),
        (lambda: torch.float32, "/value is a torch.dtype"),
        (torch.Generator, "/value is a torch._C.Generator"),
        (lambda: len, "/value is a builtins.builtin_function_or_method"),
        (lambda: {Path("x"): 1}, "/value has a key that is a pathlib.PosixPath"),
        (lambda: {torch.ones(1): 1}, "/value has a key that is a torch.Tensor"),
        (lambda: torch.eye(2).to_sparse(), "/value is a sparse tensor (torch.sparse_coo)"),
        (lambda: torch.eye(2).to_sparse_csr(), "/value is a sparse tensor (torch.sparse_csr)"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
            "/value is a quantised tensor (torch.quint8)",
        ),
        (lambda: torch.ones(2, device="meta"), "/value is a tensor on the meta device, without values"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
            "/value is a nested tensor",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "/value is a torch.nested._internal.nested_tensor.NestedTensor",
        ),
        (lambda: torch.ones(2, dtype=torch.complex128), "/value is a tensor of torch.complex128"),
        (nn.parameter.UninitializedBuffer, "/value is a parameter without a shape"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # beta, or to be removed: that is torch's word on these kinds
def test_what_a_snapshot_cannot_hold_is_named(make: Callable[[], Any], message: str) -> None:
    """What is neither JSON nor a tensor of safetensors is refused by its path and its kind."""
    with pytest.raises(StateError) as refused:
        holding(make()).capture()
    assert refused.value.message == f"include.thing{message}, which a snapshot cannot hold"


def test_value_that_holds_itself_is_refused() -> None:
    """A list that is its own item has no end to store."""
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(StateError, match=r"^include\.thing is nested too deeply, or holds itself$"):
        holding(itself).capture()


def test_expanded_buffer_is_refused_by_name() -> None:
    """Restoring copies into a module's tensors: elements that share memory cannot be copied into."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).expand(4))
    with pytest.raises(StateError, match=r"^model/mask is an expanded tensor") as refused:
        State(model=model, optimizer=SGD(model.parameters())).capture()
    assert refused.value.remedy == "register tensor.contiguous() instead"


def test_lazy_module_is_refused_by_name() -> None:
    """Parameters that a first forward will make have nothing to store."""
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(StateError, match=r"^model/0\.weight is a parameter without a shape"):
        State(model=model, optimizer=SGD([nn.Parameter(torch.ones(1))])).capture()


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (object(), "include.thing is a builtins.object, without a `state_dict` to call"),
        (Holder, "include.thing is a class, without a `state_dict` to call"),
        (torch.Generator(), "include.thing is a torch._C.Generator, without a `state_dict` to call"),
    ],
)  # fmt: skip
def test_object_without_the_methods_is_refused(thing: Any, message: str) -> None:
    """An object that cannot give and take its state is refused when training is set up."""
    model = nn.Linear(1, 1)
    with pytest.raises(StateError) as refused:
        State(model=model, optimizer=SGD(model.parameters()), include={"thing": thing})
    assert refused.value.message == message


def test_paths_that_read_the_same_are_two_tensors() -> None:
    """A slash in a name takes no other tensor's place."""
    value = {"a/b": torch.ones(1), "a": {"b": torch.zeros(2)}, 1: torch.ones(3), "1": torch.ones(4)}
    assert equal(value, after_files(value))


def test_one_tensor_in_two_places_is_one_again() -> None:
    """Objects that share a tensor share it after a restore; so do scalars."""
    shared, scalar = torch.ones(3), torch.ones(())
    found = after_files([shared, {"again": shared}, scalar, scalar, shared.conj()])
    assert found[0] is found[1]["again"]
    assert found[2] is found[3]


def test_value_of_another_version_is_refused() -> None:
    """A mark or a layout this version does not know is an error, never a dict that looks like one."""
    with pytest.raises(StateError, match=r"marked \$set, which this version does not know"):
        codec.Decoder({}, {}, copies=True).decode({"x": {"$set": [1]}})
    with pytest.raises(StateError, match="laid out as tiled, which this version does not know"):
        copy_with_layout(torch.ones(2), "tiled")


def test_ordered_dict_and_numbers_of_numpy() -> None:
    """An OrderedDict comes back as one, which can `move_to_end`; a float of numpy comes back as a float."""
    import numpy as np

    found = after_files({"o": OrderedDict(b=torch.ones(2), a={1: 2}), "f": np.float64(0.1)})
    assert equal({"o": OrderedDict(b=torch.ones(2), a={1: 2}), "f": 0.1}, found)
    with pytest.raises(StateError, match=r"include\.thing/value is a numpy\.int64, which"):
        holding(np.int64(1)).capture()


def test_json_is_strict() -> None:
    """What is written is JSON of the standard: no NaN, no Infinity."""
    captured = holding({"worst": -math.inf, "none": math.nan}).capture()
    with tempfile.TemporaryDirectory() as folder:
        content, _ = read_back(captured, Path(folder))
    assert json.loads(json.dumps(content, allow_nan=False))["include.thing"]["value"]["worst"] == {
        "$float": "-inf"
    }


def numbered(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> Tensor:
    """Return a tensor whose bytes are numbered from *first* on."""
    raw = (torch.arange(first, first + math.prod(shape) * dtype.itemsize) % 251).to(torch.uint8)
    return raw.view(dtype).view(shape)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), st.sampled_from(ALL_DTYPES)
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 5),
    st.integers(1, 6),
)
def test_rows_stored_at_one_degree_are_read_at_another(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], stored: int, wanted: int
) -> None:
    """Tensors of any shapes and types, side by side in the files of any number of ranks: every other cut has the same bytes."""
    tensors = {f"t{n}": numbered(shape, dtype, n) for n, (shape, dtype) in enumerate(kinds)}
    catalog = Catalog(Storage(f"memory://rows-{uuid.uuid4().hex}"))
    state = in_pieces.state_of(tensors)
    name = in_pieces.take(catalog, state, degree=stored).name
    loaded = load.load(Catalog(catalog.storage), name)
    found = codec.LazyTensors(loaded)
    for key, tensor in state.tensors.items():
        assert bits(tensor) == bits(found[key])
    for rank in range(wanted):
        for key, box in in_pieces.shared(state, rank, wanted).boxes.items():
            expected = state.tensors[key][box.begin : box.end]
            assert bits(expected) == bits(found.rows(key, box.begin, box.end))
    loaded.files.close()
    catalog.storage.remove_tree("snapshots")
