"""What every section of a recipe is made of: the strict base class, and the bounds that several sections share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from strop.config.yaml12 import is_plain


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if not is_plain(value):
            raise ValueError(f"{key} is {value!r}: recipes hold numbers, texts, true, false, null, lists and sections")
    return values


def _group_name(name: str) -> str:
    if name in ("decay", "no_decay", "hidden") or not name.isidentifier():
        raise ValueError(f"{name!r} must be a plain name, and not decay, no_decay or hidden: those groups exist")
    return name


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
PackageSpec = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_]*$")]
GroupName = Annotated[str, AfterValidator(_group_name)]
Plain = Annotated[dict[str, Any], AfterValidator(_plain)]


class Section(BaseModel):
    """A frozen part of a recipe. Unknown keys are mistakes, and so are true for 1 and "1" for 1."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, strict=True
    )
