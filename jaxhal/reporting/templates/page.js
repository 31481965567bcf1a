"use strict";
const at = id => document.getElementById(id);

// Text enters the page through append and properties only, so markup in it stays text.
// What reorders text is spelled out, for what is judged is the text as it is.
const spelled = text => text.replace(/[\u202a-\u202e\u2066-\u2069]/g,
  sign => `\\u${sign.charCodeAt(0).toString(16)}`);

function make(name, props = {}, ...inside) {
  const node = Object.assign(document.createElement(name), props);
  node.append(...inside.map(one => typeof one === "string" ? spelled(one) : one));
  return node;
}

function draw(name, attributes, ...inside) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  node.append(...inside);
  return node;
}

// Names of detectors are anybody's: "constructor" is none that objects have anyway.
const held = (object, name) => Object.hasOwn(object, name) ? object[name] : undefined;
const percent = value => `${Math.round(100 * value)} %`;
const number = value => Number(value.toFixed(3)).toString();
const quote = text => `“${text.replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`;
const many = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;

// What is new, for everybody; or what cards show, for who does not see it.
function say(text, unseen = false) {
  at("status").textContent = text;
  at("status").classList.toggle("unseen", unseen);
}

function fold(name, fill) {
  const node = make("details", {}, make("summary", {}, name));
  node.unfold = () => {
    if (node.children.length === 1) node.append(fill());
    node.open = true;
  };
  node.addEventListener("toggle", () => { if (node.open) node.unfold(); });
  return node;
}

function table(name, columns, rows) {
  const head = columns.map(name => make("th", {scope: "col"}, name));
  return make("div", {className: "scroll", tabIndex: 0, role: "group", ariaLabel: name},
    make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
}

const cell = (text, className = "") => make("td", {className}, text);
const title = text => make("th", {scope: "row"}, text);

// --- an answer -------------------------------------------------------------------------

// The answer between the edges of its tokens, spans and annotations.  Characters are
// counted as code points, of which JavaScript needs two units for some.
function pieces({text, tokens, spans, labels = []}) {
  const chars = [...text], edges = new Set([0, chars.length]);
  for (const {start, end} of [...tokens, ...spans, ...labels]) edges.add(start).add(end);
  const sorted = [...edges].sort((a, b) => a - b);
  let first = 0;
  return sorted.slice(1).map((end, i) => {
    const start = sorted[i], over = [], around = one => one.start <= start && end <= one.end;
    while (first < tokens.length && tokens[first].end <= start) first += 1;
    for (let t = first; t < tokens.length && tokens[t].start < end; t += 1)
      if (tokens[t].end > start) over.push(tokens[t]);
    return {text: chars.slice(start, end).join(""), tokens: over,
      span: spans.find(around), label: labels.find(around)};
  });
}

// A node in the colour of a score; how high it is can be underlined too.
function tint(node, name, score) {
  const s = Math.min(1, Math.max(0, score)), quarters = Math.floor(4 * s);
  node.classList.add("token");
  node.classList.toggle("high", quarters > 0);
  node.style.setProperty("--s", s);
  node.style.setProperty("--u", quarters);
  node.title = `${name} ${number(score)}`;
  return node;
}

function piece({text, tokens, label}, detector) {
  const scores = tokens.map(token => held(token.scores, detector)).filter(s => s != null);
  const node = make("span", {}, text);
  if (scores.length) tint(node, detector, Math.max(...scores));
  if (label) {
    node.classList.add("label");
    node.title = [node.title, `annotated: ${label.label}`].filter(Boolean).join("\n");
  }
  if (tokens[0]?.unit !== undefined) node.dataset.unit = tokens[0].unit;
  return node;
}

// The answer in a detector's colours.  Its spans are buttons: `choose(span, button)`.
function paint(box, answer, detector, choose) {
  const nodes = [];
  let last = null, button = null;
  for (const one of pieces(answer)) {
    const {span} = one, node = piece(one, detector);
    if (!span) nodes.push(node);
    else {
      if (span !== last) {
        button = make("span", {className: "guess", role: "button", tabIndex: 0,
          ariaExpanded: "false", title: `predicted, confidence ${number(span.confidence)}`});
        const own = button, press = () => choose(span, own);
        button.addEventListener("click", press);
        button.addEventListener("keydown", event => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          press();
        });
        nodes.push(button);
      }
      button.append(node);
    }
    last = span;
  }
  box.replaceChildren(...nodes);
}

function score(token, name) {
  const value = held(token.scores, name);
  return value == null ? cell("") : tint(cell(number(value), "number"), name, value);
}

// The likeliest first; what has no probability goes last.
function everyone({scores, probabilities, flagged, by, helpers = {}}, measures = null) {
  const chance = name => held(probabilities, name) ?? -1;
  const names = Object.keys(scores).sort((a, b) => chance(b) - chance(a));
  const columns = ["detector", "probability", "score", "", ...measures ? ["what it measures"] : []];
  return table("What detectors say", columns, names.map(name => {
    const known = chance(name) >= 0, asks = held(helpers, name);
    const bar = cell(known ? percent(chance(name)) : "", "bar");
    bar.style.setProperty("--s", Math.max(0, chance(name)));
    const said = [flagged.includes(name) && "flags it", name === by && "decides", asks && `asks ${asks}`];
    return make("tr", {}, title(name), bar, cell(number(scores[name]), "number"),
      cell(said.filter(Boolean).join(", ")), ...measures ? [cell(held(measures, name) ?? "", "about")] : []);
  }));
}

const detectorsSay = scores => {
  const count = Object.keys(scores).length;
  return `What ${count === 1 ? "the detector says" : `${count} detectors say`}`;
};

const legend = {
  score: () => make("span", {}, "token score ", make("span", {className: "whole"}, "0",
    make("span", {className: "scale"}), "1")),
  span: () => make("span", {}, make("span", {className: "guess sample"}, "predicted"),
    " opens on a click or Enter"),
};

// --- what a span rests on --------------------------------------------------------------

// The panel of a card: one span is open at a time, and Escape closes it.  `fill` gets the
// span; what it gives is told.
function panel(card, fill) {
  const box = make("section", {className: "rests", hidden: true, ariaLabel: "What a span rests on"});
  let pressed = null;
  const letGo = () => {
    pressed?.setAttribute("aria-expanded", "false");
    pressed = null;
    box.hidden = true;
  };
  const choose = (span, button) => {
    const again = button === pressed;
    letGo();
    if (again) return;
    pressed = button;
    button.setAttribute("aria-expanded", "true");
    box.hidden = false;
    fill(box, span);
  };
  card.addEventListener("keydown", event => { if (event.key === "Escape") letGo(); });
  return {box, choose, letGo};
}

const words = new Intl.Segmenter(undefined, {granularity: "word"});
const same = text => text.normalize("NFKC").toLowerCase();
const signed = share => `${share < 0 ? "−" : "+"}${(100 * Math.abs(share)).toFixed(1)} %`;
const where = of => of === "response" ? "the answer before it" :
  of.startsWith("messages[") ? of : `the ${of}`;

// A node in the colour of a share of relevance: for, or against; deepest at `most`.
function lean(node, share, most) {
  node.classList.add(share > 0 ? "for" : "against");
  node.style.setProperty("--s", Math.abs(share) / most);
  return node;
}

// How often a source has each word of a span.
function counted(span, source) {
  const counts = new Map();
  for (const {segment, isWordLike} of words.segment(span))
    if (isWordLike) counts.set(same(segment), [segment, 0]);
  for (const {segment} of words.segment(source)) {
    const count = counts.get(same(segment));
    if (count) count[1] += 1;
  }
  return counts;
}

// The source, with the words that the span has too marked, and the strongest shaded.
function shaded(source, counts, shares) {
  const chars = [...source], most = Math.max(...shares.map(({share}) => Math.abs(share)));
  const box = make("p", {className: "text", tabIndex: 0});
  const marked = (start, end) => [...words.segment(chars.slice(start, end).join(""))].map(
    ({segment}) => counts.has(same(segment)) ? make("mark", {}, segment) : segment);
  let last = 0;
  for (const {start, end, share} of [...shares].sort((a, b) => a.start - b.start)) {
    const node = lean(make("span", {title: signed(share)}, ...marked(start, end)), share, most);
    box.append(...marked(last, start), node);
    last = end;
  }
  box.append(...marked(last, chars.length));
  return box;
}

// What a span rests on, and its words in the source; `relevance` is the server's, or why
// there is none.
function grounds(span, relevance, [kind, source, starts = {}], counts) {
  const there = typeof relevance === "object", {rules, sentences, words} = there ? relevance : {};
  const most = there ? Math.max(...sentences.map(({share}) => Math.abs(share))) : 1;
  const places = {[kind]: 0, ...starts};  // of texts in the source
  const own = there ? words.filter(({of}) => Object.hasOwn(places, of)).map(word => ({...word,
    start: word.start + places[word.of], end: word.end + places[word.of]})) : [];
  const items = there ? sentences.map(({of, text, share}) => make("li", {},
    lean(make("span", {className: "share"}, signed(share)), share, most),
    make("span", {}, quote(text), " ", make("span", {className: "soft"}, `in ${where(of)}`)))) : [];
  const list = make("ul", {className: "words"}, ...[...counts.values()].map(([word, count]) =>
    make("li", {className: count ? "" : "gone"}, make("b", {}, word),
      count ? ` ${count}×` : ` not in the ${kind}`)));
  return [
    make("h4", {}, "It rests most on"),
    there ? make("ul", {className: "shares"}, ...items) : make("p", {className: "soft"}, relevance),
    make("h4", {}, `The ${kind}`),
    shaded(source, counts, own), list,
    make("p", {className: "soft"}, there ? make("span", {}, "Shaded: words it rests on, ",
      make("span", {className: "whole"}, "against", make("span", {className: "scale sides"}), "for. ")) : "",
      make("mark", {}, "Marked"), ": words of the span, which may stand there in another sense.",
      there ? ` Numbers are shares of the reader's relevance (${rules}) of all before the span, the ` +
        "chat template too: what made it expect these words, true or not." : ""),
  ];
}

// Fills the panel with what is known of a span, and gives what fills in its relevance.
function rests(box, span, {tokens}, names, from) {
  const [kind, source] = from;
  const own = tokens.filter(token => token.start < span.end && token.end > span.start);
  const counts = counted(span.text, source), part = make("div");
  const gone = [...counts.values()].filter(([, count]) => !count).length;
  const rows = names.map(name =>
    make("tr", {}, title(name), ...own.map(token => score(token, name))));
  box.replaceChildren(
    make("h4", {}, `${quote(span.text)}, confidence ${number(span.confidence)}`), part,
    make("h4", {}, "Scores of its tokens"),
    table("Scores of its tokens", ["detector", ...own.map(token => quote(token.text))], rows));
  return relevance => {
    part.replaceChildren(...grounds(span, relevance, from, counts));
    if (!part.isConnected || box.hidden) return;
    const best = relevance.sentences?.[0];
    say(`${quote(span.text)}: ${gone} of ${many(counts.size, "word")} not in the ${kind}; ` +
      (best ? `rests most on ${quote(best.text)} in ${where(best.of)}, ${signed(best.share)}; ` : "") +
      "more below the answer.", true);
  };
}
