"""Batch sizes and lengths that a user asks of an artifact, and the profile that has to include them."""

from collections.abc import Sequence

from optpipe.core.card import ModelCard
from optpipe.core.errors import BadInputError
from optpipe.core.wording import Call
from optpipe.models.artifacts.lookup import StoredArtifact
from optpipe.models.artifacts.model_names import choose_way, format_model_argument


def choose_batch_sizes(
    artifact: StoredArtifact, sizes: Sequence[int] | None, wider: Call | None = None
) -> tuple[int, ...]:
    """The given batch sizes, all inside the profile, or powers of two up to its end.

    `wider` makes a build that includes them; by default that of this artifact with a wider profile.
    """
    low, _, high = artifact.card.batch_range
    if sizes is None:
        return tuple(
            size for size in (1 << power for power in range(20)) if low <= size <= high
        ) or (low,)
    if outside := [size for size in sizes if not low <= size <= high]:
        profile = (min(low, *outside), high, max(high, *outside))
        way = wider or _suggest_build_again(artifact, batch=profile)
        raise BadInputError(
            f"batch size {outside[0]} is outside the profile {low}…{high} of {artifact.label}",
            remedy="`" + way + "` builds one that includes it",
        )
    return tuple(sizes)


def _suggest_build_again(artifact: StoredArtifact, **changes: object) -> str:
    """Builds the artifact again, with `changes`."""
    info, card = artifact.entry.info, artifact.card
    model = format_model_argument(card.name, card.source)
    call = Call("build", model, precision=info.precision, backend=info.backend, **changes)
    return choose_way(call, card.source)


def require_lengths(artifact: StoredArtifact, lengths: Sequence[int] | None) -> None:
    """Raises BadInputError for a length outside the profile, or for a model without sequences."""
    if lengths is not None:
        wider = _suggest_build_again(artifact, shape=artifact.card.widen_shapes(lengths))
        way_out = "`" + wider + "` builds one that includes it"
        require_card_lengths(artifact.card, lengths, artifact.label, way_out)


def require_card_lengths(card: ModelCard, lengths: Sequence[int], name: str, way_out: str) -> None:
    """As `require_lengths` for a card's profile; `name` and `way_out` are for the message."""
    if card.length_range is None:
        inputs = ", ".join(f"{spec.name} {spec.format_profile()}" for spec in card.inputs)
        raise BadInputError(
            f"{card.name} has no sequence length: its inputs are {inputs}", argument="length"
        )
    low, high = card.length_range
    if outside := [length for length in lengths if not low <= length <= high]:
        problem = f"length {outside[0]} is outside the profile {low}…{high} of {name}"
        raise BadInputError(problem, remedy=way_out + ", where the model takes that many tokens")
