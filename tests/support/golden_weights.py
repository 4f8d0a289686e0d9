"""The weights of goldens, by a rule instead of in files: `weights.json` of a golden has names, dtypes and shapes.

Weights are such that everything matters: gains that are not 1, biases that are not 0, logits of several units. Floats
are bfloat16 numbers, made by exact or correctly rounded operations, so that they are the same on every machine.
make_goldens.py imports this as the tests do, so it needs numpy only.
"""

import hashlib
import itertools
import json
import math
import re
import shutil

import numpy as np

WEIGHTS = "weights.json"
"""A golden's file: the seed, and of each file of weights each tensor's shape, or dtype and shape if that is not BF16.
Tensors that differ in an index alone have one name with all indices, as "layers.{0-3}.norm.weight".
"""
SEQUENCE_LENGTH = 41
"""Number of tokens of golden.npz."""
PROMPT_LENGTH = 24
"""How many of them precede the greedy continuation."""
POSITIONS = np.arange(4, SEQUENCE_LENGTH, 6)
"""The positions of the logits of golden.npz, with the last one; layers spread what is wrong at others."""
STORED_LESS_ONE = {
    *("gemma", "gemma2", "gemma3", "gemma3_text", "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_next", "vaultgemma"),
}
"""Families whose checkpoints hold the gains of norms less 1."""
STORED_WHOLE = "linear_attn.norm.weight"
"""The end of the name of a norm's gain that these families do not store less 1."""
INTEGERS = {"_blocks": (0, 256), "_scales": (120, 125)}
"""Which bytes the tensors of MXFP4 have, by the ends of their names."""


_ORDER = ("F32", "BF16", "U8")
"""The order of tensors in a file, in which all are aligned."""


def draws(seed, name, count):
    """Return 64 random bits for each of `count` elements of a tensor."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16]
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)


def normal(seed, name, shape):
    """Return numbers of mean 0 and variance 1: sums of four uniform ones, which no library's logarithm rounds."""
    parts = draws(seed, name, math.prod(shape)).view(np.uint16).reshape(*shape, 4)
    return (parts.sum(-1, dtype=np.int64) - 2 * 65535) / (65536 / math.sqrt(3))


def as_bfloat16(values):
    """Return the bits of the nearest bfloat16 numbers."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def center_and_spread(name, shape, gain):
    """Return the mean and standard deviation of a tensor's values."""
    if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
        return (1.0 if name.endswith(STORED_WHOLE) else gain), 0.3
    if name.endswith((".act_fn.beta", ".act_fn.eps")):
        return (0.5, 0.1) if name.endswith("beta") else (-0.05, 0.01)
    if name.endswith(".A_log"):  # states that last for tens of tokens
        return -2.5, 0.7
    if name.endswith(".layer_scalar"):
        return 0.8, 0.2
    if name.endswith(".modality_router.weight"):  # whose inputs are divided by their number
        return 0.0, math.sqrt(shape[-1])
    if name.endswith((".prediction_coefs.weight", ".correction_coefs.weight")):  # else streams grow from layer to layer
        return 0.0, 0.2
    if len(shape) == 1:
        return 0.0, 0.5
    if "embed" in name or ".wte." in name or ".wpe." in name:
        return 0.0, 1.0
    return 0.0, 1.5 / math.sqrt(shape[-1])


def tensor_bits(name, dtype, shape, seed, gain):
    """Return a tensor's values as the integers that a file holds."""
    for end, (low, high) in INTEGERS.items():
        if name.endswith(end) and dtype == "U8":
            return (low + draws(seed, name, math.prod(shape)) % (high - low)).astype(np.uint8).reshape(shape)
    if dtype not in ("BF16", "F32"):
        raise ValueError(f"{name}: there is no rule for {dtype}")
    center, spread = center_and_spread(name, shape, gain)
    bits = as_bfloat16(center + spread * normal(seed, name, shape))
    return bits if dtype == "BF16" else bits.astype(np.uint32) << 16


def read_declared(folder):
    """Return what weights.json says of the files that save_pretrained has written to a folder."""
    declared = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        declared[path.name] = {name: [tensor["dtype"], tensor["shape"]] for name, tensor in header.items()}
    return declared


def folded(tensors):
    """Return tensors with one name for those that differ in an index alone, the innermost indices first."""
    for place in reversed(range(max(name.count(".") for name in tensors))):
        groups = {}
        for name, tensor in tensors.items():
            parts = name.split(".")
            is_indexed = parts[place : place + 1] != [] and parts[place].isdigit()
            index = int(parts[place]) if is_indexed else None
            before, after = ".".join(parts[:place]), ".".join(parts[place + 1 :])
            key = (f"{before}.%s.{after}" if is_indexed else name), str(tensor)
            groups.setdefault(key, []).append((index, tensor))
        tensors = {}
        for (name, _), found in groups.items():
            [*indices], tensor = (index for index, _ in found), found[0][1]
            if indices == [None]:
                tensors[name] = tensor
                continue
            runs = itertools.groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0])
            for first, *others in ([index for _, index in run] for _, run in runs):
                tensors[name % (f"{{{first}-{others[-1]}}}" if others else first)] = tensor
    return tensors


def unfolded(name):
    """Return the names that one of `folded` stands for."""
    found = re.search(r"{(\d+)-(\d+)}", name)
    if found is None:
        return [name]
    indices = range(int(found[1]), int(found[2]) + 1)
    return [each for index in indices for each in unfolded(name.replace(found[0], str(index), 1))]


def declared_as_json(declared, seed):
    """Return weights.json with a line for each folded name."""
    files = [f' "seed": {seed}']
    for file, tensors in declared.items():
        short = {name: shape if dtype == "BF16" else [dtype, shape] for name, (dtype, shape) in tensors.items()}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in folded(short).items())
        files.append(f" {json.dumps(file)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(files) + "\n}\n"


def read_weights(golden):
    """Return a golden's seed, and what `read_declared` said."""
    declared = json.loads((golden / WEIGHTS).read_text())
    seed = declared.pop("seed")
    for file, tensors in declared.items():
        full = {name: each if each and isinstance(each[0], str) else ["BF16", each] for name, each in tensors.items()}
        declared[file] = dict(sorted((each, tensor) for name, tensor in full.items() for each in unfolded(name)))
    return seed, declared


def write_weights(golden, folder):
    """Write the files of a golden's weights to a folder, with an index if they are several."""
    seed, declared = read_weights(golden)
    seed = f"{seed}/{golden.name}"
    gain = 0.0 if json.loads((golden / "config.json").read_text())["model_type"] in STORED_LESS_ONE else 1.0
    for file, tensors in declared.items():
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda tensor: _ORDER.index(tensor[1][0])):
            bits = tensor_bits(name, dtype, shape, seed, gain).tobytes()
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(bits)]}
            data += bits
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        (folder / file).write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    if len(declared) > 1:
        index = {"metadata": {}, "weight_map": {name: file for file, tensors in declared.items() for name in tensors}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_checkpoint(golden, folder):
    """Write a golden with its weights, as a checkpoint, to `folder`, which is made."""
    folder.mkdir(parents=True)
    write_weights(golden, folder)
    for path in golden.iterdir():
        if path.name != WEIGHTS:
            shutil.copyfile(path, folder / path.name)
