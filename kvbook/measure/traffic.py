"""A byte count in the parts of the formula.

Knows: which tensors of a model and of a cache belong to which part of ``Traffic``. Does not know:
how bytes are counted, what the formula says.
"""

from torch import Tensor

from kvbook.accounting.traffic import Traffic
from kvbook.cache.cache import KVCache
from kvbook.measure.bytes import ByteCount
from kvbook.model.arguments import check_is
from kvbook.model.transformer import Transformer


def model_groups(model: Transformer, cache: KVCache | None = None) -> dict[str, list[Tensor]]:
    """The tensors of a model and of a cache, by the parts that ``Traffic`` names.

    A tied head is the embedding itself and stands under ``embedding``.
    """
    check_is("model", model, Transformer)
    if cache is not None:
        check_is("cache", cache, KVCache)
    groups: dict[str, list[Tensor]] = {
        "projections": [], "mlp": [], "norms": [model.norm.weight],
        "embedding": [model.embedding.weight],
    }  # fmt: skip
    for block in model.blocks:
        for name, weight in block.named_parameters():  # attention.qkv.weight
            if name.split(".")[-2].endswith("norm"):
                groups["norms"].append(weight)
            else:
                groups["mlp" if name.startswith("mlp.") else "projections"].append(weight)
    if not model.config.tied_embeddings:
        groups["head"] = [model.head_weight]
    if cache is not None:
        groups["cache"] = cache.tensors
    return groups


def count_traffic(count: ByteCount) -> Traffic:
    """A count over ``model_groups``, in the parts of ``kvbook.accounting.step_traffic``.

    What it leaves out are the activations: ``count.read("activations")`` and ``written``.
    """
    check_is("count", count, ByteCount)
    looked_up = count.read("embedding", "embedding")
    return Traffic(
        projections=count.read("projections"),
        mlp=count.read("mlp"),
        norms=count.read("norms"),
        head=count.read("head") + count.read("embedding") - looked_up,
        embedding=looked_up,
        cache_read=count.read("cache"),
        cache_write=count.written("cache"),
    )
