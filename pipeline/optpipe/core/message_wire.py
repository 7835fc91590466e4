"""Messages between two processes of one command, as JSON: the arguments and calls in them stay data, for the door to word.

A part of text is a string. `{"argument": name, "value": value}` is an `Argument`, `{"call": verb, ...}` a `Call`, a list a `Message`.
Their values are JSON's, apart from tuples, which mean ranges: `{"range": [1, 8, 64]}`.
"""

import json
from collections.abc import Mapping
from typing import Any

from optpipe.core.wording import Argument, Call, Message


def text_from_message(message: str) -> str:
    return json.dumps(_plain_from_part(message))


def message_from_text(text: str) -> str:
    message: str = _part_from_plain(json.loads(text))
    return message


def _plain_from_part(part: object) -> Any:
    if isinstance(part, Argument):
        return {
            "argument": part.name,
            "value": _plain_from_value(part.value),
            "setting": part.setting,
        }
    if isinstance(part, Call):
        options = {name: _plain_from_value(value) for name, value in part.options.items()}
        return {"call": part.verb, "words": list(part.words), "options": options}
    if isinstance(part, Message):
        return [_plain_from_part(inner) for inner in part.parts]
    return str(part)


def _part_from_plain(plain: Any) -> Any:
    if isinstance(plain, list):
        return Message(*map(_part_from_plain, plain))
    if not isinstance(plain, Mapping):
        return plain
    if "argument" in plain:
        value = _value_from_plain(plain["value"])
        return Argument(plain["argument"], value, setting=plain["setting"])
    options = {name: _value_from_plain(value) for name, value in plain["options"].items()}
    return Call(plain["call"], *plain["words"], **options)


def _plain_from_value(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Argument):
        return _plain_from_part(value)
    if isinstance(value, tuple):
        return {"range": [_plain_from_value(item) for item in value]}
    if isinstance(value, list):
        return [_plain_from_value(item) for item in value]
    if isinstance(value, Mapping):
        return {
            "mapping": {str(name): _plain_from_value(item) for name, item in value.items()},
        }
    return str(value)


def _value_from_plain(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value_from_plain(item) for item in plain]
    if not isinstance(plain, Mapping):
        return plain
    if "range" in plain:
        return tuple(_value_from_plain(bound) for bound in plain["range"])
    if "mapping" in plain:
        return {name: _value_from_plain(item) for name, item in plain["mapping"].items()}
    return _part_from_plain(plain)
