"""A model's weights as its folders have them, and back: named tensors in, named tensors out, one by one.

    an engine's model -> its own tensors -> export_weights -> folders, samplers of other libraries
    weights of any form -> import_weights -> tensors under the model's own names

What is given is a view of what was taken, so that nobody holds two whole models. `models/experts.py` knows the families
whose checkpoints differ from the models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from strop.models.experts import FAMILIES, STACKED, Form, Named, export_experts, import_experts


def export_weights(module: PreTrainedModel, weights: Iterable[Named], form: Form) -> Iterator[Named]:
    """A model's weights, given under its own names, in the form that the receiver asks for.

    `module` says which model it is; its own tensors are not looked at. Of families that strop knows no checkpoints of,
    transformers' own conversion is reversed, and what it gives is also what STREAMED means.
    """
    model_type = _model_type(module)
    if form is Form.PACKED:
        yield from weights
    elif model_type in FAMILIES:
        yield from export_experts(model_type, weights, form)
    else:
        yield from _reversed(module, weights)


def import_weights(module: PreTrainedModel, weights: Iterable[Named]) -> Iterator[Named]:
    """Weights in any form under the module's own names. EngineError as `import_experts`.

    Those of families that strop knows no checkpoints of must have these names already.
    """
    model_type = _model_type(module)
    stacks = (len(tensor) for name, tensor in module.state_dict().items() if STACKED.fullmatch(base_name(name) or ""))
    if model_type in FAMILIES:
        yield from import_experts(model_type, weights, next(stacks, 0))
    else:
        yield from weights


def base_name(name: str) -> str | None:
    """The Hugging Face name of a weight in a model that adapters (`models/lora.py`) may have been put into; None for
    the adapters' own."""
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part != "base_layer")


def _model_type(module: PreTrainedModel) -> str:
    """Of the part that reads texts, in whatever it is nested."""
    return module.config.get_text_config().model_type


def _reversed(module: PreTrainedModel, weights: Iterable[Named]) -> Iterator[Named]:
    """As transformers saves them. One by one, except where it makes one tensor of several."""
    mapping = get_model_conversion_mapping(module, add_legacy=False)
    changes = [change for change in mapping if not isinstance(change, PrefixChange)]
    if not changes:
        yield from weights
        return
    with torch.device("meta"):
        blank = type(module)(module.config)  # `module` may remember the names of the folder that it came from
    if any(isinstance(change, WeightConverter) and len(change.target_patterns) > 1 for change in changes):
        yield from revert_weight_conversion(blank, dict(weights)).items()
        return
    for name, tensor in weights:
        yield from revert_weight_conversion(blank, {name: tensor}).items()
