from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar
from urllib.parse import urlparse

from msgspec import structs

from optpipe.core.card import InputSpec, ModelCard, Task
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError
from optpipe.core.transform import CenterCrop, Resize, Transform
from optpipe.models.sources.base import DEFAULT_BATCH_PROFILE, LoadedModel, NoWeightsError
from optpipe.models.sources.modules import flatten_module, hash_module_weights, make_with_weights, wrap_detector
from optpipe.models.sources.transform import transform_from_torchvision
from optpipe.workspace.environment import get_package_version

_TASKS = {
    "torchvision.models.detection": Task.DETECTION,
    "torchvision.models.segmentation": Task.SEGMENTATION,
    "torchvision.models.video": None,
    "torchvision.models.optical_flow": None,
    "torchvision.models.quantization": None,
}


@dataclass(frozen=True, slots=True)
class TorchvisionSource:
    builder: str
    also_known: tuple[str, ...] = ()
    """Other possible MODEL names, for the message about an unknown one."""
    has_module: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"torchvision:{self.builder}"

    def collect_identity(self) -> dict[str, Any]:
        return {
            "source": self.name,
            "torch": get_package_version("torch"),
            "torchvision": get_package_version("torchvision"),
        }

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Preprocessing, labels and size come from the default weights' metadata."""
        from torchvision import models

        task = self._task(models)
        published = models.get_model_weights(self.builder).DEFAULT
        module, record = self._module(models, published, weights)
        transform = transform_from_torchvision(published.transforms())
        labels = tuple(published.meta.get("categories", ()))
        height, width = transform.size or _choose_size(module, task)
        detection = task is Task.DETECTION
        if transform.size is None:
            transform = _letterbox(transform, height, width)
        low, usual, high = (1, 1, 1) if detection else DEFAULT_BATCH_PROFILE
        image = InputSpec("images", "float32", *((n, 3, height, width) for n in (low, usual, high)))
        card = ModelCard(self.builder, self.name, task, (image,), transform=transform, labels=labels)
        if detection:
            module = wrap_detector(module, (height, width))
        elif task is Task.SEGMENTATION:
            module = flatten_module(module)
        return LoadedModel(card, record, module=module)

    def require_known(self) -> None:
        """Raises BadInputError, with similar names, for an unknown builder."""
        from torchvision.models import list_models

        known = list_models()
        if self.builder in known:
            return
        near = get_close_matches(self.builder, [*known, *self.also_known], n=3)
        hint = (
            f"did you mean {', '.join(near)}?"
            if near
            else "see `python -c 'import torchvision; print(torchvision.models.list_models())'`"
        )
        raise BadInputError(
            f"unknown model '{self.builder}': {hint}\nother sources: timm:NAME, hf:NAME, FILE.onnx, FILE.py:FACTORY, CARD.toml"
        )

    def _task(self, models: Any) -> Task:
        self.require_known()
        module = models.get_model_builder(self.builder).__module__
        task = next((task for prefix, task in _TASKS.items() if module.startswith(prefix)), Task.CLASSIFICATION)
        if task is None:
            raise BadInputError(
                f"{self.name} is a {module.split('.')[2]} model; optpipe supports classification, detection, and segmentation"
            )
        return task

    def _module(self, models: Any, published: Any, request: WeightsRequest) -> tuple[Any, WeightsRecord]:
        if request.kind == "default":
            try:
                module = models.get_model(self.builder, weights=published).eval()
            except OSError as error:  # URLError, timeouts and refused connections are OSErrors
                reason = f"{published} could not be downloaded ({error})"
                raise NoWeightsError(reason, urlparse(published.url).hostname or "") from error
            return module, WeightsRecord(f"default:{published}", hash_module_weights(module))
        options = {"weights": None}
        builder = models.get_model_builder(self.builder)
        if "weights_backbone" in builder.__annotations__:
            options["weights_backbone"] = None
        return make_with_weights(lambda: builder(**options), request)


def _letterbox(transform: Transform, height: int, width: int) -> Transform:
    """Scales whole images into an engine's shape and pads them, for a preset that keeps their shape.

    Boxes and masks are judged in the source's geometry, so that nothing of an image may be cut.
    """
    own = next((step for step in transform.geometry if isinstance(step, Resize)), Resize((1,)))
    box = (structs.replace(own, size=(min(height, width),), fit="long", max_size=None), CenterCrop(height, width))
    return Transform(
        (transform.decode, *box, *(step for step in transform.steps[1:] if step not in transform.geometry))
    )


def _choose_size(module: Any, task: Task) -> tuple[int, int]:
    """(height, width) for models whose preset keeps the image's shape."""
    if task is Task.DETECTION:  # a detector resizes inside the model
        own = module.transform
        return own.fixed_size or (own.min_size[-1], own.min_size[-1])
    return 520, 520  # the short side of torchvision's segmentation preset
