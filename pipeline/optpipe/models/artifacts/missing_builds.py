"""What a user is told when a MODEL has no build here: what there is instead, and the command that builds it."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress

from optpipe.core.entries import ArtifactInfo
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Argument, Call, Message, join_texts
from optpipe.models.artifacts.builds_by_name import find_builds
from optpipe.models.sources.resolve import source_from_text
from optpipe.workspace.entry import ID_LENGTH, MANIFEST
from optpipe.workspace.store import Store

_ID = re.compile(rf"((artifact|model)-)?[0-9a-f]{{4,{ID_LENGTH}}}")


def make_unbuilt_error(
    text: str, store: Store, options: Mapping[str, object] | None = None
) -> BadInputError:
    """The error for a MODEL without a build; its way out is a build with `options`, unless `text` names nothing that can be built."""
    try:
        source_from_text(text)
        require_id(text, store)
    except BadInputError as error:
        return error
    here = explain_no_build(text, store)
    others = dict.fromkeys(build.info.model for build in reversed(store.list_entries(ArtifactInfo)))
    if not here and others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        here = f", which has builds of {', '.join(list(others)[:5])}{more}"
    way_out = Call("build", text, **(options or {}))
    which = list_arguments(options or {})
    return BadInputError(
        f"no build of {text}" + which + f" in {store.workspace}{here}",
        remedy="`" + way_out + "` builds it",
    )


def list_arguments(options: Mapping[str, object]) -> Message:
    """` --precision fp16 --device cpu`, each after a space."""
    return join_texts("", (" " + Argument(name, value) for name, value in options.items()))


def explain_no_build(text: str, store: Store) -> str:
    """What the store has instead of a build of `text`: of another content, or of another version of optpipe. Empty if nothing."""
    return explain_other_content(text, store) or _describe_other_versions(store)


def _describe_other_versions(store: Store) -> str:
    """The builds that this version cannot read, with what their manifests still tell."""
    names = store.list_other_versions(ArtifactInfo)
    if not names:
        return ""
    told = []
    for name in names[-5:]:
        ident = name.partition("-")[2]
        with suppress(OSError, ValueError, AttributeError):
            info = json.loads((store.root / name / MANIFEST).read_bytes())["info"]
            words = [info.get(key) for key in ("model", "backend", "precision")]
            ident = " ".join(str(word) for word in (*words, ident) if word)
        told.append(ident)
    more = f" and {len(names) - len(told)} more" if len(names) > len(told) else ""
    which = "build" if len(names) == 1 else "builds"
    return f": {len(names)} {which} of another version of optpipe cannot be read: {', '.join(told)}{more}"


def can_be_id(text: str) -> bool:
    """Whether `text` has the form of an ID; a name may have it too."""
    return _ID.fullmatch(text) is not None


def require_id(text: str, store: Store) -> None:
    """Raises BadInputError if `text`, which names nothing, can hardly be anything other than an ID.

    Nothing of the store begins with it: the user removed the entry, mistyped the ID, or means another workspace.
    """
    if not can_be_id(text) or (text.isalpha() and len(text) < 8):
        return
    raise BadInputError(
        f"no build or model in {store.workspace} has the ID {text}{explain_no_build(text, store)}",
        remedy="`" + Call("store ls") + "` lists IDs; a removed build has to be built again",
    )


def explain_other_content(text: str, store: Store) -> str:
    """What to know if `text` has no builds of its present content: those of its name, with their IDs; empty if there are none."""
    others = find_builds(text, store, any_content=True)
    if not others:
        return ""
    listed = ", ".join(f"{build.info.label} {build.id}" for build in others[-5:])
    return f": its source is not that of its builds ({listed}); it has changed, or they are of another file"
