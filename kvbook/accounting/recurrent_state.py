"""The constant state of recurrent layers: how many numbers one sequence keeps.

Knows: the shapes of the common kinds. Does not know: bytes; which layers are recurrent.

A convolution over the last k inputs keeps k − 1 of them; some engines keep k.
"""

from collections.abc import Mapping
from typing import Any

from kvbook.accounting.layers import Kept
from kvbook.config.family_defaults import family
from kvbook.config.spellings import HEAD_WIDTH, HEADS, WIDTH, Fields, count, divide, optional_count

State = tuple[Kept, ...]

# Classes that state how wide the channels of a state are.
OWN_WIDTH = ("mamba", "falcon_mamba")

# What the readers below may ask for: they say nothing in a model without recurrent layers.
STATE_FIELDS = (
    "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim",
    "short_conv_kernel_size", "conv_L_cache", "mamba_d_state", "mamba_d_conv", "mamba_expand",
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_ssm", "mamba_num_heads",
    "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "state_size", "expand",
)  # fmt: skip


def recurrent_state(fields: Fields) -> State | None:
    """What one recurrent layer keeps per sequence; ``None`` where the kind is not known here."""
    if fields.get("linear_num_value_heads") is not None:
        return gated_delta(fields)
    nested = fields.object("linear_attn_config")
    if nested is not None:
        return kimi_delta(nested, "num_heads", "head_dim", "short_conv_kernel_size")
    if fields.get("linear_num_heads") is not None:
        return kimi_delta(fields, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if family(fields) == "olmo_hybrid":
        return gated_delta_of_heads(fields)
    if str(fields.get("model_type")).startswith("minimax"):
        return lightning(fields)
    if family(fields) == "bailing_hybrid":
        return bailing_delta(fields)
    if family(fields) == "mamba2":
        return mamba2_alone(fields)
    if fields.get("conv1d_width") is not None:
        return gated_linear(fields)
    if fields.get("mamba_headdim") is not None:
        return mamba2(fields)
    if fields.get("mamba_num_heads") is not None or fields.get("mamba_n_heads") is not None:
        return mamba2(fields)
    if fields.get("mamba_d_state") is not None:
        return mamba1(fields, "mamba_expand", "mamba_d_state", "mamba_d_conv")
    if fields.get("state_size") is not None:
        return mamba1(fields, "expand", "state_size", "conv_kernel")
    if fields.get("conv_L_cache") is not None:
        return convolution(count(fields, *WIDTH), count(fields, "conv_L_cache"))
    return None


def convolution(channels: int, kernel: int) -> State:
    """The last kernel − 1 inputs of each channel."""
    return (Kept("convolution state", channels, kernel - 1),) if kernel > 1 else ()


def gated_delta(fields: Fields) -> State:
    """Qwen3-Next: per value head a matrix of key width × value width."""
    heads = count(fields, "linear_num_value_heads")
    key_width = count(fields, "linear_key_head_dim")
    value_width = count(fields, "linear_value_head_dim")
    channels = 2 * count(fields, "linear_num_key_heads") * key_width + heads * value_width
    matrix = Kept("recurrent state", heads, key_width * value_width)
    return (matrix, *convolution(channels, count(fields, "linear_conv_kernel_dim")))


def bailing_delta(fields: Fields) -> State:
    """Ling 2.5: as Kimi-Linear, with as many heads as attention has and their stated width."""
    heads, width = count(fields, "linear_num_heads", *HEADS), count(fields, "head_dim")
    matrix = Kept("recurrent state", heads, width * width)
    return (matrix, *convolution(3 * heads * width, count(fields, "short_conv_kernel_size")))


def gated_delta_of_heads(fields: Fields) -> State | None:
    """OLMo hybrid: sizes that its class derives from the query heads are not derived here."""
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
    fields.idle(*names, "linear_conv_kernel_dim")
    return None


def kimi_delta(
    fields: Mapping[str, Any], heads_name: str, width_name: str, kernel_name: str
) -> State:
    """Kimi-Linear: per head a square matrix; q, k and v each pass a convolution."""
    heads, width = count(fields, heads_name), count(fields, width_name)
    matrix = Kept("recurrent state", heads, width * width)
    return (matrix, *convolution(3 * heads * width, count(fields, kernel_name)))


def lightning(fields: Fields) -> State:
    """MiniMax: per query head a square matrix, no convolution."""
    heads = count(fields, *HEADS)
    width = optional_count(fields, *HEAD_WIDTH) or divide(fields, WIDTH, HEADS, "head_dim")
    return (Kept("recurrent state", heads, width * width),)


def gated_linear(fields: Fields) -> State:
    """RecurrentGemma: one number for each channel, and a convolution over them."""
    width = optional_count(fields, "lru_width") or count(fields, *WIDTH)
    state = Kept("recurrent state", width, 1)
    return (state, *convolution(width, count(fields, "conv1d_width")))


def mamba1(fields: Fields, expand: str, size: str, kernel: str) -> State:
    """Mamba and Jamba: ``size`` numbers for each of ``expand`` × width channels."""
    fields.idle("n_mamba_heads")  # Zamba cuts the same channels into heads
    channels = count(fields, expand) * count(fields, *WIDTH)
    if family(fields) in OWN_WIDTH and fields.get("intermediate_size") is not None:
        channels = count(fields, "intermediate_size")
    states = Kept("recurrent state", channels, count(fields, size))
    return (states, *convolution(channels, count(fields, kernel)))


def mamba2_alone(fields: Fields) -> State:
    """Mamba-2 without attention, whose heads need no prefix."""
    heads, width = count(fields, "num_heads"), count(fields, "head_dim")
    size, groups = count(fields, "state_size"), count(fields, "n_groups")
    fields.idle("expand")
    matrix = Kept("recurrent state", heads, width * size)
    return (matrix, *convolution(heads * width + 2 * groups * size, count(fields, "conv_kernel")))


def mamba2(fields: Fields) -> State:
    """Bamba, Granite 4, Nemotron-H: per head a matrix of head width × state size."""
    heads = count(fields, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    size = count(fields, "mamba_d_state", "ssm_state_size")
    groups = count(fields, "mamba_n_groups", "n_groups", "mamba_ngroups")
    width = fields.get("mamba_d_head")
    if width == "auto":
        inner = {"inner": count(fields, "mamba_expand") * count(fields, *WIDTH), "heads": heads}
        width = divide(inner, ("inner",), ("heads",), "mamba_d_head")
    else:
        width = count(fields, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    fields.idle("mamba_expand", "expand", "mamba_d_ssm")
    channels = heads * width + 2 * groups * size
    matrix = Kept("recurrent state", heads, width * size)
    return (matrix, *convolution(channels, count(fields, "mamba_d_conv", "conv_kernel")))
