"""The base of every part of a recipe: what does not fit is a `QerlError` of one line."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from qerl.errors import QerlError


class Section(BaseModel):
    """Base of every section: unknown keys refused, values checked on assignment.

    Raises `QerlError`, never pydantic's many-line `ValidationError`.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise QerlError(_one_line(error, type(self))) from None

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.__dict__.get(name)
        try:
            super().__setattr__(name, value)
        except (ValidationError, QerlError) as error:
            if name in type(self).model_fields:  # an "after" check runs with the value in place
                object.__setattr__(self, name, before)
            if isinstance(error, QerlError):
                raise
            raise QerlError(_one_line(error, type(self))) from None

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_not_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts `true` as 1; in a recipe it is a slip of the pen."""
        if isinstance(value, bool) and info.field_name is not None:
            from qerl.recipe_errors import accepts_bool, expected

            annotation = cls.model_fields[info.field_name].annotation
            if not accepts_bool(annotation):
                raise ValueError(f"expected {expected(annotation)}, found {str(value).lower()}")
        return value


def _one_line(error: ValidationError, section: type[Section]) -> str:
    from qerl.recipe_errors import one_line

    return one_line(error, section)
