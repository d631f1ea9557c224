"""Configs of every kernel: their fields checked, and written to JSON and back by a form's name."""

import dataclasses
from collections.abc import Mapping
from typing import Any


def check_powers_of_two(config: Any, *fields: str) -> None:
    """Raise `ValueError` unless each field is a power of two."""
    for field in fields:
        value = getattr(config, field)
        if value < 1 or value & (value - 1):
            raise ValueError(f"{field}={value} must be a power of two")


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, for n from 1 on."""
    return 1 << (n - 1).bit_length()


def check_positive(config: Any, *fields: str) -> None:
    """Raise `ValueError` unless each field is at least 1."""
    for field in fields:
        if getattr(config, field) < 1:
            raise ValueError(f"{field}={getattr(config, field)} must be at least 1")


def form_to_json(config: Any, forms: Mapping[str, type]) -> dict[str, Any]:
    """The JSON object of a config that is one of `forms`; `form_from_json` reads it back."""
    form = next(name for name, cls in forms.items() if isinstance(config, cls))
    return {"form": form, **dataclasses.asdict(config)}


def form_from_json[Form](data: Mapping[str, Any], forms: Mapping[str, type[Form]]) -> Form:
    """A config from its JSON object. Raises `ValueError` on an unknown form or field."""
    fields = dict(data)
    form = fields.pop("form", None)
    if form not in forms:
        raise ValueError(f"unknown config form {form!r}; known: {sorted(forms)}")
    try:
        return forms[form](**fields)
    except TypeError as error:
        raise ValueError(f"config {data} does not fit {forms[form].__name__}: {error}") from error
