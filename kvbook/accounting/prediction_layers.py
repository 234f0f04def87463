"""Extra layers that predict further tokens: named as left out, or counted on demand.

Knows: the spellings of how many there are. Does not know: how a drafting engine uses them.
"""

from kvbook.accounting.layers import Layer
from kvbook.config.counts import check_count
from kvbook.config.spellings import Fields, check_length, optional_count

NAMES = (
    "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules",
    "mtp_num_layers", "n_mtp_layers", "mtp_layers", "num_mtp_heads",
)  # fmt: skip
LISTS = ("mtp_layer_types", "mtp_layers_block_type")
ABOUT = (
    "mtp_transformer_layers", "mtp_local_layer_ids", "mtp_mlp_layer_types",
    "mtp_hidden_states_first", "mtp_use_dedicated_embeddings", "use_mtp",
    "mtp_hybrid_override_pattern",
)  # fmt: skip


def prediction_layers(fields: Fields) -> int:
    """How many layers beside the model predict further tokens."""
    fields.idle(*ABOUT)
    stated = optional_count(fields, *NAMES, low=0)
    for name in LISTS:
        entries = fields.get(name)
        if entries and stated is not None:
            check_length(name, entries, stated) if stated else None
        if entries and stated is None:
            return sum(entry not in ("mlp", "moe") for entry in entries)
    return stated or 0


def counted(layers: tuple[Layer, ...], stated: int, mtp: int) -> tuple[Layer, ...]:
    """``mtp`` of the ``stated`` prediction layers, each like the model's last that attends."""
    check_count("mtp", mtp, 0, stated)
    attending = [layer for layer in layers if layer.per_token]
    if mtp and not attending:
        raise ValueError("no layer of this model keeps tokens, so a prediction layer is unknown")
    return (attending[-1],) * mtp if mtp else ()
