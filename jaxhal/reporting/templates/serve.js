const NOTHING = "nothing";

// --- what is asked ---------------------------------------------------------------------

let readers = [], secret = "", asked = new AbortController();

async function ask(path, body) {
  const headers = secret ? {Authorization: `Bearer ${secret}`} : {};
  const sent = body && {method: "POST", body: JSON.stringify(body)};
  if (sent) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {...sent, headers, signal: asked.signal});
  if (response.ok) return response;
  if (response.status === 401) at("entry").hidden = false;
  const said = await response.json().catch(() => null);
  throw new Error(said?.error?.message ?? `the server answers ${response.status}`);
}

// What server-sent events hold, up to the one that ends them.
async function* events(response) {
  const stream = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const {value, done} = await stream.read();
    if (done) throw new Error("the server broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(line => line.startsWith("data: "))) {
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Cards tell of what grows every four seconds.
let heard = 0;
function grown(text) {
  if (Date.now() - heard < 4000) return;
  heard = Date.now();
  say(text, true);
}

// --- what is shown ---------------------------------------------------------------------

// What the colours of an answer mean.
function key(spans) {
  return make("p", {className: "soft"}, legend.score(), ", ",
    make("span", {className: "high sample", style: "--u: 2"}, "underlined"), " from 0.25 on",
    ...spans ? ["; ", legend.span()] : []);
}

// A reader's card: what is said of an answer, or grows while it is written.
class Card {
  constructor(reader, fields) {
    const {context, question} = fields;
    const source = context ? ["context", context] : ["prompt", question];
    Object.assign(this, {reader, fields, source, chance: [], tokens: [], text: "", size: 0, held: 0});
    this.badge = make("span", {className: "badge", hidden: true});
    this.line = draw("path", {});
    this.share = make("b", {className: "chance"});
    this.likely = make("span", {hidden: true}, this.share, " likely hallucinated");
    this.basis = make("p", {className: "soft"}, reader.because);
    this.body = make("div");
    this.node = make("article", {className: "card"},
      make("div", {className: "top"}, make("h3", {}, reader.name), this.badge, this.likely),
      this.basis, this.body);
  }

  fail(error) {
    this.box?.classList.remove("open");
    const why = error.name === "AbortError" ? "Stopped; there is no verdict." : error.message;
    this.node.append(make("p", {className: "error"}, why));
    say(`${this.reader.name}: ${why}`, true);
  }

  // An answer begins to grow; `limit` is the probability that ends it.
  begin(limit) {
    this.box = make("p", {className: "answer open"});
    const chart = draw("svg", {viewBox: "0 0 100 100", preserveAspectRatio: "none",
      "aria-hidden": true}, this.line);
    if (limit) chart.append(draw("path", {class: "limit", d: `M0 ${100 - 100 * limit}H100`}));
    const says = "Probability so far, from 0 to 100 %" +
      (limit ? `; it stops at the dashed line, ${percent(limit)}` : "");
    this.course = make("figure", {}, make("figcaption", {className: "soft"}, says), chart);
    if (this.reader.rides) this.body.append(this.course, key(false));
    this.body.append(this.box);
  }

  grow({probability, tokens}) {
    for (const {text, score} of tokens) {
      // A token that ends inside a character is shown with the one that completes it.
      this.held = Math.max(this.held, score ?? 0);
      if (!text) continue;
      const scores = score === null ? {} : {[this.reader.rides]: this.held};
      const start = this.size, end = start + [...text].length;
      const token = {text, start, end, scores};
      Object.assign(this, {held: 0, size: end});
      this.tokens.push(token);
      this.box.append(piece({text, tokens: [token]}, this.reader.rides));
      this.text += text;
    }
    if (probability === null) return;
    this.sure(probability);
    grown(`${this.reader.name}: so far ${percent(probability)} likely hallucinated.`);
  }

  sure(probability) {
    this.share.textContent = percent(probability);
    this.likely.hidden = false;
    this.chance.push(probability);
    const step = 100 / Math.max(1, this.chance.length - 1);
    this.line.setAttribute("d", this.chance.map((value, i) =>
      `${i ? "L" : "M"}${i * step} ${100 - 100 * value}`).join(""));
  }

  // Says in the panel what a span rests on; the server is asked once, for all of them.
  async explain(text, span, tell) {
    tell("Reading back …");
    try {
      const body = {...row(this.reader, this.fields, text), relevance: true};
      this.asked ??= ask("v1/verdict", body).then(response => response.json());
      const {spans} = await this.asked;
      const same = spans.find(({start, end}) => start === span.start && end === span.end);
      tell(same?.relevance ?? "This span is not one of the verdict of all detectors; check the answer with them.");
    } catch (error) {
      this.asked = null;
      tell(`It cannot be said: ${error.message}`);
    }
  }

  // `found` as /v1/verdict has it.
  show(text, found) {
    const {verdict, probability, by, spans, tokens} = found;
    const names = [...new Set(tokens.flatMap(token => Object.keys(token.scores)))];
    names.sort((a, b) => (b === by) - (a === by));  // the deciding one first
    this.badge.hidden = false;
    this.badge.textContent = verdict ?? "no verdict";
    if (verdict) this.badge.classList.add(verdict);
    if (probability !== null) this.sure(probability);
    if (found.undecided) this.basis.textContent = found.undecided;
    const answer = {text, tokens, spans};
    const {box, choose, letGo} = panel(this.node, (box, span) =>
      this.explain(text, span, rests(box, span, answer, names, this.source)));
    const picks = make("div", {className: "row"}), views = make("div", {className: "views"});
    const view = (label, detectors) => {
      const shown = make("p", {className: "answer"});
      const pick = make("select", {}, ...detectors.map(name => make("option", {}, name)));
      const redraw = () => {
        letGo();
        // Spans are the deciding detector's; under another's colours they mislead.
        const own = pick.value === (names[0] ?? "");
        shown.hidden = pick.value === NOTHING;
        paint(shown, own ? answer : {...answer, spans: []}, pick.value, choose);
      };
      pick.addEventListener("change", redraw);
      redraw();
      picks.append(make("label", {className: "soft", hidden: detectors.length < 2}, `${label} `, pick));
      views.append(shown);
    };
    view("Colour by", names);
    if (names.length > 1) view("Beside it", [NOTHING, ...names.slice(1)]);
    this.body.replaceChildren(...this.course ? [this.course] : [],
      ...names.length ? [picks, key(spans.length)] : [], views, box);
    if (found.scores) this.body.append(
      fold(detectorsSay(found.scores), () => everyone(found, this.reader.detectors)));
    if (names.length) this.body.append(fold("Every token", () => table("Every token", ["token", ...names],
      tokens.map(token => make("tr", {}, title(quote(token.text)), ...names.map(name => score(token, name)))))));
    say(`${this.reader.name}: ${this.badge.textContent}` +
      (probability === null ? "" : `, ${percent(probability)} likely hallucinated`) +
      (spans.length ? `; predicted: ${spans.map(span => quote(span.text)).join(", ")}.` : "."), true);
  }
}

// --- what is done ----------------------------------------------------------------------

// An answer, as /v1/verdict takes it.
function row(reader, {context, question}, answer) {
  const prompt = context ? {context, ...question && {question}} : {prompt: question};
  return {model: reader.name, ...prompt, response: answer};
}

async function check(reader, card, fields) {
  const body = {...row(reader, fields, fields.answer), tokens: true, all: true};
  card.show(fields.answer, await (await ask("v1/verdict", body)).json());
}

async function write(reader, card, {context, question}) {
  const limit = at("ends").checked && at("limit").valueAsNumber / 100;
  card.begin(limit);
  const response = await ask("v1/chat/completions", {
    model: reader.name, stream: true,
    // As a prompt is made of context and question for a verdict.
    messages: [{role: "user", content: [context, question].filter(Boolean).join("\n\n")}],
    max_tokens: at("most").valueAsNumber, temperature: at("temperature").valueAsNumber,
    ...limit && {stop_on: {probability: limit, then: at("then").value}},
  });
  for await (const {choices: [{delta, finish_reason: why}], jaxhal} of events(response)) {
    if (why) end(card, why, jaxhal ?? {verdict: null, probability: null, by: null, spans: []});
    else if (delta.content || jaxhal) card.grow(jaxhal);
  }
}

function end(card, why, found) {
  card.show(card.text, {...found, tokens: card.tokens});
  const says = {
    length: "The answer has as many tokens as it may have.",
    content_filter: `Stopped at ${at("limit").value} %: what made it so likely is not shown.`,
  }[why];
  if (says) card.body.append(make("p", {className: "error"}, says));
  const more = make("button", {type: "button"}, "Check it with every detector");
  more.addEventListener("click", () => {
    at("answer").value = card.text;
    begin(check, "Reading …");
  });
  if (card.text.trim()) card.body.append(more);
}

async function begin(work, says) {
  asked.abort();
  const mine = asked = new AbortController();
  const fields = Object.fromEntries(
    ["context", "question", "answer"].map(name => [name, at(name).value]));
  const chosen = readers.filter(one => [one.name, ""].includes(at("reader").value));
  const cards = chosen.map(reader => new Card(reader, fields));
  at("cards").replaceChildren(...cards.map(card => card.node));
  at("stop").hidden = false;
  say(says);
  await Promise.all(cards.map(async card => {
    try {
      await work(card.reader, card, fields);
    } catch (error) {
      if (mine === asked) card.fail(error);
    }
  }));
  if (mine !== asked) return;
  if (document.activeElement === at("stop")) at("write").focus();
  at("stop").hidden = true;
}

async function meet() {
  asked = new AbortController();
  try {
    const about = await (await ask("v1/about")).json();
    readers = about.readers;
    const options = readers.map(({name}) => make("option", {value: name}, name));
    if (readers.length > 1) options.push(make("option", {value: ""}, "all, side by side"));
    at("reader").replaceChildren(...options);
    at("entry").hidden = true;
    say("Nothing was asked yet.");
  } catch (error) {
    say(`The server cannot be asked: ${error.message}.`);
    at("token").focus();
  }
  for (const name of ["check", "write"]) at(name).disabled = !readers.length;
}

at("entry").addEventListener("submit", event => {
  event.preventDefault();
  secret = at("token").value;
  meet();
});
at("form").addEventListener("submit", event => {
  event.preventDefault();
  begin(check, "Reading …");
});
// What is wrong in a folded field could not be pointed at.
at("form").addEventListener("invalid", () => { at("how").open = true; }, true);
at("write").addEventListener("click", () => {
  if (at("form").reportValidity()) begin(write, "Writing …");
});
at("stop").addEventListener("click", () => asked.abort());
at("example").addEventListener("click", () => {
  at("context").value = "The museum in Harwick shows paintings of the sea. It is open from " +
    "Tuesday to Sunday, and entry is free for children.";
  at("question").value = "In which year was the museum founded, and by whom?";
  at("answer").value = "The museum in Harwick is open from Tuesday to Sunday. It was founded " +
    "in 1962 by the painter Ida Rowe.";
});
meet();
