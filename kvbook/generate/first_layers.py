"""A model cut off after its first layers, as a draft of itself.

Knows: which parts of a model are its layers. Does not know: caches, drafts.
"""

from copy import copy
from dataclasses import replace

from kvbook.cache.sizes import check_class
from kvbook.model.transformer import Transformer


def first_layers(model: Transformer, layers: int) -> Transformer:
    """The first ``layers`` of ``model`` between its own embedding, last norm and head.

    The weights are those of ``model``, which stays as it is: nothing is copied. It needs a cache of
    its own, as any other model. How well it guesses depends on the training: most models were never
    asked to answer early. (Elhoushi et al. 2024, arXiv 2404.16710, train one that is.)

    Raises ``ValueError`` unless ``layers`` is from 1 to the model's own number.
    """
    check_class("model", model, Transformer, "load_smollm2() or Transformer(config)")
    config = model.config
    if type(layers) is not int or not 1 <= layers <= config.n_layers:
        raise ValueError(
            f"layers must be an integer from 1 to {config.n_layers}, those of the model, got "
            f"{layers!r:.60}"
        )
    windows = config.windows[:layers]
    sinks = config.sinks if any(windows) else 0
    early = copy(model)  # shallow, and with a list of modules of its own
    early._modules = {**model._modules, "blocks": model.blocks[:layers]}
    early.config = replace(config, n_layers=layers, window=windows, sinks=sinks)
    return early
