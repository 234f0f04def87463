"""The switch of multi-head latent attention, which some files have beside its sizes.

Knows: when the switch and the sizes agree. Does not know: what a latent is made of, defaults.
"""

from kvbook.config.spellings import Fields, count, flag

SIZES_OF_LATENTS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def latents_switched(fields: Fields) -> bool | None:
    """Whether ``use_mla`` is on or off; ``None`` where no file says so.

    Raises ``ValueError`` where the sizes say something else: switched on without them, or off and
    one of them is neither null nor zero. Readers differ in which of the two they believe.
    """
    if fields.get("use_mla") is None:
        return None
    if flag(fields, "use_mla"):
        count(fields, "kv_lora_rank")
        return True
    for name in SIZES_OF_LATENTS:
        if fields.get(name):
            raise ValueError(
                f"use_mla is false, but {name} is {fields[name]!r:.40}; switch it on, or set "
                f"{name} to null"
            )
    return False
