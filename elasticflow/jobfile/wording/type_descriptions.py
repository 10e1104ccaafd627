"""Descriptions of the values that the job file takes at each place, read off the models."""

from __future__ import annotations

import json
import types
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from elasticflow.jobfile.diagnostics.toml_literals import to_toml
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.types import ONE_OF, Description

if TYPE_CHECKING:
    from elasticflow.jobfile.diagnostics.positions import KeyPath


def keys_at(path: KeyPath) -> list[str]:
    """Return the keys that the table at *path* can have; none for a free table."""
    model = model_at(path)
    return [] if model is None else list(model.model_fields)


def model_at(path: KeyPath) -> type[BaseModel] | None:
    """Return the model of the table at *path*, the first model if there are several; None for a free table."""
    annotation = annotation_at(path)
    is_union = get_origin(annotation) in {Union, types.UnionType}
    members = _some(annotation) if is_union else [annotation]
    return next((each for each in members if isinstance(each, type) and issubclass(each, BaseModel)), None)


def describe(annotation: Any) -> str:
    """Return the description of a type, as it follows "must be"."""
    for mark in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        if isinstance(mark, Description):
            return mark.words
    if get_origin(annotation) is Annotated:
        return describe(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        parts = [part for part in get_args(annotation) if part is not type(None)]
        words = [describe(part) for part in parts if get_origin(part) is not list]
        lists = [", or a list of them" for part in parts if get_origin(part) is list and words]
        return " or ".join(dict.fromkeys(words)) + "".join(lists)
    if get_origin(annotation) is Literal:
        *others, last = [json.dumps(choice) for choice in get_args(annotation)]
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) is list:
        return f"a list ({describe(get_args(annotation)[0])}, ...)" if get_args(annotation) else "a list"
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "a table"
    plain = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
    return plain.get(annotation, "something else")


@lru_cache(maxsize=1024)
def annotation_at(path: KeyPath) -> Any:
    """Return the type of the value at *path*; None if the models have no such key."""
    annotation: Any = Job
    for part in path:
        annotation = _inside(annotation, part)
    while get_origin(annotation) in {Union, types.UnionType} and len(_some(annotation)) == 1:
        annotation = _some(annotation)[0]
    return annotation


def _some(union: Any) -> list[Any]:
    return [part for part in get_args(union) if part is not type(None)]


def _inside(annotation: Any, part: str | int) -> Any:
    if get_origin(annotation) in {Union, types.UnionType}:
        inner = [_inside(each, part) for each in _some(annotation)]
        return next((each for each in inner if each is not None), None)
    if get_origin(annotation) is list and isinstance(part, int):
        return get_args(annotation)[0]
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return None
    if annotation.model_config.get("extra") == "allow":
        return _inside(_extra_of(annotation), part)
    if part in annotation.model_fields:
        field = annotation.model_fields[str(part)]
        marks = [mark for mark in field.metadata if isinstance(mark, Description)]
        return Annotated[field.annotation, marks[0]] if marks else field.annotation
    return None


@lru_cache
def _extra_of(model: type[BaseModel]) -> Any:
    """Return the annotation of the keys that a model does not list."""
    return get_type_hints(model, include_extras=True)["__pydantic_extra__"]


def kind_of_key(path: KeyPath) -> str:
    """Return the description of the keys of the free table around *path*."""
    table = annotation_at(path[:-1])
    return describe(get_args(table)[0]) if get_origin(table) is dict else "a name"


def choices(annotation: Any) -> list[object]:
    """Return the words a type allows, if it lists them."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in choices(part)]


def example(path: KeyPath) -> str:
    """Return a line that gives a key a value: `epochs = 5`; of an enclosing table, its usual keys."""
    model = model_at(path)
    if model is not None and path[0] in Job.model_fields and len(path) == 1:
        needed = [key for key, field in model.model_fields.items() if field.is_required()]
        chosen = (*needed, *ONE_OF.get(str(path[0]), ())[:1])
        return " and ".join(
            example((*path, key)) for key in sorted(chosen, key=list(model.model_fields).index)
        )
    table, key = model_at(path[:-1]), str(path[-1])
    assert table is not None
    field = table.model_fields[key]
    marks = [values for mark in field.metadata if (values := getattr(mark, "examples", None))]
    [value, *_] = field.examples or marks[0]
    return f"{key} = {to_toml(value)}"


def is_off_without(path: KeyPath) -> bool:
    """Return whether a key may be left out to turn its feature off."""
    model = model_at(path[:-1])
    if model is None:
        return False
    field = model.model_fields.get(str(path[-1]))
    return field is not None and not field.is_required() and field.default is None
