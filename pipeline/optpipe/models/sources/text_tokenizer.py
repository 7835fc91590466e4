"""Tokenizers of a model card: `tokenizer = "tokenizer.json"`, or a Python function, `tokenizer = "file.py:tokenize"`.

The function takes a text, or two that the model reads together, and returns the token identifiers, at most as many as the model's
input holds; or a mapping with `input_ids` and `token_type_ids`, as tokenizers of transformers do. The stored model keeps
only the function's name and a hash of its file and of what that reads; the function runs only in a command whose card names it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optpipe.core.errors import BadInputError, read_as_user_file, require_file
from optpipe.core.files import hash_value, read_user_text
from optpipe.models.sources.python_file import UserCode, describe_user_error

FUNCTION = "function"
TYPES = "token_type_ids"
"""The input that tells which of two texts a token belongs to."""
PROBE = "Yes."
"""A text that is tokenized once, so that a file that is read on the first call counts too."""
_FUNCTIONS: dict[str, "TokenizerFunction"] = {}
"""Functions that this process's cards name, by the hash in their content."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sample: identifiers, and for each which of two texts it belongs to, 0 or 1."""

    ids: tuple[int, ...]
    types: tuple[int, ...]

    def cut(self, length: int) -> "Tokens":
        return Tokens(self.ids[:length], self.types[:length])


@dataclass(frozen=True, slots=True)
class TokenizerFunction:
    code: UserCode
    name: str

    def encode(self, text: str | tuple[str, str]) -> Tokens:
        """Tokens of a text, or of two. Raises BadInputError with the function's error, or for anything else."""
        where = f"{self.code.path.name}:{self.name}"
        with self.code.running():
            function = getattr(self.code.import_definitions(), self.name, None)
            if not callable(function):
                raise BadInputError(f"{self.code.path} defines no function '{self.name}'")
            try:
                answer = function(text) if isinstance(text, str) else function(*text)
                tokens = _tokens_from_answer(answer)
            except (AttributeError, KeyError, TypeError) as error:
                way = "a tokenizer takes a text (or two, for pairs) and returns a list of integers"
                raise BadInputError(
                    f"{where} raised {describe_user_error(error)}\n{way}"
                ) from error
            except (Exception, SystemExit) as error:
                raise BadInputError(f"{where} raised {describe_user_error(error)}") from error
        if any(number < 0 for number in (*tokens.ids, *tokens.types)):
            least = min(*tokens.ids, *tokens.types)
            raise BadInputError(f"{where} returns {least}; token identifiers are not negative")
        if len(tokens.types) != len(tokens.ids):
            counts = f"{len(tokens.types)} token types for {len(tokens.ids)} tokens"
            raise BadInputError(f"{where} returns {counts}; each token has one")
        return tokens


def _tokens_from_answer(answer: Any) -> Tokens:
    """Without types, all tokens are of the first text."""
    if not isinstance(answer, Mapping):
        answer = {"input_ids": answer}
    ids = tuple(number.__index__() for number in answer["input_ids"])
    types = answer.get(TYPES)
    return Tokens(
        ids, (0,) * len(ids) if types is None else tuple(number.__index__() for number in types)
    )


def read_tokenizer_source(text: str, folder: Path) -> str:
    """The content that a stored model keeps of the tokenizer that a card in `folder` names.

    Raises BadInputError for a missing file, and for one that is neither a `tokenizer.json` nor a Python file.
    """
    file, _, function = text.rpartition(":")
    if file.endswith(".py"):
        return _register(require_file(str((folder / file).resolve())), function)
    path = (folder / text).resolve()
    if path.suffix != ".json":
        raise BadInputError(
            f'tokenizer = "{text}": expected the path of a tokenizer.json, or file.py:function'
        )
    with read_as_user_file(require_file(str(path)), "a tokenizer"):
        content = read_user_text(path)
        if not isinstance(json.loads(content).get("model"), dict):
            raise ValueError('it has no "model"')
    return content


def _register(path: Path, name: str) -> str:
    function = TokenizerFunction(UserCode(path), name)
    function.encode(PROBE)
    digest = hash_value(dict(function.code.files(None)))
    _FUNCTIONS[digest] = function
    return json.dumps({FUNCTION: f"{path.name}:{name}", "sha256": digest})


def is_function(content: str) -> bool:
    """Whether the content of a stored tokenizer names a Python function."""
    return FUNCTION in json.loads(content)


def encode_by_function(content: str, texts: Sequence[str | tuple[str, str]]) -> list[Tokens]:
    """The tokens of each sample, not cut. Raises BadInputError if no card of this command names the function."""
    record: dict[str, Any] = json.loads(content)
    function = _FUNCTIONS.get(record["sha256"])
    if function is None:
        raise BadInputError(
            f"the model's tokenizer is the Python function {record[FUNCTION]}, which only its model card finds\n"
            "name the model by its card (MODEL.toml)"
        )
    return [function.encode(text) for text in texts]
