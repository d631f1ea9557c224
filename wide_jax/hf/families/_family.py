"""What a family file declares, and the reader that notices keys nobody understood."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from wide_jax.config import ModelConfig


class ConfigError(ValueError):
    """A `config.json` that cannot be read exactly; the message lists every problem."""

    def __init__(self, problems: list[str], source: str = "config.json"):
        self.problems = list(problems)
        super().__init__(f"{source}: " + "; ".join(self.problems))


class Keys:
    """The entries of a `config.json`, remembering which were read and what was wrong with them.

    A key that is absent has the family's default, which is that of `transformers`' config class.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.raw = raw
        self.defaults = defaults
        self.seen: set[str] = set()
        self.problems: list[str] = []

    def take(self, key: str) -> Any:
        """The key's value as written, or the family's default (None where it has none)."""
        self.seen.add(key)
        return self.raw.get(key, self.defaults.get(key))

    def size(self, key: str, otherwise: int | None = None) -> int:
        """A count of at least 1; `otherwise` replaces an absent or null value."""
        value = self.take(key)
        value = otherwise if value is None else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(f"{key}={value!r}, expected a whole number of at least 1")
            return 1
        return value

    def number(self, key: str) -> float:
        """A number above zero."""
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.problems.append(f"{key}={value!r}, expected a number above 0")
            return 1.0
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; null counts as false."""
        value = self.take(key)
        if value not in (True, False, None):
            self.problems.append(f"{key}={value!r}, expected true or false")
        return value is True

    def only(self, key: str, allowed: Collection[Any], why: str) -> None:
        """Note a problem unless the key is absent, null or has one of the allowed values."""
        value = self.take(key)
        if value is not None and value not in allowed:
            self.problems.append(f"{key}={value!r} is not supported ({why})")


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
        model_type: As in `config.json`.
        architecture: The class name for `architectures`.
        defaults: What `transformers`' config class assumes for keys that `config.json` leaves out.
        read: The `ModelConfig` fields that only this family sets, from the keys and a copy of the
            common fields read so far.
        write: The keys that only this family writes.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    read: Callable[[Keys, dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


def read_layer_windows(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding window of Qwen2/3: `use_sliding_window` with `layer_types` or `max_window_layers`.

    Without `layer_types`, layers from `max_window_layers` on slide, as in `transformers`.
    """
    layers = fields["num_hidden_layers"]
    use, window = keys.flag("use_sliding_window"), keys.take("sliding_window")
    first, types = keys.take("max_window_layers"), keys.take("layer_types")
    window = window if use else None
    if types is None:
        slides = [window is not None and i >= (first or 0) for i in range(layers)]
    else:
        unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if unknown:
            keys.problems.append(f"layer_types has {unknown}, which are not supported")
        slides = [t == "sliding_attention" for t in types]
    if len(slides) != layers:
        keys.problems.append(f"layer_types has {len(slides)} entries for {layers} layers")
        return {}
    if not any(slides):
        return {}
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        keys.problems.append(
            f"layer_types has sliding layers, but use_sliding_window={use} and "
            f"sliding_window={window!r} give them no window"
        )
        return {}
    every = all(slides)
    return {"sliding_window": window, "sliding_window_layers": None if every else tuple(slides)}


def write_layer_windows(config: ModelConfig) -> dict[str, Any]:
    """The keys that `read_layer_windows` reads."""
    windows = [config.window_of_layer(i) for i in range(config.num_hidden_layers)]
    if not any(windows):
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
    }
