// Formulas: the common part of TeX as MathML, which browsers draw. A formula with anything else stays as it was written.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_FORMULA = 2000; // characters
const MAX_DEPTH = 50;

const LETTERS = Object.fromEntries(
  ("alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ " +
    "sigma σ tau τ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω " +
    "vartheta ϑ varrho ϱ upsilon υ Upsilon Υ infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ emptyset ∅ varnothing ∅ Re ℜ Im ℑ aleph ℵ")
    .split(" ").reduce((pairs, word, index, words) => (index % 2 ? pairs : [...pairs, [word, words[index + 1]]]), []),
);
const OPERATORS = Object.fromEntries(
  ("cdot · times × div ÷ pm ± mp ∓ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ propto ∝ in ∈ notin ∉ subset ⊂ subseteq ⊆ " +
    "cup ∪ cap ∩ to → rightarrow → Rightarrow ⇒ leftarrow ← iff ⇔ mapsto ↦ forall ∀ exists ∃ neg ¬ land ∧ lor ∨ circ ∘ " +
    "sum ∑ prod ∏ int ∫ iint ∬ oint ∮ bigcup ⋃ bigcap ⋂ ldots … cdots ⋯ dots … vdots ⋮ ddots ⋱ mid ∣ langle ⟨ rangle ⟩ " +
    "lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert | Vert ‖ implies ⟹ Leftrightarrow ⇔ longrightarrow ⟶ Leftarrow ⇐ leftrightarrow ↔ " +
    "uparrow ↑ downarrow ↓ setminus ∖ supset ⊃ supseteq ⊇ oplus ⊕ otimes ⊗ perp ⊥ parallel ∥ angle ∠ star ⋆ ast ∗ ll ≪ gg ≫ " +
    "cong ≅ simeq ≃ lt < gt > colon : therefore ∴ because ∵ vdash ⊢ models ⊨ top ⊤ bot ⊥ prime ′ " +
    "{ { } } | ‖ % % $ $ _ _ # # & &")
    .split(" ").reduce((pairs, word, index, words) => (index % 2 ? pairs : [...pairs, [word, words[index + 1]]]), []),
);
const SPACES = { ",": "0.17em", ";": "0.28em", ":": "0.22em", " ": "0.25em", "!": "0em", quad: "1em", qquad: "2em" };
const NAMES = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lim max min det gcd arg dim ker sup inf Pr".split(" "));
const TEXTS = new Set("text mathrm operatorname mathbf textbf textit mathit mathsf mathtt texttt".split(" "));
const LIMITS = new Set([..."∑∏⋃⋂", "lim", "max", "min", "sup", "inf"]);
const SIZES = /^(?:left|right|[bB]igg?[lr]?)$/; // of a bracket
const ACCENTS = { hat: "^", widehat: "^", bar: "‾", overline: "‾", vec: "→", tilde: "~", dot: "˙", ddot: "¨" };
const FENCES = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"],
  array: ["", ""], cases: ["{", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], gathered: ["", ""],
};
const ENDS = new Set(["}", "&", "\\\\", "\\end"]); // of a row of atoms
const DOUBLE_STRUCK = [..."𝔸𝔹ℂ𝔻𝔼𝔽𝔾ℍ𝕀𝕁𝕂𝕃𝕄ℕ𝕆ℙℚℝ𝕊𝕋𝕌𝕍𝕎𝕏𝕐ℤ"];
const SCRIPT = [..."𝒜ℬ𝒞𝒟ℰℱ𝒢ℋℐ𝒥𝒦ℒℳ𝒩𝒪𝒫𝒬ℛ𝒮𝒯𝒰𝒱𝒲𝒳𝒴𝒵"];

/** The element of a formula, or null if it has something that is not known here. */
export function formula(source, isDisplay) {
  if (source.length > MAX_FORMULA) return null;
  const tokens = source.match(/\\[a-zA-Z]+|\\[^]|\d+(?:\.\d+)?|\s+|[^]/gu) ?? [];
  try {
    const content = row(tokens, isDisplay, 0);
    if (tokens.length) return null; // a bracket too many
    return element("math", { display: isDisplay ? "block" : "inline" }, content);
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

class Unknown extends Error {}

function row(tokens, isDisplay, depth) {
  const items = [];
  while (tokens.length && !ENDS.has(tokens[0])) {
    if (!tokens[0].trim()) tokens.shift();
    else items.push(scripted(tokens, isDisplay, depth));
  }
  return element("mrow", {}, ...items);
}

function scripted(tokens, isDisplay, depth) {
  const base = "_^".includes(tokens[0]) ? element("mrow") : atom(tokens, isDisplay, depth);
  const scripts = {};
  for (;;) {
    while (tokens.length && !tokens[0].trim()) tokens.shift();
    const mark = tokens[0];
    if (mark === undefined || !"_^".includes(mark)) break;
    if (scripts[mark]) throw new Unknown(mark);
    tokens.shift();
    scripts[mark] = argument(tokens, isDisplay, depth);
  }
  const [under, over] = [scripts._, scripts["^"]];
  if (!under && !over) return base;
  const kind = isDisplay && LIMITS.has(base.textContent) ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  if (under && over) return element(kind[2], {}, base, under, over);
  return under ? element(kind[0], {}, base, under) : element(kind[1], {}, base, over);
}

function argument(tokens, isDisplay, depth) {
  while (tokens.length && !tokens[0].trim()) tokens.shift();
  return atom(tokens, isDisplay, depth);
}

function atom(tokens, isDisplay, depth) {
  const token = tokens.shift();
  if (token === undefined || depth > MAX_DEPTH) throw new Unknown(token);
  if (token === "{") {
    const group = row(tokens, isDisplay, depth + 1);
    if (tokens.shift() !== "}") throw new Unknown("{");
    return group;
  }
  if (/^\d/.test(token)) return element("mn", {}, token);
  if (/^\p{L}$/u.test(token)) return element("mi", {}, token);
  if (/^[-+*\/=<>()[\]|,.;:!?']$/.test(token)) return element("mo", {}, token === "-" ? "−" : token === "'" ? "′" : token);
  if (token[0] !== "\\") throw new Unknown(token);
  const name = token.slice(1);
  if (name === "frac" || name === "dfrac" || name === "tfrac") {
    return element("mfrac", {}, argument(tokens, isDisplay, depth + 1), argument(tokens, isDisplay, depth + 1));
  }
  if (name === "binom") {
    const [over, under] = [argument(tokens, isDisplay, depth + 1), argument(tokens, isDisplay, depth + 1)];
    return fenced(["(", ")"], element("mfrac", { linethickness: "0" }, over, under));
  }
  if (name === "sqrt") {
    if (tokens[0] !== "[") return element("msqrt", {}, argument(tokens, isDisplay, depth + 1));
    const end = tokens.indexOf("]");
    if (end < 0) throw new Unknown(token);
    const degree = row(tokens.splice(0, end + 1).slice(1, -1), false, depth + 1);
    return element("mroot", {}, argument(tokens, isDisplay, depth + 1), degree);
  }
  if (SIZES.test(name)) {
    if (tokens[0] === ".") return tokens.shift() && element("mrow");
    return argument(tokens, isDisplay, depth + 1);
  }
  if (name === "begin") return environment(tokens, isDisplay, depth + 1);
  if (name === "displaystyle") return element("mrow");
  if (name === "boxed") return element("mrow", { class: "boxed" }, argument(tokens, isDisplay, depth + 1));
  if (Object.hasOwn(ACCENTS, name)) {
    return element("mover", { accent: "true" }, argument(tokens, isDisplay, depth + 1), element("mo", {}, ACCENTS[name]));
  }
  if (name === "mathbb" || name === "mathcal") {
    const letters = tokens[0] === "{" ? word(tokens) : tokens.shift();
    if (!/^[A-Z]+$/.test(letters)) throw new Unknown(name);
    const alphabet = name === "mathbb" ? DOUBLE_STRUCK : SCRIPT;
    return element("mi", {}, Array.from(letters, (letter) => alphabet[letter.charCodeAt() - 65]).join(""));
  }
  if (TEXTS.has(name) && tokens[0] === "{") return element("mtext", {}, word(tokens).replaceAll(" ", "\u00a0"));
  if (NAMES.has(name)) return element("mi", {}, name);
  if (Object.hasOwn(LETTERS, name)) return element("mi", {}, LETTERS[name]);
  if (Object.hasOwn(OPERATORS, name)) return element("mo", {}, OPERATORS[name]);
  if (Object.hasOwn(SPACES, name)) return element("mspace", { width: SPACES[name] });
  throw new Unknown(token);
}

/** The text of a group in braces. */
function word(tokens) {
  const end = tokens.indexOf("}");
  const text = tokens.splice(0, end + 1).slice(1, -1).join("");
  if (end < 0 || /[\\{$]/.test(text)) throw new Unknown(text);
  return text;
}

/** A matrix, cases, or lines that are aligned: what follows `\begin`. */
function environment(tokens, isDisplay, depth) {
  const name = word(tokens);
  if (!Object.hasOwn(FENCES, name)) throw new Unknown(name);
  if (name === "array") word(tokens);
  const rows = [[]];
  for (;;) {
    rows.at(-1).push(element("mtd", {}, row(tokens, isDisplay, depth)));
    const end = tokens.shift();
    if (end === "\\end") break;
    if (end === "\\\\") {
      rows.push([]);
      if (tokens[0] === "[") tokens.splice(0, tokens.indexOf("]") + 1); // the space between two lines
    } else if (end !== "&") throw new Unknown(end);
  }
  if (word(tokens) !== name) throw new Unknown(name);
  if (rows.length > 1 && rows.at(-1).every((cell) => !cell.textContent)) rows.pop(); // lines end with a break
  return fenced(FENCES[name], element("mtable", { class: name.replace("*", "") }, ...rows.map((cells) => element("mtr", {}, ...cells))));
}

function fenced(fences, content) {
  const [open, close] = fences.map((fence) => (fence ? [element("mo", {}, fence)] : []));
  return element("mrow", {}, ...open, content, ...close);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
