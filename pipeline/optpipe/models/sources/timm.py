"""timm by name: `timm:vit_tiny_patch16_224`."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from optpipe.core.card import ModelCard, Task
from optpipe.core.errors import BadInputError, MissingError
from optpipe.core.tensors import InputSpec
from optpipe.core.weights import WeightsRecord, WeightsRequest
from optpipe.models.sources.base import DEFAULT_BATCH_PROFILE, LoadedModel, NoWeightsError
from optpipe.models.sources.hub import HUB, explain_hub_error, use_hub
from optpipe.models.sources.transform import transform_from_timm
from optpipe.models.sources.weights import hash_module_weights, make_with_weights
from optpipe.workspace.environment import get_package_version


@dataclass(frozen=True, slots=True)
class TimmSource:
    """A model registered with timm."""

    model: str
    has_module: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """`timm:NAME`."""
        return f"timm:{self.model}"

    def collect_identity(self) -> dict[str, Any]:
        """The model and the libraries that define it."""
        return {"source": self.name, "torch": get_package_version("torch"), "timm": get_package_version("timm")}

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Builds the module; preprocessing and size come from timm's data configuration."""
        if get_package_version("timm") is None:
            raise MissingError(f"{self.name} requires timm; install it with `uv sync --extra timm`")
        import timm

        architecture = self.model.split(".")[0]
        if not timm.is_model(architecture):
            near = get_close_matches(architecture, timm.list_models(), n=3)
            raise BadInputError(
                f"unknown timm model '{self.model}'" + (f": did you mean {', '.join(near)}?" if near else "")
            )
        module, record = self._module(timm, weights)
        config = timm.data.resolve_data_config(model=module)
        transform = transform_from_timm(config)
        image = InputSpec("images", "float32", *((n, *config["input_size"]) for n in DEFAULT_BATCH_PROFILE))
        return LoadedModel(
            ModelCard(self.model, self.name, Task.CLASSIFICATION, (image,), transform=transform), record, module=module
        )

    def _module(self, timm: Any, request: WeightsRequest) -> tuple[Any, WeightsRecord]:
        if request.kind != "default":
            return make_with_weights(lambda: timm.create_model(self.model, pretrained=False), request)
        with use_hub() as unreachable:
            try:
                module = timm.create_model(self.model, pretrained=True).eval()
            except (OSError, RuntimeError) as error:  # hub errors are OSErrors; timm raises RuntimeError without a URL
                raise NoWeightsError(f"{self.name}: {explain_hub_error(error, unreachable)}", HUB) from error
        return module, WeightsRecord(f"default:{self.name}", hash_module_weights(module))
