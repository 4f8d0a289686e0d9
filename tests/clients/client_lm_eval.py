"""lm-evaluation-harness `local-completions` on tasks made here: scores of token-id prompts by echo + logprobs."""

import json

import httpx
import lm_eval
import lm_eval.tasks
import pytest
from conftest import MODEL, PATIENCE, ROOT

DOCS = [
    {"question": "The ship sailed over the", "choices": ["sea", "table"], "answer": 0},
    {"question": "In the morning the sun", "choices": ["ran", "rose"], "answer": 1},
    {"question": "He opened the", "choices": ["door", "sky", "seven"], "answer": 0},
    {"question": "She was very", "choices": ["and", "tired"], "answer": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICES = (
    'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\noutput_type: multiple_choice\nmetric_list: [{metric: acc}]\n'
)
GENERATE = (
    'doc_to_target: "{{choices[0]}}"\noutput_type: generate_until\n'
    "generation_kwargs: {max_gen_toks: 12, until: ['.'], temperature: 0}\nmetric_list: [{metric: exact_match}]\n"
)


@pytest.fixture(scope="module")
def results(url, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "docs.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCS)))
    for name, rest in (("choices", CHOICES), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=f"local_{name}", data=data) + rest)
    arguments = {
        "model": MODEL,
        "base_url": f"{url}/completions",
        "tokenizer": str(ROOT / "checkpoints" / MODEL),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 1024,
        "batch_size": 2,
    }
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["local_choices", "local_generate"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def token_ids(url, text):
    """Return the text's token ids without BOS, as the harness sends them."""
    body = {"prompt": text, "add_special_tokens": False}
    return httpx.post(f"{url.removesuffix('/v1')}/tokenize", json=body, timeout=PATIENCE).json()["tokens"]


def test_scores(url, results):
    """Each choice's score is the sum of the server's log probabilities for the whole text."""
    samples = results["samples"]["local_choices"]
    assert len(samples) == len(DOCS)
    assert 0 <= results["results"]["local_choices"]["acc,none"] <= 1
    for sample in samples:
        for choice, response in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            scores = []
            for text in (sample["doc"]["question"], f"{sample['doc']['question']} {choice}"):
                body = {"prompt": token_ids(url, text), "echo": True, "logprobs": 1, "max_tokens": 0}
                answer = httpx.post(f"{url}/completions", json=body, timeout=PATIENCE)
                scores.append(sum(answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:]))
            assert response[0] == pytest.approx(scores[1] - scores[0], abs=0.02)


def test_texts(url, results):
    for sample in results["samples"]["local_generate"]:
        body = {"prompt": token_ids(url, sample["doc"]["question"]), "max_tokens": 12, "temperature": 0, "stop": ["."]}
        expected = httpx.post(f"{url}/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"]
        assert sample["resps"][0][0] == expected
