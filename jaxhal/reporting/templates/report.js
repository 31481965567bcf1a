const PAGE = 200;
const data = JSON.parse(at("data").textContent);
const share = value => `${value < 0 ? "−" : "+"}${Math.abs(value / 100).toFixed(2)}`;

function heatMap(name, values, numbers, low, high, signed) {
  const layers = values.length, heads = values[0].length;
  const size = Math.max(6, Math.min(16, Math.floor(400 / layers), Math.floor(400 / heads)));
  const left = 44, width = left + layers * size + 2, height = heads * size + 32;
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `${name}: ${layers} layers by ${heads} heads, values from ` +
      `${number(low)} to ${number(high)}`,
  });
  svg.append(draw("rect", {
    class: "back", x: left, y: 0, width: layers * size + 1, height: heads * size + 1,
  }));
  const span = signed ? Math.max(-low, high) || 1 : high - low || 1;
  values.forEach((row, layer) => row.forEach((value, head) => {
    const share = signed ? Math.abs(value) / span : (value - low) / span;
    const cell = draw("rect", {
      x: left + layer * size + .5, y: head * size + .5, width: size - .5,
      height: size - .5, "fill-opacity": share.toFixed(3),
      class: signed && value < 0 ? "low" : "",
    });
    cell.dataset.say = `layer ${numbers[layer]}, head ${head}: ${number(value)}`;
    svg.append(cell);
  }));
  const bottom = heads * size;
  const put = (text, x, y, anchor) =>
    svg.append(draw("text", {x, y, "text-anchor": anchor}, text));
  put("head 0", left - 5, 10, "end");
  if (heads > 2) put(heads - 1, left - 5, bottom, "end");
  put(`layer ${numbers[0]}`, left, bottom + 14, "start");
  if (layers > 6) put(numbers[layers - 1], left + layers * size, bottom + 14, "end");
  const readout = make("output", {}, "point at a cell to read it");
  svg.addEventListener("pointerover", event => {
    if (event.target.dataset.say) readout.textContent = event.target.dataset.say;
  });
  const ends = signed ? [-span, span] : [low, high];
  const scale = make("span", {className: signed ? "scale signed" : "scale map"});
  return make("figure", {},
    make("figcaption", {}, make("b", {}, name), " ",
      make("span", {className: "whole"}, number(ends[0]), scale, number(ends[1]))),
    svg, readout);
}

function overview() {
  for (const name in data.maps) {
    const {values, layers, signed} = data.maps[name];
    const flat = values.flat(), low = Math.min(...flat), high = Math.max(...flat);
    at("maps").append(heatMap(name, values, layers, low, high, signed));
    at("what").textContent = signed
      ? "Mean over the hallucinated answers minus mean over the grounded ones."
      : "Mean over the answers.";
    at("overview").hidden = false;
  }
}

// The unit that a key leads to; up and down, the nearest one of the next line.
function neighbour(nodes, here, key) {
  const row = {ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: nodes.length - 1};
  if (key in row) return nodes[row[key]];
  const step = {ArrowUp: -1, ArrowDown: 1}[key], from = nodes[here];
  const far = node => Math.abs(node.offsetLeft - from.offsetLeft);
  let best, line;
  for (let i = here + step; nodes[i]; i += step) {
    if (nodes[i].offsetTop === from.offsetTop) continue;
    line ??= nodes[i].offsetTop;
    if (nodes[i].offsetTop !== line) break;
    if (!best || far(nodes[i]) < far(best)) best = nodes[i];
  }
  return best;
}

// Units of text, numbered from the first on.  Tab enters where the keys last were.
function units(name, texts, first) {
  const nodes = texts.map((text, i) => {
    const node = make("span", {role: "button", tabIndex: i ? -1 : 0}, text);
    node.dataset.unit = first + i;
    node.classList.toggle("break", /^\s*\n\s*$/.test(text));
    return node;
  });
  const box = make("div", {className: "units", role: "group", ariaLabel: name}, ...nodes);
  box.addEventListener("focusin", event => {
    for (const node of nodes) if (node.tabIndex === 0) node.tabIndex = -1;
    event.target.tabIndex = 0;
  });
  box.addEventListener("keydown", event => {
    const node = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey || !node.dataset.unit) return;
    const next = neighbour(nodes, nodes.indexOf(node), event.key);
    if (event.key === "Enter" || event.key === " ") node.click();
    else if (next) next.focus();
    else return;
    event.preventDefault();
  });
  return [box, nodes];
}

// The words beside the text: which unit is chosen, and the strongest of the others.
function chosen(unit, found, kept, {prompt, response}) {
  const start = prompt.length, asked = unit < start;
  const name = each => make("b", {className: "quote"}, quote([...prompt, ...response][each]));
  const place = each => make("span", {className: "soft"},
    each < start ? `prompt ${each + 1}` : `answer ${each - start + 1}`);
  const best = [...found].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 5);
  const items = best.map(([each, value]) => {
    const amount = lean(make("b", {className: "share"}, share(value)), value, 100);
    return make("li", {}, amount, name(each), place(each));
  });
  return [
    make("h4", {}, asked ? "What rests on" : "What it rests on"),
    make("p", {}, name(unit), " ", place(unit)),
    make("ol", {className: "shares"}, ...items),
    make("p", {className: "soft"}, found.length > 5 ? `The strongest 5 of ${found.length} tokens.`
      : found.length ? "" : "No token."),
    make("p", {className: "soft"}, kept ? "Kept; Escape lets it go." : ""),
  ];
}

// What tokens rest on.  Units of the prompt come first, then those of the answer.  A row
// per unit of the answer holds hundredths for all units and lacks the zeros at its end.
function view(relevance) {
  const {prompt, response, rows, rules} = relevance, start = prompt.length;
  const [above, asked] = units("Prompt tokens", prompt, 0);
  const [below, said] = units("Answer tokens", response, start);
  const nodes = [...asked, ...said];
  const side = make("div", {className: "chosen", ariaLive: "polite"});
  let pinned = null, shown = [];

  function show(unit) {
    for (const node of shown) {
      node.classList.remove("pick", "for", "against");
      node.removeAttribute("title");
    }
    shown = [];
    if (unit === null) {
      side.replaceChildren(make("p", {className: "soft"}, "Point at a token, or reach it with " +
        "Tab and the arrow keys. A click, Enter or Space keeps it; Escape lets it go."));
      return [];
    }
    const all = unit < start ? response.map((_, i) => [start + i, rows[i][unit]])
      : rows[unit - start].map((value, other) => [other, value]);
    const found = all.filter(([, value]) => value);
    for (const [other, value] of found) {
      lean(nodes[other], value, 100).title = share(value);
    }
    nodes[unit].classList.add("pick");
    shown = [nodes[unit], ...found.map(([other]) => nodes[other])];
    side.replaceChildren(...chosen(unit, found, unit === pinned, relevance));
    return found;
  }

  // Also scrolls the other text, but not the page, to where its strongest unit is.
  function pin(unit) {
    pinned = unit;
    const others = show(unit).filter(([other]) => (other < start) !== (unit < start));
    if (!others.length) return;
    const [best] = others.reduce((a, b) => Math.abs(b[1]) > Math.abs(a[1]) ? b : a);
    const node = nodes[best], box = node.parentNode, top = node.offsetTop - box.scrollTop;
    if (top < 0 || top + node.offsetHeight > box.clientHeight)
      box.scrollTop += top - box.clientHeight / 2;
  }

  const text = make("div", {},
    make("h4", {}, "Prompt"), above, make("h4", {}, "Answer"), below);
  const preview = event => {
    if (pinned === null && event.target.dataset.unit) show(Number(event.target.dataset.unit));
  };
  const leave = () => { if (pinned === null) show(null); };
  for (const name of ["pointerover", "focusin"]) text.addEventListener(name, preview);
  for (const name of ["pointerleave", "focusout"]) text.addEventListener(name, leave);
  text.addEventListener("click", event => {
    const unit = event.target.dataset.unit;
    if (unit) pin(Number(unit) === pinned ? null : Number(unit));
  });
  show(null);
  const node = make("div", {},
    make("p", {className: "soft"}, "Relevance by the rules ", make("b", {}, rules), "\u2003",
      make("span", {className: "whole"}, "against −1",
        make("span", {className: "scale sides"}), "+1 for")),
    make("div", {className: "trace"}, text, side),
    make("p", {className: "soft"}, "A token of the answer rests on tokens of the prompt and on " +
      "earlier ones of the answer; a token of the prompt shows what rests on it. Numbers are " +
      "relative to the largest of each token of the answer and rounded to 0.01; they do not " +
      "say which token of the answer rests on more. Tokens that share a character are shown " +
      "as one, with the strongest of their numbers."));
  return {node, pin: unit => pin(start + unit), letGo: () => { pinned = null; show(null); }};
}

// The answer as it is drawn, its characters counted as code points.
function drawn({response, places, tokens, relevance, spans, labels}) {
  const chars = [...response], names = Object.keys(tokens);
  return {text: response, spans, labels, tokens: places.map(([start, end], i) => ({
    start, end, text: chars.slice(start, end).join(""), unit: relevance?.units[i],
    scores: Object.fromEntries(names.map(name => [name, tokens[name][i]])),
  }))};
}

const UNTRACED = "This page was made without relevance; jaxhal detect --relevance attnlrp adds it.";

function card(answer) {
  const top = make("div", {className: "top"}, make("h3", {}, answer.id || "answer"));
  if (answer.verdict !== null) top.append(
    make("span", {className: `badge ${answer.verdict}`}, answer.verdict),
    make("span", {title: `of a hallucination, by ${answer.by}`}, percent(answer.probability)));
  if (answer.label !== null) top.append(make("span", {className: "soft"},
    `label: ${answer.label ? "hallucinated" : "grounded"}`));
  const node = make("article", {className: "card"}, top), [kind, source] = answer.source;
  if (answer.question) node.append(make("p", {}, make("b", {}, answer.question)));
  if (source !== null) {
    const text = fold(kind === "context" ? "Context" : "Prompt",
      () => make("p", {className: "text", tabIndex: 0}, source));
    text.unfold();
    node.append(text);
  }
  const whole = drawn(answer), shown = make("p", {className: "answer"});
  const names = [answer.detector, ...Object.keys(answer.tokens)]
    .filter((name, i, all) => held(answer.tokens, name) && all.indexOf(name) === i);
  const {box, choose, letGo} = panel(node, (box, span) =>
    rests(box, span, whole, names, [kind, source ?? "", answer.starts])(span.relevance ?? UNTRACED));
  if (answer.response) node.append(shown, box);
  node.repaint = () => {
    letGo();
    // Spans belong to the answer's own detector; under another's colours they mislead.
    const detector = at("detector").value;
    const own = detector === answer.detector || !data.detectors.includes(answer.detector);
    paint(shown, own ? whole : {...whole, spans: []}, detector, choose);
  };
  node.repaint();
  if (answer.error !== null) {
    node.append(make("p", {className: "error"}, `Not scored: ${answer.error}`));
    return node;
  }
  if (Object.keys(answer.scores).length)
    node.append(fold(detectorsSay(answer.scores), () => everyone(answer)));
  if (answer.relevance) trace(node, answer.relevance);
  if (Object.keys(answer.heads).length) node.append(fold("Layer by head heat map", () => {
    const maps = make("div", {className: "maps"});
    for (const name in answer.heads) {
      const flat = answer.heads[name].flat();
      const [low, high] = Object.hasOwn(data.maps, name) ? data.maps[name].range
        : [Math.min(...flat), Math.max(...flat)];
      maps.append(heatMap(name, answer.heads[name], answer.layers, low, high, false));
    }
    return maps;
  }));
  return node;
}

// Adds what the answer's tokens rest on; a click on one outside of spans leads there.
function trace(node, relevance) {
  let made = null;
  const sight = () => made ??= view(relevance);
  const more = fold("What its tokens rest on", () => sight().node);
  node.append(more);
  node.letGo = () => made?.letGo();
  node.querySelector(".answer").addEventListener("click", event => {
    if (!event.target.dataset.unit || event.target.closest(".guess")) return;
    more.unfold();
    more.scrollIntoView({block: "nearest"});
    sight().pin(Number(event.target.dataset.unit));
  });
  if (traced <= 3) more.unfold();
}

// What answers are ordered by, a choice each; the first is as given.
const orders = [null];
function ordered(name, value) {
  orders.push(value);
  at("order").append(make("option", {}, `${name} first`));
}

let order = [], shown = 0;
const traced = data.answers.filter(answer => answer.relevance).length;

function more() {
  const next = order.slice(shown, shown + PAGE);
  at("cards").append(...next.map(card));
  shown += next.length;
  at("more").hidden = shown === order.length;
  at("shown").textContent = shown < order.length
    ? `${shown} of ${order.length} answers shown` : "";
}

function restart() {
  const value = orders[at("order").selectedIndex];
  order = [...data.answers];
  // Answers without the number, the failed ones, go last.
  if (value) order.sort((a, b) => (value(b) ?? -Infinity) - (value(a) ?? -Infinity) || 0);
  at("cards").replaceChildren();
  shown = 0;
  more();
}

function key() {
  const parts = at("detector").value ? [legend.score()] : [];
  if (data.answers.some(answer => answer.labels.length))
    parts.push(make("span", {className: "label sample"}, "annotated"));
  if (data.answers.some(answer => answer.spans.length)) parts.push(legend.span());
  at("legend").replaceChildren(...parts.flatMap(part => [part, "\u2003"]));
}

for (const name of data.detectors) at("detector").append(make("option", {}, name));
if (data.answers.some(a => a.verdict !== null)) {
  ordered("most likely hallucinated", a => a.probability);
  at("order").selectedIndex = 1;
}
for (const name of data.scores) ordered(`${name}, highest`, a => held(a.scores, name));
const usual = data.answers.find(a => Object.hasOwn(a.tokens, a.detector));
if (usual) at("detector").value = usual.detector;
at("pick").hidden = !data.detectors.length;
at("detector").addEventListener("change", () => {
  for (const node of at("cards").children) if (node.repaint) node.repaint();
});
at("order").addEventListener("change", restart);
at("more").addEventListener("click", more);
document.addEventListener("keydown", event => {
  if (event.key === "Escape") for (const node of at("cards").children) node.letGo?.();
});
new IntersectionObserver(entries => {
  if (entries.some(entry => entry.isIntersecting) && shown < order.length) more();
}).observe(at("more"));
key();
overview();
restart();
