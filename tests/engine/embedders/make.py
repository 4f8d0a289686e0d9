"""Write goldens.json: what sentence-transformers 6.2 and transformers 5.24 make of the models of cases.py, in float32.

Run by an interpreter that has torch, as tests/goldens/make.sh makes one, sentence-transformers and ml_dtypes.
"""

import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))

import cases  # noqa: E402
import ml_dtypes  # noqa: E402, F401  # numpy has bfloat16 by it
from sentence_transformers import CrossEncoder, SentenceTransformer  # noqa: E402

goldens = {"embeddings": {}, "similarities": {}, "scores": {}}
with tempfile.TemporaryDirectory() as folder:
    for name, (modules, files) in cases.EMBEDDERS.items():
        path = cases.write(pathlib.Path(folder, name), modules=modules, files=files)
        model = SentenceTransformer(str(path), device="cpu")
        vectors = model.encode(cases.TEXTS, batch_size=1)
        goldens["embeddings"][name] = vectors.tolist()
        goldens["similarities"][name] = model.similarity(vectors[:1], vectors[1:])[0].tolist()
    for name, (model, modules, files, changes) in cases.RERANKERS.items():
        path = cases.write(pathlib.Path(folder, name), model=model, modules=modules, files=files, changes=changes)
        scores = CrossEncoder(str(path), device="cpu").predict(cases.PAIRS, batch_size=1)
        goldens["scores"][name] = scores.tolist()
(HERE / "goldens.json").write_text(json.dumps(goldens) + "\n")
