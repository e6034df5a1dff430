"""`hf:PATH/config.json` -> a model file: a Hugging Face model built from its configuration, without weights.

    config.json + `--set` values --> text with build_model, make_batch and loss_fn --> a file in the user's cache

From there on it is a model file like any other: it is traced, cached, and copied into the output folder, where a reader
can change it. It needs torch and transformers. Nothing is downloaded, and code beside the configuration never runs.

What is predicted follows from the class in `architectures`, which transformers itself lists under a task; `TASKS` has
the text of each task that can be trained here.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autoplan.checks.options import nearest
from autoplan.errors import InputError, UsageError
from autoplan.tracing.hugging_face_templates import CAUSAL, IMAGE_CLASSES, MASKED, MODEL, SEQ_TO_SEQ, SEQUENCE_CLASSES
from autoplan.user_cache import cache_folder

PREFIX = "hf:"
# Samples of this length at most, unless `--set context=...` says otherwise: a model may allow far more than is trained.
DEFAULT_CONTEXT = 2048
CONTEXT_MULTIPLE = 8  # positions that a model keeps for itself (514 = 512 + 2) are left out by rounding down
DEFAULT_IMAGE_SIZE = 224  # for models that take any size
_LINE_LENGTH = 120
_WRITTEN_BY_SAVING = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
_VALID_CONFIG = "the config.json of a model of transformers"


@dataclass(frozen=True, slots=True)
class _Task:
    """One kind of training.

    Attributes:
        table: where transformers lists the classes of this task, by model type.
        constants: (configuration, context or None) -> the constants of the file.
        functions: the text of make_batch and loss_fn.
    """

    table: str
    constants: Callable[[_Source, Any], dict[str, int]]
    functions: str


@dataclass(frozen=True, slots=True)
class _Source:
    """A configuration as given: where it stands, its values with every `--set`, and the asked length of a sample."""

    path: Path
    values: dict[str, Any]
    context: Any


def is_hugging_face(model: str | Path) -> bool:
    """Whether a MODEL names a Hugging Face configuration instead of a model file."""
    return str(model).startswith(PREFIX)


def write_model_file(model: str | Path, overrides: Mapping[str, Any]) -> Path:
    """The model file for `hf:PATH`, written to the user's cache; its name holds the hash of its text.

    `overrides` are fields of the configuration or of its parts (`text_config.hidden_size`), or `context`, the tokens of
    a sample.

    Raises: InputError naming the file and field that cannot be used, or how to install transformers.
    """
    name, text = model_file_text(Path(str(model).removeprefix(PREFIX)), overrides)
    folder = cache_folder() / "models" / hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        return _write(folder, name, text)
    except OSError:  # a cache that cannot be written
        return _write(Path(tempfile.mkdtemp(prefix="autoplan-")), name, text)


def model_file_text(path: Path, overrides: Mapping[str, Any]) -> tuple[str, str]:
    """(file name, text) of the model file for a configuration."""
    path = path / "config.json" if path.is_dir() else path
    values = _read(path)
    transformers = _transformers(path)
    model_type = values["model_type"]
    config_class = _config_class(transformers, path, values)
    class_name, task = _class_and_task(path, values)
    part, config_class, values = _part(transformers, config_class, class_name, values)
    overrides = {name.removeprefix(f"{part}."): value for name, value in overrides.items()} if part else overrides
    context, fields = overrides.get("context"), {name: overrides[name] for name in overrides if name != "context"}
    values = _with_overrides(config_class, path, values, fields)
    config = _configuration(config_class, path, values)
    source = _Source(path, _kept(config, values), context)
    constants = task.constants(source, config)
    return f"{model_type.replace('-', '_')}.py", _text(source, config_class, class_name, task, constants)


# ---------------------------------------------------------------- the configuration


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise InputError.unreadable(f"{PREFIX}{path}", error, expected="a config.json") from error
    except (ValueError, RecursionError) as error:
        raise InputError.of(
            f"{PREFIX}{path}", found=f"no JSON: {error}", expected=_VALID_CONFIG, fix="use the file as it was published"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise InputError.of(
            f"{PREFIX}{path}: model_type", found=found, expected=_VALID_CONFIG, fix='add "model_type", such as "llama"'
        )
    if "quantization_config" in values:
        raise InputError.of(
            f"{PREFIX}{path}: quantization_config",
            found=values["quantization_config"],
            expected="a model that is trained in the precision of the plan",
            fix="remove the field from a copy of the file",
        )
    return values


def _transformers(path: Path) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError.of(
            f"{PREFIX}{path}",
            found=f"no transformers on this machine ({error})",
            expected="the package transformers, which holds the model's code",
            fix="pip install 'autoplan[hugging-face]', or pip install transformers",
        ) from error


def _config_class(transformers: Any, path: Path, values: dict[str, Any]) -> Any:
    model_type = values["model_type"]
    try:
        found = transformers.CONFIG_MAPPING[model_type]
    except KeyError as error:
        hint = nearest(model_type, transformers.CONFIG_MAPPING.keys())
        fix = "upgrade transformers, or write a model file; code that comes with a configuration is never run"
        raise InputError.of(
            f"{PREFIX}{path}: model_type",
            found=model_type,
            expected=f"a model type of transformers {transformers.__version__}{hint}",
            fix=fix,
        ) from error
    return found


def _part(
    transformers: Any, config_class: Any, class_name: str, values: dict[str, Any]
) -> tuple[str, Any, dict[str, Any]]:
    """What the model's class takes, as transformers does: this configuration (""), or the part of it for text."""
    parts = {name: part for name, part in config_class.sub_configs.items() if name in ("text_config", "decoder")}
    wanted = getattr(getattr(transformers, class_name), "config_class", None) if parts else config_class
    for name, part in parts.items():
        if part is wanted:
            return name, part, values.get(name) or {}
    return "", config_class, values


def _with_overrides(
    config_class: Any, path: Path, values: dict[str, Any], overrides: Mapping[str, Any], *, where: str = ""
) -> dict[str, Any]:
    """The configuration's values with those of `--set`, under the names that its class uses.

    `text_config.num_hidden_layers` is a field of a part; `where` is that part and the dot behind it.
    """
    known = _configuration(config_class, path, values)
    parts = [name for name in config_class.sub_configs if hasattr(getattr(known, name, None), "to_dict")]
    found, of_parts = dict(values), defaultdict[str, dict[str, Any]](dict)
    for name, value in overrides.items():
        part, _, field = name.partition(".")
        if field and part in parts:
            of_parts[part][field] = value
            continue
        if not hasattr(known, name):
            names = [key for key in known.to_dict() if not key.startswith("_") and key not in parts]
            names = sorted([*names, *(f"{key}.NAME" for key in parts)])
            raise UsageError.of(
                f"{PREFIX}{path}: --set {where}{name}",
                found=f"{where}{name}={value}",
                expected=f"{'' if where else 'context, or '}a field of {config_class.__name__}: {', '.join(names)}",
                fix=f"use one of these names{nearest(f'{part}.NAME' if field else name, names)}",
            )
        if name == "num_labels":
            found.pop("id2label", None)
            found.pop("label2id", None)
        found[config_class.attribute_map.get(name, name)] = value
    for part, fields in of_parts.items():
        own = getattr(known, part)
        given = found.get(part) or {"model_type": own.model_type}
        found[part] = _with_overrides(type(own), path, given, fields, where=f"{where}{part}.")
    layers = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return _with_layers(found, layers, n_layers=getattr(known, layers, None))


def _with_layers(values: dict[str, Any], layers: str, *, n_layers: Any) -> dict[str, Any]:
    """What has an entry per layer, cut to a changed number of layers.

    Of more layers, kinds are left to the class, and anything else as it is: the class then says what is missing.
    """
    changed = values.get(layers, n_layers)
    if not isinstance(changed, int) or changed == n_layers:
        return values
    kept: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("per_layer") and isinstance(value, dict):  # by the layer's number
            kept[name] = {key: item for key, item in value.items() if not str(key).isdigit() or int(key) < changed}
        elif not isinstance(value, list) or len(value) != n_layers or name.endswith("token_id"):
            kept[name] = value
        elif changed < len(value):
            kept[name] = value[:changed]
        elif not name.endswith(("layer_types", "block_type", "_types")):
            kept[name] = value
    return kept


def _configuration(config_class: Any, path: Path, values: dict[str, Any]) -> Any:
    try:
        return config_class.from_dict(values)
    except Exception as error:  # each class checks its own fields, in its own way
        lines = " ".join(line.strip() for line in str(error).splitlines())
        raise InputError.of(
            f"{PREFIX}{path}",
            found=lines,
            expected=f"fields that {config_class.__name__} accepts",
            fix="correct the field, or leave its --set out",
        ) from error


def _kept(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """What the model is built from: no cache of keys, labels by their number, nothing that saving wrote."""
    kept = {name: value for name, value in values.items() if name not in _WRITTEN_BY_SAVING}
    if "id2label" in kept:
        kept["num_labels"] = len(kept.pop("id2label"))
        kept.pop("label2id", None)
    for name in config.sub_configs:
        if isinstance(kept.get(name), dict) and hasattr(getattr(config, name), "use_cache"):
            kept[name] = {**kept[name], "use_cache": False}
    if hasattr(config, "use_cache"):
        kept["use_cache"] = False
    return kept


def _class_and_task(path: Path, values: dict[str, Any]) -> tuple[str, _Task]:
    """The model's class and its task: the class that `architectures` names, else the causal language model."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    named = values.get("architectures") or []
    if not named and values["model_type"] in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[values["model_type"]], TASKS[0]
    for task in TASKS:
        for entry in getattr(auto, task.table).values():
            classes = (entry,) if isinstance(entry, str) else tuple(entry)
            if named and named[0] in classes:
                return named[0], task
    offered = [getattr(auto, task.table).get(values["model_type"]) for task in TASKS]
    names = ", ".join(str(name) for name in offered if name) or "none of them for this model type"
    return _refuse(
        path,
        "architectures",
        named,
        f"a class for causal, masked or sequence-to-sequence language modelling, or for image or sequence"
        f" classification: {names}",
        "name such a class in a copy of the file, or write a model file",
    )


# ---------------------------------------------------------------- constants of the tasks


def _text_constants(source: _Source, config: Any) -> dict[str, int]:
    """Vocabulary, and tokens of a sample: what was asked for, else what the model allows, up to `DEFAULT_CONTEXT`."""
    vocabulary = _number(source, config, "vocab_size")
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if source.context is None:
        length = min(most if isinstance(most, int) and most > 0 else DEFAULT_CONTEXT, DEFAULT_CONTEXT)
        length -= length % CONTEXT_MULTIPLE if length > CONTEXT_MULTIPLE else 0
        return {"VOCABULARY": vocabulary, "CONTEXT": length}
    is_length = isinstance(source.context, int) and not isinstance(source.context, bool) and source.context > 0
    if not is_length or (isinstance(most, int) and source.context > most > 0):
        limit = f", at most max_position_embeddings = {most}" if isinstance(most, int) else ""
        _refuse(
            source.path, "--set context", source.context, f"a number of tokens above 0{limit}", "choose such a length"
        )
    return {"VOCABULARY": vocabulary, "CONTEXT": source.context}


def _label_constants(source: _Source, config: Any) -> dict[str, int]:
    n_labels = _number(source, config, "num_labels")
    if n_labels < 2:
        _refuse(source.path, "num_labels", n_labels, "at least 2 classes", "use --set num_labels=2")
    return {"N_LABELS": n_labels}


def _sequence_constants(source: _Source, config: Any) -> dict[str, int]:
    """A decoder reads its prediction at the last token that is no padding, so it must know the padding's number."""
    if getattr(config, "pad_token_id", None) is None:
        source.values["pad_token_id"] = 0
    return {**_text_constants(source, config), **_label_constants(source, config)}


def _image_constants(source: _Source, config: Any) -> dict[str, int]:
    seen = config if hasattr(config, "image_size") else getattr(config, "vision_config", config)
    size = getattr(seen, "image_size", None) or DEFAULT_IMAGE_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    n_channels = getattr(seen, "num_channels", 3)
    if source.context is not None:
        _refuse(source.path, "--set context", source.context, "no context: this model reads images", "leave it out")
    return {"N_CHANNELS": n_channels, "HEIGHT": height, "WIDTH": width, **_label_constants(source, config)}


def _number(source: _Source, config: Any, name: str) -> int:
    value = getattr(config.get_text_config(), name, None)
    if not isinstance(value, int) or value < 1:
        _refuse(source.path, name, value, "a whole number above 0", f"use --set {name}=...")
    return value


def _refuse(path: Path, field: str, found: object, expected: str, fix: str) -> NoReturn:
    raise InputError.of(f"{PREFIX}{path}: {field}", found=found, expected=expected, fix=fix)


# ---------------------------------------------------------------- the text


def _text(source: _Source, config_class: Any, class_name: str, task: _Task, constants: dict[str, int]) -> str:
    opening = MODEL.format(
        class_name=class_name,
        config_class=config_class.__name__,
        imports=", ".join(sorted({config_class.__name__, class_name})),
        config=_literal(source.values, ""),
        constants="\n".join(f"{name} = {value}" for name, value in constants.items()),
    )
    return f"{opening}\n\n{task.functions}"


def _literal(value: Any, indent: str) -> str:
    """A JSON value as a Python literal, an entry a line where it is long."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    inner = indent + "    "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(str(key))}: {_literal(item, inner)},\n" for key, item in value.items()]
        return "{\n" + "".join(lines) + indent + "}"
    if isinstance(value, list | tuple) and value:
        items = [_literal(item, inner) for item in value]
        line = "[" + ", ".join(items) + "]"
        if "\n" not in line and len(indent) + len(line) < _LINE_LENGTH - 40:
            return line
        return "[\n" + "".join(f"{inner}{item},\n" for item in items) + indent + "]"
    return repr(value)


def _write(folder: Path, name: str, text: str) -> Path:
    """Written beside and renamed, so that another process never reads half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    if not (target.is_file() and target.read_text() == text):
        descriptor, scratch = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(scratch, target)
    return target


TASKS = (
    _Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _text_constants, CAUSAL),
    # before the masked ones, among which transformers lists the same class of BART
    _Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _text_constants, SEQ_TO_SEQ),
    _Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _text_constants, MASKED),
    _Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _image_constants, IMAGE_CLASSES),
    _Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _sequence_constants, SEQUENCE_CLASSES),
)
