// Formulas: the common part of TeX as MathML, which browsers draw. A formula with anything else stays as it was written.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_FORMULA = 2000; // characters
const MAX_DEPTH = 50;

const LETTERS = Object.fromEntries(
  ("alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ " +
    "sigma σ tau τ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω " +
    "infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ emptyset ∅")
    .split(" ").reduce((pairs, word, index, words) => (index % 2 ? pairs : [...pairs, [word, words[index + 1]]]), []),
);
const OPERATORS = Object.fromEntries(
  ("cdot · times × div ÷ pm ± mp ∓ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ propto ∝ in ∈ notin ∉ subset ⊂ subseteq ⊆ " +
    "cup ∪ cap ∩ to → rightarrow → Rightarrow ⇒ leftarrow ← iff ⇔ mapsto ↦ forall ∀ exists ∃ neg ¬ land ∧ lor ∨ circ ∘ " +
    "sum ∑ prod ∏ int ∫ ldots … cdots ⋯ dots … mid ∣ langle ⟨ rangle ⟩ { { } } | ‖")
    .split(" ").reduce((pairs, word, index, words) => (index % 2 ? pairs : [...pairs, [word, words[index + 1]]]), []),
);
const SPACES = { ",": "0.17em", ";": "0.28em", ":": "0.22em", " ": "0.25em", "!": "0em", quad: "1em", qquad: "2em" };
const NAMES = new Set("sin cos tan log ln exp lim max min det gcd arg dim ker sup inf Pr".split(" "));
const TEXTS = new Set("text mathrm operatorname mathbf textbf".split(" "));
const LIMITS = new Set([..."∑∏", "lim", "max", "min", "sup", "inf"]);

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
  while (tokens.length && tokens[0] !== "}") {
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
  if (name === "sqrt" && tokens[0] !== "[") return element("msqrt", {}, argument(tokens, isDisplay, depth + 1));
  if (name === "left" || name === "right") {
    if (tokens[0] === ".") return tokens.shift() && element("mrow");
    return argument(tokens, isDisplay, depth + 1);
  }
  if (TEXTS.has(name) && tokens[0] === "{") {
    const end = tokens.indexOf("}");
    const text = tokens.splice(0, end + 1).slice(1, -1).join("");
    if (end < 0 || /[\\{$]/.test(text)) throw new Unknown(name);
    return element("mtext", {}, text);
  }
  if (NAMES.has(name)) return element("mi", {}, name);
  if (Object.hasOwn(LETTERS, name)) return element("mi", {}, LETTERS[name]);
  if (Object.hasOwn(OPERATORS, name)) return element("mo", {}, OPERATORS[name]);
  if (Object.hasOwn(SPACES, name)) return element("mspace", { width: SPACES[name] });
  throw new Unknown(token);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
