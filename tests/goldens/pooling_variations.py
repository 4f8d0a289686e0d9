"""What files of sentence-transformers may say: for each field that its modules read, other values of it.

A row is a value and what it does to the base that `tests/loading/test_pooling_variations.py` writes: it "changes" how
vectors are made, is "refused", is "logged" as not followed, or says the "same".
"""

CHANGES, REFUSED, LOGGED, SAME = "changes", "refused", "logged", "same"
TORCH = "torch.nn.modules"
ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")

POOLING = {
    "embedding_dimension": ((8, REFUSED), (16, SAME), (None, SAME)),
    "word_embedding_dimension": ((8, REFUSED), (16, SAME)),
    "pooling_mode": (
        *((mode, CHANGES) for mode in ("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ["cls"])),
        *((mode, SAME) for mode in ("mean", ["mean"])),
        *((mode, REFUSED) for mode in (["cls", "mean"], "median", ["no"], 3)),  # two do not fit the Dense
    ),
    "pooling_mode_cls_token": ((True, SAME), (False, SAME)),  # pooling_mode wins
    "pooling_mode_attention": ((False, SAME),),
    "include_prompt": ((True, SAME), (False, REFUSED), (None, REFUSED)),
    "no_such_field": ((1, LOGGED),),
}
OLD_POOLING = {
    "pooling_mode_cls_token": ((True, CHANGES), (False, SAME)),
    "pooling_mode_max_tokens": ((True, CHANGES), (False, SAME)),
    "pooling_mode_mean_tokens": ((True, SAME), (False, SAME)),
    "pooling_mode_mean_sqrt_len_tokens": ((True, CHANGES),),
    "pooling_mode_weightedmean_tokens": ((True, CHANGES),),
    "pooling_mode_lasttoken": ((True, CHANGES),),
    "pooling_mode_no_such": ((True, REFUSED), (False, SAME)),
}
"""Fields of a Pooling without pooling_mode."""
NAMES = {
    "module_input_name": (("token_embeddings", REFUSED), ("sentence_embedding", SAME), (None, SAME)),
    "module_output_name": (("other", REFUSED), ("sentence_embedding", SAME), (None, SAME)),
}
DENSE = NAMES | {
    "in_features": ((8, REFUSED), (16, SAME)),
    "out_features": ((8, REFUSED), (16, SAME)),
    "bias": ((False, REFUSED), (True, SAME)),  # its tensor is there
    "activation_function": (
        *((f"{TORCH}.{name}", CHANGES) for name in ("activation.ReLU", "activation.GELU", "linear.Identity")),
        *((f"{TORCH}.{name}", CHANGES) for name in ("activation.Sigmoid", "activation.SiLU", "activation.Softmax")),
        (f"{TORCH}.activation.Tanh", SAME),
        *((name, REFUSED) for name in (f"{TORCH}.activation.Hardswish", "my.Own", None)),
    ),
    "use_residual": ((True, CHANGES), (False, SAME)),
    "no_such_field": ((1, LOGGED),),
}
LAYER_NORM = {"dimension": ((8, REFUSED), (16, SAME)), "no_such_field": ((1, LOGGED),)}
NORMALIZE = NAMES | {"no_such_field": ((1, LOGGED),)}
TRANSFORMER = {
    "max_seq_length": ((7, CHANGES), (None, SAME), (0, REFUSED), ("7", REFUSED)),
    "do_lower_case": ((True, CHANGES), (False, SAME), ("no", REFUSED)),
    "transformer_task": (
        *(("feature-extraction", SAME), ("sequence-classification", SAME), ("text-generation", SAME)),
        *(("fill-mask", REFUSED), ("retrieval", REFUSED), ("any-to-any", REFUSED)),
    ),
    "modality_config": (
        ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}}, SAME),
        ({"text": {"method": "get_text_features", "method_output_name": "last_hidden_state"}}, REFUSED),
        ({"text": {"method": "forward", "method_output_name": "pooler_output"}}, REFUSED),
        ({"message": {"method": "forward"}}, REFUSED),
        ({"image": {"method": "forward"}}, REFUSED),
    ),
    "module_output_name": (("token_embeddings", SAME), ("sentence_embedding", REFUSED), (None, SAME)),
    "processing_kwargs": (({"text": {"padding": True}}, REFUSED), ({"chat_template": {"x": 1}}, SAME), ({}, SAME)),
    "unpad_inputs": ((True, SAME), (False, SAME)),
    "query_length": ((7, REFUSED), (None, SAME)),
    "document_length": ((7, REFUSED), (None, SAME)),
    "query_expansion": (({"strategy": "fixed"}, REFUSED), (None, SAME)),
    "tokenizer_name_or_path": (("other/model", REFUSED), (None, SAME)),
    "no_such_field": ((1, REFUSED),),
    **dict.fromkeys(
        ARGUMENTS,
        (
            *(({}, SAME), ({"attn_implementation": "eager"}, SAME), ({"torch_dtype": "bfloat16"}, SAME)),
            *(({"is_causal": False}, REFUSED), ({"rope_theta": 5.0}, REFUSED)),
        ),
    ),
}
for _name in ARGUMENTS:
    _is_tokenizers = _name in ("tokenizer_args", "processor_kwargs")
    TRANSFORMER[_name] += (({"model_max_length": 7}, CHANGES if _is_tokenizers else REFUSED),)
MODEL = {
    "prompts": (({"query": "q: "}, CHANGES), ({"query": "find: ", "document": "d: "}, CHANGES), ("q", REFUSED)),
    "default_prompt_name": (("query", CHANGES), ("other", REFUSED), (None, SAME)),
    "similarity_fn_name": (
        *((name, CHANGES) for name in ("dot", "euclidean", "manhattan")),
        *(("cosine", SAME), (None, SAME), ("maxsim", REFUSED)),
    ),
    "truncate_dim": ((5, CHANGES), (None, SAME), (99, REFUSED), ("5", REFUSED)),
    "model_type": (("SentenceTransformer", SAME),),
    "activation_fn": ((f"{TORCH}.linear.Identity", SAME),),  # of a CrossEncoder, see loading.reranking
    "requirements": ((["x>1"], SAME),),
    "__version__": (({"sentence_transformers": "99"}, SAME),),
    "no_such_field": ((1, LOGGED),),
}
TOKENIZER = {
    "model_max_length": ((7, CHANGES), (10**30, SAME), (1e30, SAME), (None, SAME)),
    "max_len": ((7, CHANGES), (None, SAME)),
}

FILES = {
    "1_Pooling/config.json": POOLING,
    "2_Dense/config.json": DENSE,
    "3_LayerNorm/config.json": LAYER_NORM,
    "4_Normalize/config.json": NORMALIZE,
    "sentence_bert_config.json": TRANSFORMER,
    "config_sentence_transformers.json": MODEL,
    "tokenizer_config.json": TOKENIZER,
}

ST = "sentence_transformers.models"
MODULE = {
    "idx": ((9, SAME),),
    "name": (("other", SAME),),
    "path": (("4_None", SAME), ("../x", REFUSED), ("/x", REFUSED), (3, REFUSED)),
    "type": (
        ("sentence_transformers.base.modules.normalize.Normalize", SAME),
        (f"{ST}.Dropout", CHANGES),
        *((f"{ST}.{kind}", REFUSED) for kind in ("Pooling", "WordWeights", "WeightedLayerPooling", "Router", "CNN")),
        *((f"{ST}.{kind}", REFUSED) for kind in ("LSTM", "BoW", "StaticEmbedding", "Dense", "LayerNorm")),
        *((kind, REFUSED) for kind in ("my.Normalize", None)),
    ),
    "kwargs": ((["task"], SAME),),
    "no_such_field": ((1, LOGGED),),
}
"""Fields of the last entry of modules.json, a Normalize."""
