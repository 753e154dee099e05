"use strict";
// Shows the episodes of a run. Everything from outside becomes text nodes; nothing is ever parsed as HTML.

const SCALE = { logprobs: 1e4, gap: 1e6, entropy: 1e4, advantages: 1e4 };
const NAMES = { logprobs: "log-prob", gap: "engine - trainer", entropy: "entropy", advantages: "advantage" };
const OUTCOMES = { s: ["●", "solved"], f: ["✕", "failed"], c: ["◐", "cut"], a: ["○", "aborted"] };
const LISTED = 300;
const TINTS = {
  logprobs: { at: (v) => ["217, 83, 30", -v / 5], low: "likely", high: "-5 nats", colors: ["217, 83, 30"] },
  entropy: { at: (v) => ["126, 87, 194", v / 2.5], low: "0", high: "2.5 nats", colors: ["126, 87, 194"] },
  gap: { at: (v) => ["200, 30, 110", (Math.log10(Math.abs(v) + 1e-9) + 4) / 4], low: "1e-4", high: "1 nat", colors: ["200, 30, 110"] },
  advantages: {
    at: (v) => [v < 0 ? "217, 83, 30" : "31, 111, 178", Math.abs(v) / 2], low: "-2", high: "+2",
    colors: ["217, 83, 30", "31, 111, 178"],
  },
};

const $ = (id) => document.getElementById(id);
const state = { kind: "train", step: 0, tint: "logprobs", group: null, listed: [], token: -1, prompts: false };
const unpacked = new Map();
let index = null;
let stored = (id) => $(id).textContent;  // a chunk; of a run that goes on it is fetched

function make(tag, classes = "", ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

async function unpack(id) {
  if (!unpacked.has(id)) {
    if (!$(id) && document.readyState === "loading")
      await new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }));
    const packed = Uint8Array.from(atob(await stored(id)), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    if (unpacked.size > 24) unpacked.delete(unpacked.keys().next().value);
    unpacked.set(id, new Response(stream).json());
  }
  return unpacked.get(id);
}

// ---------------------------------------------------------------- which groups

function steps() {
  return [...new Set(index.groups.filter((group) => group.kind === state.kind).map((group) => group.step))];
}

function wanted(group) {
  const outcome = $("outcome").value;
  if (group.kind !== state.kind || group.step !== state.step) return false;
  if (outcome === "changed" ? !changed(group) : outcome === "mixed" ? new Set(group.rewards.filter((one) => one !== null)).size < 2
    : outcome && !group.outcomes.includes(outcome)) return false;
  for (const select of document.querySelectorAll("#attributes select"))
    if (select.value && String(group.attributes[select.name]) !== select.value) return false;
  const words = $("words").value.trim().toLowerCase();
  return !words || group.question.toLowerCase().includes(words) || group.task.toLowerCase().includes(words);
}

// How the share of solved attempts differs from that of the first evaluation.
function changed(group) {
  const first = group.kind === "eval" ? firstOf(group) : null;
  const [before, now] = [first, group].map((one) => one && share(one));
  return before === null || now === null ? 0 : Math.sign(now - before);
}

function share(group) {
  const ended = [...group.outcomes].filter((letter) => letter !== "a");
  return ended.length ? ended.filter((letter) => letter === "s").length / ended.length : null;
}

function list(all = false) {
  state.listed = index.groups.filter(wanted);
  const kept = state.listed.includes(state.group) ? state.group : sameTask() || state.listed[0];
  const shown = all || state.listed.indexOf(kept) >= LISTED ? state.listed : state.listed.slice(0, LISTED);
  const total = index.groups.filter((group) => group.kind === state.kind && group.step === state.step).length;
  $("count").textContent = `${state.listed.length} of ${total} groups`;
  $("list").replaceChildren(...shown.map(row));
  if (shown.length < state.listed.length) {
    const more = make("button", "", `${state.listed.length - shown.length} more …`);
    more.onclick = () => list(true);
    $("list").append(make("li", "", more));
  }
  if (kept) select(kept);
  else {
    state.group = null;
    $("group").replaceChildren(make("p", "quiet", total ? "No group fits the filters." : "Nothing is stored of this kind."));
  }
}

function average(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? (known.reduce((sum, value) => sum + value, 0) / known.length).toFixed(2) : "-";
}

// Of all groups of the step, filters aside: what was solved, by each attribute of the tasks.
function scores() {
  const of = (step) => index.groups.filter((group) => group.kind === state.kind && group.step === step);
  const solved = (groups) => {
    const ended = groups.flatMap((group) => [...group.outcomes]).filter((letter) => letter !== "a");
    return ended.length ? `${Math.round(100 * ended.filter((letter) => letter === "s").length / ended.length)}%` : "-";
  };
  const first = Math.min(...steps());
  const grown = state.kind === "eval" && state.step !== first;
  const line = (tag, cells) => make("tr", "", ...cells.map((cell) => make(tag, "", String(cell))));
  const rows = Object.entries(index.attributes).flatMap(([key, values]) => {
    const those = (groups, value) => groups.filter((group) => String(group.attributes[key]) === String(value));
    return [line("th", [key, "groups", "solved", ...(grown ? ["at first"] : []), "reward"]), ...values.flatMap((value) => {
      const groups = those(of(state.step), value);
      return groups.length === 0 ? [] : line("td", [value, groups.length, solved(groups), ...(grown ? [solved(those(of(first), value))] : []),
        average(groups.flatMap((group) => group.rewards))]);
    })];
  });
  $("scores").replaceChildren(...rows);
}

function sameTask() {
  return state.group && state.listed.find((group) => group.task === state.group.task);
}

function row(group) {
  const marks = [...group.outcomes].map((letter) => make("span", letter, OUTCOMES[letter][0]));
  const mean = average(group.rewards);
  const turned = ["  ↓ lost since", "", "  ↑ solved since"][changed(group) + 1];
  const said = [...group.outcomes].map((letter) => OUTCOMES[letter][1]).join(", ");
  const results = make("div", "r", ...marks, `  ${mean}${turned}`);
  results.setAttribute("aria-label", `${said}; mean reward ${mean}${turned}`);
  const button = make("button", "", make("div", "q", group.question), results);
  button.onclick = () => select(group);
  group.button = button;
  return make("li", "", button);
}

// ---------------------------------------------------------------- one group

async function select(group) {
  if (state.group && state.group.button) state.group.button.removeAttribute("aria-current");
  state.group = group;
  state.token = -1;
  hideTip();
  if (group.button) {
    group.button.setAttribute("aria-current", "true");
    group.button.scrollIntoView({ block: "nearest" });
  }
  const first = $("beside").checked && group.kind === "eval" ? firstOf(group) : null;
  const [chunk, before] = await Promise.all([unpack(group.chunk), first && unpack(first.chunk)]);
  if (state.group !== group) return;
  show(group, chunk[group.place], first && { group: first, data: before[first.place] });
}

function firstOf(group) {
  if (!index.first) {
    const evaluated = index.groups.filter((other) => other.kind === "eval");
    const start = evaluated.reduce((least, other) => Math.min(least, other.step), Infinity);
    index.first = new Map(evaluated.filter((other) => other.step === start).map((other) => [other.task, other]));
  }
  const first = index.first.get(group.task);
  return first && first.step < group.step ? first : null;
}

function show(group, data, before) {
  const facts = make("p", "facts", `${group.task} · step ${group.step}`);
  for (const [key, value] of Object.entries(group.attributes)) facts.append(` · ${key} ${value}`);
  if (data.answers.length) {
    facts.append(" · answer ");
    data.answers.slice(0, 6).forEach((answer, at) => facts.append(at ? " or " : "", make("mark", "", answer)));
  }
  const gold = pattern(data.answers);
  const columns = make("div", "columns");
  if (before) before.data.attempts.forEach((attempt, at) =>
    columns.append(column(before.group, attempt, at, gold, `first evaluation, step ${before.group.step}`)));
  data.attempts.forEach((attempt, at) =>
    columns.append(column(group, attempt, at, gold, before ? `step ${group.step}` : `attempt ${at + 1}`)));
  $("group").replaceChildren(make("h2", "", data.question), facts, columns);
  tint();
}

function column(group, attempt, at, gold, name) {
  const [mark, word] = OUTCOMES[group.outcomes[at]];
  const outcome = make("p", "outcome", make("span", group.outcomes[at], `${mark} ${word}`),
    ` · reward ${number(attempt.reward)}`);
  if (typeof attempt.advantage === "number") outcome.append(` · advantage ${signed(attempt.advantage)}`);
  const details = [attempt.stop, `${attempt.response_tokens} tokens sampled`, `${attempt.observation_tokens} shown`];
  if (attempt.source && attempt.source !== "local") details.push(attempt.source);
  outcome.append(make("small", "", details.join(" · ")));
  const element = make("section", "column", make("h3", "", name), outcome);
  element.append(...cards(attempt, gold));
  if (attempt.error) element.append(make("p", "error", attempt.error));
  const metrics = Object.entries(attempt.metrics).filter(([, value]) => value !== null);
  if (metrics.length) element.append(folded("metrics", metrics.map(([key, value]) => `${key} ${number(value)}`).join("\n")));
  return element;
}

function cards(attempt, gold) {
  const found = [];
  const places = attempt.tokens ? attempt.tokens.turns : [];
  const whole = attempt.tokens ? attempt.tokens.segments.map(expand) : [];
  const prompt = places.length ? text(whole[places[0][0]], 0, places[0][1]) : said(attempt.prompt);
  found.push(folded("prompt", prompt, gold, state.prompts));
  attempt.turns.forEach((turn, at) => {
    const place = places[at];
    const name = `turn ${at + 1} · policy`;
    const side = `${turn.tokens} tokens · ${turn.duration_s.toFixed(1)} s${turn.reward ? ` · reward ${number(turn.reward)}` : ""}`;
    const body = make("pre");
    if (place) body.append(...spans(whole[place[0]], place[1], place[2], gold));
    else body.append(...marked(turn.response, gold));
    const heading = make("h4", "", make("span", "", name), make("span", "", side));
    found.push(make("div", "card policy", heading, picture(turn.picture), body));
    const next = places[at + 1];
    const shown = place && next && next[0] === place[0] ? text(whole[place[0]], place[2], next[1]) : said(turn.observation);
    if (shown.trim()) {
      const unread = at === attempt.turns.length - 1 ? " · not read" : "";
      found.push(make("div", "card context", make("h4", "", `turn ${at + 1} · environment${unread}`),
        make("pre", "", ...marked(shown.trim(), gold))));
    }
    if (place && next && next[0] !== place[0])
      found.push(folded(`rewritten before turn ${at + 2}`, text(whole[next[0]], 0, next[1]), gold));
  });
  return found;
}

// What a response was about; only ever an image within the page.
function picture(url) {
  if (!/^data:image\/(jpeg|png|webp);base64,[A-Za-z0-9+/=]+$/.test(url || "")) return null;
  const element = make("img");
  element.src = url;
  element.alt = "what the response was about";
  return element;
}

function folded(name, content, gold = null, open = false) {
  const body = make("pre");
  const element = make("details", "card context", make("summary", "", name), body);
  element.dataset.name = name;
  const fill = () => { if (!body.firstChild) body.append(...marked(content, gold)); };
  element.addEventListener("toggle", fill);
  if (open) { element.open = true; fill(); }
  return element;
}

function said(value) {
  if (typeof value === "string") return value;
  return (value || []).map((message) => `[${message.role}] ${message.content}`).join("\n");
}

// A segment's columns with a number per token: `at[k]` is the place of token k among the sampled ones, or -1.
function expand(segment) {
  const at = [];
  let sampled = false, count = 0;
  for (const length of segment.runs) {
    for (let k = 0; k < length; k += 1) at.push(sampled ? count++ : -1);
    sampled = !sampled;
  }
  return { ...segment, at };
}

function text(segment, start, stop) {
  return segment.texts.slice(start, stop).join("");
}

function spans(segment, start, stop, gold) {
  const hits = gold ? [...text(segment, start, stop).matchAll(gold)].map((hit) => [hit.index, hit.index + hit[0].length]) : [];
  const found = [];
  let from = 0;
  for (let k = start; k < stop; k += 1) {
    const letters = segment.texts[k];
    const to = from + letters.length;
    const span = make("span", "t", letters);
    const place = segment.at[k];
    span.info = { id: segment.ids[k], text: letters, trained: place >= 0 && segment.advantages[place] !== null };
    if (place >= 0) {
      span.info.version = segment.versions[place];
      for (const name of Object.keys(SCALE))
        span.info[name] = segment[name][place] === null ? null : segment[name][place] / SCALE[name];
    }
    if (!span.info.trained) span.classList.add("untrained");
    if (hits.some(([low, high]) => from < high && to > low)) span.classList.add("gold");
    found.push(span);
    from = to;
  }
  return found;
}

function pattern(answers) {
  const plain = answers.map((answer) => answer.trim()).filter((answer) => answer.length > 1).slice(0, 20);
  if (!plain.length) return null;
  const quoted = plain.map((answer) => answer.replace(/[.*+?^${}()|[\]\\\/]/g, "\\$&").replace(/\s+/g, "\\s+"));
  return new RegExp(`(?<![\\p{L}\\p{N}])(?:${quoted.join("|")})(?![\\p{L}\\p{N}])`, "giu");
}

function marked(content, gold) {
  const found = [];
  let from = 0;
  for (const hit of gold ? content.matchAll(gold) : []) {
    found.push(content.slice(from, hit.index), make("mark", "", hit[0]));
    from = hit.index + hit[0].length;
  }
  found.push(content.slice(from));
  return found.filter((part) => part !== "");
}

// ---------------------------------------------------------------- numbers and colours

function number(value) {
  return typeof value === "number" ? String(Math.round(value * 1e4) / 1e4) : "-";
}

function signed(value) {
  return `${value > 0 ? "+" : ""}${value.toFixed(2)}`;
}

function tint() {
  state.tint = $("tint").value;
  const how = TINTS[state.tint];
  for (const span of document.querySelectorAll("#group .t")) {
    const value = how ? span.info[state.tint] : null;
    const [color, strength] = typeof value === "number" ? how.at(value) : ["", 0];
    span.style.backgroundColor = strength > 0 ? `rgba(${color}, ${Math.min(0.75, strength * 0.75).toFixed(3)})` : "";
  }
  $("legend").replaceChildren();
  if (!how) return;
  const band = make("i");
  const [left, right] = how.colors.length > 1 ? how.colors.map((color) => `rgba(${color}, .75)`) : ["transparent", `rgba(${how.colors[0]}, .75)`];
  band.style.background = `linear-gradient(90deg, ${left}${how.colors.length > 1 ? ", transparent" : ""}, ${right})`;
  $("legend").append(how.low, band, how.high);
}

function tip(span) {
  const info = span.info;
  const rows = [["token", JSON.stringify(info.text)], ["id", info.id]];
  if (info.version !== undefined) {
    rows.push(["version", info.version]);
    if (typeof info.logprobs === "number") rows.push(["probability", Math.exp(info.logprobs).toPrecision(3)]);
    for (const name of ["logprobs", "gap", "entropy", "advantages"])
      rows.push([NAMES[name], info[name] === null ? "not known" : name === "gap" ? info.gap.toPrecision(2) : info[name].toFixed(4)]);
  }
  if (!info.trained) rows.push(["trained", "no"]);
  $("tip").replaceChildren(make("dl", "", ...rows.flatMap(([key, value]) => [make("dt", "", key), make("dd", "", String(value))])));
  $("tip").hidden = false;
  const box = span.getBoundingClientRect(), own = $("tip").getBoundingClientRect();
  const below = box.bottom + own.height + 12 < innerHeight;
  $("tip").style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 8))}px`;
  $("tip").style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - own.height - 6)}px`;
}

function hideTip() {
  $("tip").hidden = true;
  document.querySelectorAll(".t.here").forEach((span) => span.classList.remove("here"));
}

// ---------------------------------------------------------------- controls

function has(kind) {
  return kind === "run" ? $("run").textContent.trim() !== "" || index.opens === "run" : index.groups.some((group) => group.kind === kind);
}

function setKind(kind) {
  if (!has(kind)) return;
  state.kind = document.body.dataset.kind = kind;
  document.querySelector(`input[value="${kind}"]`).checked = true;
  hideTip();
  if (kind === "run") return;
  const all = steps();
  $("step").max = String(all.length - 1);
  $("besides").hidden = kind !== "eval" || all.length < 2;
  $("outcome").querySelector('[value="changed"]').disabled = kind !== "eval" || all.length < 2;
  if ($("outcome").selectedOptions[0].disabled) $("outcome").value = "";
  setStep(all.length - 1);
}

function setStep(place) {
  const all = steps();
  const kept = Math.max(0, Math.min(all.length - 1, place));
  $("step").value = String(kept);
  state.step = all[kept];
  $("at").value = String(state.step);
  scores();
  list();
}

function move(by) {
  const place = state.listed.indexOf(state.group) + by;
  if (place >= 0 && place < state.listed.length) {
    if (!state.listed[place].button) list(true);
    select(state.listed[place]);
  }
}

function moveToken(by) {
  const all = document.querySelectorAll("#group .t");
  if (!all.length) return;
  state.token = Math.max(0, Math.min(all.length - 1, state.token + by));
  hideTip();
  all[state.token].classList.add("here");
  all[state.token].scrollIntoView({ block: "nearest", inline: "nearest" });
  tip(all[state.token]);
}

const KEYS = {
  ArrowLeft: () => setStep(Number($("step").value) - 1),
  ArrowRight: () => setStep(Number($("step").value) + 1),
  j: () => move(1),
  k: () => move(-1),
  n: () => moveToken(1),
  p: () => moveToken(-1),
  r: () => setKind("run"),
  t: () => setKind("train"),
  e: () => setKind("eval"),
  b: () => { $("beside").click(); },
  o: () => {
    state.prompts = !state.prompts;
    document.querySelectorAll('[data-name="prompt"]').forEach((element) => { element.open = state.prompts; });
  },
  "/": () => $("words").focus(),
  "?": () => $("help").click(),
  Escape: () => { hideTip(); document.activeElement.blur(); },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input[type=text], select");
  if (typing && event.key !== "Escape") return;
  if (event.target.matches("input[type=range]") && event.key.startsWith("Arrow")) return;
  const tints = [...$("tint").options];
  if (/^[1-5]$/.test(event.key) && tints[Number(event.key) - 1]) {
    $("tint").selectedIndex = Number(event.key) - 1;
    tint();
  } else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
}

function offer() {
  $("attributes").replaceChildren(...Object.entries(index.attributes).map(([key, values]) => {
    const select = make("select", "", new Option("any", ""), ...values.map((value) => new Option(String(value), String(value))));
    select.name = key;
    select.addEventListener("change", () => list());
    return make("label", "", `${key} `, select);
  }));
  offerKinds();
}

function offerKinds() {
  for (const radio of document.querySelectorAll("input[name=kind]")) radio.disabled = !has(radio.value);
}

async function start() {
  index = await unpack("index");
  offer();
  for (const radio of document.querySelectorAll("input[name=kind]")) radio.addEventListener("change", () => setKind(radio.value));
  $("step").addEventListener("input", () => setStep(Number($("step").value)));
  for (const id of ["outcome", "words"]) $(id).addEventListener("input", () => list());
  $("beside").addEventListener("change", () => state.group && select(state.group));
  $("tint").addEventListener("change", tint);
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("help").addEventListener("click", () => {
    $("keys").hidden = !$("keys").hidden;
    $("help").setAttribute("aria-expanded", String(!$("keys").hidden));
  });
  $("group").addEventListener("mouseover", (event) => event.target.info && tip(event.target));
  $("group").addEventListener("mouseout", (event) => event.target.info && hideTip());
  document.addEventListener("keydown", onKey);
  setKind(index.opens === "train" && !has("train") ? "eval" : index.opens);
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  $("group").replaceChildren(make("p", "error", `This page cannot be shown here (${error.message}). It needs a browser with DecompressionStream: `
    + "Chromium 80, Firefox 113, Safari 16.4 or newer."));
  throw error;
});
