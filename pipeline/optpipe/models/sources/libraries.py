"""Models of libraries: `hf:google/vit-base-patch16-224`, `hf:./my-model` (a local folder), `timm:NAME`, `torchvision:resnet50`.

The hub serves image, text and token classification, answers to questions, and text encoders: a checkpoint without a head gives
embeddings, pooled over tokens inside the model. The configuration is required (from the hub, its cache or the folder);
the weights may be replaced by random ones.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlparse, urlsplit

from msgspec import structs

from optpipe.core import LazyModule
from optpipe.core.card import InputSpec, ModelCard, Task, Tokenization
from optpipe.core.entries import WeightsRecord, WeightsRequest
from optpipe.core.errors import BadInputError, MissingError, first_line, read_as_user_file
from optpipe.core.files import hash_file, hash_text, read_user_text
from optpipe.core.suggestions import suggest_names
from optpipe.core.transform import CenterCrop, Resize, Transform
from optpipe.core.wording import Call
from optpipe.models.sources.modules import (
    DEFAULT_BATCH_PROFILE,
    LoadedModel,
    NoWeightsError,
    flatten_module,
    hash_module_weights,
    make_with_weights,
    pool_tokens,
    take_last_flow,
    use_seed,
    wrap_detector,
)
from optpipe.models.sources.nesting import arrange_inputs
from optpipe.models.sources.own_type import make_loaded_model
from optpipe.models.sources.text_tokenizer import TYPES
from optpipe.models.sources.transform import (
    transform_from_processor,
    transform_from_timm,
    transform_from_torchvision,
)
from optpipe.workspace.environment import get_package_version
from optpipe.workspace.places import format_extra

SOURCES = (
    "a torchvision name, timm:NAME, hf:NAME, FILE.onnx, FILE.pt2, FILE.py:FACTORY, or CARD.toml"
)
"""What a MODEL can be."""

transformers, timm, models = map(LazyModule, ("transformers", "timm", "torchvision.models"))
HUB = "huggingface.co"


@contextmanager
def use_hub() -> Iterator[str | None]:
    """Makes the client of an unreachable hub read only its cache, since it would try every file for 20 s and longer.

    Yields the reason; None if the hub is reachable. The timeout is that of the client's own requests, by default 10 s,
    so that a slow network is used.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    why = explain_unreachable(constants.ENDPOINT, constants.HF_HUB_ETAG_TIMEOUT)
    constants.HF_HUB_OFFLINE = why is not None
    try:
        yield (
            None
            if why is None
            else f"{urlsplit(constants.ENDPOINT).hostname} cannot be reached ({why})"
        )
    finally:
        constants.HF_HUB_OFFLINE = False


def explain_hub_error(error: Exception, unreachable: str | None) -> str:
    if unreachable is not None and is_not_cached(error):
        return f"{unreachable}, and the Hugging Face cache does not have this model"
    return first_line(error)


def is_not_cached(error: Exception) -> bool:
    """Whether the client, or transformers for it, reports that neither the hub nor the cache has a file."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return isinstance(error, LocalEntryNotFoundError) or isinstance(
        error.__cause__, LocalEntryNotFoundError
    )


def explain_unreachable(url: str, timeout_s: float) -> str | None:
    """Why the host of `url` cannot be reached; None if it can, and behind a proxy, where only trying tells."""
    from urllib.request import getproxies

    parts = urlsplit(url)
    if {parts.scheme, "all"} & set(getproxies()):
        return None
    try:
        addresses = socket.getaddrinfo(
            parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM
        )
    except OSError as error:
        return error.strerror or str(error)
    reason = ""
    for family, address in {
        family: address for family, *_, address in addresses
    }.items():  # one address per family
        try:
            with socket.socket(family) as connection:
                connection.settimeout(timeout_s)
                connection.connect(address)
                return None
        except OSError as error:
            reason = error.strerror or str(error)
    return reason


DEFAULT_SEQUENCE_PROFILE = (8, 128, 512)
JUDGE_PAIRS = (
    Task.TEXT_CLASSIFICATION,
    Task.REGRESSION,
    Task.MULTI_LABEL,
    Task.QUESTION_ANSWERING,
)
"""Tasks of whole texts, which may be two that are read together."""
POOLING_FOLDER = "1_Pooling"
VOCABULARY_FILES = (
    "tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""A repository without any of these has no tokenizer."""


@dataclass(frozen=True, slots=True)
class HuggingFaceSource:
    repository: str
    has_module: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"hf:{self.repository}"

    def collect_identity(self) -> dict[str, Any]:
        """A local folder is identified by its name and the hashes of its files."""
        folder = Path(self.repository)
        files = sorted((*folder.glob("*"), *folder.glob(f"{POOLING_FOLDER}/*.json")))
        return {
            "source": f"hf:{self._published_name}",
            "files": {
                path.relative_to(folder).as_posix(): hash_file(path)
                for path in files
                if path.is_file()
            },
            **{name: get_package_version(name) for name in ("transformers", "tokenizers", "torch")},
        }

    def load(self, weights: WeightsRequest) -> LoadedModel:
        if get_package_version("transformers") is None:
            raise MissingError(
                f"{self.name} requires transformers; install it with `{format_extra('hf')}`"
            )
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # the record has the tensors that are not in the checkpoint
        with nullcontext() if Path(self.repository).exists() else use_hub() as unreachable:
            return self._load(weights, unreachable)

    def _load(self, weights: WeightsRequest, unreachable: str | None) -> LoadedModel:
        config = self._read_config(unreachable)
        kind, task = _choose_head(config, self.name)
        module, record = self._module(kind, config, weights, unreachable)
        image = task is Task.CLASSIFICATION
        tokenizer = None if image else _load_tokenizer(self.repository)
        card = (
            self._make_image_card(config)
            if image
            else self._make_text_card(config, tokenizer, task)
        )
        if task is Task.EMBEDDING:
            pooling = _read_pooling(self.repository)
            card = replace(card, labels=(), head={"pooling": pooling})
            module = pool_tokens(module, pooling)
        arrange = arrange_inputs(module, [spec.name for spec in card.inputs])
        text = tokenizer.backend_tokenizer.to_str() if tokenizer else None
        return replace(make_loaded_model(module, card, record, arrange), tokenizer=text)

    def _read_config(self, unreachable: str | None) -> Any:
        try:
            return transformers.AutoConfig.from_pretrained(self.repository)
        except (OSError, ValueError) as error:
            if unreachable is not None and is_not_cached(error):
                problem = f"{self.name}: {explain_hub_error(error, unreachable)}"
                way = f"use a local folder (hf:FOLDER), or fill the cache with `hf download {self.repository}`"
                raise MissingError(
                    f"{problem}\n{way} where there is a network and HF_HUB_OFFLINE is not set"
                ) from error
            raise (BadInputError if Path(self.repository).exists() else MissingError)(
                f"{self.name}: no configuration found ({first_line(error)}); use a name on {HUB} or a local folder"
            ) from error

    def _module(
        self, kind: Any, config: Any, request: WeightsRequest, unreachable: str | None
    ) -> tuple[Any, WeightsRecord]:
        if request.kind != "default":
            return make_with_weights(lambda: kind.from_config(config), request)
        try:
            with use_seed(request.seed):
                module, said = kind.from_pretrained(
                    self.repository, use_safetensors=True, output_loading_info=True
                )
        except OSError as error:
            raise NoWeightsError(
                f"{self.name}: {explain_hub_error(error, unreachable)}", HUB
            ) from error
        except (RuntimeError, ValueError) as error:
            problem = f"{self.name}: its checkpoint does not fit its configuration"
            raise BadInputError(f"{problem}: {first_line(error)}") from error
        sha256, missing = hash_module_weights(module.eval()), sorted(said["missing_keys"])
        if kind.__name__ == "AutoModel":  # the model's pooler is not used
            missing = [name for name in missing if not name.startswith("pooler.")]
        if not missing:
            return module, WeightsRecord(f"default:{self._published_name}", sha256)
        drawn = f"{len(missing)} of {len(module.state_dict())} tensors are not in the checkpoint, first {missing[0]}"
        return module, WeightsRecord("random", sha256, request.seed, drawn)

    def _make_image_card(self, config: Any) -> ModelCard:
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(self.repository)
        except OSError as error:
            problem = (
                f"{self.name}: it has no preprocessor_config.json, so its preprocessing is unknown"
            )
            raise BadInputError(f"{problem} ({first_line(error)})") from error
        transform = transform_from_processor(processor)
        size = transform.size or (getattr(config, "image_size", 224),) * 2
        channels = getattr(config, "num_channels", 3)
        image = InputSpec(
            "pixel_values", "float32", *((n, channels, *size) for n in DEFAULT_BATCH_PROFILE)
        )
        labels = tuple(config.id2label[key] for key in sorted(config.id2label))
        return ModelCard(
            self._short_name,
            self.name,
            Task.CLASSIFICATION,
            (image,),
            transform=transform,
            labels=labels,
        )

    def _make_text_card(self, config: Any, tokenizer: Any, task: Task) -> ModelCard:
        """The engine takes token types where a model that judges whole texts tells two of them apart by types."""
        limit = getattr(config, "max_position_embeddings", DEFAULT_SEQUENCE_PROFILE[2])
        lengths = [min(length, limit) for length in DEFAULT_SEQUENCE_PROFILE]
        shapes = list(zip(DEFAULT_BATCH_PROFILE, lengths, strict=True))
        names = ["input_ids", "attention_mask"]
        if task in JUDGE_PAIRS and tokenizer and _reads_types(config, tokenizer):
            names.append(TYPES)
        inputs = tuple(InputSpec(name, "int64", *shapes) for name in names)
        answers = task is Task.QUESTION_ANSWERING
        labels = () if answers else tuple(config.id2label[key] for key in sorted(config.id2label))
        tokenization = _describe_tokenization(tokenizer, config, limit) if tokenizer else None
        return ModelCard(
            self._short_name, self.name, task, inputs, labels=labels, tokenization=tokenization
        )

    @property
    def _published_name(self) -> str:
        """The name on the hub, or a local folder's without its path."""
        return self._short_name if Path(self.repository).is_dir() else self.repository

    @property
    def _short_name(self) -> str:
        return Path(self.repository).resolve().name


def _choose_head(config: Any, name: str) -> tuple[Any, Task]:
    """The class that loads the checkpoint, and its task. Raises BadInputError for an unsupported head."""
    if type(config) in transformers.AutoModelForImageClassification._model_mapping:
        return transformers.AutoModelForImageClassification, Task.CLASSIFICATION
    architectures = config.architectures or ()
    if architectures and all(name.endswith("Model") for name in architectures):
        return transformers.AutoModel, Task.EMBEDDING
    if any(name.endswith("ForTokenClassification") for name in architectures):
        return transformers.AutoModelForTokenClassification, Task.TOKEN_CLASSIFICATION
    if any("ForQuestionAnswering" in name for name in architectures):
        return transformers.AutoModelForQuestionAnswering, Task.QUESTION_ANSWERING
    if type(config) in transformers.AutoModelForSequenceClassification._model_mapping:
        return transformers.AutoModelForSequenceClassification, _read_kind_of_answer(config)
    problem = f"{name} is a {config.model_type} model without a head for classifying images, texts or tokens, or for answering questions"
    raise BadInputError(f"{problem}\ngive a file.py:factory that returns it")


def _read_kind_of_answer(config: Any) -> Task:
    """What a head for whole texts answers; a single output is a value, as transformers take it."""
    known = {
        "regression": Task.REGRESSION,
        "multi_label_classification": Task.MULTI_LABEL,
        "single_label_classification": Task.TEXT_CLASSIFICATION,
    }
    alone = Task.REGRESSION if config.num_labels == 1 else Task.TEXT_CLASSIFICATION
    return known.get(config.problem_type, alone)


def _reads_types(config: Any, tokenizer: Any) -> bool:
    """Whether the model tells two texts apart by token types, and its tokenizer gives them."""
    return (
        getattr(config, "type_vocab_size", 0) > 1
        and TYPES in tokenizer.model_input_names
        and any(tokenizer.backend_tokenizer.encode("a", "b").type_ids)
    )


def _read_pooling(repository: str) -> str:
    """`cls` or `mean` from sentence-transformers' configuration; `mean` without one."""
    place = transformers.utils.cached_file(
        repository,
        "config.json",
        subfolder=POOLING_FOLDER,
        _raise_exceptions_for_missing_entries=False,
    )
    if place is None:
        return "mean"
    with read_as_user_file(Path(place), "pooling configuration"):
        said = json.loads(read_user_text(Path(place)))
        modes = [
            name
            for name, value in said.items()
            if name.startswith("pooling_mode_") and value is True
        ]
    known = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    if len(modes) != 1 or modes[0] not in known:
        problem = f"hf:{repository}: pooling {', '.join(modes) or 'none'} is not supported"
        raise BadInputError(f"{problem}; known: {', '.join(known)}")
    return known[modes[0]]


def _load_tokenizer(repository: str) -> Any | None:
    """The fast tokenizer; None without one. Without vocabulary files transformers would create an empty one."""
    with suppress(OSError, ValueError):
        for name in VOCABULARY_FILES:
            if transformers.utils.cached_file(
                repository, name, _raise_exceptions_for_missing_entries=False
            ):
                tokenizer = transformers.AutoTokenizer.from_pretrained(repository)
                return tokenizer if tokenizer.is_fast else None
    return None


def _describe_tokenization(tokenizer: Any, config: Any, positions: int) -> Tokenization:
    """The maximum length is the tokenizer's, or without one the default profile's."""
    stated = int(tokenizer.model_max_length)  # 1e30 if nothing is stated
    pad = (
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else getattr(config, "pad_token_id", None)
    )
    return Tokenization(
        sha256=hash_text(tokenizer.backend_tokenizer.to_str()),
        max_length=min(stated if stated < 1e9 else DEFAULT_SEQUENCE_PROFILE[2], positions),
        pad_id=int(pad or 0),
    )


@dataclass(frozen=True, slots=True)
class TimmSource:
    model: str
    has_module: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"timm:{self.model}"

    def collect_identity(self) -> dict[str, Any]:
        return {
            "source": self.name,
            "torch": get_package_version("torch"),
            "timm": get_package_version("timm"),
        }

    def load(self, weights: WeightsRequest) -> LoadedModel:
        if get_package_version("timm") is None:
            raise MissingError(
                f"{self.name} requires timm; install it with `{format_extra('timm')}`"
            )
        architecture = self.model.split(".")[0]
        if not timm.is_model(architecture):
            hint = suggest_names(
                architecture, timm.list_models(), count=3, otherwise="see timm.list_models()"
            )
            raise BadInputError(f"unknown timm model '{self.model}': {hint}")
        module, record = self._module(weights)
        config = timm.data.resolve_data_config(model=module)
        transform = transform_from_timm(config)
        image = InputSpec(
            "images", "float32", *((n, *config["input_size"]) for n in DEFAULT_BATCH_PROFILE)
        )
        card = ModelCard(self.model, self.name, Task.CLASSIFICATION, (image,), transform=transform)
        return LoadedModel(card, record, module=module)

    def _module(self, request: WeightsRequest) -> tuple[Any, WeightsRecord]:
        if request.kind != "default":
            return make_with_weights(
                lambda: timm.create_model(self.model, pretrained=False), request
            )
        with use_hub() as unreachable:
            try:
                module = timm.create_model(self.model, pretrained=True).eval()
            except (
                OSError,
                RuntimeError,
            ) as error:  # hub errors are OSErrors; timm raises RuntimeError without a URL
                raise NoWeightsError(
                    f"{self.name}: {explain_hub_error(error, unreachable)}", HUB
                ) from error
        return module, WeightsRecord(f"default:{self.name}", hash_module_weights(module))


_TASKS = {
    "torchvision.models.detection": Task.DETECTION,
    "torchvision.models.segmentation": Task.SEGMENTATION,
    "torchvision.models.video": Task.CLASSIFICATION,
    "torchvision.models.optical_flow": Task.OTHER,
}
VIDEO_FRAMES = 16
VIDEO_BATCHES = (1, 2, 8)
FLOW_SIZE = (256, 384)
"""Height and width of the frames of an optical-flow network; RAFT takes multiples of 8 from 128 on."""


def make_folder_error(folder: str) -> BadInputError:
    """The error for a folder as MODEL, which names what it holds."""
    files = sorted(Path(folder).glob("*.onnx"))
    way = f"give {SOURCES}"
    if Path(folder, "config.json").is_file():
        way = f"hf:{folder} is the checkpoint of transformers in it"
    elif files:
        way = f"give the file in it: {files[0]}"
    return BadInputError("is a folder", place=folder, remedy=way)


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
            **{name: get_package_version(name) for name in ("torch", "torchvision")},
        }

    def load(self, weights: WeightsRequest) -> LoadedModel:
        """Preprocessing, labels and size come from the default weights' metadata."""
        task = self._task()
        published = models.get_model_weights(self.builder).DEFAULT
        module, record = self._module(published, weights)
        if task is Task.OTHER:
            return self._describe_flow(module, record)
        if self._package == "video":
            return self._describe_video(module, record, published)
        transform = transform_from_torchvision(published.transforms())
        labels = tuple(published.meta.get("categories", ()))
        height, width = transform.size or _choose_size(module, task)
        detection = task is Task.DETECTION
        if transform.size is None:
            transform = _letterbox(transform, height, width)
        low, usual, high = (1, 1, 1) if detection else DEFAULT_BATCH_PROFILE
        image = InputSpec("images", "float32", *((n, 3, height, width) for n in (low, usual, high)))
        card = ModelCard(
            self.builder, self.name, task, (image,), transform=transform, labels=labels
        )
        if detection:
            module = wrap_detector(module, (height, width))
        elif task is Task.SEGMENTATION:
            module = flatten_module(module)
        return LoadedModel(card, record, module=module)

    def _describe_video(self, module: Any, record: WeightsRecord, published: Any) -> LoadedModel:
        """Clips are tensors: optpipe decodes no videos."""
        height, width = published.transforms().crop_size
        shape = 3, VIDEO_FRAMES, height, width
        clips = InputSpec("clips", "float32", *((n, *shape) for n in VIDEO_BATCHES))
        labels = tuple(published.meta.get("categories", ()))
        card = ModelCard(self.builder, self.name, Task.CLASSIFICATION, (clips,), labels=labels)
        return LoadedModel(card, record, module=module)

    def _describe_flow(self, module: Any, record: WeightsRecord) -> LoadedModel:
        """Two frames in, one pair a call, because RAFT's code depends on the batch; the flow of the last iteration out."""
        frames = tuple(
            InputSpec(name, "float32", *((1, 3, *FLOW_SIZE) for _ in range(3)))
            for name in ("image1", "image2")
        )
        card = ModelCard(self.builder, self.name, Task.OTHER, frames)
        return LoadedModel(card, record, module=take_last_flow(module))

    @property
    def _package(self) -> str:
        """`detection` for a builder of torchvision.models.detection; a file's name for a classifier's."""
        return str(models.get_model_builder(self.builder).__module__).split(".")[2]

    def require_known(self) -> None:
        """Raises BadInputError, with similar names, for an unknown builder."""
        known = models.list_models()
        if self.builder in known:
            return
        if Path(self.builder).is_dir():
            raise make_folder_error(self.builder)
        listing = "see `python -c 'import torchvision; print(torchvision.models.list_models())'`"
        hint = suggest_names(self.builder, [*known, *self.also_known], count=3, otherwise=listing)
        raise BadInputError(f"unknown model '{self.builder}': {hint}", remedy=f"give {SOURCES}")

    def _task(self) -> Task:
        self.require_known()
        if self._package == "quantization":
            plain = self.builder.removeprefix("quantized_")
            raise BadInputError(
                f"{self.name} has integer kernels that only torch has",
                remedy=f"quantize {plain} instead: "
                + Call("build", plain, precision="int8", calibration="DIR"),
            )
        return _TASKS.get(f"torchvision.models.{self._package}", Task.CLASSIFICATION)

    def _module(self, published: Any, request: WeightsRequest) -> tuple[Any, WeightsRecord]:
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
    box = (
        structs.replace(own, size=(min(height, width),), fit="long", max_size=None),
        CenterCrop(height, width),
    )
    rest = (step for step in transform.steps[1:] if step not in transform.geometry)
    return Transform((transform.decode, *box, *rest))


def _choose_size(module: Any, task: Task) -> tuple[int, int]:
    """(height, width) for models whose preset keeps the image's shape."""
    if task is Task.DETECTION:  # a detector resizes inside the model
        own = module.transform
        return own.fixed_size or (own.min_size[-1], own.min_size[-1])
    return 520, 520  # the short side of torchvision's segmentation preset
