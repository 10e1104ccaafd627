"""Merges a site's own fields, for which [kubernetes] has no key, into the objects of a manifest."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError, YAMLWarning

from elasticflow.clusters.yaml_text import Commented, without_comment
from elasticflow.errors import RenderError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# A key identifies the items of these lists, as in Kubernetes' strategic merge patch; other lists are replaced.
_KEYS_OF_ITEMS = {
    **dict.fromkeys(
        ("containers", "initContainers", "env", "volumes", "imagePullSecrets", "replicatedJobs"), "name"
    ),
    "volumeMounts": "mountPath",
    "hostAliases": "ip",
}


def patched(objects: Sequence[Any], path: Path) -> list[Any]:
    """Return a manifest's objects with the fields in the file at *path* merged in.

    Raises:
        RenderError: the file cannot be read, or fits none of the objects.
    """
    documents = _documents(path)
    if not documents:
        raise RenderError(f"kubernetes.patch: {path} is empty", "leave kubernetes.patch out")
    merged_objects = list(objects)
    for line, patch in documents:
        place = f"{path}:{line}"
        at = _object_for(patch, objects, place)
        merged_objects[at] = _merged(merged_objects[at], patch, place, ())
    return merged_objects


def place_of_unknown_field(said: str, path: Path) -> str | None:
    """Return the line of the patch with the unknown field that kubectl's refusal names; None for another refusal."""
    if match := re.search(r'unknown field "(?:[^"]*\.)?(\w+)"', said):
        key = re.compile(rf"""(^|[\s{{,])["']?{match[1]}["']?\s*:""")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if key.search(line):
                return f"{path}:{number}"
    return None


def _documents(path: Path) -> list[tuple[int, Any]]:
    """Return the documents of a file, each with the number of its first line."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", YAMLWarning)  # `_check_value` handles values of YAML 1.1
            begins = [node.start_mark.line + 1 for node in YAML(typ="safe", pure=True).compose_all(text)]
            newer, older = (_loaded(text, version) for version in ("1.2", "1.1"))
    except (OSError, UnicodeDecodeError, YAMLError, ValueError, RecursionError) as error:
        raise RenderError(
            f"kubernetes.patch: {path} cannot be read: {error}",
            "give a file of YAML, relative to the project's folder",
        ) from error
    for line, new, old in zip(begins, newer, older, strict=True):
        try:
            _check_value(new, old, f"{path}:{line}", ())
        except RecursionError:
            raise _refused(
                f"{path}:{line}", (), "a value holds itself", "write it without an alias"
            ) from None
    return list(zip(begins, newer, strict=True))


def _loaded(text: str, version: str) -> list[Any]:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = version
    return list(yaml.load_all(text))


def _check_value(new: Any, old: Any, place: str, keys: tuple[str, ...]) -> None:
    """Refuse values that kubectl, which reads YAML 1.1, would read differently, such as `yes` or `0644`."""
    if isinstance(new, dict) and isinstance(old, dict) and list(map(str, new)) == list(map(str, old)):
        for (key, item), other in zip(new.items(), old.values(), strict=True):
            if not isinstance(key, str):
                raise _refused(place, (*keys, str(key)), "a key is a text", "write it in quotes")
            _check_value(item, other, place, (*keys, key))
    elif isinstance(new, list) and isinstance(old, list):
        for number, (item, other) in enumerate(zip(new, old, strict=True)):
            _check_value(item, other, place, (*keys, str(number)))
    elif not isinstance(new, str | int | float | None) or (type(new), new) != (type(old), old):
        raise _refused(
            place,
            keys,
            f"{new!s} is {old!s} to some readers of YAML",
            "write a text in quotes, true or false, or a decimal number",
        )


def _object_for(patch: Any, objects: Sequence[Any], place: str) -> int:
    """Return the index of the object that a patch is for."""
    heads = [_head_of(without_comment(each)) for each in objects]
    there = ", ".join(f"{kind} {name}" for _, kind, name in heads)
    remedy = f"name one by kind, and by metadata.name where there are two: {there}"
    if not isinstance(patch, dict) or not isinstance(patch.get("metadata", {}), dict):
        raise _refused(place, (), "this is no object of Kubernetes", remedy)
    wanted = _head_of(patch)
    fitting = [
        number
        for number, head in enumerate(heads)
        if wanted[1] == head[1] and all(want in {None, have} for want, have in zip(wanted, head, strict=True))
    ]
    what = " ".join(str(part) for part in wanted if part is not None) or "object without a kind"
    if len(fitting) != 1:
        count = "no" if not fitting else str(len(fitting))
        raise _refused(place, (), f"the manifest has {count} {what}", remedy)
    return fitting[0]


def _head_of(document: dict[str, Any]) -> tuple[Any, Any, Any]:
    return document.get("apiVersion"), document.get("kind"), document.get("metadata", {}).get("name")


def _merged(value: Any, patch: Any, place: str, keys: tuple[str, ...]) -> Any:
    if isinstance(value, Commented):
        return Commented(value.comment, _merged(value.value, patch, place, keys))
    if _kind_of(value) != _kind_of(patch):
        raise _refused(
            place, keys, f"the manifest has {_kind_of(value)} there", "write the same kind of value"
        )
    if isinstance(value, dict):
        return _merged_mapping(value, patch, place, keys)
    if isinstance(value, list) and keys and keys[-1] in _KEYS_OF_ITEMS:
        return _merged_items(value, patch, place, keys)
    return patch


def _kind_of(value: Any) -> str:
    return (
        "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else "a single value"
    )


def _merged_mapping(value: dict[str, Any], patch: dict[str, Any], place: str, keys: tuple[str, ...]) -> Any:
    merged = dict(value)
    for key, item in patch.items():
        inner = (*keys, key)
        if key.startswith("$"):
            raise _refused(place, inner, "directives of patches are not known here", "null takes a key away")
        if item is not None:
            empty: Any = {} if isinstance(item, dict) else [] if isinstance(item, list) else None
            merged[key] = _merged(merged.get(key, empty), item, place, inner)
        elif merged.pop(key, None) is None:
            raise _refused(place, inner, "the manifest has no such key to take away", "leave the line out")
    return merged


def _merged_items(value: list[Any], patch: list[Any], place: str, keys: tuple[str, ...]) -> list[Any]:
    name = _KEYS_OF_ITEMS[keys[-1]]
    items = {without_comment(item).get(name): item for item in value}
    for number, item in enumerate(patch):
        inner = (*keys, str(number))
        if not isinstance(item, dict) or item.get(name) is None:
            raise _refused(place, inner, f"an item without {name}", f"give it its {name}")
        items[item[name]] = _merged(items.get(item[name], {}), item, place, inner)
    return list(items.values())


def _refused(place: str, keys: tuple[str, ...], message: str, remedy: str) -> RenderError:
    key = f" {'.'.join(keys)}:" if keys else ""
    return RenderError(f"kubernetes.patch: {place}:{key} {message}", remedy)
