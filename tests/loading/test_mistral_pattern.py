"""The faulty pattern of Mistral's files is reported and repaired where transformers does."""

import json

import pytest
import tokenizers
import transformers
from depths import quick_first
from tokenizers import Regex, decoders, models, pre_tokenizers

from jaxserve.loading.mistral_pattern import PATTERN
from jaxserve.tokenizer import Tokenizer

FAULTY = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """A tokenizer large enough to be one of Mistral's byte-level ones."""
    folder = tmp_path_factory.mktemp("mistral")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"{i}!" for i in range(100_000))]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    for name, pattern in (("faulty", FAULTY), ("right", PATTERN)):
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.save(str(folder / f"{name}.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.save(str(folder / "bytes.json"))
    return folder


@pytest.mark.parametrize(
    ("name", "fix", "model", "outcome"),
    quick_first(
        [
            ("faulty", None, {"model_type": "mistral", "transformers_version": "4.51.0"}, "warned"),
            ("faulty", None, {"model_type": "mistral3", "transformers_version": "5.0.0.dev0"}, "warned"),
            ("faulty", None, {}, "left"),
            ("faulty", None, {"vocab_size": 1}, "warned"),
            ("faulty", None, {"model_type": "llama"}, "left"),
            ("faulty", True, {"model_type": "llama"}, "left"),
            ("faulty", None, {"model_type": "mistral", "transformers_version": "5.0.0"}, "left"),
            ("faulty", True, {"model_type": "mistral", "transformers_version": "5.2.0"}, "left"),
            ("faulty", False, {"model_type": "mistral"}, "left"),
            ("faulty", True, {"model_type": "mistral"}, "repaired"),
            ("faulty", True, {"model_type": "ministral", "transformers_version": "4.9"}, "repaired"),
            ("bytes", True, {"model_type": "pixtral"}, "repaired"),
            ("right", None, {"model_type": "mistral"}, "left"),
            ("right", True, {"model_type": "mistral"}, "left"),
        ]
    ),
)
def test_a_faulty_pattern_of_mistral_is_repaired_as_transformers_does(
    mistral, name, fix, model, outcome, tmp_path, caplog
):
    (tmp_path / "tokenizer.json").symlink_to(mistral / f"{name}.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({} if fix is None else {"fix_mistral_regex": fix}))
    if model:
        (tmp_path / "config.json").write_text(json.dumps(model))
    ours = Tokenizer.load(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    state = json.loads(ours._backend.to_str())["pre_tokenizer"]
    assert state == json.loads(theirs.backend_tokenizer.to_str())["pre_tokenizer"]
    before = json.loads((mistral / f"{name}.json").read_text())["pre_tokenizer"]
    assert (state != before) == (outcome == "repaired")
    warnings = [record for record in caplog.records if record.name.startswith("jaxserve")]
    assert len(warnings) == (outcome == "warned")
