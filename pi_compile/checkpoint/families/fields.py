"""Config fields that families share: heads, activations, sliding windows."""

from typing import Any

from pi_compile.checkpoint.config import Config

_GELU_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(_GELU_TANH, "gelu_tanh"),
}
"""transformers' name of an activation → ours."""
FATRELU = "fatrelu"
"""The activation z where z is above a threshold, `hidden_act_param`, else 0 (ProSparse)."""


def activation(config: Config, key: str, default: str) -> dict[str, Any]:
    """The decoder's fields `activation` and `threshold`."""
    if config.get(key, default) != FATRELU:
        return {"activation": config.choice(key, default, ACTIVATIONS)}
    value = config.get("hidden_act_param")
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise config.error(
            "hidden_act_param", value, expected="FATReLU's threshold: one number for all layers, 0 or more"
        )
    return {"activation": "relu", "threshold": float(value)}


def kv_heads(config: Config, key: str, default: int, n_heads: int) -> int:
    """The number of heads of keys and values, a divisor of `n_heads`."""
    found = config.size(key, default)
    if n_heads % found:
        raise config.error(key, found, expected=f"a divisor of {n_heads} attention heads")
    return found


def head_dim(config: Config, d_model: int, n_heads: int, default: int | None = None) -> int:
    """The width of a head: from the config, else the model's width divided by the number of heads."""
    if config.get("head_dim") is None and default is None and d_model % n_heads:
        raise config.error("hidden_size", d_model, expected=f"a multiple of {n_heads} attention heads, or head_dim")
    return config.size("head_dim", default or max(1, d_model // n_heads))


def within_window(config: Config, context: int, default: int | None = None) -> int:
    """The context of a model with a sliding window, cut to the window: up to there attention is full.

    `default` is the family's window where the config has no such key.
    """
    window = config.fields.get("sliding_window", default)
    if window is None:
        return context
    if type(window) is not int or window < 1:
        raise config.error("sliding_window", window, expected="a positive integer, or null for none")
    if window < context:
        config.notices.append(
            f"config.json: sliding_window = {window}: the context is cut from {context} positions to the window, "
            "within which attention is the full one"
        )
    return min(window, context)


def no_window(config: Config, context: int) -> None:
    """Refuse `use_sliding_window` where the window would hide any position."""
    if not config.flag("use_sliding_window", default=False):
        return
    window, full = config.fields.get("sliding_window", 4096), config.get("max_window_layers", 28)
    if window is None or (type(window) is int and window >= context):
        return
    if type(full) is int and full >= config.size("num_hidden_layers"):
        return
    raise config.error(
        "use_sliding_window",
        True,
        expected=f"false, or a window of {context} positions or more",
        remedy="its layers with and without a window are not supported: use a checkpoint without",
    )
