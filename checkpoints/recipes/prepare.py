"""Turn the raw corpus into training text: `books.jsonl`, `chats.jsonl`, `heldout.txt`, and `report.csv` of what stayed.

The result depends only on the corpus, `books.csv` and `about.json`: same input, same bytes. Whole books and whole
conversations are held out by the SHA-256 of their name, so adding a file never moves another across the line.
"""

import argparse
import csv
import hashlib
import json
import random
import re
import string
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
HELDOUT_SHARE = 0.01

PUNCTUATION = str.maketrans(
    {
        **dict.fromkeys("\u201c\u201d\u201e", '"'),
        **dict.fromkeys("\u2018\u2019", "'"),
        "\u2026": "...",
        "\u00a0": " ",
        "\u200b": None,
        "\ufeff": None,
    }
)
FRONT_MATTER = re.compile(
    r"\b(preface|introduction|introductory|foreword|contents|footnotes?|notes?|appendix|index|dedication|dedicated|"
    r"illustrations|transcriber|bibliography|glossary|errata|advertisement|translator|publisher|copyright|"
    r"author's note|biograph\w+|prefatory|gutenberg)\b",
    re.IGNORECASE,
)
# Boilerplate, broken encodings, and a slur that the period's books use freely: those paragraphs are left out.
UNWANTED = re.compile(
    r"gutenberg|\[illustration|\[footnote|transcriber|https?:|â€|Ã|\ufffd|[«»|]|\bnigg", re.IGNORECASE
)
NUMBER_WORDS = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    "eighteen|nineteen|twenty|thirty|forty|fifty|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last"
)
NUMBERING = re.compile(
    rf"^(?:(?:chapter|chap|book|part|volume|vol|section|canto|letter|act|scene|epilogue|prologue|the(?=\s+(?:{NUMBER_WORDS})))"
    rf"\b[\s.]*"
    rf"|(?:[ivxlc]+|\d+|(?:{NUMBER_WORDS})(?:[-\s](?:{NUMBER_WORDS}))*)\b(?=[\s.:)\-—]|$)[\s.:)\-—]*)+",
    re.IGNORECASE,
)
STOPWORDS = frozenset(
    re.findall(r"\w+", "the and of to a in was he that his her it i with you for she had on as is at not but")
)

STORY_NOUNS = (
    "bear bird boat boy brother castle cat child cow crow daughter detective dog dragon eagle fairy farmer father fish "
    "forest fox frog garden ghost giant girl goat gold goose hen horse house hunter island journey king knight lion "
    "miller monkey moon mother mountain mouse murder old man old woman owl pig pirate prince princess queen rabbit "
    "river robber sailor sea servant shepherd ship sister snake soldier stranger tailor thief tiger train treasure "
    "tree wife witch wizard wolf"
)
NOUNS = tuple(re.findall(r"old \w+|\w+", STORY_NOUNS))
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are Scribe, a small storyteller.",
    "You are a friendly companion who likes to talk.",
    "Answer the user politely and briefly.",
)
STORY_REQUESTS = (
    "Tell me a story about {}.",
    "Please tell me a story about {}.",
    "Can you tell me a story about {}?",
    "Write a short story about {}.",
    "I would like to hear a story about {}.",
    "Write a story about {}.",
)
TITLE_REQUESTS = (
    'Tell me the story "{}".',
    "Tell me a story called {}.",
    'Write a story with the title "{}".',
    "Do you know the story of {}?",
)
PLAIN_REQUESTS = ("Tell me a story.", "Please tell me a story.", "Can you tell me a story?", "Write a short story.")
GO_ON = ("Go on.", "Please go on.", "What happened next?", "And then?", "Continue.", "Tell me more.")
CONTINUE_REQUESTS = ("Continue this story: {}", "How does this go on? {}", "Continue the story:\n\n{}")


@dataclass
class Section:
    """One chapter or tale: its title (empty if the heading was only a number) and its paragraphs."""

    title: str
    paragraphs: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The title, where there is one, and the paragraphs, separated by blank lines."""
        return "\n\n".join([self.title, *self.paragraphs] if self.title else self.paragraphs)


def is_heldout(name: str, share: float = HELDOUT_SHARE) -> bool:
    """Return true if `name` is held out: its SHA-256, read as a fraction of one, is less than `share`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < share * 2**64


def clean_inline(text: str) -> str:
    """Plain text of one line of markdown: no emphasis marks, straight quotes, one kind of dash."""
    text = unicodedata.normalize("NFC", text).translate(PUNCTUATION)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\[\^?\d+\]|<[a-zA-Z/][^>]*>", "", text)
    text = re.sub(r"\\([*_\[\]#`])", r"\1", text)
    text = re.sub(r"(?<!\w)_+|_+(?!\w)", "", text)
    text = re.sub(r"\*{1,3}([^*]+)\*{1,3}", r"\1", text)
    text = re.sub(r"\s*-{2,}\s*|\s*—+\s*", "—", text)
    return re.sub(r"[ \t]+", " ", text.lstrip(">")).strip()


def clean_title(heading: str) -> str:
    """Return the words of a heading without its numbering: "CHAPTER 1 - Down the Rabbit-Hole" is "Down the
    Rabbit-Hole".
    """
    title = clean_inline(heading.strip("# \t")).strip(" .:—-\"'")
    rest = NUMBERING.sub("", title).strip(" .:—-\"'")
    if sum(map(str.isalpha, rest)) < 3 or len(rest) > 80:
        return ""
    return string.capwords(rest) if rest.isupper() else rest


def split_block(block: str) -> Iterator[str]:
    """Yield the paragraphs of one block that blank lines separate: hard-wrapped prose is joined, verse keeps its
    lines.
    """
    lines = [cleaned for line in block.split("\n") if (cleaned := clean_inline(line))]
    if not lines:
        return
    if max(map(len, lines)) > 120:
        yield from lines
    elif len(lines) > 1 and sorted(map(len, lines))[len(lines) // 2] > 45:
        yield " ".join(lines)
    else:
        yield "\n".join(lines)


def read_book(path: Path) -> list[Section]:
    """Sections of one markdown book, front and back matter left out."""
    raw = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    header = re.match(r"(?:\s*#+ *(?:Title|Author|Year):[^\n]*\n|\s*\n|\s*-{3,} *\n)*", raw)
    body = re.sub(r"^(#{1,6}[^\n]*)$", r"\n\n\1\n\n", raw[header.end() if header else 0 :], flags=re.MULTILINE)
    sections, skip = [Section("")], False
    for block in re.split(r"\n\s*\n", body):
        block = block.strip("\n")
        if block.lstrip().startswith("#"):
            skip = bool(FRONT_MATTER.search(block)) and len(block) < 80
            sections.append(Section(clean_title(block)))
        elif not skip:
            for paragraph in split_block(block):
                letters = sum(map(str.isalpha, paragraph))
                if letters > 0.5 * len(paragraph) and not UNWANTED.search(paragraph):
                    sections[-1].paragraphs.append(paragraph)
    return sections


def is_english(section: Section) -> bool:
    """Return true if enough of the words are among the most common English ones."""
    words = re.findall(r"[a-z]+", " ".join(section.paragraphs)[:20000].lower())
    return len(words) > 30 and sum(w in STOPWORDS for w in words) > 0.2 * len(words)


def drop_seen(section: Section, seen: set[bytes]) -> Section | None:
    """Return the section without long paragraphs that are in `seen`; None if most of it was there."""
    kept, num_long, num_seen = [], 0, 0
    for paragraph in section.paragraphs:
        if len(paragraph) >= 120:
            num_long += 1
            key = hashlib.blake2b(re.sub(r"\W+", "", paragraph.lower()).encode(), digest_size=12).digest()
            if key in seen:
                num_seen += 1
                continue
            seen.add(key)
        kept.append(paragraph)
    return None if num_seen * 2 > num_long else Section(section.title, kept)


def load_books(root: Path) -> Iterator[tuple[str, str, list[Section], int]]:
    """(name, group, sections, raw bytes) per listed book; held-out books first, so that they win every duplicate."""
    with open(HERE / "books.csv", encoding="utf-8", newline="") as f:
        rows = [(row["path"], row["group"]) for row in csv.DictReader(f)]
    books = [(path, "heldout" if is_heldout(path) else group) for path, group in rows if group != "drop"]
    order = {"heldout": 0, "tales": 1, "plain": 2, "prose": 3}
    seen: set[bytes] = set()
    for path, group in sorted(books, key=lambda book: (order[book[1]], book[0])):
        sections = [drop_seen(s, seen) for s in read_book(root / path) if is_english(s)]
        yield path, group, [s for s in sections if s and len(s.text) >= 300], (root / path).stat().st_size


def turns(speakers: list[tuple[str, str]]) -> list[dict[str, str]]:
    """Messages with strictly alternating roles, starting with the user; one speaker's run of lines becomes one."""
    messages: list[dict[str, str]] = []
    for role, text in speakers:
        text = re.sub(r"\s+", " ", unicodedata.normalize("NFC", text).translate(PUNCTUATION)).strip()
        if not text or (not messages and role != "user"):
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += " " + text
        else:
            messages.append({"role": role, "content": text})
    if messages and messages[-1]["role"] == "user":
        messages.pop()
    return messages


def dialogues(corpus: Path) -> Iterator[tuple[str, str, list[dict[str, str]]]]:
    """(source, id, messages) of both dialogue sets. Topical-Chat has no roles: each side plays the user once."""
    for path in sorted((corpus / "topical_chat/conversations").glob("*.json")):
        for key, conversation in json.loads(path.read_text()).items():
            lines = [(line["agent"], line["message"]) for line in conversation["content"]]
            for user in ("agent_1", "agent_2"):
                yield "topical_chat", key, turns([("user" if a == user else "assistant", t) for a, t in lines])
    for path in sorted((corpus / "taskmaster4/TM-4-2024/data").glob("*.json")):
        for conversation in json.loads(path.read_text()):
            lines = [(u["speaker"], u["text"]) for u in conversation["utterances"]]
            yield "taskmaster4", conversation["conversation_id"], turns(lines)


def take(paragraphs: list[str], num_chars: int) -> tuple[str, list[str]]:
    """Return the first whole paragraphs, about `num_chars` characters, and the rest."""
    taken, size = [], 0
    while paragraphs and (not taken or size + len(paragraphs[0]) <= num_chars):
        taken.append(paragraphs[0])
        size += len(paragraphs[0])
        paragraphs = paragraphs[1:]
    return "\n\n".join(taken), paragraphs


def story_chats(sections: list[Section], rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Yield requests for stories with the openings of real ones as answers: by noun, by title, or as a continuation."""
    for section in sections:
        paragraphs = section.paragraphs
        if len("".join(paragraphs)) < 400 or len(paragraphs[0]) > 1500:
            continue
        kind = rng.random()
        messages = []
        if kind < 0.2 or paragraphs[0].startswith(('"', "'")):
            start = rng.randrange(len(paragraphs))
            prompt, paragraphs = take(paragraphs[start:], 400)
            if not paragraphs or len(prompt) > 800:
                continue
            messages.append({"role": "user", "content": rng.choice(CONTINUE_REQUESTS).format(prompt)})
        reply, paragraphs = take(paragraphs, rng.choice((700, 1100, 1500)))
        if len(reply) > 2200:
            continue
        if not messages:
            counts = {n: len(re.findall(rf"\b{n}s?\b", reply.lower())) for n in NOUNS}
            best = max(counts, key=lambda n: counts[n])
            if counts[best] >= 2:
                request = rng.choice(STORY_REQUESTS).format(("an " if best[0] in "aeio" else "a ") + best)
                request = re.sub(r"\ba (gold)\b", r"\1", request)
            elif section.title and kind < 0.7:
                request = rng.choice(TITLE_REQUESTS).format(section.title)
            else:
                request = rng.choice(PLAIN_REQUESTS)
            messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": reply})
        while paragraphs and rng.random() < 0.4:
            reply, paragraphs = take(paragraphs, 900)
            if len(reply) > 1500:
                break
            messages += [{"role": "user", "content": rng.choice(GO_ON)}, {"role": "assistant", "content": reply}]
        yield messages


def about_chats(rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Short talks about the model itself and everyday politeness, drawn from `about.json`."""
    pairs = json.loads((HERE / "about.json").read_text(encoding="utf-8"))
    for _ in range(60):
        for pair in pairs:
            messages = []
            for chosen in [pair, *rng.sample(pairs, rng.randrange(3))]:
                messages.append({"role": "user", "content": rng.choice(chosen["user"])})
                messages.append({"role": "assistant", "content": rng.choice(chosen["assistant"])})
            yield messages


def main() -> None:
    """Write the prepared text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with classic_books/, topical_chat/, ...")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sample-chars", type=int, default=20_000, help="of each held-out book in heldout.txt")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    report, stories, samples = [], [], []
    with open(args.out / "books.jsonl", "w", encoding="utf-8") as f:
        for name, group, sections, size in load_books(args.corpus / "classic_books"):
            kept = sum(len(s.text.encode()) for s in sections)
            report.append((name, group, size, kept))
            for section in sections:
                row = {"book": name, "group": group, "text": section.text}
                f.write(json.dumps(row, ensure_ascii=False) + "\n")
            for _ in range({"tales": 4, "plain": 1}.get(group, 0)):
                stories += [(name, messages) for messages in story_chats(sections, rng)]
            if group == "heldout":
                samples.append("\n\n".join(s.text for s in sections)[: args.sample_chars].rpartition("\n\n")[0])
    (args.out / "heldout.txt").write_text("\n\n".join(samples) + "\n", encoding="utf-8")

    rows = [(source, key, messages) for source, key, messages in dialogues(args.corpus)]
    rows += [("stories", key, messages) for key, messages in stories]
    rows += [("about", "", messages) for messages in about_chats(rng)]
    with open(args.out / "chats.jsonl", "w", encoding="utf-8") as f:
        for source, key, messages in rows:
            if len(messages) < 2:
                continue
            if rng.random() < 0.2:
                messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *messages]
            split = "heldout" if key and is_heldout(key) else "train"
            row = {"source": source, "split": split, "messages": messages}
            f.write(json.dumps(row, ensure_ascii=False) + "\n")

    with open(args.out / "report.csv", "w", encoding="utf-8", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["path", "group", "raw_bytes", "kept_bytes"])
        writer.writerows(report)

    for group in ("heldout", "tales", "plain", "prose"):
        books = [r for r in report if r[1] == group]
        print(f"{group}: {len(books)} books, {sum(r[2] for r in books)} bytes raw, {sum(r[3] for r in books)} kept")


if __name__ == "__main__":
    main()
