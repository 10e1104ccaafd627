"""What a model takes and gives, as far as its layers' literal sizes tell."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.python_source.syntax import dotted_names
from elasticflow.scaffold.arguments import arguments_of
from elasticflow.scaffold.candidates import method_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elasticflow.scaffold.candidates import Candidate

_SIZES = (28, 32, 64, 96, 128, 224, 8, 16)
_LENGTH = 32
_FIRST = {
    "Linear": "in_features",
    "Embedding": "num_embeddings",
    "Conv1d": "in_channels",
    "Conv2d": "in_channels",
}
_POOLS = {"MaxPool2d", "AvgPool2d"}


_IMAGE_SIZES, _CHANNELS = ("image_size", "img_size"), ("channels", "in_chans", "in_channels")
_LENGTHS = tuple(
    f"{owner}{name}"
    for owner in ("", "config.", "cfg.", "args.")
    for name in ("block_size", "max_len", "max_length", "max_seq_len", "seq_len", "context_length")
)


class Shapes(NamedTuple):
    """One sample and one output.

    Attributes:
        sample: Shape of an input.
        outputs: Numbers that come out for each; None: not known.
        tokens: Inputs are whole numbers below this; None: they are real.
    """

    sample: tuple[int, ...]
    outputs: int | None
    tokens: int | None = None


class _Layer(NamedTuple):
    name: str
    numbers: tuple[int | None, ...]
    named: Mapping[str, int | None]

    def number(self, position: int, name: str) -> int | None:
        return self.numbers[position] if position < len(self.numbers) else self.named.get(name)


def shapes_of(model: Candidate, given: Mapping[str, object]) -> Shapes | None:
    """Return what the layers tell, in the order in which the source makes them; None where they do not.

    Args:
        model: A class.
        given: Values of its arguments, over their defaults.
    """
    numbers = _numbers(model, given)
    layers = list(_layers(model.made or model.node, numbers))
    linear = [layer for layer in layers if layer.name == "Linear"]
    if not linear:
        return None  # what comes out is no row of numbers
    outputs = linear[-1].number(1, "out_features")
    size = next((numbers[name] for name in _IMAGE_SIZES if name in numbers), None)
    if isinstance(size, int):
        channels = next((numbers[name] for name in _CHANNELS if name in numbers), 3)
        return Shapes((int(channels), size, size), outputs)
    for position, layer in enumerate(layers):
        if layer.name in model.classes:
            return None  # layers made elsewhere come first
        if layer.name in _FIRST:
            return _taken_by(layer, layers[:position], layers, numbers, outputs)
    return None


def _taken_by(
    layer: _Layer,
    before: list[_Layer],
    layers: list[_Layer],
    numbers: Mapping[str, int | float],
    outputs: int | None,
) -> Shapes | None:
    """Return what a model takes whose first layer with a size is *layer*."""
    first = layer.number(0, _FIRST[layer.name])
    if first is None:
        return None
    match layer.name:
        case "Linear" if any("Pool" in each.name for each in before):
            return None  # convolutions made elsewhere come first
        case "Linear":
            return Shapes((first,), outputs)
        case "Embedding":
            length = min([int(numbers[name]) for name in _LENGTHS if name in numbers], default=_LENGTH)
            return Shapes((min(length, _LENGTH),), outputs, tokens=first)
        case "Conv1d":
            return Shapes((first, _LENGTH), outputs)
        case _:
            return Shapes((first, *[_image_size(layers, first)] * 2), outputs)


def _numbers(model: Candidate, given: Mapping[str, object]) -> dict[str, int | float]:
    """Return the numbers that arguments stand for, and fields of those that are objects: `config.vocab_size`."""
    values: dict[str, object] = {}
    if model.made is not None and model.made is not model.node:
        # A function: what it gives the class is not followed, so the class's own defaults count.
        maker = method_of(model.made, "__init__", model.classes)
        values |= (
            {} if maker is None else {each.name: each.default for each in arguments_of(maker, "", {}, skip=1)}
        )
    values |= model.defaults
    for each in model.arguments:
        config = model.configs.get(each.takes.config or "")
        for field in config.fields if config else ():
            values[f"{each.name}.{field.name}"] = field.default
    for name, value in given.items():
        values[name] = value
        fields = value.get("args", {}) if isinstance(value, dict) else {}
        values |= {f"{name}.{key}": inner for key, inner in fields.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _layers(node: ast.AST, env: Mapping[str, int | float]) -> Iterator[_Layer]:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    for call in sorted(calls, key=lambda each: (each.func.end_lineno or 0, each.func.end_col_offset or 0)):
        if names := dotted_names(call.func):
            named = {each.arg: _value(each.value, env) for each in call.keywords if each.arg is not None}
            yield _Layer(names[-1], tuple(_value(each, env) for each in call.args), named)


def _image_size(layers: list[_Layer], channels: int) -> int:
    """Return the side of square images that fits the first linear layer after the convolutions."""
    flat = next((layer.number(0, "in_features") for layer in layers if layer.name == "Linear"), None)
    likely = _SIZES[1] if channels == 3 else _SIZES[0]  # in colour, or not
    if any(layer.name.startswith("Adaptive") for layer in layers) or flat is None:
        return likely
    return next((side for side in _SIZES if _flattened(layers, side) == flat), likely)


def _flattened(layers: list[_Layer], side: int) -> int | None:
    channels = 0
    for layer in layers:
        if layer.name == "Conv2d":
            kernel, stride = layer.number(2, "kernel_size"), layer.number(3, "stride") or 1
            padding = layer.number(4, "padding") or 0
            channels = layer.number(1, "out_channels") or 0
        elif layer.name in _POOLS:
            kernel, padding = layer.number(0, "kernel_size"), 0
            stride = layer.number(1, "stride") or kernel or 1
        else:
            continue
        if kernel is None:
            return None
        side = (side + 2 * padding - kernel) // stride + 1
    return channels * side * side


def _value(node: ast.expr, env: Mapping[str, int | float]) -> int | None:
    """Return the whole number that an expression of numbers and arguments is."""
    match node:
        case ast.Constant(value=int() as value):
            return int(value)
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            value_of_name = env.get(name)
            return value_of_name if isinstance(value_of_name, int) else None
        case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
            value_of_name = env.get(f"{owner}.{name}")
            return value_of_name if isinstance(value_of_name, int) else None
        case ast.BinOp(left=left, op=op, right=right):
            one, two = _value(left, env), _value(right, env)
            if one is None or two is None or abs(one) > 1 << 20 or abs(two) > 1 << 20:
                return None
            match op:
                case ast.Add():
                    return one + two
                case ast.Sub():
                    return one - two
                case ast.Mult():
                    return one * two
                case ast.FloorDiv() if two:
                    return one // two
                case _:
                    return None
        case _:
            return None
