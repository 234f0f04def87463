"""The constant state of recurrent layers: how many numbers one sequence keeps.

Knows: the shapes of the common kinds. Does not know: bytes; which layers are recurrent.

A convolution over the last k inputs keeps k − 1 of them; some engines keep k.
"""

from collections.abc import Mapping

from kvbook.accounting.fields import HEAD_WIDTH, HEADS, WIDTH, Fields, count, divide, optional_count
from kvbook.accounting.layers import Kept

State = tuple[Kept, ...]


def recurrent_state(fields: Fields) -> State | None:
    """What one recurrent layer keeps per sequence; ``None`` where the kind is not known here."""
    if fields.get("linear_num_value_heads") is not None:
        return gated_delta(fields)
    if isinstance(fields.get("linear_attn_config"), Mapping):
        return kimi_delta(
            fields["linear_attn_config"], "num_heads", "head_dim", "short_conv_kernel_size"
        )
    if fields.get("linear_num_heads") is not None:
        return kimi_delta(fields, "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if str(fields.get("model_type")).startswith("minimax"):
        return lightning(fields)
    if fields.get("mamba_num_heads") is not None or fields.get("mamba_n_heads") is not None:
        return mamba2(fields)
    if fields.get("mamba_d_state") is not None:
        return mamba1(fields)
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


def kimi_delta(fields: Fields, heads_name: str, width_name: str, kernel_name: str) -> State:
    """Kimi-Linear: per head a square matrix; q, k and v each pass a convolution."""
    heads, width = count(fields, heads_name), count(fields, width_name)
    matrix = Kept("recurrent state", heads, width * width)
    return (matrix, *convolution(3 * heads * width, count(fields, kernel_name)))


def lightning(fields: Fields) -> State:
    """MiniMax: per query head a square matrix, no convolution."""
    heads = count(fields, *HEADS)
    width = optional_count(fields, *HEAD_WIDTH) or divide(fields, WIDTH, HEADS, "head_dim")
    return (Kept("recurrent state", heads, width * width),)


def mamba1(fields: Fields) -> State:
    """Jamba: d_state numbers for each of expand × width channels."""
    channels = count(fields, "mamba_expand") * count(fields, *WIDTH)
    states = Kept("recurrent state", channels, count(fields, "mamba_d_state"))
    return (states, *convolution(channels, count(fields, "mamba_d_conv")))


def mamba2(fields: Fields) -> State:
    """Bamba, Granite 4, Nemotron-H: per head a matrix of head width × state size."""
    heads = count(fields, "mamba_n_heads", "mamba_num_heads")
    size = count(fields, "mamba_d_state", "ssm_state_size")
    groups = count(fields, "mamba_n_groups", "n_groups")
    width = fields.get("mamba_d_head")
    if width == "auto":
        inner = {"inner": count(fields, "mamba_expand") * count(fields, *WIDTH), "heads": heads}
        width = divide(inner, ("inner",), ("heads",), "mamba_d_head")
    else:
        width = count(fields, "mamba_d_head", "mamba_head_dim")
    channels = heads * width + 2 * groups * size
    matrix = Kept("recurrent state", heads, width * size)
    return (matrix, *convolution(channels, count(fields, "mamba_d_conv", "conv_kernel")))
