"""No field is passed over: what nothing has read, and may change a cache, is refused by name.

Knows: which words in a name speak of a cache, and which fields do not touch it. Does not know:
how the others are read.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from re import compile
from typing import Any

from kvbook.config.spellings import Fields
from kvbook.errors import UnsupportedModelError

SPEAKS = compile(
    "kv|head|group|window|layer|pattern|interval|loop|share|reuse|source|compress|index|latent|"
    "state|depth|cache|chunk|sliding|global|local|every|mtp|nextn|cross|recur|conv|ssm|mamba|lru|"
    "repeat|skip|stride|period|rank|sink|decoder|passes|cycles"
)

# An object of settings is opened if it is about attention; other *_config are of other parts.
ATTENDS = compile("attn|attention|mla|mixer")

# Families of names that do not touch the cache, and why.
IRRELEVANT = compile(
    "|".join(
        (
            r".*(layer_?norm|_ln_|rms_norm|groupnorm|norm_).*",  # norms
            r"(rope|rotary|no_rope|qk_rope_interleave).*", r".*_rope_(theta|base|scaling).*",
            r".*(dropout|layerdrop|_pdrop).*",  # training
            r".*(vocab|ngram).*",  # embeddings
            r"(moe|mlp|router|expert|ffn|dense|n_hash|num_hash|hash|altup|laurel|ple|engram)_.*",
            r".*(expert|_moe|dense).*",  # which MLP a layer has
            r"(vision|image|video|audio|speech|visual|mm|projector|img|boi|eoi|boa|eoa)_.*",
            r".*_(token|token_id|token_ids|token_index|token_list)",
            r".*(_init|_std|_bias|_act|_fn|_eps|_epsilon|_multiplier|_scale|_scaling|_dtype)",
            r".*(softcap|softcapping|embeddings?|_loss|_coef|_kernels?|_kernel_type|_multipliers)",
            r"(id2label|label2id|auto_map|architectures|quantization_config|compression_config)",
            r"(output|return|gradient|initializer|pretraining|torch|unsloth|time_step)_.*",
        )
    )
)

# Words that no family of names excuses, but for the last part of these: of another modality, a
# bias, a format, a factor.
STRONG = compile("kv|window|sliding|reuse|compress|loop|latent|cross")
EXCUSES = compile(
    r"(vision|image|video|audio|speech|visual|projector)_.*|"
    r".*_(dropout|bias|eps|epsilon|dtype|scale|init|std|act|norm|layernorm|multiplier)"
)

# Single names, each with what it says instead.
BY_NAME = {
    "compress_rope_theta": "positions", "compression_config": "weights",
    "num_sliding_attention_heads": "query heads", "insert_layer_id": "pictures",
    "seconds_per_chunk": "sound", "spatial_pool_stride": "pictures",
    "spatial_target_layers": "pictures", "use_decoder_only_language_model": "which class",
    "conv_dim": "the model's width", "conv_dim_out": "the same",
    "keep_window_size": "how much is read, not kept",
    "use_cache": "whether to cache at all",
    "n_group": "routing of experts", "topk_group": "routing of experts",
    "num_expert_group": "routing of experts", "n_shared_experts": "experts",
    "decoder_sparse_step": "which layers are mixtures", "first_k_dense_replace": "the same",
    "chunk_size_feed_forward": "how an MLP is computed", "o_groups": "the output projection",
    "o_lora_rank": "the output projection", "lm_head": "the output head",
    "q_lora_rank": "the query projection", "scale_depth": "a factor on residuals",
    "scale_attn_by_inverse_layer_idx": "a factor on scores", "head_gate": "the output gate",
    "activation_sparsity_pattern": "the MLP", "vocab_size_per_layer_input": "embeddings",
    "hidden_size_per_layer_input": "embeddings", "per_layer_input": "embeddings",
    "num_attention_heads_per_layer": "query heads", "swa_num_attention_heads": "query heads",
    "num_shared_experts": "experts", "shared_intermediate_size": "the MLP of shared experts",
    "mamba_chunk_size": "how a state is computed", "chunk_size": "the same",
    "mamba_rms_norm": "a norm", "mamba_dt_rank": "a projection", "time_step_rank": "a projection",
    "mamba_conv_bias": "a bias", "mamba_ssm_cache_dtype": "the format of the state",
    "mamba_state_dtype": "the format of the state", "moe_latent_size": "the MLP",
    "hc_sinkhorn_iters": "residual streams", "gated_norm_rank": "a norm",
    "attn_temperature_tuning": "a factor on scores", "floor_scale": "the same",
    "interleave_moe_layer_step": "which layers are mixtures",
    "num_mem_blocks": "weights shared by attention blocks", "adapter_rank": "adapters of weights",
    "use_shared_attention_adapter": "adapters of weights",
    "query_pre_attn_scalar": "a factor on scores", "mamba_proj_bias": "a bias",
    "num_ln_in_parallel_attn": "norms", "is_decoder": "the mask", "add_cross_attention": "off here",
    "head_dim_scale": "a factor on scores", "attention_sink_bias": "a logit, not a token",
    "add_swa_attention_sink_bias": "a logit", "add_full_attention_sink_bias": "a logit",
    "swa_rope_theta": "positions", "layer_rope_theta": "positions", "headwise_attn_output_gate":
    "the output gate", "use_head_wise_attn_gate": "the output gate", "encoder_layers": "no cache",
    "encoder_attention_heads": "no cache", "num_encoder_layers": "no cache",
    "num_encoder_attention_heads": "no cache", "encoder_ffn_dim": "no cache",
    "median_filter_width": "timestamps", "forced_decoder_ids": "generation",
    "decoder_start_token_id": "generation", "begin_suppress_tokens": "generation",
    "decoder_ffn_dim": "the MLP", "n_layers_per_attn_res_block": "residuals",
    "full_attn_alpha_factor": "residuals", "full_attn_beta_factor": "residuals",
    "linear_attn_alpha_factor": "residuals", "linear_attn_beta_factor": "residuals",
    "problem_type": "a task", "finetuning_task": "a task", "is_encoder": "a task",
    "attention_value_scale": "a factor on values", "share_embeddings": "weights",
    "use_recurrent_gating": "a gate", "l_bp_cycles": "training",
    "use_qkv_bias": "a bias", "qkv_bias": "a bias", "qk_head_dim": "queries",
    "sparse_num_index_heads": "queries of the indexer", "mup_width_multiplier": "factors",
    "use_kernel_forward_from_hub": "kernels", "final_layer_idx": "outputs",
    "index_n_heads": "queries of the indexer", "index_topk": "how much is read, not kept",
    "index_topk_blocks": "how much is read, not kept", "index_local_blocks": "the same",
    "index_block_size": "the same", "share_encoder_decoder_embeddings": "weights",
    "attention_k_eq_v": "read with the values", "output_hidden_states": "outputs",
}  # fmt: skip


def refuse_unread(fields: Fields, inside: str = "") -> None:
    """Raise ``UnsupportedModelError`` for a field that nobody has read and that may matter.

    A field that is off (null, false, zero, empty) says nothing.
    """
    for name, value in fields.unread():
        for at, what in parts(name, value):
            if what and may_matter(at):
                raise UnsupportedModelError(
                    f"{inside}{at} = {shortly(what)} is not known here, and its name may speak of "
                    f"the cache; if it changes nothing, leave it out (override {at}=null); if it "
                    "means a field that is read, state that one"
                )
    for name, inner in fields.inside.items():
        refuse_unread(inner, f"{inside}{name}.")


def parts(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """The field itself, or those of an object whose own name says nothing."""
    if IRRELEVANT.fullmatch(name) and not STRONG.search(name):
        return
    silent = not SPEAKS.search(name) and (ATTENDS.search(name) or not name.endswith("_config"))
    if isinstance(value, Mapping) and silent:
        for inner, each in value.items():
            yield f"{name}.{inner}", each
    else:
        yield name, value


def may_matter(name: str) -> bool:
    """Whether the name speaks of a cache and is not known to be about something else."""
    last = name.rpartition(".")[2].lower()
    if last in BY_NAME or not SPEAKS.search(last):
        return False
    excuses = EXCUSES if STRONG.search(last) else IRRELEVANT
    return not excuses.fullmatch(last)


def refuse_unknown_overrides(fields: Fields, overrides: Mapping[str, Any]) -> None:
    """An override that nothing reads would change nothing, and must not look as if it did."""
    unread = {name for name, _ in fields.unread()}
    for name, value in overrides.items():
        if value is not None and name in unread:
            near = get_close_matches(name, fields.read, n=1)
            hint = f"did you mean {near[0]}?" if near else "it was read under no name like it"
            raise ValueError(f"nothing reads {name} of this model, so {name} = {value!r:.40} would "
                             f"change nothing; {hint}")  # fmt: skip


def shortly(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
